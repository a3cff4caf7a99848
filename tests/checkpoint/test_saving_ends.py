"""Saves that do not go as they should: disks that are full, other jobs, processes that end or are killed meanwhile."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import ROOT, job, over, run_ranks
from trainers import fingerprint, started, trained

import autotp
from autotp.checkpoint import save as saving
from autotp.checkpoint import write as writing
from autotp.checkpoint.files import tensor_pieces as pieces
from autotp.checkpoint.save import saved_steps
from autotp.distributed.peers import heartbeat

pytestmark = pytest.mark.system


# ---- a file system that fails


@contextmanager
def small_files(bytes: int) -> Iterator[None]:
    """Within, this process cannot write a file beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(rank: int, n: int, folder: str) -> list[str]:
    heartbeat.INTERVAL = 0.01  # The disk is full for it, too: the ranks met in a file.
    trainer, optimizer = started((2, 1, 1))
    trained(trainer, optimizer, range(1))
    autotp.save_checkpoint(folder, trainer, optimizer, 1)
    before, found = fingerprint(trainer, optimizer), []
    trained(trainer, optimizer, range(1, 2))
    for full in (0, 1):
        with small_files(2000 if rank == full else resource.RLIM_INFINITY):
            found.append(message(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 2)))
    dist.barrier()
    assert {path.name for path in Path(folder).iterdir()} == {"step-00000001", ".lock"}
    assert autotp.load_checkpoint(folder, trainer, optimizer) == 1
    assert fingerprint(trainer, optimizer) == before
    no_folder = Path(folder, "file", "below")
    if rank == 0:
        no_folder.parent.touch()
    dist.barrier()
    found.append(message(lambda: autotp.save_checkpoint(no_folder, trainer, optimizer, 2)))
    autotp.save_checkpoint(folder, trainer, optimizer, 2)
    assert saved_steps(folder) == [1, 2]
    return found


def test_save_on_a_full_disk_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    """One error on every rank, and the older checkpoint is whole."""
    for rank, found in enumerate(run_ranks(full_disk, 2, str(tmp_path), timeout=100)):
        for full, text in enumerate(found[:2]):
            first, *facts = text.splitlines()
            assert first.startswith(f"save_checkpoint: {tmp_path}/.step-00000002.")
            assert first.endswith(".new cannot be written: [Errno 27] File too large")
            remedy = "  try      a folder that this process may write, on a disk with free space"
            assert facts == [remedy, *([] if rank == full else [f"  on       global rank {full}"])]
        first, *facts = found[2].splitlines()
        assert first == (
            f"save_checkpoint: {tmp_path}/file/below cannot be written: "
            f"[Errno 20] Not a directory: '{tmp_path}/file/below'"
        )
        assert facts == [remedy, *([] if rank == 0 else ["  on       global rank 0"])]


