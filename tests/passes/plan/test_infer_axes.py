"""infer_axes: what rules name alike is one axis; views and splits refine it; what cannot be cut is marked."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from graphs import call_named, draft, some
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autotp
from autotp.passes.plan.infer_axes import Axes, infer_axes
from autotp.rules.language import Rule
from autotp.rules.registry import RULES
from autotp.sharding.axis import find

aten = torch.ops.aten


def inferred(make: Any, **inputs: torch.Tensor) -> tuple[fx.Graph, Axes]:
    graph = draft(make, **inputs)
    return graph, infer_axes(graph)


def place(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def mlp(call: Any, x: Any, up: Any, down: Any) -> Any:
    return call(aten.linear.default, call(aten.relu.default, call(aten.linear.default, x, up)), down)


def test_infer_axes_finds_one_width_through_an_mlp() -> None:
    graph, axes = inferred(mlp, x=some(3, 4), up=some(6, 4), down=some(5, 6))
    up, down = place(graph, "up"), place(graph, "down")
    assert find(axes.of(up)[0]) is find(axes.of(down)[1]) is find(axes.of(call_named(graph, "relu"))[1])
    assert find(axes.of(up)[1]) is not find(axes.of(down)[0])
    assert axes.dim_of(down, axes.of(up)[0]) == 1
    assert axes.dim_of(place(graph, "x"), axes.of(up)[0]) is None


def test_cuttable_says_how_a_product_is_cut() -> None:
    graph, axes = inferred(mlp, x=some(3, 4), up=some(6, 4), down=some(5, 6))
    first, second = call_named(graph, "linear"), call_named(graph, "linear", 1)
    width = axes.of(place(graph, "up"))[0]
    column, row = axes.bound[first].cuttable(width), axes.bound[second].cuttable(width)
    assert column is not None and column.outs == {0: 1} and column.ins == {1: 0}
    assert row is not None and not row.outs and row.ins == {0: 1, 1: 1} and row.summed


def test_infer_axes_refines_by_a_view() -> None:
    """12 becomes heads x 4: cut by heads, each rank has whole heads."""

    def make(call: Any, x: Any, w: Any) -> Any:
        return call(aten.view.default, call(aten.linear.default, x, w), [3, 3, 4])

    graph, axes = inferred(make, x=some(3, 5), w=some(12, 5))
    rows = find(axes.of(place(graph, "w"))[0])
    assert rows.kind == "product" and [part.size.number for part in map(find, rows.parts)] == [3, 4]
    view = call_named(graph, "view")
    assert find(rows.parts[0]) is find(axes.of(view)[1])
    assert axes.dim_of(place(graph, "w"), axes.of(view)[1]) == 0


def test_infer_axes_refines_by_a_split() -> None:
    def make(call: Any, x: Any, w: Any) -> Any:
        parts = call(aten.split_with_sizes.default, call(aten.linear.default, x, w), [4, 2], 1)
        return call(aten.relu.default, call(operator.getitem, parts, 0))

    graph, axes = inferred(make, x=some(3, 5), w=some(6, 5))
    rows = find(axes.of(place(graph, "w"))[0])
    assert rows.kind == "concat" and [part.size.number for part in map(find, rows.parts)] == [4, 2]
    assert find(axes.of(call_named(graph, "relu"))[1]) is find(rows.parts[0])


def test_infer_axes_cuts_no_operator_without_a_rule() -> None:
    graph, axes = inferred(lambda call, x: call(aten.linalg_matrix_exp.default, x), x=some(4, 4))
    bound = axes.bound[call_named(graph, "linalg_matrix_exp")]
    assert not bound.known
    assert bound.cuttable(axes.of(place(graph, "x"))[0]) is None


@pytest.mark.parametrize("rule", ["a b c -> a b c", "a b, a b -> a b", "* a b c -> * a b c"])
def test_infer_axes_treats_a_misfit_rule_as_none(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, aten.tanh.default, lambda call: Rule.of(rule))
    graph, axes = inferred(lambda call, x: call(aten.tanh.default, x), x=some(4, 4))
    bound = axes.bound[call_named(graph, "tanh")]
    assert not bound.known
    assert bound.cuttable(axes.of(place(graph, "x"))[0]) is None


class Squeezed(nn.Module):
    """Removes a dimension whose length is computed, and is 1 for inputs of this size. x: [rows, 4, 5] -> [rows, 6]"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.vector = nn.Linear(4, 9), nn.Linear(9, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(F.avg_pool1d(x, 4).squeeze(2)).relu())
        return y + F.linear(y, self.vector).unsqueeze(1)


def test_squeeze_of_a_computed_one_is_verified() -> None:
    model, x = Squeezed().double(), some(3, 4, 5)
    report = autotp.verify(model, 2, example_inputs=x)
    assert report.ok, report
    assert "9@tp" in str(report.plan)


def test_cuttable_leaves_the_width_of_a_norm_whole() -> None:
    """A norm needs its width; its rows may be cut."""
    graph, axes = inferred(lambda call, x: call(aten.layer_norm.default, x, [4]), x=some(3, 4))
    rows, width = axes.of(place(graph, "x"))
    bound = axes.bound[call_named(graph, "layer_norm")]
    assert bound.cuttable(width) is None
    assert bound.cuttable(rows) is not None


def test_cuttable_refuses_a_sum_of_unlike_axes() -> None:
    """Six rows are 4 | 2 here and 3 x 2 there: their sum cannot be cut along them."""

    def make(call: Any, x: Any, w: Any, v: Any) -> Any:
        one, other = (call(aten.linear.default, x, weight) for weight in (w, v))
        parts = call(aten.split_with_sizes.default, one, [4, 2], 1)
        return call(aten.add.Tensor, one, other), parts, call(aten.view.default, other, [3, 3, 2])

    def alike(call: Any, x: Any, w: Any, v: Any) -> Any:
        one, other = (call(aten.linear.default, x, weight) for weight in (w, v))
        return call(aten.add.Tensor, one, other)

    for function, cut in ((make, False), (alike, True)):
        graph, axes = inferred(function, x=some(3, 5), w=some(6, 5), v=some(6, 5))
        rows = find(axes.of(place(graph, "v"))[0])
        leaf = rows.parts[0] if rows.parts else rows
        bound = axes.bound[call_named(graph, "add")]
        assert (bound.cuttable(leaf) is not None) == cut


def test_cuttable_skips_broadcast_dimensions() -> None:
    graph, axes = inferred(lambda call, x, y: call(aten.add.Tensor, x, y), x=some(3, 4), y=some(3, 1))
    width = axes.of(place(graph, "x"))[1]
    factor = axes.bound[call_named(graph, "add")].cuttable(width)
    assert factor is not None and factor.ins == {0: 1}
