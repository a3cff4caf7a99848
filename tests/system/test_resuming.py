"""Ranks that are killed in a step: the job ends with an error that names them, or goes on where it last saved."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from ranks import job, run_ranks
from scripts import resuming
from scripts.resuming import SAVE_EVERY

from autotp.checkpoint.save import saved_steps


def told(folder: Path) -> list[tuple[int, int, str]]:
    """Attempt, step and loss, in the order in which they were computed."""
    if not (folder / "told").exists():
        return []
    rows = [line.split() for line in (folder / "told").read_text().splitlines()]
    return [(int(attempt), int(step), loss) for attempt, step, loss in rows]


def kills(times: int, steps: int, draw: random.Random) -> list[str]:
    """One for each attempt but the last, each further than the one before; any moment of a step, any rank."""
    found, gap = [], steps // (times + 1) // SAVE_EVERY * SAVE_EVERY
    for attempt in range(times):
        moment, step = draw.choice(("backward", "update", "save")), attempt * gap + draw.randint(1, gap)
        step = -(-step // SAVE_EVERY) * SAVE_EVERY if moment == "save" else step
        found.append(f"{attempt}:{step}:{draw.randrange(2)}:{moment}")
    return found


def alone(rank: int, n: int, folder: Path, steps: int) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    resuming.main(folder, steps)


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(2, marks=pytest.mark.timeout(300)),
        pytest.param(20, marks=[pytest.mark.rare, pytest.mark.timeout(1800)]),
    ],
)
def test_a_killed_job_resumes_without_losing_or_repeating_steps(times: int, tmp_path: Path) -> None:
    """No step is lost beyond the last checkpoint, and none is done twice: the result is one run's, bit for bit."""
    folder, undisturbed, steps = tmp_path / "job", tmp_path / "undisturbed", 12 * times
    undisturbed.mkdir()
    run_ranks(alone, 2, undisturbed, steps, timeout=200)
    with job(folder, "resuming.py", [str(steps), *kills(times, steps, random.Random(times))], times + 1) as process:
        output = process.communicate(timeout=1500)[0]
    assert process.returncode == 0, output
    done, losses = told(folder), {step: loss for _, step, loss in told(undisturbed)}
    assert {step for _, step, _ in done} == set(range(1, steps + 1))
    for attempt, step, loss in done:
        assert loss == losses[step], f"attempt {attempt}, step {step}"
    reached = 0
    for attempt in range(times + 1):
        mine = [step for tried, step, _ in done if tried == attempt]
        if not mine:  # It was killed in its first step.
            continue
        assert mine == list(range(mine[0], mine[-1] + 1))
        # A save that was under way is lost, and so are at most the steps since the one before.
        assert (mine[0] - 1) % SAVE_EVERY == 0 and reached - 2 * SAVE_EVERY <= mine[0] - 1 <= reached
        reached = mine[-1]
    ours, theirs = (torch.load(path / "state") for path in (folder, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert saved_steps(folder / "saved")[-1] == steps


@pytest.mark.rare  # That an error names it is tested without torchrun, in `test_heartbeat.py`.
@pytest.mark.timeout(300)
def test_the_error_of_a_killed_rank_names_its_signal(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    with job(folder, "resuming.py", ["100000", "0:5:1:backward"], 0) as process:
        output = process.communicate(timeout=100)[0]
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL) received" in output, output
