"""cheapest: each corner of a block's curve is the fastest choice for its bytes."""

from __future__ import annotations

import pytest
from budgets.fates import every_choice, random_table
from torch import fx

from autotp.costs.hardware import CPU_GLOO, H100_80GB
from autotp.passes.emit.memory.block_table import BlockTable, BlockValue
from autotp.passes.emit.memory.cheapest import closure, curve


@pytest.mark.parametrize("seed", range(12))
def test_corners_of_the_curve_are_the_fastest_choices_for_their_bytes(seed: int) -> None:
    table = random_table(seed)
    choices, corners = every_choice(table), curve(table, CPU_GLOO, ("recompute",))
    assert [choice.bytes for choice in corners] == sorted({choice.bytes for choice in corners}, reverse=True)
    for corner in corners:
        best = min(choice.seconds for choice in choices if choice.bytes <= corner.bytes)
        assert corner.seconds == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert corners[-1].bytes == min(choice.bytes for choice in choices)


def test_a_curve_moves_values_to_the_host_where_that_is_faster() -> None:
    value = BlockValue(name="v", node=fx.Graph().placeholder("v"), seconds=1.0, made=10**6, kept=10**6, smaller=10**6)
    table = BlockTable(values={"v": value}, inputs=frozenset(), results=())
    assert [dict(choice.fates) for choice in curve(table, H100_80GB, ("recompute", "host"))] == [{}, {"v": "host"}]
    assert [dict(choice.fates) for choice in curve(table, H100_80GB, ("recompute",))] == [{}, {"v": "recompute"}]


def test_a_curve_keeps_masks_in_bits_before_it_computes_again() -> None:
    value = BlockValue(name="v", node=fx.Graph().placeholder("v"), seconds=1.0, made=10**6, kept=10**6, smaller=125_000)
    table = BlockTable(values={"v": value}, inputs=frozenset(), results=())
    corners = curve(table, H100_80GB, ("recompute", "bits"))
    assert [(dict(choice.fates), choice.bytes) for choice in corners] == [
        ({}, 10**6), ({"v": "bits"}, 125_000), ({"v": "recompute"}, 0),
    ]  # fmt: skip


def test_collectives_run_again_last() -> None:
    node = fx.Graph().placeholder("v")
    summed = BlockValue(name="a", node=node, seconds=1e-6, collectives=1, made=10**6, kept=10**6, smaller=10**6)
    slow = BlockValue(name="b", node=node, seconds=1e-3, made=10**5, kept=10**5, smaller=10**5)
    table = BlockTable(values={"a": summed, "b": slow}, inputs=frozenset(), results=())
    first, *_, last = curve(table, CPU_GLOO, ("recompute",))
    assert not first.fates and set(last.fates) == {"a", "b"}
    assert [set(choice.fates) for choice in curve(table, CPU_GLOO, ("recompute",))][1] == {"b"}


def test_closure_takes_a_gain_with_what_it_needs() -> None:
    assert closure([5.0, -3.0, -1.0], [(0, 1)]) == {0, 1}
    assert closure([2.0, -3.0], [(0, 1)]) == set()
    assert closure([2.0, 2.0, -3.0], [(0, 2), (1, 2)]) == {0, 1, 2}