class NoMemory:
    """In the place of a function of the save on one rank: Python's error, and torch's on the CPU."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *given: Any, **named: Any) -> Any:
        raise self.error


def told_late(rank: int, n: int, folder: str) -> list[str]:
    """A save fails; one rank waited for it, the other is told in the next call."""
    trainer, optimizer = started((2, 1, 1))
    trained(trainer, optimizer, range(1))

    def fails(*given: Any) -> Any:
        raise OSError(28, "No space left on device")

    found, before = list[str](), writing.write_pieces
    writing.write_pieces = fails if rank else before  # type: ignore[assignment]
    if rank:
        found.append(message(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 1)))
    else:
        autotp.save_checkpoint(folder, trainer, optimizer, 1, wait=False)
    found.append(message(lambda: autotp.load_checkpoint(folder, trainer, optimizer)))
    writing.write_pieces = before
    assert autotp.load_checkpoint(folder, trainer, optimizer) == 0
    autotp.save_checkpoint(folder, trainer, optimizer, 2)
    assert autotp.load_checkpoint(folder, trainer, optimizer) == 2
    return found


def test_a_save_that_failed_is_told_to_all_ranks(tmp_path: Path) -> None:
    for found in run_ranks(told_late, 2, str(tmp_path), timeout=60):
        assert all("No space left on device" in text for text in found), found


def no_memory(rank: int, n: int, folder: str, names: list[str]) -> list[str]:
    trainer, optimizer = started((2, 1, 1))
    of_torch = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\nand more"
    found = []
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                error = RuntimeError(of_torch) if name == "_state" else MemoryError()
                patch.setattr(writing, name, NoMemory(error))
            found.append(message(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 1)))
        dist.barrier()
        assert {path.name for path in Path(folder).iterdir()} == {".lock"}
    autotp.save_checkpoint(folder, trainer, optimizer, 1)
    return found


@pytest.mark.parametrize(
    "names",
    [
        ["_chosen", "_state"],
        pytest.param(["_holders", "bytes_of", "_expect_alike", "write_pieces", "local_of"], marks=pytest.mark.rare),
    ],
)
def test_save_on_a_rank_without_memory_fails_on_all(tmp_path: Path, names: list[str]) -> None:
    """One error on every rank, wherever in a save it happens: nobody waits for that rank."""
    for rank, found in enumerate(run_ranks(no_memory, 2, str(tmp_path), names, timeout=30)):
        for name, text in zip(names, found, strict=True):
            said = ": [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            first = f"save_checkpoint: there is not enough memory{said if name == '_state' else ''}"
            lines = [first, "  try      free memory, and call it again", "  on       global rank 1"]
            assert text.splitlines() == lines[: 3 if rank == 0 else 2]


# ---- other jobs

CLAIM = """
import pathlib, sys
from autotp.checkpoint.files.folder_lock import claim
claim(pathlib.Path(sys.argv[1]))
print(flush=True)
input()
"""


@contextmanager
def other_job(folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the folder to itself."""
    process = subprocess.Popen([sys.executable, "-c", CLAIM, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def two_jobs(rank: int, n: int, folder: str) -> str:
    """Another job saves there: an error on every rank. Once it was killed, this one saves, and clears what it left."""
    trainer, optimizer = started((2, 1, 1))
    left = Path(folder, ".step-00000007.00ff.new")
    if rank == 0:
        with other_job(folder) as process:
            owner = f"process {process.pid} on "
            found = message(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 1))
            assert owner in found
            left.mkdir()
    else:
        found = message(lambda: autotp.save_checkpoint(folder, trainer, optimizer, 1))
    dist.barrier()
    autotp.save_checkpoint(folder, trainer, optimizer, 1)
    assert saved_steps(folder) == [1] and not left.exists()
    trainer, optimizer = started((2, 1, 1))  # The same process: no other job.
    autotp.save_checkpoint(folder, trainer, optimizer, 2)
    return found


def test_save_refuses_a_folder_of_another_job(tmp_path: Path) -> None:
    for rank, text in enumerate(run_ranks(two_jobs, 2, str(tmp_path), timeout=100)):
        first, *facts = text.splitlines()
        assert first.startswith("save_checkpoint: process ") and first.endswith(f" saves into {tmp_path}")
        assert facts == ["  try      another folder, or end it", "  on       global rank 0"][: 1 + rank]


def vanishing(rank: int, n: int, folder: str) -> list[str]:
    """Another job removes a checkpoint at each moment of its being read; then there is the one before."""
    trainer, optimizer = started((2, 1, 1))
    found = []
    for step, (module, name, count) in enumerate(MOMENTS, 2):
        autotp.save_checkpoint(folder, trainer, optimizer, 1) if step == 2 else None
        trained(trainer, optimizer, range(step - 2, step - 1))
        autotp.save_checkpoint(folder, trainer, optimizer, step)
        before, run, calls = fingerprint(trainer, optimizer), getattr(module, name), itertools.count(1)
        gone = Path(folder, f"step-{step:08d}")

        def removed(*given: Any, run: Any = run, calls: Any = calls, gone: Path = gone, count: int = count) -> Any:
            value = run(*given)
            if next(calls) == count and rank == n - 1:
                gone.rename(f"{gone}-elsewhere")  # At once: half of it is another error.
                shutil.rmtree(f"{gone}-elsewhere")
            return value

        setattr(module, name, removed)
        found.append(message(lambda: autotp.load_checkpoint(folder, trainer, optimizer)))
        setattr(module, name, run)
        assert fingerprint(trainer, optimizer) == before
        assert autotp.load_checkpoint(folder, trainer, optimizer) == 1
    return found


MOMENTS = [
    (saving, "path_of", 1), (saving, "read_manifest", 1), (pieces, "read_piece", 1), (pieces, "read_piece", 9),
]  # fmt: skip


def test_load_tells_that_its_checkpoint_was_removed_meanwhile(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(vanishing, 2, str(tmp_path), timeout=100)):
        for step, text in enumerate(found, 2):
            path, (first, *facts) = tmp_path / f"step-{step:08d}", text.splitlines()
            assert first == f"load_checkpoint: {path} was removed while it was read", (rank, text)
            assert facts[0] == "  try      load_checkpoint again: it takes the newest that is there"


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [True, False], ids=["later", "at-once"])
def test_of_two_torchrun_jobs_one_saves_and_one_is_refused(first: bool, tmp_path: Path) -> None:
    """The one that saves first goes on; what it saved is its own, and the other ends with an error that names it."""
    saved, folders = tmp_path / "saved", [tmp_path / "one", tmp_path / "two"]
    with ExitStack() as stack:
        jobs = []
        for seed, folder in enumerate(folders):
            jobs.append(stack.enter_context(job(folder, "beside.py", [str(saved), str(seed)], 0)))
            while first and not saved_steps(saved) and jobs[0].poll() is None:
                over(jobs[0], 0.05)
        while all(process.poll() is None for process in jobs):
            over(jobs[1], 0.05)
        loser = next(i for i, process in enumerate(jobs) if process.poll() is not None)
        (folders[1 - loser] / "enough").touch()
        said = [process.communicate(timeout=100)[0] for process in jobs]
    assert not first or loser == 1
    assert jobs[loser].returncode != 0 and f"saves into {saved}" in said[loser], said[loser]
    assert jobs[1 - loser].returncode == 0, said[1 - loser]
    run_ranks(holds, 2, str(saved), str(folders[1 - loser] / "state"), timeout=100)


