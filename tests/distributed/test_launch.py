"""launch: processes of srun or mpirun find each other, or are told what to write; one alone stays alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HERE, JOB, NAMES, ROOT, of_hydra, of_open_mpi, of_srun, put, run_ranks

import autotp
from autotp.distributed.launch import TORCHRUN, Launch, is_first_rank, launch, ranks_on_one_card, store_of
from autotp.distributed.mesh import gather_ints, group_of, make_mesh, world_size


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


# ---- what the variables say


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, None),  # in a batch script
        (of_srun(0, 1, "1"), None),  # srun --pty bash
        (of_srun(1, 2), Launch("srun", 1, 2, 1, 2, "77.3.0")),
        (of_srun(5, 7, "2(x3),1"), Launch("srun", 5, 7, 1, 2, "77.3.0")),
        (of_srun(6, 7, "2(x3),1"), Launch("srun", 6, 7, 0, 1, "77.3.0")),
        (of_open_mpi(1, 2), Launch("mpirun", 1, 2, 1, 2, "prterun-host-1234@1")),
        (of_srun(0, 2, "1(x2)") | of_open_mpi(3, 4), Launch("mpirun", 3, 4, 1, 2, "prterun-host-1234@1")),
        (of_hydra(1, 2), Launch("mpirun", 1, 2, 1, 2)),
        (of_srun(1, 2) | of_hydra(1, 2), Launch("srun", 1, 2, 1, 2, "77.3.0")),  # srun --mpi=pmi2
        (of_srun(0, 2, "1(x2)") | of_hydra(3, 4), Launch("mpirun", 3, 4, 1, 2)),
        (
            of_srun(0, 2) | dict(zip(TORCHRUN, ("3", "4", "localhost", "1"), strict=True)) | {"LOCAL_RANK": "1"},
            Launch("torchrun", 3, 4, 1, 1),
        ),
        (dict(zip(TORCHRUN, ("0", "1", "localhost", "1"), strict=True)), Launch("torchrun", 0, 1, 0, 1)),
    ],
    ids=[
        "alone", "batch", "shell", "srun", "srun-nodes", "srun-last", "open-mpi", "open-mpi-in-srun", "mpich",
        "srun-pmi2", "mpich-in-srun", "torchrun-in-srun", "torchrun-1",
    ],
)  # fmt: skip
def test_launch_reads_who_started_the_process(variables: dict[str, str], expected: Launch | None) -> None:
    put(variables)
    assert launch() == expected
    assert world_size() == (expected.size if expected is not None else 1)
    assert is_first_rank() == (expected is None or expected.rank == 0)


@pytest.mark.parametrize(
    ("variables", "here", "line"),
    [
        (of_srun(0, 4, "2(x2)"), 2, "MASTER_ADDR=<the first node> MASTER_PORT=29500 srun"),
        (of_open_mpi(0, 4), 2, "mpirun -x MASTER_ADDR=<the first node> -x MASTER_PORT=29500"),
        (of_hydra(0, 4), 2, "mpirun -x MASTER_ADDR=<the first node> -x MASTER_PORT=29500"),
    ],
    ids=["srun", "open-mpi", "mpich"],
)
def test_launch_without_an_address_says_what_to_write(variables: dict[str, str], here: int, line: str) -> None:
    put(variables)
    with pytest.raises(autotp.Error) as raised:
        make_mesh(4)
    by = "srun" if "srun" in line else "mpirun"
    assert str(raised.value) == (
        f"{by} started 4 processes ({here} here), and they do not know where to meet\n"
        f"  try      {line} ... (or torchrun on each machine)"
    )
    assert not dist.is_initialized()


def test_launch_refuses_a_folder_that_others_may_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"autotp-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(autotp.Error) as raised:
        store_of(Launch("srun", 0, 2, 0, 2, "1.0.0"), timedelta(seconds=1))
    assert str(raised.value) == f"{folder} can be changed by other users\n  try      TMPDIR=<a folder of yours>"


# ---- one card for each process


@dataclass(frozen=True)
class Card:
    """What `torch.cuda.get_device_properties` says of where a card is."""

    pci_bus_id: int
    pci_domain_id: int = 0
    pci_device_id: int = 0


def answers(store: dist.Store, buses: Sequence[int], by_default: Sequence[int] = ()) -> set[Any]:
    """What ranks with cards at these places of the bus are told."""

    def asked(rank: int) -> Any:
        started = Launch("srun", rank, len(buses), rank, len(buses))
        return ranks_on_one_card(store, started, Card(buses[rank]), rank not in by_default)

    with ThreadPoolExecutor(len(buses)) as threads:
        return set(threads.map(asked, range(len(buses))))


def test_ranks_on_one_card_are_found() -> None:
    store = dist.HashStore()
    assert answers(store, (5, 7, 9)) == {((), True)}
    assert answers(store, (9, 5, 7), by_default=(1,)) == {((), False)}, "another world in the same store"
    (found,) = answers(store, (5, 7, 7))
    assert sorted(found[0]) == [1, 2] and found[1]
    (found,) = answers(store, (5, 7, 5), by_default=(1,))
    assert sorted(found[0]) == [0, 2] and not found[1]


def test_the_requests_of_a_rank_do_not_grow_with_the_world() -> None:
    few, many = (Counting() for _ in range(2))
    for store, size in ((few, 2), (many, 32)):
        answers(store, range(size))
        assert store.requests <= 7 * size


class Counting(dist.Store):
    """A store that counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.requests = dist.HashStore(), 0

    def set(self, *args: Any) -> Any:
        self.requests += 1
        return self.inside.set(*args)

    def get(self, *args: Any) -> Any:
        self.requests += 1
        return self.inside.get(*args)

    def add(self, *args: Any) -> Any:
        self.requests += 1
        return self.inside.add(*args)

    def check(self, *args: Any) -> Any:
        self.requests += 1
        return self.inside.check(*args)

    def compare_set(self, *args: Any) -> Any:
        self.requests += 1
        return self.inside.compare_set(*args)


