"""overlap: products of one copied or gathered value become one operator, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import draft, lines
from torch import fx

from autotp.ops.collectives import all_gather, copy, reduce
from autotp.passes.lower.overlap import overlap, separate

aten = torch.ops.aten


def of(make: Any, **shapes: tuple[int, ...]) -> fx.Graph:
    return draft(make, **{name: torch.ones(shape) for name, shape in shapes.items()})


SHAPES: dict[str, tuple[int, ...]] = {"x": (2, 3, 4), "w": (6, 4), "v": (5, 4), "b": (6,)}


def pair(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    c = call(copy, x, "tp")
    return call(aten.linear.default, c, w, b), call(aten.linear.default, c, call(aten.mul.Tensor, v, 2))


def test_overlap_joins_products_of_one_copy() -> None:
    """A weight that is computed between them stands before."""
    graph = of(pair, **SHAPES)
    assert lines(overlap(graph)) == [
        "mul(v, 2)",
        "async_linear(x, 'tp', None, None, [w, mul], [b, None], [False, False])",
        "getitem(async_linear, 0)",
        "getitem_1 = getitem(async_linear, 1)",
        "return getitem, getitem_1",
    ]
    assert sorted(lines(separate(overlap(graph)))[:-1]) == sorted(lines(graph)[:-1])


def flattened(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    f = call(aten.flatten.using_ints, call(all_gather, x, "tp", 1, 3), 0, 1)
    return call(aten.addmm.default, b, f, call(aten.t.default, w)), call(aten.mm.default, f, call(aten.t.default, v))


def test_overlap_joins_transposed_weights_behind_a_flattening() -> None:
    graph = of(flattened, **SHAPES)
    assert "async_linear(x, 'tp', [1, 3, 1], [0, 1], [t, t_1], [b, None], [True, True])" in lines(overlap(graph))
    assert sorted(lines(separate(overlap(graph)))[:-1]) == sorted(lines(graph)[:-1])


def reshaped(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    rows = call(aten.reshape.default, call(copy, x, "tp"), [-1, 4])
    return call(aten.addmm.default, b, rows, call(aten.t.default, w))


def test_overlap_joins_products_behind_a_reshape_to_rows() -> None:
    """The `Conv1D` of transformers' GPT-2 writes it so."""
    graph = of(reshaped, **SHAPES)
    assert "async_linear(x, 'tp', None, [0, -2], [t], [b], [True])" in lines(overlap(graph))
    assert sorted(lines(separate(overlap(graph)))) == sorted(lines(graph))


def halved(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    half = call(aten.slice.Tensor, w, 1, 0, 2)
    return call(aten.mm.default, call(aten.reshape.default, call(copy, x, "tp"), [-1, 2]), call(aten.t.default, half))


def others(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    c = call(copy, x, "tp")
    return call(aten.linear.default, c, w), call(aten.relu.default, c)


def chained(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    c = call(copy, x, "tp")
    first = call(aten.linear.default, c, call(aten.slice.Tensor, w, 0, 0, 4))
    return call(aten.linear.default, c, call(aten.sum.dim_IntList, first, [0])), first


def sums(call: Any, x: Any, w: Any, v: Any, b: Any) -> Any:
    return call(aten.linear.default, call(reduce, x, "tp"), w), b


def test_overlap_leaves_complex_products() -> None:
    """Their gradients are conjugated, which the operator does not do."""
    given = {name: torch.ones(shape, dtype=torch.complex64) for name, shape in SHAPES.items()}
    graph = draft(pair, **given)
    assert lines(overlap(graph)) == lines(graph)


@pytest.mark.parametrize("make", [others, chained, sums, halved], ids=lambda make: make.__name__)
def test_overlap_leaves_products_that_are_no_group(make: Any) -> None:
    """Something else reads the copy; a weight is made of another product; no copy; rows of another length."""
    graph = of(make, **SHAPES)
    assert lines(overlap(graph)) == lines(graph)
