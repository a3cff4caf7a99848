"""The benchmark of small sums measures both ways, and what it sums is right."""

from __future__ import annotations

import platform

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


@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="no such memory")
def test_both_ways_are_measured() -> None:
    for lines, sums in run_ranks(measured, 2):
        assert sums == [3.0, 3.0]
        assert [line.split("numbers")[1].split()[0] for line in lines] == ["gloo", "shared_memory"]
