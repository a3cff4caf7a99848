"""Four processes train on sequences that one process cannot hold, and on packed texts as one process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "sequences"


def run(ranks: int, *flags: str, script: str = "long_sequences.py") -> subprocess.CompletedProcess[str]:
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*started, str(FOLDER / script), *flags], capture_output=True, text=True, timeout=110, check=False
    )


def test_four_processes_can_what_one_cannot() -> None:
    alone, together = run(1, "--steps", "1"), run(4, "--steps", "1")
    assert alone.returncode and "4096 tokens on 1 process need more than 800 MiB" in alone.stdout
    assert together.returncode == 0, together.stdout + together.stderr
    assert "step 0: loss" in together.stdout


def test_the_losses_are_those_of_one_process() -> None:
    flags = ("--length", "301", "--steps", "2", "--layers", "2", "--limit", "4000")
    losses = [[line.partition(",")[0] for line in run(n, *flags).stdout.splitlines() if "loss" in line] for n in (1, 3)]
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def test_packed_text_trains_on_tp_and_cp_as_on_one_process() -> None:
    """The script compares the losses of each step, which has other documents than the one before."""
    together = run(4, "--steps", "8", "--documents", "5", script="finetune_packed.py")
    assert together.returncode == 0, together.stdout + together.stderr
    assert "nats a byte, tp=2, cp=2, 8 steps" in together.stdout
