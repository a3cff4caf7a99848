"""grid: who holds what, that the parts make up the whole, and that what several hold counts once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import places as places_of

from autotp.ops.placement_moves import first, place, take
from autotp.sharding.axis import Axis, Size, concat, holds, product, touches
from autotp.sharding.grid import all_grids, grid, is_full, positions_of_part, same_cut, slices_of, splits
from autotp.sharding.layout import Layout, layout_of, ranges
from autotp.sharding.partition import chunk_bounds


def axis(n: int) -> Axis:
    return Axis(Size(n))


@pytest.mark.parametrize(
    ("kv", "group", "tp", "expected"),
    [
        pytest.param(2, 3, 4, (2, 2), id="2-kv-on-4"),
        pytest.param(2, 4, 8, (2, 4), id="2-kv-on-8"),
        pytest.param(8, 8, 16, (8, 2), id="8-kv-on-16"),
        pytest.param(8, 4, 4, (4, 1), id="enough-kv"),
        pytest.param(2, 6, 3, (1, 3), id="no-common-factor"),
        pytest.param(1, 6, 4, (1, 4), id="one-kv"),
    ],
)
def test_splits_divides_ranks_among_heads_and_groups(kv: int, group: int, tp: int, expected: tuple[int, int]) -> None:
    assert splits(kv, group, tp) == expected


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 16))
def test_splits_leaves_the_fullest_rank_fewest_heads(kv: int, group: int, tp: int) -> None:

    def fullest(n: int) -> int:
        return max(-(-kv // n) * -(-group // (tp // n)), 0)

    found = splits(kv, group, tp)
    assert found[0] * found[1] == tp
    assert fullest(found[0]) == min(fullest(n) for n in range(1, tp + 1) if tp % n == 0)


# ---- fused weights, against an oracle

KV, GROUP, DIM = axis(2), axis(3), axis(4)
QUERIES, KEYS = product([KV, GROUP, DIM]), product([KV, DIM])
WEIGHTS = {
    "queries": QUERIES,
    "keys": KEYS,
    "q|k|v": concat([QUERIES, KEYS, KEYS]),
    "per-group": product([KV, concat([GROUP, axis(1), axis(1)]), DIM]),
    "multi-query": product([concat([GROUP, axis(2)]), DIM]),
}


@pytest.mark.parametrize("tp", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_ranges_of_a_grid_are_intersections_of_its_cuts(weight: Axis, tp: int) -> None:
    """A rank holds a position if it holds its place along each leaf that the position has."""
    for cut in all_grids([KV, GROUP], tp):
        if not touches(weight, cut):
            continue
        for rank in range(tp):
            held = torch.ones(weight.size.number, dtype=torch.bool)
            for leaf, parts, run in slices_of(cut, tp):
                start, stop = chunk_bounds(leaf.size.number, parts, rank // run % parts)
                at = places_of(weight, leaf)
                held &= (at < 0) | ((at >= start) & (at < stop))
            mine = [i for a, b in ranges(weight, cut, tp, rank) for i in range(a, b)]
            assert mine == held.nonzero().flatten().tolist()


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_layouts_of_grids_take_and_put_exactly(weight: Axis, tp: int) -> None:
    """Taking and putting back is exact; the first holders' positions, and their places, make up the whole once."""
    full = torch.randn(weight.size.number, 2)
    for cut in all_grids([KV, GROUP], tp):
        layout = layout_of((weight.size.number, 2), (weight, axis(2)), cut, tp, "")
        if layout.dim is None:
            continue
        again, seen, total = torch.zeros_like(full), [], torch.zeros_like(full)
        for rank in range(tp):
            local = layout.take(full, rank)
            layout.put(again, local, rank)
            mine = layout.first(rank)
            places = layout.places(rank, mine)
            seen += [i for a, b in places for i in range(a, b)]
            total += place(local, "tp", 0, tuple(mine), tuple(places), full.shape[0])
            assert torch.equal(take(full, "tp", 0, layout.pieces, rank), local)
        assert torch.equal(again, full) and torch.equal(total, full)
        assert sorted(seen) == list(range(full.shape[0]))
        assert layout.repeated == (sum(layout.lengths()) > full.shape[0]) == (max(layout.holders()) > 1)


def test_grid_holds_axes_that_a_plain_cut_does_not() -> None:
    """A plain cut needs every part of a concatenation, a grid leaves some whole; what is tangled is never cut."""
    fused = WEIGHTS["q|k|v"]
    assert not holds(fused, GROUP) and holds(fused, grid([(GROUP, 4, 1)], 4))
    assert not holds(product([axis(3), axis(4)]), grid([(GROUP, 4, 1)], 4))
    assert not holds(product([GROUP, GROUP]), grid([(GROUP, 4, 1)], 4))
    tangled = Axis(Size(3), tangled=True)
    assert not holds(concat([tangled, axis(2)]), grid([(tangled, 2, 1)], 2))


def test_same_cut_compares_grids_by_meaning() -> None:
    both = grid([(KV, 2, 2), (GROUP, 2, 1)], 4)
    assert same_cut(both, grid([(KV, 2, 2), (GROUP, 2, 1)], 4)) and is_full(both)
    outer = grid([(KV, 2, 2)], 4)
    assert not same_cut(both, outer) and not is_full(outer)
    assert not same_cut(outer, grid([(KV, 2, 1)], 4))
    assert same_cut(KV, grid([(KV, 4, 1)], 4)) and not same_cut(KV, GROUP)
    assert positions_of_part(QUERIES, both, 4, 3) == (Size(6), 1)
    assert positions_of_part(KEYS, both, 4, 3) == (Size(2), 1)


def test_first_passes_gradients_only_at_its_ranges() -> None:
    """The value is all of it; the gradient reaches the positions that are named, and is zero where these are none."""
    x = torch.randn(2, 5, requires_grad=True)
    for ranges_, expected in ((None, [1.0] * 5), ((), [0.0] * 5), (((1, 2), (3, 5)), [0.0, 1.0, 0.0, 1.0, 1.0])):
        x.grad, y = None, first(x, "tp", 1, ranges_)
        assert torch.equal(y, x)
        y.sum().backward()
        assert x.grad is not None and x.grad[0].tolist() == expected


def test_layout_without_repetition_shares_nothing() -> None:
    layout = Layout((4,), 0, (((0, 2),), ((2, 4),)), "heads")
    assert not layout.repeated and layout.shared(0) == [] and layout.first(1) == [(0, 2)]
