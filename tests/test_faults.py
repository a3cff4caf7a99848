"""Ranks that are killed at any moment: the job ends with an error that names them, or goes on where it last saved."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from resuming import SAVE_EVERY

from autotp.checkpoint.save import saved_steps

STEPS = 240
HERE = Path(__file__).resolve().parent


@contextmanager
def job(folder: Path, script: str, given: Sequence[str], restarts: int) -> Iterator[subprocess.Popen[str]]:
    """torchrun with two processes of a script here; ended, with its own processes, in any case."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    process = subprocess.Popen(
        [*command, *where, str(HERE / script), str(folder), *given],
        env=environment,
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


def told(folder: Path) -> list[tuple[int, int, str]]:
    """Attempt, step and loss, in the order in which they were computed."""
    if not (folder / "told").exists():
        return []
    rows = [line.split() for line in (folder / "told").read_text().splitlines()]
    return [(int(attempt), int(step), loss) for attempt, step, loss in rows]


def killed(folder: Path, process: subprocess.Popen[str], times: int, draw: random.Random) -> int:
    """Kills a rank at a random moment of a step, `times` times, each time once the job has come further; how often."""
    done = 0
    while done < times and process.poll() is None:
        attempts = {attempt for attempt, _, _ in told(folder)}
        if done in attempts:  # This attempt has done a step.
            over(process, draw.uniform(0, 0.5))
            try:
                os.kill(int((folder / f"pid-{draw.randrange(2)}").read_text()), signal.SIGKILL)
            except ProcessLookupError:  # It was done.
                break
            done += 1
        over(process, 0.05)
    return done


def over(process: subprocess.Popen[str], seconds: float) -> bool:
    """Whether a process is over within a time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs") / "undisturbed"
    with job(folder, "resuming.py", [str(STEPS)], 0) as process:
        output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=[pytest.mark.rare, pytest.mark.timeout(1800)])])
def test_what_is_killed_goes_on(times: int, undisturbed: Path, tmp_path: Path) -> None:
    """No step is lost beyond the last checkpoint, and none is done twice: the result is one run's, bit for bit."""
    folder = tmp_path / "job"
    with job(folder, "resuming.py", [str(STEPS)], times + 1) as process:
        kills = killed(folder, process, times, random.Random(0))
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert kills == times
    steps, losses = told(folder), {step: loss for _, step, loss in told(undisturbed)}
    assert {step for _, step, _ in steps} == set(range(1, STEPS + 1))
    for attempt, step, loss in steps:
        assert loss == losses[step], f"attempt {attempt}, step {step}"
    reached = 0
    for attempt in range(times + 1):
        mine = [step for tried, step, _ in steps if tried == attempt]
        assert mine == list(range(mine[0], mine[-1] + 1))
        # A save that was under way is lost, and so are at most the steps since the one before.
        assert (mine[0] - 1) % SAVE_EVERY == 0 and reached - 2 * SAVE_EVERY <= mine[0] - 1 <= reached
        reached = mine[-1]
    ours, theirs = (torch.load(path / "state") for path in (folder, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert saved_steps(folder / "saved")[-1] == STEPS


@pytest.mark.timeout(300)
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with job(folder, "resuming.py", ["100000"], 0) as process:
        assert killed(folder, process, 1, random.Random(1)) == 1
        began = time.monotonic()
        output = process.communicate(timeout=100)[0]
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    assert "Signal 9 (SIGKILL) received" in output, output