def holds(rank: int, n: int, folder: str, state: str) -> None:
    """The newest checkpoint is that state, and there is one of each step."""
    trainer, optimizer = started((2, 1, 1))
    step = autotp.load_checkpoint(folder, trainer, optimizer)
    assert saved_steps(folder) == list(range(step // 1000 * 1000 + 1, step + 1))
    found, expected = autotp.full_state_dict(trainer), torch.load(state)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def lagging(rank: int, n: int, folder: str) -> None:
    """The second rank does not see the newest checkpoint in its list; both load what the first sees."""
    trainer, optimizer = started((2, 1, 1))
    for step in (1, 2):
        trained(trainer, optimizer, range(step - 1, step))
        autotp.save_checkpoint(folder, trainer, optimizer, step)
    before = fingerprint(trainer, optimizer)
    if rank:
        saving.saved_steps = lambda folder: [1]  # type: ignore[assignment]
    assert autotp.load_checkpoint(folder, trainer, optimizer) == 2
    assert fingerprint(trainer, optimizer) == before


def test_load_takes_the_step_that_the_first_rank_sees(tmp_path: Path) -> None:
    run_ranks(lagging, 2, str(tmp_path), timeout=100)


# ---- what is saved besides


class Schedule:
    """Has a state; may refuse a new one, having taken half of it."""

    def __init__(self, value: Any, fails: bool = False) -> None:
        self.value, self.fails = value, fails

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.fails:
            raise KeyError("gamma")


def others(rank: int, n: int, folder: str) -> list[str]:
    trainer, optimizer = started((2, 1, 1))
    trained(trainer, optimizer, range(1))
    autotp.save_checkpoint(folder, trainer, optimizer, 1, one=Schedule((1, {2: torch.ones(2)})), two=Schedule(5))
    trained(trainer, optimizer, range(1, 2))
    before, one, two = fingerprint(trainer, optimizer), Schedule(8), Schedule(9, fails=rank == 1)
    found = [message(lambda: autotp.load_checkpoint(folder, trainer, optimizer, one=one, two=two))]
    assert (one.value, two.value) == (8, 9)
    assert fingerprint(trainer, optimizer) == before
    for value in (rank, torch.full((2,), float(rank)), lambda: 3):
        call = {"one": Schedule({"a": [value]})}
        found.append(message(lambda call=call: autotp.save_checkpoint(folder, trainer, optimizer, 2, **call)))
    two.fails = False
    assert autotp.load_checkpoint(folder, trainer, optimizer, one=one, two=two) == 1
    assert two.value == 5 and one.value[0] == 1 and torch.equal(one.value[1][2], torch.ones(2))
    return found


def test_objects_saved_by_name_are_compared_between_ranks(tmp_path: Path) -> None:
    """It is the same on all ranks, and plain; where one of it cannot be loaded nothing is changed."""
    for rank, found in enumerate(run_ranks(others, 2, str(tmp_path), timeout=100)):
        where = [] if rank else ["  on       global rank 1"]
        text = "load_checkpoint: `two` cannot be loaded into a Schedule: KeyError: 'gamma'"
        remedy = "  try      an object like the one that was saved as `two`"
        assert found[0].splitlines() == [text, remedy, *where]
        first = [text.splitlines()[0].removeprefix("save_checkpoint: ") for text in found[1:]]
        assert first == [
            "global rank 1 saves another state by name than rank 0",
            "global rank 1 saves another state by name than global rank 0",
            "the state of `one`['value']['a'][0] is a builtins.function, which a checkpoint cannot hold",
        ]


# ---- processes that end


def destroyed(rank: int, n: int, folder: str) -> None:
    """torch.distributed is shut down while a save is under way."""
    trainer, optimizer = started((2, 1, 1))
    gone, write = threading.Event(), writing.write_pieces

    def late(*args: Any) -> Any:
        gone.wait(60)
        return write(*args)

    writing.write_pieces = late  # type: ignore[assignment]
    future = autotp.save_checkpoint(folder, trainer, optimizer, 1, wait=False)
    dist.destroy_process_group()
    gone.set()
    future.result()
    assert saved_steps(folder) == [1]


def test_save_ends_although_torch_distributed_is_shut_down(tmp_path: Path) -> None:
    run_ranks(destroyed, 2, str(tmp_path), timeout=100)


def ended(tmp_path: Path, *mode: str) -> tuple[int, str]:
    """How torchrun of two processes ended that saved and did not wait, and what it said."""
    with job(tmp_path / "job", "ending.py", mode, 0) as process:
        output = process.communicate(timeout=100)[0]
    return process.returncode, output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["destroy", pytest.param("exit", marks=pytest.mark.rare)])
def test_save_ends_although_the_program_ends(mode: str, tmp_path: Path) -> None:
    status, output = ended(tmp_path, mode)
    assert status == 0, output
    assert saved_steps(tmp_path / "job" / "saved") == [1, 2]


@pytest.mark.rare
@pytest.mark.timeout(300)
def test_a_save_that_fails_as_the_program_ends_is_told(tmp_path: Path) -> None:
    status, output = ended(tmp_path, "full")
    assert status != 0 and "File too large" in output, output
    assert saved_steps(tmp_path / "job" / "saved") == [1]


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.rare, pytest.mark.timeout(1800)])])
def test_a_rank_killed_during_save_leaves_a_resumable_checkpoint(times: int, tmp_path: Path) -> None:
    """The job ends with an error; the next one goes on at the checkpoint before, and saves."""
    for attempt in range(times):
        with job(tmp_path / str(attempt), "ending.py", ("killed", str(attempt)), 0) as process:
            output = process.communicate(timeout=100)[0]
        assert process.returncode != 0 and "SIGKILL" in output, output
        folder = tmp_path / str(attempt) / "saved"
        assert saved_steps(folder) in ([1], [1, 2])
        run_ranks(goes_on, 2, str(folder), timeout=100)


