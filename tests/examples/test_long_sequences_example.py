"""Four processes train on sequences that one process cannot hold within the same memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "sequences" / "long_sequences.py"


def run(ranks: int, *flags: str) -> subprocess.CompletedProcess[str]:
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*started, str(EXAMPLE), *flags], capture_output=True, text=True, timeout=110, check=False)


def test_four_processes_can_what_one_cannot() -> None:
    alone, together = run(1, "--steps", "1"), run(4, "--steps", "1")
    assert alone.returncode and "4096 tokens on 1 process need more than 800 MiB" in alone.stdout
    assert together.returncode == 0, together.stdout + together.stderr
    assert "step 0: loss" in together.stdout


def test_the_losses_are_those_of_one_process() -> None:
    flags = ("--length", "301", "--steps", "2", "--layers", "2", "--limit", "4000")
    losses = [[line.partition(",")[0] for line in run(n, *flags).stdout.splitlines() if "loss" in line] for n in (1, 3)]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
