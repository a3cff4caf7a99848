"""layout: which elements a rank holds, and that taking and putting them back is exact."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import places

from autotp.sharding.axis import Axis, Size, concat, find, holds, product
from autotp.sharding.layout import Layout, divided_as, layout_of, ranges
from autotp.sharding.partition import chunk_bounds

TP = (1, 2, 3, 4, 8)


def axis(n: int) -> Axis:
    return Axis(Size(n))


def trees(leaf: Axis, depth: int = 3) -> st.SearchStrategy[Axis]:
    """Axes that have `leaf` in every part of a concatenation and in one of a product."""
    if not depth:
        return st.just(leaf)
    inner = trees(leaf, depth - 1)
    others = st.lists(st.integers(1, 3).map(axis), max_size=2)
    products = st.tuples(others, inner, others).map(lambda found: product([*found[0], found[1], *found[2]]))
    return st.one_of(inner, products, st.lists(inner, min_size=1, max_size=3).map(concat))


@st.composite
def held(draw: st.DrawFn) -> tuple[Axis, Axis]:
    leaf = axis(draw(st.integers(2, 9)))
    return draw(trees(leaf)), leaf


@settings(deadline=None)
@given(held(), st.sampled_from(TP))
def test_ranges_are_the_positions_of_a_rank_s_chunk(found: tuple[Axis, Axis], tp: int) -> None:
    whole, leaf = found
    at = places(whole, leaf)
    for rank in range(tp):
        start, stop = chunk_bounds(leaf.size.number, tp, rank)
        mine = ranges(whole, leaf, tp, rank)
        assert [i for a, b in mine for i in range(a, b)] == [i for i, p in enumerate(at.tolist()) if start <= p < stop]
        assert all(b < c for (_, b), (c, _) in pairwise(mine))  # Neighbours are joined.


@settings(deadline=None)
@given(held(), st.sampled_from(TP[1:]))
def test_divided_as_repeats_the_pieces_or_changes_nothing(found: tuple[Axis, Axis], tp: int) -> None:
    whole, leaf = found
    pieces = tuple(tuple(ranges(whole, leaf, tp, rank)) for rank in range(tp))
    alone = Axis(whole.size)
    again = divided_as(alone, pieces, tp)
    if again is None:
        assert find(alone) is alone and alone.kind == "leaf"
    else:
        assert tuple(tuple(ranges(alone, again, tp, rank)) for rank in range(tp)) == pieces


@pytest.mark.parametrize("sizes", [(8,), (5, 8), (3, 64), (2, 4, 4)])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("tp", [2, 3])
def test_divided_as_finds_heads_of_fused_weights(sizes: tuple[int, ...], repeats: int, tp: int) -> None:
    """Heads, and heads of q | k | v, each behind another factor (repeats of it) and before one."""
    leaf = axis(sizes[-2] if len(sizes) > 1 else sizes[0])
    factors = [leaf if n == leaf.size.number and i == max(len(sizes) - 2, 0) else axis(n) for i, n in enumerate(sizes)]
    whole = concat([product(factors) for _ in range(repeats)])
    pieces = tuple(tuple(ranges(whole, leaf, tp, rank)) for rank in range(tp))
    assert divided_as(Axis(whole.size), pieces, tp) is not None


@settings(deadline=None)
@given(held(), st.sampled_from(TP), st.integers(0, 2))
def test_layout_take_and_put_are_inverses(found: tuple[Axis, Axis], tp: int, dim: int) -> None:
    whole, leaf = found
    dims = [axis(2), axis(3)]
    dims.insert(dim, whole)
    shape = tuple(d.size.number for d in dims)
    layout = layout_of(shape, tuple(dims), leaf, tp, "heads")
    full, back = torch.randn(shape), torch.full(shape, torch.nan)
    for rank in range(tp):
        local = layout.take(full, rank)
        assert tuple(local.shape) == layout.local_shape(rank)
        layout.put(back, local, rank)
        assert layout.take(back, rank).equal(local)
    assert back.equal(full)
    assert sum(layout.lengths()) == shape[dim] and layout.dim == dim


def test_layout_of_a_fused_qkv_cuts_each_part_by_heads() -> None:
    heads = axis(12)
    qkv = concat([product([heads, axis(64)]) for _ in range(3)])
    assert ranges(qkv, heads, 8, 5) == [(640, 768), (1408, 1536), (2176, 2304)]
    assert ranges(qkv, heads, 8, 6) == []
    layout = layout_of((2304, 768), (qkv, axis(768)), heads, 8, "heads")
    assert layout.lengths() == [384] * 6 + [0, 0]
    assert str(layout) == "[2304@tp, 768]"
    assert layout.local_shape(7) == (0, 768)


def test_layout_of_an_uncut_tensor_is_whole() -> None:
    heads, other = axis(4), axis(4)
    both = concat([heads, other])
    for dims in [(axis(8), axis(4)), (both, axis(4)), (heads, heads)]:
        shape = tuple(d.size.number for d in dims)
        assert layout_of(shape, dims, heads, 2, "heads") == Layout(shape)
    assert not holds(both, heads)
    assert layout_of((4,), (heads,), None, 2, "") == Layout((4,))


@pytest.mark.parametrize("layout", [Layout((2, 3)), Layout((2, 3), 1, (((0, 2),), ((2, 3),)))], ids=["whole", "cut"])
def test_layout_take_returns_memory_of_its_own(layout: Layout) -> None:
    full = torch.zeros(2, 3)
    layout.take(full, 0).fill_(1.0)
    assert full.equal(torch.zeros(2, 3))
