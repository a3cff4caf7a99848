"""owners: what moves makes up each whole matrix on one rank, and each part again, in the bytes of one all-gather."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod

import pytest
import torch
from errors import message
from torch import Tensor

from autotp.compiler import analyse
from autotp.experimental.whole_matrices.owners import Box, HeldPart, Move, OwnerPlan, plan_owners
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.sharding.boxes import Box as HeldBox
from autotp.sharding.boxes import boxes
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


def boxes_of(layout: Layout, rank: int) -> list[HeldBox]:
    return boxes(torch.empty(layout.local_shape(rank), device="meta"), layout, rank, first=False)


def sides(start: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(low, low + size) for low, size in zip(start, sizes, strict=True)]


def part_of(layout: Layout, rank: int, group: int = 0) -> HeldPart:
    pairs = [(sides(box.whole, box.sizes), sides(box.local, box.sizes)) for box in boxes_of(layout, rank)]
    return HeldPart(group, layout.shape, "float64", pairs)


def at(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(*side) for side in box)]


def expect_moved(layouts: Mapping[str, Layout], ranks: int) -> OwnerPlan:
    """Each whole is made up of the parts, each part comes back; no more elements move than an all-gather has."""
    every = [{name: part_of(layout, rank) for name, layout in layouts.items()} for rank in range(ranks)]
    every = [{name: part for name, part in parts.items() if part.boxes} for parts in every]
    told = json.loads(json.dumps(every))  # As ranks tell each other.
    every = [{name: HeldPart(*row) for name, row in parts.items()} for parts in told]
    plans = [plan_owners(every, rank, {}) for rank in range(ranks)]
    for a, b in ((a, b) for a in range(ranks) for b in range(ranks)):
        for some, others in ((plans[a].to_owner, plans[b].to_owner), (plans[a].from_owner, plans[b].from_owner)):
            between = [[move for move in moves if (move.source, move.target) == (a, b)] for moves in (some, others)]
            assert between[0] == between[1], "the same moves in the same order on both ranks"
    assert all(each[:4] == plans[0][:4] for each in plans), "all ranks plan alike"
    for name, layout in layouts.items():
        expected = torch.arange(prod(layout.shape), dtype=torch.float64).view(layout.shape)
        parts = [layout.take(expected, rank) for rank in range(ranks)]
        whole, back = torch.full_like(expected, -1), [torch.full_like(part, -1) for part in parts]
        gathered, scattered = (
            [m for rank in range(ranks) for m in plans[rank].to_owner if (m.source, m.name) == (rank, name)],
            [m for rank in range(ranks) for m in plans[rank].from_owner if (m.target, m.name) == (rank, name)],
        )
        for move in gathered:
            at(whole, move.target_box).copy_(at(parts[move.source], move.source_box))
        assert torch.equal(whole, expected), name
        for move in scattered:
            at(back[move.target], move.target_box).copy_(at(whole, move.source_box))
        assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True)), name
        moving = [[move for move in moves if move.source != move.target] for moves in (gathered, scattered)]
        assert [bool(moves) for moves in moving] == [name in plans[0].gathered, name in plans[0].scattered]
        sent = sum(prod(stop - start for start, stop in move.source_box) for moves in moving for move in moves)
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


def test_owners_stay() -> None:
    every = [{"a": part_of(WHOLE, rank), "b": part_of(WHOLE, rank)} for rank in range(2)]
    assert plan_owners(every, 0, {"b": 0}).owners == {"a": 1, "b": 0}
    assert plan_owners(every, 0, {}).owners == {"a": 0, "b": 1}
    assert plan_owners(every, 0, {"a": 7}).owners == {"a": 0, "b": 1}, "a rank that does not hold it"


def test_a_replica_has_its_own_part_for_itself() -> None:
    """The gradients of replicas are equal, so nothing moves to the owner; to the other rank the new values do."""
    of_second = plan_owners([{"w": part_of(WHOLE, 0)}, {"w": part_of(WHOLE, 0)}], 1, {})
    assert (of_second.gathered, of_second.scattered, of_second.to_owner) == ({}, {"w": "float64"}, [])
    assert of_second.from_owner == [Move("w", 0, 1, ((0, 3), (0, 4)), ((0, 3), (0, 4)))]


def test_owners_of_stages_share_only_tied_matrices() -> None:
    """A rank of a pipeline has other parameters; what two stages share has one owner."""
    part = part_of(WHOLE, 0)
    every = [{"a": part, "tied": part}, {"tied": part, "b": part}]
    plans = [plan_owners(every, rank, {}) for rank in range(2)]
    assert plans[0].owners == {"a": 0, "b": 1, "tied": 0}
    assert {move.name for each in plans for move in each.from_owner if move.source != move.target} == {"tied"}
    assert plans[0].holders == {"a": (0,), "b": (1,), "tied": (0, 1)}


def test_holders_that_share_a_box_send_in_turn() -> None:
    """Ranks 1 and 2 hold the same half: each sends one of two matrices to the owner of the other half."""
    local = ((0, 2), (0, 2))
    half, rest = (HeldPart(0, (4, 2), "float32", [((rows, (0, 2)), local)]) for rows in ((0, 2), (2, 4)))
    every = [{"a": half, "b": half}, {"a": rest, "b": rest}, {"a": rest, "b": rest}]
    moves = plan_owners(every, 0, {"a": 0, "b": 0}).to_owner
    assert [(m.name, m.source) for m in moves if m.source] == [("a", 1), ("b", 2)]


def test_refused() -> None:
    other = [{"w": part_of(HALVES, 0)}, {"w": part_of(HALVES, 1, group=1)}]
    assert message(lambda: plan_owners(other, 0, {})) == (
        "`w` is not in the same group of the optimizer on all ranks, or has another shape or dtype there\n"
        "  try      the same groups of parameters on all ranks"
    )
    assert message(lambda: plan_owners([{"w": part_of(HALVES, 0)}, {}], 0, {})) == (
        "the ranks that step `w` together hold 16 of its 24 elements\n"
        "  try      autotp.distribute(model, tp=..., dp=..., zero=...) in place of fully_shard on a parallel model\n"
        "  or       an optimizer with the same parameters on all ranks"
    )
