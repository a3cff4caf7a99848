"""Functions and programs on real ranks: `run_ranks`, `Checks`, `job`; what is counted of them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cards.build import NoCompiler, built
from cards.pretend import DEVICES, REAL, asked_for, pretend
from graphs import shared_captures
from torch.utils._python_dispatch import TorchDispatchMode

import autotp

PRELOADED = [
    "torch", *sorted(f"autotp.{home}" for home in set(autotp._HOMES.values())), "torch.export._trace",
    "transformers.modeling_utils", "graphs", "scripts.warm",
]  # fmt: skip
"""What every rank would import, or most: forked, they have it already. A failure in one of them is not told."""
SERVERS: dict[str, ForkServer] = {}
"""A hash seed -> the process with it that ranks are forked from. Python's own context has only one."""
HASH_SEEDS = ("1", "3")
"""Of those that `fresh` ranks are forked from. tests/passes/canonicalize/test_canonical_order.py sees them differ."""
HERE = Path(__file__).resolve().parent
"""`scripts` beside this file has programs: torchrun starts them, but for `warm`, which runs before ranks are forked."""
ROOT = HERE.parent.parent
LAST_WORDS = 0.5  # seconds the other ranks have to answer once one has failed
EXPECTED = (
    ".*this rank's part", ".* is captured for the",  # Tests compare parts, and change models.
    "tensors of the batch are on the CPU",  # With `cards`, as they come from a loader.
    "Converting a tensor with requires_grad", "The .grad attribute of a Tensor that is not a leaf",
    "There is a performance drop", "autotp is tested with torch",  # `make versions` runs them with others.
)  # fmt: skip
"""Warnings that tests on ranks give rise to, of autotp and of torch."""


@dataclass
class Bill:
    """The CPU that the running test is charged beside that of its own process, in seconds. `conftest.py` reads it."""

    ranks: float = 0.0  # of each launch, that of its busiest rank


BILL = Bill()


@dataclass
class Running:
    """Which test runs, and how. `conftest.py` writes it; ranks are told."""

    file: Path = HERE
    captures_in: Path | None = None  # Processes share captures there; none do with None.

    def captures(self) -> AbstractContextManager[None]:
        """A region in which the file's tests run."""
        return shared_captures(self.file, self.captures_in) if self.captures_in is not None else nullcontext()


RUNNING = Running()


SELECTED: set[tuple[Path, int, str]] = set()
"""The cases of `Checks` that this session runs: file, number of ranks, name. `conftest.py` writes it."""


class Died(RuntimeError):
    """A rank ended without an answer."""


class CheckFailed(AssertionError):
    """A function of `Checks` failed on this rank; `outcomes`: those of the functions till then, by name."""

    def __init__(self, outcomes: dict[str, Outcome]) -> None:
        super().__init__(outcomes)
        self.outcomes = outcomes


@dataclass(frozen=True)
class Reply:
    """What a rank returned, or what it raised and where."""

    value: Any = None
    error: BaseException | None = None
    where: str = ""
    cpu: float = 0.0  # seconds


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60,
    may_die: Sequence[int] = (),
    fresh: bool = False,
    alone: bool = False,
    cards: bool = False,
) -> list[Any]:
    """What `fn(rank, n, *args)` returned on each of `n` real processes, by rank; None for one of `may_die` that died.

    Within `fn`, a module-level function, the default process group is initialised (gloo, one thread a rank) and the
    environment is as torchrun sets it. A rank that is done lives on until all are, and then waits for what the same
    file runs next on as many ranks: what is imported and cached by then need not be so again. Each run has a process
    group of its own. After a failure the next run starts new processes.

    Args:
        timeout: in seconds, for the whole run and for each collective.
        may_die: these ranks may end without an answer. Such a run has processes of its own.
        fresh: the run has processes of its own, and sets of strings have another order on each rank than on the one
            before it, as torchrun's do: they are forked from two servers with two hash seeds.
        alone: the run has processes of its own, for it changes what cannot be put back.
        cards: each rank has an NVIDIA card of its own, a pretended one where the machine has too few, and NCCL. The
            test is skipped where no cards can be pretended. With pytest's `--cards` every run is so.

    Raises:
        Exception: what a rank raised first, with its traceback there as the cause.
        Died: a rank died.
        TimeoutError: a rank was not done in time.
    """
    alone, cards = alone or fresh or bool(may_die), cards or asked_for()
    if cards:
        expect_cards()
    ranks = Ranks(n, fresh, cards) if alone else _waiting(RUNNING.file, n, cards)
    try:
        replies = ranks.run(pickle.dumps((fn, args)), timeout, may_die)
        failed = [rank for rank, reply in replies.items() if reply.error is not None]
        alone = alone or bool(failed) or len(replies) < n
    except BaseException:
        alone = True
        raise
    finally:
        if alone:
            WAITING.pop((RUNNING.file, n, cards), None)
            ranks.end()
    BILL.ranks += max((reply.cpu for reply in replies.values()), default=0.0)
    return _values(fn.__name__, n, replies, may_die, timeout)