def goes_on(rank: int, n: int, folder: str) -> None:
    trainer, optimizer = started((2, 1, 1))
    step = autotp.load_checkpoint(folder, trainer, optimizer)
    trained(trainer, optimizer, range(step, step + 1))
    autotp.save_checkpoint(folder, trainer, optimizer, step + 1)
    assert saved_steps(folder)[-1] == step + 1
    dist.barrier()
    assert not [name for name in os.listdir(folder) if name.endswith(".new")]


def fails(how: str) -> None:
    future = saving.Saving(lambda: (_ for _ in ()).throw(OSError("the disk is full")))
    if how == "told":
        with pytest.raises(OSError, match="full"):
            future.result()


@pytest.mark.parametrize("how", ["untold", "told"])
def test_a_forked_process_whose_save_failed_exits_1(how: str) -> None:
    """Where nobody asked for the result of a save that failed; multiprocessing ends its processes in its own way."""
    process = multiprocessing.get_context("fork").Process(target=fails, args=(how,))
    process.start()
    process.join(30)
    assert process.exitcode == (1 if how == "untold" else 0)


LATE = """
import atexit, sys, threading, time

atexit.register(lambda: print(*(it.name for it in threading.enumerate())))
from autotp.checkpoint.save import Saving

class Tensors:
    def __del__(self):
        time.sleep(2)

def save():
    state = Tensors()
    saving = Saving(lambda: print("saved", type(state).__name__))
    if sys.argv[1] == "told":
        saving.result()

atexit.register(save)
"""


@pytest.mark.parametrize("how", ["untold", "told"])
def test_a_save_begun_while_python_ends_is_finished(how: str) -> None:
    """Its thread ends before Python does: a thread that frees tensors while Python ends aborts the process."""
    given = [sys.executable, "-c", LATE, how]
    done = subprocess.run(given, stdout=subprocess.PIPE, text=True, timeout=100, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "saved Tensors\nMainThread\n")


def test_save_without_a_thread_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts none at the end of a program, and the system none beyond its limit."""

    def start(*_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    run = list[str]()
    saving.Saving(lambda: run.append("saved")).result()
    assert run == ["saved"]
    with pytest.raises(OSError, match="full"):
        saving.Saving(lambda: (_ for _ in ()).throw(OSError("the disk is full"))).result()
