"""Finds who started this process (torchrun, mpirun or srun) and with which rank, from environment variables.

A process in a SLURM allocation that `srun` did not start has variables of the job, but none of a step: it is alone.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autotp.errors import Error

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""torch's environment variable: the network interface of gloo."""


@dataclass(frozen=True)
class Launch:
    """One of several processes that were started together.

    Attributes:
        by: the program that started them.
        rank, size: the rank of this process, and the number of processes.
        local_rank, local_size: the same among the processes of this machine.
        job: a name that is unique on this machine; "" if there is none.
    """

    by: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str = ""


def launch() -> Launch | None:
    """Returns how this process was started; None if it is alone. The innermost launcher is asked first."""
    if all(name in os.environ for name in TORCHRUN):
        local = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE", 1)
        return Launch("torchrun", _number("RANK"), _number("WORLD_SIZE"), *local)
    for candidate in (_open_mpi(), _srun(), _hydra()):
        if candidate is not None and candidate.size > 1:
            return candidate
    return None


def is_first_rank() -> bool:
    """Returns True on one process of a run: global rank 0, or the only process.

    It reads the variables of torchrun, srun and mpirun until there is a process group, so that a script may ask before
    its model is parallel.

    No call of a model or of a cut parameter may stand under it: these need every rank.

    Raises:
        ValueError: a variable of the launcher is no number.

    Example:
        >>> if autotp.is_first_rank():
        ...     print("one line, whatever the number of processes")
        one line, whatever the number of processes
    """
    if dist.is_initialized():
        return dist.get_rank() == 0
    started = launch()
    return started is None or started.rank == 0


def _open_mpi() -> Launch | None:
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = (_number(f"OMPI_COMM_WORLD_{name}") for name in names)
    return Launch("mpirun", rank, size, local_rank, local_size, os.environ.get("PMIX_NAMESPACE", ""))