def expect_cards() -> None:
    """Skips the test where there are no cards, and none can be pretended."""
    try:
        REAL or built()
    except NoCompiler as error:
        pytest.skip(str(error))


def _values(name: str, n: int, replies: dict[int, Reply], may_die: Sequence[int], timeout: float) -> list[Any]:
    """What the ranks returned, by rank; raises as `run_ranks` says."""
    errors = {rank: reply.error for rank, reply in replies.items() if reply.error is not None}
    failed = [rank for rank, error in errors.items() if not (isinstance(error, Died) and rank in may_die)]
    if failed:  # a death counts before what it made the others raise
        rank = min(failed, key=lambda rank: not isinstance(errors[rank], Died))
        raise errors[rank] from RuntimeError(f"on rank {rank} of {n}:\n{replies[rank].where}")
    late = [rank for rank in range(n) if rank not in replies]
    if late:
        raise TimeoutError(f"{name}: ranks {late} of {n} not done in {timeout} s")
    return [replies[rank].value for rank in range(n)]


class Ranks:
    """Running processes, one a rank. These, and nothing else, are killed by `end`."""

    def __init__(self, n: int, fresh: bool = False, cards: bool = False) -> None:
        self.folder, self.cards = Path(tempfile.mkdtemp()), cards
        self.runs = 0
        self.ranks: list[tuple[BaseProcess, Connection]] = []
        context = multiprocessing.get_context("forkserver")
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(rank, n, there), daemon=True)
            with _forked_from(HASH_SEEDS[rank % len(HASH_SEEDS)] if fresh else ""):
                process.start()
            there.close()  # so that reading ends when the rank does
            self.ranks.append((process, here))

    def run(self, payload: bytes, timeout: float, may_die: Sequence[int]) -> dict[int, Reply]:
        """What the ranks answered to a pickled function and its arguments, in order of arrival."""
        self.runs += 1
        job = Job(payload, Path(self.folder, f"rendezvous-{self.runs}").as_uri(), timeout, RUNNING, self.cards)
        for _, pipe in self.ranks:
            with suppress(ConnectionError):  # It died: reading will say so.
                pipe.send(job)
        return _replies(self.ranks, time.monotonic() + timeout, may_die)

    def end(self) -> None:
        for process, pipe in self.ranks:
            pipe.close()
            process.kill()
            process.join()
        shutil.rmtree(self.folder)


WAITING: dict[tuple[Path, int, bool], Ranks] = {}
"""A file of tests, a number of ranks, whether they have cards -> those that wait for its next run."""


@atexit.register
def _end_waiting() -> None:
    while WAITING:
        WAITING.popitem()[1].end()


def _waiting(file: Path, n: int, cards: bool) -> Ranks:
    """Ranks that wait for this file, or new ones; those of other files end."""
    for key in [key for key in WAITING if key[0] != file]:
        WAITING.pop(key).end()
    if (file, n, cards) not in WAITING:
        WAITING[file, n, cards] = Ranks(n, cards=cards)
    return WAITING[file, n, cards]


