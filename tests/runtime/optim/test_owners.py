"""owners: what moves makes up each whole matrix on one rank, and each part again, in the bytes of one all-gather."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import pytest
import torch
from errors import message
from torch import Tensor

from autotp.compiler import analyse
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.runtime.optim.owners import Held, Move, Owners, as_text, assign, from_text
from autotp.sharding.boxes import Box, boxes, inner_box
from autotp.sharding.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # in transformers
USUAL = ("gpt2", "llama", "deepseek_v3", "phi3")
"""Fused and separate heads, fewer key/value heads than ranks, experts. All are rare tests."""
HALVES = Layout((6, 4), 0, (((0, 4),), ((4, 6),)))
NONE_ON_THE_LAST = Layout((5, 4), 1, (((0, 2),), ((2, 4),), ()))
FUSED = Layout((12, 3), 0, (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12))))
ONE_KEY = Layout((6, 3), 0, (((0, 2), (4, 6)), ((2, 6),)))
PAIRS = Layout((4, 3), 0, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))
OVERLAP = Layout((4, 3), 1, (((0, 2),), ((1, 3),)))
WHOLE = Layout((3, 4))
CASES = {
    "halves": (2, HALVES), "none-on-the-last": (3, NONE_ON_THE_LAST), "fused": (2, FUSED), "one-key": (2, ONE_KEY),
    "pairs": (4, PAIRS), "whole": (3, WHOLE), "overlap": (2, OVERLAP), "number": (2, Layout(())),
    "empty": (2, Layout((0, 3))),
}  # fmt: skip


def boxes_of(layout: Layout, rank: int, first: bool) -> list[Box]:
    return boxes(torch.empty(layout.local_shape(rank), device="meta"), layout, rank, first)


def held(name: str, layout: Layout, rank: int, group: int = 0) -> Held:
    places = [tuple((box.whole, box.sizes) for box in boxes_of(layout, rank, first)) for first in (False, True)]
    return Held(name, group, layout.shape, "float64", places[0], places[1])


def at(whole: Tensor, move: Move) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(move.start, move.sizes, strict=True))]


def expect_moved(layouts: Mapping[str, Layout], ranks: int) -> Owners:
    """Each whole is made up of the parts, each part comes back; no more elements move than an all-gather has."""
    every = [[held(name, layout, rank) for name, layout in layouts.items()] for rank in range(ranks)]
    every = [from_text(as_text(some)) for some in every]
    plans = [assign(every, rank) for rank in range(ranks)]
    for a, b in ((a, b) for a in range(ranks) for b in range(ranks)):
        for one, other in ((plans[a].to_owner, plans[b].to_owner), (plans[a].from_owner, plans[b].from_owner)):
            between = [[move for move in some if (move.source, move.target) == (a, b)] for some in (one, other)]
            assert between[0] == between[1], "the same moves in the same order on both ranks"
    for name, layout in layouts.items():
        expected = torch.arange(prod(layout.shape), dtype=torch.float64).view(layout.shape)
        parts = [layout.take(expected, rank) for rank in range(ranks)]
        where = [boxes_of(layout, rank, False) for rank in range(ranks)]
        whole, back, sent = torch.full_like(expected, -1), [torch.full_like(part, -1) for part in parts], 0
        for move in (
            m for rank, plan in enumerate(plans) for m in plan.to_owner if m.source == rank and m.name == name
        ):
            at(whole, move).copy_(inner_box(where[move.source], move.start, move.sizes).of(parts[move.source]))
            sent += prod(move.sizes) * (move.source != move.target)
        assert torch.equal(whole, expected), name
        for move in (
            m for rank, plan in enumerate(plans) for m in plan.from_owner if m.target == rank and m.name == name
        ):
            inner_box(where[move.target], move.start, move.sizes).of(back[move.target]).copy_(at(whole, move))
            sent += prod(move.sizes) * (move.source != move.target)
        assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True)), name
        assert sent <= (ranks - 1) * expected.numel(), name
    return plans[0]


@pytest.mark.parametrize("name", CASES)
def test_moves_make_up_the_whole_matrices_of_a_case(name: str) -> None:
    ranks, layout = CASES[name]
    expect_moved({"weight": layout}, ranks)


@pytest.mark.parametrize("tp", [3, 4])
@pytest.mark.parametrize("name", USUAL)
def test_moves_make_up_the_whole_matrices_of_a_family(name: str, tp: int) -> None:
    expect_moved(_layouts(name, tp), tp)


def _layouts(name: str, tp: int) -> Mapping[str, Layout]:
    pytest.importorskip("transformers")
    from support.hf_families import FAMILIES

    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    program = analyse(skeleton_of(model.train()), (), inputs, tp, Options())
    found = {key: p for key, p in program.layouts.items() if key in set(program.captured.parameters.values())}
    assert any(layout.dim is not None for layout in found.values())
    return found


@pytest.mark.rare
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_moves_make_up_the_whole_matrices_of_every_family(tp: int) -> None:
    from support.hf_families import FAMILIES

    for name in FAMILIES:
        expect_moved(_layouts(name, tp), tp)


def test_owners_have_like_work() -> None:
    """The largest matrices first, each to the rank with the least work; of a step the ranks have alike."""
    square = Layout((8, 8), 0, tuple(((2 * i, 2 * i + 2),) for i in range(4)))
    layouts = {f"w{i}": square for i in range(8)} | {"norm": Layout((8,))}
    owners = expect_moved(layouts, 4).owners
    assert [sum(owner == rank for name, owner in owners.items() if name != "norm") for rank in range(4)] == [2] * 4
    assert expect_moved({f"w{i}": WHOLE for i in range(6)}, 3).owners == {f"w{i}": i % 3 for i in range(6)}


def test_of_two_uneven_parts_the_larger_rank_owns() -> None:
    """The other one would move 8 + 8 elements; an all-gather has 16 - 8 + 8."""
    assert set(expect_moved({f"w{i}": HALVES for i in range(4)}, 2).owners.values()) == {0}


def test_owners_stay_where_they_were() -> None:
    every = [[held("a", WHOLE, rank), held("b", WHOLE, rank)] for rank in range(2)]
    assert assign(every, 0, {"b": 0}).owners == {"a": 1, "b": 0}
    assert assign(every, 0).owners == {"a": 0, "b": 1}
    assert assign(every, 0, {"a": 7}).owners == {"a": 0, "b": 1}, "a rank that does not hold it"


def test_a_replica_has_its_own_part_for_itself() -> None:
    """The gradients of replicas are equal, so nothing moves to the owner; to the other rank the new values do."""
    plan = assign([[held("w", WHOLE, 0)], [held("w", WHOLE, 0)]], 1)
    assert (plan.gathered, plan.scattered, plan.sent) == ((), ("float64",), frozenset())
    assert plan.from_owner == (Move("w", 0, 1, (0, 0), (3, 4)),)


def test_owners_of_stages_share_only_tied_matrices() -> None:
    """A rank of a pipeline has other parameters; what two stages share has one owner."""
    every = [[held("a", WHOLE, 0), held("tied", WHOLE, 0)], [held("tied", WHOLE, 0), held("b", WHOLE, 0)]]
    plans = [assign(every, rank) for rank in range(2)]
    assert plans[0].owners == {"a": 0, "b": 1, "tied": 0}
    assert {move.name for plan in plans for move in plan.from_owner if move.source != move.target} == {"tied"}


def test_assign_refuses_ranks_that_differ() -> None:
    other = [[held("w", HALVES, 0)], [held("w", HALVES, 1, group=1)]]
    assert message(lambda: assign(other, 0)) == (
        "`w` is not in the same group of the optimizer on all ranks, or has another shape or dtype there\n"
        "  try      the same groups of parameters on all ranks"
    )
    assert message(lambda: assign([[held("w", HALVES, 0)], []], 0)) == (
        "the ranks that step `w` together hold 16 of its 24 elements\n"
        "  try      autotp.distribute(model, tp=..., dp=..., zero=...) in place of fully_shard on a parallel model\n"
        "  or       an optimizer with the same parameters on all ranks"
    )
