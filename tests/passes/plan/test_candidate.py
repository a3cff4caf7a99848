"""candidate: products that sum over an axis, who reads a value, and where a value comes from."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from graphs import call_named, draft, op, some
from torch import fx

from autotp.passes.plan.candidate import contracts, maker, readers, root
from autotp.passes.plan.infer_axes import infer_axes

aten = torch.ops.aten


def several(call: Any, x: Any, w: Any) -> Any:
    """The parts of `x` are read, once by its size alone."""
    parts = call(aten.split.Tensor, call(aten.linear.default, x, w), 2, 1)
    first, second = (call(operator.getitem, parts, i) for i in range(2))
    size = call(aten.sym_size.int, first, 0)
    return call(aten.mul.Tensor, call(aten.relu.default, first), second), size


def graph_of(make: Any) -> fx.Graph:
    return draft(make, x=some(3, 4), w=some(4, 4))


def test_products() -> None:
    def make(call: Any, x: Any, w: Any) -> Any:
        return call(aten.mul.Tensor, call(aten.mm.default, x, w), call(aten.linear.default, x, w)), call(
            aten.sum.dim_IntList, x, [1]
        )

    graph = graph_of(make)
    axes = infer_axes(graph)
    found = [op(node) for node in graph.nodes if contracts(axes.bound.get(node))]
    assert found == ["mm", "linear"]


def test_readers_and_makers() -> None:
    graph = graph_of(several)
    linear, split = call_named(graph, "linear"), call_named(graph, "split")
    assert [op(node) for node in readers(linear)] == ["split"]
    assert sorted(op(node) for node in readers(split)) == ["mul", "relu"]
    assert maker(call_named(graph, "getitem", 1)) is split
    assert maker(linear) is linear


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda call, x, w: call(aten.view.default, call(aten.mul.Tensor, w, x), [2, 6]), "w"),
        (lambda call, x, w: call(aten.index.Tensor, w, [call(aten.arange.default, 2)]), "w"),
        (lambda call, x, w: call(aten.transpose.int, w, 0, 1), "w"),
        (lambda call, x, w: call(aten.exp.default, call(aten.add.Tensor, x, w)), "add"),
    ],
    ids=["scaled", "rows", "view", "sum"],
)
def test_roots(make: Any, name: str) -> None:
    """The parameter that is read in the end; a sum of two values has none."""
    graph = draft(make, x=some(3, 4), w=some(3, 4))
    (last,) = graph.output_node().args[0]  # type: ignore[misc]
    found = root(last)  # type: ignore[arg-type]
    assert (found.name if found.op == "placeholder" else op(found)) == name
