"""The benchmark of compared steps: a comparison is counted apart from its step."""

from __future__ import annotations

from calls import compared_steps
from ranks import run_ranks


def measured(rank: int, n: int) -> list[str]:
    return compared_steps.measure("tiny", count=5).strip("| ").split(" | ")


def test_a_row() -> None:
    for name, parameters, step, comparison, share, _, operators, read in run_ranks(measured, 2, timeout=100):
        assert (name, parameters) == ("tiny", "0.2M")
        assert float(step) > 0 and 0 < float(comparison) < 1000 and share.endswith("%")
        assert int(operators) < 150 and int(read) == 3