def of_ray(rank: int, size: int, port: int) -> dict[str, str]:
    """What a worker of Ray sets before it imports torch; here the parent keeps the store."""
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    found = {name: str(value) for name, value in values.items()}
    return found | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def with_one_visible_card(rank: int, n: int, by: str, where: Any, buses: Sequence[int], device: str | None) -> Any:
    """Each process sees one card, as under `srun --gpus-per-task=1` and in an actor of Ray."""
    dist.destroy_process_group()
    put(of_srun(rank, n) | {"TMPDIR": where} if by == "srun" else of_ray(rank, n, where))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: Card(buses[rank]))
        try:
            mesh = make_mesh(n, timeout=timedelta(seconds=30), device=device)
        except autotp.Error as error:
            return str(error), dist.is_initialized()
    x = torch.tensor([1.0 + rank], device=mesh.device if dist.get_backend() != "gloo" else "cpu")
    dist.all_reduce(x, group=group_of(mesh))
    assert x.item() == 3.0
    return str(mesh.device), dist.get_backend(), [str(warning.message) for warning in told]


SHARED = r"global ranks (0 and 1|1 and 0) compute on the same GPU"


@pytest.mark.parametrize("by", ["srun", "ray"])
def test_each_process_sees_one_card_of_its_own(by: str, tmp_path: Path) -> None:
    for device in (None, "cuda:0"):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = str(tmp_path) if by == "srun" else store.port
        found = run_ranks(with_one_visible_card, 2, by, where, (23, 27), device, cards=True)
        assert found == [("cuda:0", "cpu:gloo,cuda:nccl", [])] * 2


def test_all_processes_see_the_same_card(tmp_path: Path) -> None:
    for message, initialised in run_ranks(with_one_visible_card, 2, "srun", str(tmp_path), (7, 7), None, cards=True):
        problem, fix = message.splitlines()
        assert re.fullmatch(f"{SHARED}, and NCCL wants one for each rank", problem)
        assert fix.endswith('fewer processes, or device="cuda:0" on each to share a card (slow: gloo instead of NCCL)')
        assert not initialised, "an error leaves nothing half done"
    for device, backend, told in run_ranks(
        with_one_visible_card, 2, "srun", str(tmp_path), (7, 7), "cuda:0", cards=True
    ):
        assert (device, backend) == ("cuda:0", "gloo")
        assert re.match(f"{SHARED}, so all ranks send over gloo", told[0])


# ---- processes that meet


def meet(rank: int, n: int, kind: str, folder: str, port: int) -> Any:
    dist.destroy_process_group()
    put({"srun": of_srun, "open-mpi": of_open_mpi, "mpich": of_hydra}[kind](rank, n) | {"TMPDIR": folder})
    if port:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(SLURM_STEP_TASKS_PER_NODE="1(x2)")  # It does not matter then where they are.
    mesh = make_mesh(2, timeout=timedelta(seconds=30))
    return mesh.rank, mesh.size, gather_ints([rank * 7], mesh)


