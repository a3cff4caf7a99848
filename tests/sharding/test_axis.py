"""axis: sizes, unification of products and concatenations, and what is never cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autotp.sharding.axis import (
    ONE,
    Axis,
    Size,
    concat,
    find,
    holds,
    leaves,
    open_product,
    product,
    tangle,
    touches,
    unify,
)
from autotp.sharding.layout import ranges


def axis(n: int) -> Axis:
    return Axis(Size(n))


def sizes(of: Axis) -> list[int]:
    return [leaf.size.number for leaf in leaves(of)]


# ---- sizes


def test_size_of_collects_factors_and_symbols() -> None:
    s, t = (ShapeEnv().create_unbacked_symint() for _ in range(2))
    u = str(s.node.expr)
    assert Size.of(s) == Size(1, (u,))
    assert Size.of(s * 4) == Size(4, (u,))
    assert Size.of(s * s * 6) == Size(6, (u, u))
    assert Size.of(Size(3)) == Size.of(3) == Size(3)
    assert Size.of(s + 1).number == 1 and len(Size.of(s + 1).symbols) == 1
    assert Size.of(s) == Size.of(t)  # Symbols are compared by name: they come from one exporter.


def test_size_of_simplifies_exact_quotients() -> None:
    s = ShapeEnv().create_unbacked_symint()
    u = str(s.node.expr)
    assert Size.of(s * s * 3 // s) == Size(3, (u,))
    assert Size.of((s * 4 + s * s) // s) == Size.of(s + 4)
    half = Size.of(s // 2)
    assert half.number == 1 and half.symbols == (f"({u}//2)",)


def test_size_multiplies_divides_and_prints() -> None:
    long = Size(12, ("b", "s"))
    assert long == Size(4, ("s",)) * Size(3, ("b",))
    assert long.divided(Size(4, ("s",))) == Size(3, ("b",))
    assert long.divided(Size(5)) is None
    assert long.divided(Size(1, ("t",))) is None
    assert long.divided(Size(0)) is None
    assert long.common(Size(8, ("s", "t"))) == Size(4, ("s",))
    assert [str(size) for size in (long, Size(1, ("s",)), ONE, Size(5))] == ["12*b*s", "s", "1", "5"]


# ---- products


def test_product_drops_axes_of_one() -> None:
    a = axis(4)
    assert product([ONE_AXIS, a]) is a
    assert product([]).size == ONE
    assert str(product([axis(12), axis(64)])) == "(12 64)"


ONE_AXIS = Axis(ONE)


def test_unify_splits_a_weight_into_heads() -> None:
    width, heads, head_dim = axis(768), axis(12), axis(64)
    unify(width, product([heads, head_dim]))
    assert holds(width, heads) and holds(width, head_dim)
    unify(width, product([axis(4), axis(3), axis(64)]))
    assert sizes(width) == [4, 3, 64]
    assert sizes(heads) == [4, 3]


@st.composite
def groupings(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Two ways to group the same numbers."""
    base = draw(st.lists(st.integers(2, 5), min_size=1, max_size=5))
    return _grouped(draw, base), _grouped(draw, base)


