"""candidate: the order of cuts, products that sum over an axis, who reads a value, where a value comes from."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from graphs import call_named, draft, op, some
from torch import fx

from autotp.passes.plan.candidate import (
    ATTENTION,
    EXPERTS,
    MLP,
    Candidate,
    contracts,
    counts_attentions,
    cut_values,
    maker,
    readers,
    root,
)
from autotp.passes.plan.infer_axes import infer_axes
from autotp.sharding.axis import Axis, Size

aten = torch.ops.aten


def several(call: Any, x: Any, w: Any) -> Any:
    """The parts of `x` are read, once by its size alone."""
    parts = call(aten.split.Tensor, call(aten.linear.default, x, w), 2, 1)
    first, second = (call(operator.getitem, parts, i) for i in range(2))
    size = call(aten.sym_size.int, first, 0)
    return call(aten.mul.Tensor, call(aten.relu.default, first), second), size


def graph_of(make: Any) -> fx.Graph:
    return draft(make, x=some(3, 4), w=some(4, 4))


def test_contracts_is_true_of_products_alone() -> None:
    def make(call: Any, x: Any, w: Any) -> Any:
        return call(aten.mul.Tensor, call(aten.mm.default, x, w), call(aten.linear.default, x, w)), call(
            aten.sum.dim_IntList, x, [1]
        )

    graph = graph_of(make)
    axes = infer_axes(graph)
    found = [op(node) for node in graph.nodes if contracts(axes.bound.get(node))]
    assert found == ["mm", "linear"]


def test_readers_and_maker_look_through_tuple_items() -> None:
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
        (lambda call, x, w: call(aten.add.Tensor, w, call(aten.mul.Tensor, call(aten.exp.default, x), x)), "w"),
    ],
    ids=["scaled", "rows", "view", "sum", "adapted"],
)
def test_root_is_the_parameter_behind_views(make: Any, name: str) -> None:
    """The parameter that is read in the end; a sum of two values has none."""
    graph = draft(make, x=some(3, 4), w=some(3, 4))
    (last,) = graph.output_node().args[0]  # type: ignore[misc]
    found = root(last)  # type: ignore[arg-type]
    assert (found.name if found.op == "placeholder" else op(found)) == name


def candidate(pattern: str = "", name: str = "", hub: bool = False) -> Candidate:
    return Candidate(Axis(Size(4)), name=name, pattern=pattern, hub=hub)


def test_candidate_turns_are_experts_heads_width_vocab() -> None:
    """Experts first, then heads, widths, vocabularies, the rest; a residual stream is no width of a block."""
    order = [
        candidate(EXPERTS, "experts"),
        candidate(ATTENTION, "heads"),
        candidate(MLP, "width"),
        candidate("head, loss", "vocab"),
        candidate(MLP, "width", hub=True),
    ]
    assert [each.turn for each in order] == [0, 1, 2, 3, 4]
    assert [each.core for each in order] == [True, True, True, False, False]


@pytest.fixture
def graph() -> fx.Graph:
    """A product with a scaled view of a weight, a split of its result, and a sum over batches of products."""

    def make(call: Any, x: Any, w: Any, s: Any) -> Any:
        scaled = call(aten.mul.Tensor, w, s)
        product = call(aten.linear.default, x, call(aten.view.default, scaled, [6, 4]))
        parts = call(aten.split.Tensor, product, 2, -1)
        first = call(operator.getitem, parts, 0)
        scores = call(aten.matmul.default, first, call(aten.transpose.int, first, -2, -1))
        return call(aten.exp.default, scores)

    return draft(make, x=some(3, 5, 4), w=some(24), s=some(24))


def test_counts_attentions_is_the_batch_of_matmul(graph: fx.Graph) -> None:
    """A factor of both operands and of the result: the batch of the matrix product, not its rows."""
    axes = infer_axes(graph)
    found = {}
    for name in ("matmul", "linear"):
        node = call_named(graph, name)
        found[name] = [counts_attentions(node, factor, axes) for factor in axes.bound[node].factors]
    assert sum(found["matmul"]) == 1 and not any(found["linear"])


def test_cut_values_are_the_split_parts_with_the_axis(graph: fx.Graph) -> None:
    """Of the parts of a split, those that have the axis."""
    split, item = call_named(graph, "split"), call_named(graph, "getitem")
    axes = infer_axes(graph)
    assert list(cut_values(split, axes.of(item)[0], axes)) == [item]
    assert list(cut_values(split, Axis(Size(7)), axes)) == []
