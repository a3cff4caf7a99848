"""The benchmark of small sums measures both ways, and what it sums is right."""

from __future__ import annotations

import pytest
import torch
from calls import small_sums
from ranks import run_ranks


def measured(rank: int, tp: int) -> tuple[list[str], list[float]]:
    ways = small_sums.ways()
    sums = []
    for add in ways.values():
        x = torch.full((512,), float(rank + 1))
        add(x)
        sums.append(x.unique().item())
    return small_sums.measure(512, rounds=1), sums


def test_both_ways_are_measured() -> None:
    if not small_sums.has_shared_memory():
        pytest.skip("ranks share memory on Linux, on x86-64, with a core for each")
    for lines, sums in run_ranks(measured, 2):
        assert sums == [3.0, 3.0]
        assert [line.split("numbers")[1].split()[0] for line in lines] == ["gloo", "shared"]