def _grouped(draw: st.DrawFn, base: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for n in base:
        if groups and draw(st.booleans()):
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


@settings(deadline=None)
@given(groupings(), st.integers(2, 4))
def test_unify_aligns_products_at_common_boundaries(two: tuple[list[list[int]], list[list[int]]], tp: int) -> None:
    xs, ys = ([axis(prod(group)) for group in groups] for groups in two)
    x, y = product(xs), product(ys)
    unify(x, y)
    assert find(x) is find(y)
    assert _prefixes(sizes(x), prod) == _prefixes([*map(prod, two[0])], prod) | _prefixes([*map(prod, two[1])], prod)
    for leaf in leaves(x):
        assert not leaf.tangled and holds(x, leaf)
        whole = [ranges(x, leaf, tp, rank) for rank in range(tp)]
        assert whole == [ranges(product(xs), leaf, tp, rank) for rank in range(tp)]
        assert whole == [ranges(product(ys), leaf, tp, rank) for rank in range(tp)]


def _prefixes(numbers: list[int], total: Callable[[list[int]], int]) -> set[int]:
    return {total(numbers[:i]) for i in range(len(numbers) + 1)}


@settings(deadline=None)
@given(st.lists(st.integers(2, 6), min_size=1, max_size=4), st.lists(st.integers(2, 6), min_size=1, max_size=4))
def test_unify_cuts_unaligned_products_only_before_the_difference(a: list[int], b: list[int]) -> None:
    xs, ys = [axis(n) for n in [*a, prod(b)]], [axis(n) for n in [*b, prod(a)]]
    x, y = product(xs), product(ys)
    unify(x, y)
    for leaf in (leaf for leaf in leaves(x) if holds(x, leaf)):
        for rank in range(3):
            assert ranges(product(xs), leaf, 3, rank) == ranges(product(ys), leaf, 3, rank)


def test_unify_of_6x4_and_4x6_keeps_factor_2() -> None:
    x, y = product([axis(6), axis(4)]), product([axis(4), axis(6)])
    unify(x, y)
    major, *rest = leaves(x)
    assert major.size == Size(2) and not major.tangled
    assert all(leaf.tangled for leaf in rest)
    assert [holds(y, leaf) for leaf in leaves(y)] == [True, False, False]


def test_unify_factors_symbolic_sizes() -> None:
    b, s = Size(1, ("b",)), Size(1, ("s",))
    x, y = product([Axis(b * s), axis(12)]), product([Axis(b), Axis(s), axis(3), axis(4)])
    unify(x, y)
    assert [str(leaf) for leaf in leaves(x)] == ["b", "s", "3", "4"]
    assert not any(leaf.tangled for leaf in leaves(x))


# ---- concatenations


def test_concat_drops_empty_axes() -> None:
    a = axis(4)
    assert concat([axis(0), a]) is a
    assert str(concat([a, axis(2)])) == "(4 | 2)"


@settings(deadline=None)
@given(groupings())
def test_unify_aligns_concats_at_common_boundaries(two: tuple[list[list[int]], list[list[int]]]) -> None:
    xs, ys = ([axis(sum(group)) for group in groups] for groups in two)
    x, y = concat(xs), concat(ys)
    unify(x, y)
    assert _prefixes(sizes(x), sum) == _prefixes([*map(sum, two[0])], sum) | _prefixes([*map(sum, two[1])], sum)
    assert not any(leaf.tangled for leaf in leaves(x))


def test_concat_holds_an_axis_only_in_every_part() -> None:
    q, k = axis(4), axis(4)
    both = concat([q, k])
    assert touches(both, q) and not holds(both, q)
    unify(q, k)
    assert holds(both, q)


def test_unify_of_product_and_concat_tangles_both() -> None:
    three, q, k, v = axis(3), axis(4), axis(4), axis(4)
    x, y = product([three, axis(4)]), concat([q, k, v])
    unify(x, y)
    assert not any(holds(side, leaf) for side in (x, y) for leaf in leaves(side))
    assert all(leaf.tangled for leaf in (three, q, k, v))


def test_unify_never_splits_a_product_inside_a_concat() -> None:
    x, y = concat([product([axis(2), axis(4)]), axis(4)]), concat([axis(4), axis(8)])
    unify(x, y)
    assert not any(holds(x, leaf) for leaf in leaves(x))


# ---- whatever comes


def test_unify_tangles_axes_of_unequal_sizes() -> None:
    a, b = axis(4), product([axis(2), axis(3)])
    unify(a, b)
    assert find(a) is not find(b)
    assert a.tangled and all(leaf.tangled for leaf in leaves(b))


def test_unify_keeps_lengths_of_different_symbols_apart() -> None:
    """Rows of logits, batch times sequence, and rows of labels: whatever else has these axes may be cut."""
    a, b = (product([Axis(Size(1, (s,))) for s in pair]) for pair in (("s0", "s1"), ("s2", "s3")))
    assert not unify(a, b)
    assert find(a) is not find(b)
    assert not any(leaf.tangled for axis in (a, b) for leaf in leaves(axis))


def test_unify_keeps_tangled_axes_tangled() -> None:
    a, b, c = axis(6), product([axis(2), axis(3)]), axis(6)
    tangle(a)
    unify(a, b)
    unify(c, b)
    assert all(leaf.tangled for leaf in leaves(c))


def test_unify_leaves_empty_products_alone() -> None:
    a, b = axis(0), axis(5)
    whole = product([a, b])
    unify(whole, a)
    assert list(leaves(whole)) == [a, b]


def test_product_does_not_hold_an_axis_twice() -> None:
    h = axis(3)
    assert not holds(product([h, h]), h)
    assert holds(concat([h, h]), h)


@pytest.mark.parametrize(("leaf", "found"), [(0, (1, 12)), (1, (2, 4)), (2, (6, 1))])
def test_open_product_gives_sizes_before_and_behind_a_leaf(leaf: int, found: tuple[int, int]) -> None:
    parts = [axis(2), axis(3), axis(4)]
    whole = product([parts[0], product(parts[1:])])
    assert open_product(whole, parts[leaf]) == (Size(found[0]), Size(found[1]))
    assert open_product(concat([whole, whole]), parts[leaf]) is None


@settings(deadline=None)
@given(st.data())
def test_unify_of_any_trees_ends(data: st.DataObject) -> None:
    """Random trees over few axes, unified in any order, neither hang nor become part of themselves."""
    pool = [axis(n) for n in data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=2, max_size=5))]
    for _ in range(data.draw(st.integers(1, 8))):
        parts = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
        pool.append(data.draw(st.sampled_from([product, concat]))(parts))
        unify(data.draw(st.sampled_from(pool)), data.draw(st.sampled_from(pool)))
    for one in pool:
        assert all(leaf.kind == "leaf" for leaf in leaves(one))
        assert str(one)
