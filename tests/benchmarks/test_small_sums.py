"""Benchmarks of one operation measure both ways, and what these compute is right: small sums, a layer of experts."""

from __future__ import annotations

import platform

import pytest
import torch
from calls import plain_experts, small_sums
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


def measured_experts(rank: int, ranks: int) -> tuple[list[float], list[str]]:
    losses = [step().item() for step in plain_experts.ways(16).values()]
    return losses, plain_experts.measure(16, rounds=2)


def test_a_layer_of_experts_is_measured_beside_one_by_hand() -> None:
    for (by_hand, ours), lines in run_ranks(measured_experts, 2):
        assert abs(by_hand - ours) < 1e-5
        assert [line.split("tokens")[1].split()[0] for line in lines] == ["by", "autotp"]
