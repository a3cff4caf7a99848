"""exchange: wherever in a dimension a leaf lies, its parts are put together and taken apart as `layout.ranges` says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from graphs import lines, some
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autotp.diagnostics.lockstep import run_lockstep
from autotp.ops.collectives import all_gather, gather, reduce_scatter, scatter
from autotp.passes.builder import Builder, size_assumptions
from autotp.passes.lower.exchange import write_exchange
from autotp.passes.lower.local_sizes import Local, Target
from autotp.sharding.axis import Axis, Size, concat, product
from autotp.sharding.layout import layout_of


@dataclass(frozen=True)
class Dimension:
    """A dimension of a tensor, and the leaf in it that is cut."""

    axis: Axis
    leaf: Axis


def plain() -> Dimension:
    leaf = Axis(Size(7))
    return Dimension(leaf, leaf)


def heads() -> Dimension:
    """`heads x head_dim`"""
    leaf = Axis(Size(5))
    return Dimension(product([leaf, Axis(Size(3))]), leaf)


def minor() -> Dimension:
    """`group x heads x head_dim`, cut in the middle"""
    leaf = Axis(Size(5))
    return Dimension(product([Axis(Size(2)), leaf, Axis(Size(3))]), leaf)


def fused() -> Dimension:
    """`q | k | v`, cut by the heads in each"""
    leaf = Axis(Size(4))
    return Dimension(concat([product([leaf, Axis(Size(2))]), product([leaf, Axis(Size(2))]), leaf]), leaf)


def interleaved() -> Dimension:
    """`head_dim x (q | k)`: a concatenation inside a product"""
    leaf = Axis(Size(3))
    return Dimension(product([Axis(Size(2)), concat([leaf, leaf])]), leaf)


DIMENSIONS = (plain, heads, minor, fused, interleaved)


def moved(case: Dimension, x: Tensor, kind: Callable[..., Any], tp: int, rank: int, dim: int) -> fx.Graph:
    """The graph of one rank, of which dimension `dim` of `x` is moved."""
    builder = Builder(FakeTensorMode(allow_non_fake_inputs=True))
    local = Local(builder, Target("tp", tp, rank))
    place = builder.graph.placeholder("x")
    place.meta["val"] = builder.mode.from_tensor(x)
    local.learn(place, None)
    new = write_exchange(local, place, case.axis, case.leaf, dim, kind)
    builder.graph.output((new,))
    return builder.graph


def parts(case: Dimension, whole: Tensor, tp: int, dim: int) -> list[Tensor]:
    """What each rank holds of a tensor."""
    dims = [Axis(Size(n)) for n in whole.shape]
    dims[dim] = case.axis
    held = layout_of(tuple(whole.shape), tuple(dims), case.leaf, tp, "")
    return [held.take(whole, rank) for rank in range(tp)]


@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("kind", [gather, all_gather, scatter, reduce_scatter])
@pytest.mark.parametrize("make", DIMENSIONS)
@pytest.mark.parametrize("dim", [0, 1])
def test_exchange_moves_any_leaf_of_a_dimension(
    make: Callable[[], Dimension], kind: Callable[..., Any], tp: int, dim: int
) -> None:
    """With parts of unequal size, and on eight ranks with empty ones."""
    case = make()
    size = case.axis.size.number
    whole = some(size, 2) if dim == 0 else some(2, size)
    cut = parts(case, whole, tp, dim)
    given = cut if kind in (gather, all_gather) else [whole / (tp if kind is reduce_scatter else 1)] * tp
    expected = [whole] * tp if kind in (gather, all_gather) else cut
    graphs = [moved(case, given[rank], kind, tp, rank, dim) for rank in range(tp)]
    found = run_lockstep(graphs, [[x] for x in given])
    for rank in range(tp):
        torch.testing.assert_close(found[rank][0], expected[rank], rtol=0, atol=1e-12)
        made = graphs[rank].output_node().args[0][0].meta["val"]  # type: ignore[index,union-attr]
        assert made.shape == expected[rank].shape


@pytest.mark.parametrize("kind", [gather, scatter])
def test_exchange_assumes_nothing_of_other_sizes(kind: Callable[..., Any]) -> None:
    """torch's view of a value asks whether it has two elements: at other sizes it may have one."""
    case = minor()
    builder = Builder(FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
    local = Local(builder, Target("tp", 2, 0))
    n = builder.length("n", 64)
    place = builder.graph.placeholder("x")
    with builder.mode:
        place.meta["val"] = torch.empty((n // 4 - 1) ** 2 + 1, 18 if kind is gather else 30)
    local.learn(place, None)
    before = list(size_assumptions(builder.graph))
    new = write_exchange(local, place, case.axis, case.leaf, 1, kind)
    assert new.meta["val"].shape[1] == (30 if kind is gather else 18)
    assert size_assumptions(builder.graph) == before


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(plain, ["gather(x, 'tp', 1, 7)"], id="plain"),
        pytest.param(heads, ["gather(x, 'tp', 1, 15, 3)"], id="whole-heads"),
        pytest.param(
            minor,
            ["unflatten(x, 1, [2, 3, 3])", "gather(unflatten, 'tp', 2, 5)", "flatten(gather, 1, 3)"],
            id="inside-a-product",
        ),
        pytest.param(
            fused,
            [
                "split_with_sizes(x, [4, 4, 2], 1)",
                "getitem(split_with_sizes, 0)",
                "gather(getitem, 'tp', 1, 8, 2)",
                "getitem_1 = getitem(split_with_sizes, 1)",
                "gather_1 = gather(getitem_1, 'tp', 1, 8, 2)",
                "getitem_2 = getitem(split_with_sizes, 2)",
                "gather_2 = gather(getitem_2, 'tp', 1, 4)",
                "cat([gather, gather_1, gather_2], 1)",
            ],
            id="concatenation",
        ),
    ],
)
def test_exchange_needs_the_collective_alone_for_major_leaves(
    make: Callable[[], Dimension], expected: list[str]
) -> None:
    case = make()
    assert lines(moved(case, parts(case, some(2, case.axis.size.number), 2, 1)[0], gather, 2, 0, 1))[:-1] == expected
