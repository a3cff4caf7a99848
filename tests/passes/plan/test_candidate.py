"""candidate: the order in which axes are cut, and questions about operators: products, readers, roots."""

from __future__ import annotations

import operator

import pytest
import torch
from graphs import call_named, draft, some
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


def candidate(pattern: str = "", name: str = "", hub: bool = False) -> Candidate:
    return Candidate(Axis(Size(4)), name=name, pattern=pattern, hub=hub)


def test_turns() -> None:
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

    def make(call, x, w, s):  # type: ignore[no-untyped-def]
        scaled = call(aten.mul.Tensor, w, s)
        product = call(aten.linear.default, x, call(aten.view.default, scaled, [6, 4]))
        parts = call(aten.split.Tensor, product, 2, -1)
        first = call(operator.getitem, parts, 0)
        scores = call(aten.matmul.default, first, call(aten.transpose.int, first, -2, -1))
        return call(aten.exp.default, scores)

    return draft(make, x=some(3, 5, 4), w=some(24), s=some(24))


def test_products(graph: fx.Graph) -> None:
    bound = infer_axes(graph).bound
    assert contracts(bound[call_named(graph, "linear")]) and contracts(bound[call_named(graph, "matmul")])
    assert not contracts(bound[call_named(graph, "exp")]) and not contracts(None)


def test_what_counts_attentions(graph: fx.Graph) -> None:
    """A factor of both operands and of the result: the batch of the matrix product, not its rows."""
    axes = infer_axes(graph)
    found = {}
    for name in ("matmul", "linear"):
        node = call_named(graph, name)
        found[name] = [counts_attentions(node, factor, axes) for factor in axes.bound[node].factors]
    assert sum(found["matmul"]) == 1 and not any(found["linear"])


def test_from_values_to_operators(graph: fx.Graph) -> None:
    split, product = call_named(graph, "split"), call_named(graph, "linear")
    item = next(node for node in graph.nodes if node.target is operator.getitem)
    assert maker(item) is split and maker(product) is product
    assert list(readers(split)) == list(readers(item)) and len(list(readers(item))) == 2
    axes = infer_axes(graph)
    assert list(cut_values(split, axes.of(item)[0], axes)) == [item]
    assert list(cut_values(split, Axis(Size(7)), axes)) == []


def test_root(graph: fx.Graph) -> None:
    """Through views and the scale of a weight; a product of two values has no root but itself."""
    places = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    assert root(call_named(graph, "view")) is places["w"]
    assert root(call_named(graph, "matmul")) is call_named(graph, "matmul")
