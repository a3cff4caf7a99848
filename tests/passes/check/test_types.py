"""types: what operators and conjugates take and give, told from their rules and from what they are cut along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import call_named, draft
from torch import fx

from autotp.passes.check.types import OperatorCut, Typed, cut_factor, moved_leaf, placements
from autotp.passes.plan.infer_axes import Axes, Bound, infer_axes
from autotp.sharding.axis import Axis, Size, product
from autotp.sharding.placement import Copied, Partial, Placement, Replicate, Shard

aten = torch.ops.aten
F32 = torch.float32
SHARDED = "sharded"


def leaf(size: int) -> Axis:
    return Axis(Size(size))


def bound(make: Any, kind: str, **shapes: tuple[int, ...]) -> tuple[Bound, Axes, fx.Node]:
    """The rule of an operator in a graph, and the axes of all of it."""
    graph = draft(make, **{name: torch.ones(shape) for name, shape in shapes.items()})
    axes, node = infer_axes(graph), call_named(graph, kind)
    return axes.bound[node], axes, node


def product_of(call: Any, x: Any, w: Any) -> Any:
    return call(aten.linear.default, x, w)


LINEAR = bound(product_of, "linear", x=(2, 4), w=(6, 4))
X, W = (list(dims) for dims in LINEAR[0].dims[0])


def typed(dims: list[Axis], placement: Placement, flows: bool = True) -> Typed:
    return Typed(F32, tuple(dims), placement, flows)


def test_typed_prints_as_errors_show_it() -> None:
    heads = leaf(4)
    dims = [leaf(2), product([heads, leaf(3)])]
    assert str(typed(dims, Shard(heads))) == "f32[2, 12@tp]"
    assert str(typed(dims, Partial())) == "f32[2, 12]{+tp}"
    assert str(typed(dims, Copied())) == "f32[2, 12]{tp}"
    assert str(Typed(torch.int64, tuple(dims), Replicate(), False)) == "i64[2, 12]"


def test_typed_without_gradient_fits_replicated_and_copied() -> None:
    for flows in (True, False):
        one = typed(X, Replicate(), flows)
        assert one.fits(Replicate()) and one.fits(Copied()) is not flows
        assert not one.fits(Partial()) and not one.fits(Shard(X[0]))


@pytest.mark.parametrize(
    ("cut", "reads", "gives"),
    [(W[0], [Copied(), SHARDED], SHARDED), (W[1], [SHARDED, SHARDED], Partial()), (X[0], [SHARDED, Copied()], SHARDED)],
    ids=["columns", "rows", "batch"],
)
def test_placements_of_a_cut_product(cut: Axis, reads: list[Any], gives: Any) -> None:
    """Along what it sums over it gives parts of a sum; what is whole beside a part is read by divided work."""
    rule = LINEAR[0]
    factor = cut_factor(rule, cut)
    assert factor is not None
    types = [typed(X, Shard(cut)), typed(W, Shard(cut))]
    found = placements(rule, types, OperatorCut(cut, factor))
    assert found == (
        [Shard(cut) if one is SHARDED else one for one in reads],
        [Shard(cut) if gives is SHARDED else gives],
    )


def test_placements_pass_a_partial_sum_through_one_linear_operand() -> None:
    rule = LINEAR[0]
    assert placements(rule, [typed(X, Partial()), typed(W, Copied())], None) == ([Partial(), Copied()], [Partial()])
    wants, gives = placements(rule, [typed(X, Partial()), typed(W, Partial())], None)
    assert Partial() not in wants and Partial() not in gives


def test_placements_of_whole_work_on_copied_values_are_copied() -> None:
    """Its gradient is a part of a sum: all operands are read so, and so is the result."""
    rule = LINEAR[0]
    assert placements(rule, [typed(X, Replicate()), typed(W, Replicate())], None) == ([Replicate()] * 2, [Replicate()])
    assert placements(rule, [typed(X, Copied()), typed(W, Replicate())], None) == ([Copied()] * 2, [Copied()])
    assert placements(rule, [typed(X, Copied(), False), typed(W, Replicate())], None)[1] == [Replicate()]


def squared(call: Any, x: Any) -> Any:
    return call(aten.matmul.default, x, call(aten.t.default, x))


def test_cut_factor_refuses_a_leaf_in_two_dimensions() -> None:
    """x @ x.T has its rows twice: a part of both would not be a part of the result."""
    rule, axes, node = bound(squared, "matmul", x=(3, 4))
    rows = axes.dims[node][0][0]
    assert cut_factor(rule, rows) is None
    assert cut_factor(LINEAR[0], leaf(7)) is None


def test_moved_leaf_is_the_outermost_of_its_dimension() -> None:
    """The outermost of its dimension, in blocks of all the rest; once in the value."""
    heads, width = leaf(4), leaf(3)
    cut = typed([leaf(2), product([heads, width])], Copied())
    assert moved_leaf(cut, 1, 12, 3) is heads and moved_leaf(cut, -1, 12, 3) is heads
    assert moved_leaf(cut, 1, 12, 1) is None  # Other blocks.
    assert moved_leaf(cut, 1, 8, 3) is None  # Another length.
    assert moved_leaf(typed([heads, heads], Copied()), 0, 4) is None