def free_port() -> int:
    """A port that the first rank can have: nobody has it now."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(store.port)


@pytest.mark.parametrize("kind", ["srun", "open-mpi"])
def test_ranks_of_one_machine_meet_in_a_folder(kind: str, tmp_path: Path) -> None:
    """A job of the same name that was killed has left the port of a process that is gone."""
    left = tmp_path / f"autotp-{os.getuid()}"
    left.mkdir(mode=0o700)
    for job in ("77.3.0", "prterun-host-1234_1"):
        (left / job).write_text(str(free_port()))
    for rank, found in enumerate(run_ranks(meet, 2, kind, str(tmp_path), 0)):
        assert found == (rank, 2, [[0], [7]])


@pytest.mark.parametrize("kind", ["srun", "mpich"])
def test_ranks_meet_at_an_address(kind: str, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(meet, 2, kind, str(tmp_path), free_port())):
        assert found == (rank, 2, [[0], [7]])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rank", "taken", "why"),
    [(0, False, "waiting for clients"), (1, False, "timed out"), (0, True, "EADDRINUSE")],
    ids=["first", "second", "port-taken"],
)
def test_a_rank_whose_others_are_missing_is_told(rank: int, taken: bool, why: str) -> None:
    """One process of two, which waits for nobody."""
    dist.destroy_process_group() if dist.is_initialized() else None
    with socket.create_server(("", 0)) as held:
        port = held.getsockname()[1] if taken else free_port()
        put(dict(zip(TORCHRUN, (str(rank), "2", "127.0.0.1", str(port)), strict=True)))
        with pytest.raises(autotp.Error) as raised:
            make_mesh(2, timeout=timedelta(seconds=1))
    first, *others = str(raised.value).splitlines()
    assert first.startswith(f"global rank {rank} of 2 could not meet the others at 127.0.0.1:{port}: ") and why in first
    assert others == [
        "  try      start all processes, and read the log of each; MASTER_PORT=<a free port> if this one is taken",
        "  or       timeout= of autotp.parallelize, if they start at other times",
    ]
    assert not dist.is_initialized()


SCRIPT = """
import torch, autotp
torch.manual_seed(0)
model = autotp.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)),
                           example_inputs=torch.ones(2, 4))
print(model.mesh, tuple(model[0].weight.shape))
"""


def test_a_script_under_srun_runs_unchanged(tmp_path: Path) -> None:
    """`srun python train.py`, unchanged."""
    started = []
    for rank in range(2):
        variables = {name: value for name, value in os.environ.items() if not NAMES.match(name)}
        variables |= of_srun(rank, 2) | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", SCRIPT]
        started.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    for rank, process in enumerate(started):
        assert process.communicate(timeout=60)[0] == f"tp=2, rank {rank} on cpu (8, 4)\n"
    assert not list(tmp_path.rglob("77*")), "the file is gone"


@pytest.mark.parametrize(
    "how", ["spawn", pytest.param("notebook", marks=pytest.mark.rare), pytest.param("launch", marks=pytest.mark.rare)]
)
def test_ranks_started_by_other_launchers_find_each_other(how: str, tmp_path: Path) -> None:
    """torch.multiprocessing.spawn, accelerate.notebook_launcher, accelerate launch."""
    script, port = str(HERE / "scripts" / "launched.py"), str(free_port())
    if how != "spawn":
        pytest.importorskip("accelerate")
    given = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    command = {
        "spawn": [script, how, str(tmp_path / "meet")],
        "notebook": [script, how, port],
        "launch": ["-m", "accelerate.commands.launch", *given, f"--main_process_port={port}", script, how],
    }[how]
    variables = {name: value for name, value in os.environ.items() if not NAMES.match(name)}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], env=variables, stdout=subprocess.PIPE, text=True, timeout=100)
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("tp="))
    assert told == [f"tp=2, rank {rank} on cpu [8@tp, 4] 0.135520" for rank in range(2)]


def test_accelerate_starts_one_process_for_a_cpu() -> None:
    """`accelerate launch --cpu --num_processes=2` is one process, and the error names torchrun."""
    pytest.importorskip("accelerate")
    script = str(HERE / "scripts" / "launched.py")
    given = ["--cpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    variables = {name: value for name, value in os.environ.items() if not NAMES.match(name)}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "accelerate.commands.launch", *given, script, "launch"]
    done = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode
    told = "autotp.Error: parallelize(Sequential, tp=2): tp=2 needs 2 processes, and this is one\n"
    assert f"{told}  try      torchrun --nproc-per-node 2 {script}" in done.stderr