@contextmanager
def _forked_from(hash_seed: str) -> Iterator[None]:
    """A region in which processes are forked from the server with this hash seed; "": with any. It starts here."""
    server = SERVERS.setdefault(hash_seed, ForkServer())
    server.set_forkserver_preload(PRELOADED)
    variables = {"PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}  # It does not get `sys.path`.
    if hash_seed:
        variables["PYTHONHASHSEED"] = hash_seed
    with _variables(variables), patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        yield


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """A region in which these variables of the environment have these values, for interpreters that are started."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _replies(ranks: list[tuple[BaseProcess, Connection]], deadline: float, may_die: Sequence[int]) -> dict[int, Reply]:
    """What has come by `deadline`, or soon after the first failure that was not expected, in order of arrival."""
    silent = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    replies: dict[int, Reply] = {}
    while silent and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(silent), left)
        for pipe in [pipe for pipe in silent if pipe in ready]:
            rank = silent.pop(pipe)
            try:
                replies[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                ranks[rank][0].join(LAST_WORDS)
                replies[rank] = Reply(error=Died(f"rank {rank} of {len(ranks)}, exit code {ranks[rank][0].exitcode}"))
            if replies[rank].error is not None and rank not in may_die:
                deadline = min(deadline, time.monotonic() + LAST_WORDS)
    return replies


def _rank(rank: int, n: int, pipe: Connection) -> None:
    environment, random_state = dict(os.environ), torch.get_rng_state()
    with suppress(EOFError):  # There is no other run.
        while True:
            job: Job = pipe.recv()  # Till now the peers may read from this rank.
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(environment)
            torch.set_rng_state(random_state)
            began = time.process_time()
            try:
                value = _run(job, rank, n)
                reply = pickle.dumps(Reply(value, cpu=time.process_time() - began))
            except BaseException as error:
                reply = _failure(error, time.process_time() - began)
            pipe.send_bytes(reply)


def _run(job: Job, rank: int, n: int) -> Any:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in (place | master).items()})
    torch.set_num_threads(1)
    limit = timedelta(seconds=job.timeout)
    if job.cards:
        pretend()
        torch.cuda.set_device(rank)
        torch.cuda.manual_seed_all(0)
    backend = "cpu:gloo,cuda:nccl" if job.cards else "gloo"
    dist.init_process_group(backend, init_method=job.rendezvous, rank=rank, world_size=n, timeout=limit)
    dist.barrier()  # Else a function that leaves the group at once could close it while another rank still connects.
    fn, args = pickle.loads(job.payload)
    with job.running.captures(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # setup.cfg asks for the same, of the process of pytest only.
        for message in EXPECTED:
            warnings.filterwarnings("ignore", message, UserWarning)
        return fn(rank, n, *args)


def _failure(error: BaseException, cpu: float) -> bytes:
    where = "".join(traceback.format_exception(error))
    try:
        reply = pickle.dumps(Reply(error=error, where=where, cpu=cpu))
        pickle.loads(reply)
    except Exception:  # an exception that cannot travel
        return pickle.dumps(Reply(error=RuntimeError(repr(error)), where=where))
    return reply


@dataclass(frozen=True)
class Job:
    """What ranks are to run.

    Attributes:
        payload: a pickled function and its arguments.
        rendezvous: the address of a file where the ranks meet.
        timeout: in seconds.
        cards: whether each rank has a card.
    """

    payload: bytes
    rendezvous: str
    timeout: float
    running: Running
    cards: bool


@dataclass(frozen=True)
class Outcome:
    """What a function did on a rank."""

    failure: str  # empty if it held
    cpu: float  # seconds


class Checks:
    """Functions that assert on real ranks, batched: one launch for each number of ranks and module.

    A file registers its functions with `@checks.on(2, 4)` and ends in one test over `checks.cases()`. Those that the
    session does not run (`-k`, `-m`) are left out.
    """

    def __init__(self, timeout: float = 240, fresh: bool = False, cards: bool = False) -> None:
        self.timeout, self.fresh, self.cards = timeout, fresh, cards
        self.functions: dict[tuple[int, bool], list[Callable[[int, int], None]]] = {}
        self.not_on_cards: dict[str, str] = {}
        self.outcomes: dict[tuple[int, bool], list[dict[str, Outcome]] | BaseException] = {}

    def on(
        self, *sizes: int, rare: bool = False, not_on_cards: str = ""
    ) -> Callable[[Callable[[int, int], None]], Callable[[int, int], None]]:
        """Registers a module-level function of the rank and the number of ranks.

        Args:
            rare: whether it is for `--all` only.
            not_on_cards: why it is left out with `--cards`.
        """

        def register(fn: Callable[[int, int], None]) -> Callable[[int, int], None]:
            if not_on_cards:
                self.not_on_cards[fn.__name__] = not_on_cards
            for n in sizes:
                self.functions.setdefault((n, rare), []).append(fn)
            return fn

        return register

    def cases(self) -> list[Any]:
        """Parameters `n, name` for each function and size."""
        found = [(n, fn.__name__, rare) for (n, rare), functions in self.functions.items() for fn in functions]
        return [pytest.param(n, name, marks=self._marks(name, rare), id=f"{n}-{name}") for n, name, rare in found]

    def _marks(self, name: str, rare: bool) -> list[pytest.MarkDecorator]:
        reason = self.not_on_cards.get(name)
        return [pytest.mark.rare] * rare + ([pytest.mark.not_on_cards(reason)] if reason else [])

    def expect(self, n: int, name: str) -> None:
        """Fails with the traceback of the first rank on which the function failed."""
        key = next(key for key, functions in self.functions.items() if key[0] == n and name in map(_name, functions))
        if key not in self.outcomes:
            self.outcomes[key] = self._launched(*key)
        outcome = self.outcomes[key]
        if isinstance(outcome, BaseException):
            raise outcome
        BILL.ranks += max((found[name].cpu for found in outcome if name in found), default=0.0)
        for found in outcome:
            assert name in found, f"not run: {list(found)[-1]} failed before"
            assert not found[name].failure, found[name].failure

    def _launched(self, n: int, rare: bool) -> list[dict[str, Outcome]] | BaseException:
        """What all functions of a size did. A test pays for its own, not for being the first that asked."""
        before = BILL.ranks
        chosen = [fn for fn in self.functions[n, rare] if (RUNNING.file, n, fn.__name__) in SELECTED]
        try:
            return run_ranks(_in_turn, n, chosen, timeout=self.timeout, fresh=self.fresh, cards=self.cards)
        except CheckFailed as failed:
            return [failed.outcomes]
        except Exception as error:
            return error
        finally:
            BILL.ranks = before


def _name(fn: Callable[..., Any]) -> str:
    return fn.__name__


def _in_turn(rank: int, n: int, functions: Sequence[Callable[[int, int], None]]) -> dict[str, Outcome]:
    """Returns the outcomes by name; raises `CheckFailed` at the first failure, for then nothing is in step.

    A rank that failed starts no collective: its peers may be in one, would take it for theirs, and where sizes differ
    gloo aborts the process. They wait until they are ended.
    """
    outcomes: dict[str, Outcome] = {}
    for fn in functions:
        torch.manual_seed(0)
        began = time.process_time()
        try:
            with warnings.catch_warnings():
                fn(rank, n)
        except BaseException as error:  # pytest's own failures are no Exceptions
            failure = f"on rank {rank} of {n}:\n" + "".join(traceback.format_exception(error))
            raise CheckFailed(outcomes | {fn.__name__: Outcome(failure, time.process_time() - began)}) from None
        outcomes[fn.__name__] = Outcome("", time.process_time() - began)
        dist.barrier()
    return outcomes


@contextmanager
def silence() -> Iterator[None]:
    """A region in which a warning is an error: in the ranks' processes it is none by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "tensors of the batch are on the CPU")  # With cards, once a process.
        yield


class Collectives(TorchDispatchMode):
    """Counts the collectives that run, in-place ones too (which torch's CommDebugMode does not see)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name != "wait_tensor":
            name = name.rstrip("_").replace("_", "-")
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def environment(cards: bool) -> dict[str, str]:
    """The variables of a program that a test starts; with `cards` it has NVIDIA cards, as `run_ranks` says."""
    paths = [ROOT, HERE]
    if cards or asked_for():
        expect_cards()
        paths.insert(0, HERE / "cards" / "site")
    more = {DEVICES: os.environ.get(DEVICES, "8")} if cards else {}
    return os.environ | more | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}


@contextmanager
def job(
    folder: Path, script: str, given: Sequence[str], restarts: int, cards: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """torchrun with two processes of a file of `scripts`; ended, with its own processes, in any case."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.1"]
    process = subprocess.Popen(
        [*command, *where, str(HERE / "scripts" / script), str(folder), *given],
        env=environment(cards),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def over(process: subprocess.Popen[str], seconds: float) -> bool:
    """Whether a process is over within a time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def shared(rank: int) -> Path:
    """A new folder, the same on all ranks."""
    made = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(made)
    return Path(made[0])


# ---- the environment variables that torchrun, srun and mpirun give to a rank

NAMES = re.compile("^(RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMIX?_|MPI_)")
JOB = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "a1"}
"""What a shell in an allocation has, with or without a step."""


def of_srun(rank: int, size: int, per_node: str = "2") -> dict[str, str]:
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": per_node}
    return {**JOB, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)}


def of_open_mpi(rank: int, size: int, local_size: int = 2) -> dict[str, str]:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": local_size}
    variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
    return {**variables, "PMIX_NAMESPACE": "prterun-host-1234@1"}


def of_hydra(rank: int, size: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank % 2), "MPI_LOCALNRANKS": "2"}


def of_torchrun(rank: int, size: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def put(variables: dict[str, str]) -> None:
    """Gives this process the variables of a launcher, and takes those of all others away."""
    for name in [name for name in os.environ if NAMES.match(name)]:
        del os.environ[name]
    os.environ.update(variables)
    tempfile.tempdir = None  # It is found again, in TMPDIR.


LAUNCHERS = {"torchrun": of_torchrun, "srun": of_srun, "mpirun": of_open_mpi}