def _srun() -> Launch | None:
    """Reads the variables of srun; None if an mpirun inside of its step started another number of processes."""
    size = _number("SLURM_STEP_NUM_TASKS", 1)
    if "SLURM_PROCID" not in os.environ or _number("PMI_SIZE", size) != size:
        return None
    job = ".".join(os.environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    return Launch("srun", _number("SLURM_PROCID"), size, _number("SLURM_LOCALID"), _tasks_here(size), job)


def _tasks_here(size: int) -> int:
    """Returns the number of a step's processes on this node: `4(x2),3` means 4 on each of two nodes, 3 on the third."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))):
        counts += [int(count)] * int(times or 1)
    return counts[_number("SLURM_NODEID")]


def _hydra() -> Launch | None:
    """Reads the variables of mpirun of MPICH and of Intel MPI."""
    if not {"PMI_RANK", "PMI_SIZE"} <= os.environ.keys():
        return None
    size = _number("PMI_SIZE")
    return Launch("mpirun", _number("PMI_RANK"), size, _number("MPI_LOCALRANKID"), _number("MPI_LOCALNRANKS", size))


def _number(name: str, default: int = 0) -> int:
    return int(os.environ.get(name, default))


def store_of(started: Launch, timeout: timedelta) -> dist.Store:
    """Returns the store in which processes that were started together meet: at MASTER_ADDR, or on their machine.

    NOTE [Restarts] torchrun keeps its store when it restarts processes, and a process may find there the address of an
    ended process (pytorch issue 135712). So each attempt has its own keys. With several nodes each node counts its own
    attempts; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps there.

    Raises:
        Error: no address is known.
    """
    if started.by == "torchrun":
        store: dist.Store = next(dist.rendezvous("env://", timeout=timeout))[0]
    elif {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        url = f"tcp://{address}:{port}?rank={started.rank}&world_size={started.size}"
        store = next(dist.rendezvous(url, timeout=timeout))[0]
    else:
        store = _on_one_machine(started, timeout)
    store.set_timeout(timeout)
    return dist.PrefixStore(f"autotp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def ranks_on_one_card(store: dist.Store, started: Launch, card: Any, asked_for: bool) -> tuple[tuple[int, ...], bool]:
    """Returns two ranks that compute on the same card, if there are such, and whether all asked for their cards.

    All ranks call it, and all get the same answer. Each makes six requests to the store, however many ranks there are.
    Two cards are the same by the rule of NCCL: in one machine, with one address on its bus.

    Args:
        store: one in which the ranks meet.
        card: the properties of this rank's card.
        asked_for: whether the caller named this card.
    """
    entered = store.add("cards", 1)
    store = dist.PrefixStore(f"cards/{(entered - 1) // started.size}", store)  # A store may serve several worlds.
    address = f"{machine()}/{card.pci_domain_id}:{card.pci_bus_id}:{card.pci_device_id}"
    first = int(store.compare_set(address, "", str(started.rank)))
    if first != started.rank:
        store.set("shared", f"{first} {started.rank}")
    if not asked_for:
        store.set("by default", "")
    # The last rank to arrive finds in the store what all others have written.
    if store.add("arrived", 1) == started.size:
        shared = store.get("shared").decode() if store.check(["shared"]) else ""
        store.set("answer", f"{int(not store.check(['by default']))} {shared}")
    all_asked, *ranks = map(int, store.get("answer").split())
    if ranks:  # An error follows, and the store ends with the process that keeps it: not before all have the answer.
        if store.add("read", 1) == started.size:
            store.set("all have read", "")
        with suppress(RuntimeError):
            store.wait(["all have read"], timedelta(seconds=5))
    return tuple(ranks), bool(all_asked)


def machine() -> str:
    """Returns a name of this machine, the same in all its containers."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


@contextmanager
def meeting(started: Launch) -> Iterator[None]:
    """A region in which the started processes meet; torch's errors become one Error that says who waited, and where."""
    try:
        yield
    except RuntimeError as error:
        of_gloo = "gloo" in str(error)  # It raises plain errors.
        if isinstance(error, Error) or not (of_gloo or isinstance(error, dist.DistError)):
            raise
        where = f"{os.environ.get('MASTER_ADDR', 'this machine')}:{os.environ.get('MASTER_PORT', 'any port')}"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise Error(
            f"global rank {started.rank} of {started.size} could not meet the others at {where}: {reason}",
            fix=f"{GLOO_INTERFACE}=<the network interface that the other machines reach>, on each machine"
            if of_gloo
            else "start all processes, and read the log of each; MASTER_PORT=<a free port> if this one is taken",
            alternative="timeout= of autotp.parallelize, if they start at other times",
        ) from error


def _on_one_machine(started: Launch, timeout: timedelta) -> dist.Store:
    """Returns a store on a free port, which the first process writes into a file with the job's name."""
    # The store below is reached on this machine alone.
    if started.local_size != started.size or not started.job:
        variables = "MASTER_ADDR=<the first node> MASTER_PORT=29500"
        flags = {"srun": f"{variables} srun", "mpirun": "mpirun " + variables.replace("MASTER", "-x MASTER")}
        raise Error(
            f"{started.by} started {started.size} processes ({started.local_size} here), and they do not know where "
            "to meet",
            fix=f"{flags[started.by]} ... (or torchrun on each machine)",
        )
    file = _folder() / re.sub(r"[^\w.-]", "_", started.job)
    if started.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, started.size, True, timeout, wait_for_workers=False)
        # Renamed when it is whole: a reader finds no half of a number.
        temporary = file.with_name(f"{file.name}.new")
        temporary.write_text(str(store.port))
        temporary.replace(file)
        atexit.register(file.unlink, missing_ok=True)
        return store
    return dist.TCPStore("127.0.0.1", _port_in(file, timeout), started.size, False, timeout)


def _port_in(file: Path, timeout: timedelta) -> int:
    """Returns the port in the file, once a process listens there: a killed job may have left an old file."""
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        with suppress(OSError, ValueError):
            port = int(file.read_text())
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return port
        time.sleep(0.05)
    raise Error(f"the first process did not answer within {timeout}", fix="read its log")


def _folder() -> Path:
    """Returns a folder that only this user can write to."""
    folder = Path(tempfile.gettempdir(), f"autotp-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise Error(f"{folder} can be changed by other users", fix="TMPDIR=<a folder of yours>")
    return folder
