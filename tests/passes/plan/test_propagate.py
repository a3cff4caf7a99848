"""propagate: the placements that follow from cuts, and where a gradient flows."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import call_named, draft, some

from autotp.ops.losses.cross_entropy import peak
from autotp.passes.plan.infer_axes import infer_axes
from autotp.passes.plan.propagate import needs, needs_grad, propagate
from autotp.sharding.axis import leaves

aten = torch.ops.aten
VALUES = {"x": some(2, 3, 4), "w": some(5, 4), "b": some(5)}


@pytest.mark.parametrize(
    ("source", "dim", "operands", "output"),
    [
        pytest.param("w", 0, ["{tp}", "@tp"], "@tp", id="column"),
        pytest.param("w", 1, ["@tp", "@tp"], "{+tp}", id="row"),
        pytest.param("x", 1, ["@tp", "{tp}"], "@tp", id="sequence"),
        pytest.param("w", None, ["", ""], "", id="whole"),
    ],
)
def test_needs_gives_placements_of_linear(source: str, dim: int | None, operands: list[str], output: str) -> None:
    graph = draft(lambda call, x, w, b: call(aten.linear.default, x, w), **VALUES)
    axes, node = infer_axes(graph), call_named(graph, "linear")
    place = graph.find_nodes(op="placeholder", target=source)[0]
    leaf = None if dim is None else next(leaves(axes.of(place)[dim]))
    found = needs(node, axes, leaf, propagate(graph, axes, {}, {}))
    assert [placement.text("tp") for placement in found.operands] == operands
    assert [placement.text("tp") for placement in found.outputs] == [output]


def test_needs_gives_a_partial_maximum() -> None:
    graph = draft(lambda call, x: call(peak, x, 2), x=VALUES["x"])
    axes, node = infer_axes(graph), call_named(graph, "peak")
    found = needs(node, axes, axes.of(graph.find_nodes(op="placeholder")[0])[2], {})
    assert [placement.text("tp") for placement in found.outputs] == ["{max tp}"]


def through(target: Any, *rest: Any, also: Any = None) -> Callable[..., Any]:
    """An operator that reads a partial sum, `y`; another may read it, too."""

    def make(call: Any, x: Any, w: Any, b: Any) -> Any:
        y = call(aten.linear.default, x, w)
        given = [{"b": b, "y": y}.get(arg, arg) if isinstance(arg, str) else arg for arg in rest]
        found = call(target, y, *given)
        return (found, call(also, y)) if also else found

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(through(aten.mul.Tensor, 2.0), "{+tp}", id="times-a-number"),
        pytest.param(through(aten.mul.Tensor, "b"), "{+tp}", id="times-a-whole-value"),
        pytest.param(through(aten.reshape.default, [6, 5]), "{+tp}", id="view"),
        pytest.param(through(aten.sum.dim_IntList, [0]), "{+tp}", id="sum"),
        pytest.param(through(aten.add.Tensor, "y"), "{+tp}", id="sum-with-itself"),
        pytest.param(through(aten.mul.Tensor, "y"), "", id="times-itself"),
        pytest.param(through(aten.add.Tensor, "b"), "", id="plus-a-whole-value"),
        pytest.param(through(aten.exp.default), "", id="not-linear"),
        pytest.param(through(aten.expand.default, [7, 2, 3, 5]), "", id="grows"),
        pytest.param(through(aten.mul.Tensor, 2.0, also=aten.exp.default), "", id="read-twice"),
    ],
)
def test_propagate_lets_partial_sums_wait(make: Callable[..., Any], expected: str) -> None:
    """A partial sum goes on through what is linear in it, if nothing else reads it and it does not grow."""
    graph = draft(make, **VALUES)
    axes, product = infer_axes(graph), call_named(graph, "linear")
    w = graph.find_nodes(op="placeholder", target="w")[0]
    leaf = axes.of(w)[1]
    have = propagate(graph, axes, {product: leaf}, {w: leaf})
    reader = next(iter(product.users))
    assert [p.text("tp") for node in (w, product, reader) for p in have[node]] == ["@tp", "{+tp}", expected]


def adapter(beside: str, then: Any) -> Callable[..., Any]:
    """A row-parallel product of rank 2 and, through what makes it wider, a sum with another value."""

    def make(call: Any, x: Any, low: Any, up: Any, w: Any, b: Any) -> Any:
        layer = {"partial": call(aten.linear.default, x, w), "whole": b}[beside]
        wide = call(aten.linear.default, call(aten.linear.default, x, low), up)
        return call(aten.add.Tensor, call(aten.add.Tensor, layer, b), then(call, wide))

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(adapter("partial", lambda call, y: call(aten.mul.Tensor, y, 2.0)), "{+tp}", id="lora"),
        pytest.param(adapter("whole", lambda call, y: call(aten.mul.Tensor, y, 2.0)), "", id="beside-a-whole-value"),
        pytest.param(adapter("partial", lambda call, y: call(aten.exp.default, y)), "", id="not-linear-after"),
    ],
)
def test_propagate_lets_adapter_sums_wait_for_the_sum_beside(make: Callable[..., Any], expected: str) -> None:
    """LoRA's `B(A(x)) * scaling` is wider than `A(x)`, but what it is added to is reduced anyway."""
    graph = draft(make, x=VALUES["x"], low=some(2, 4), up=some(5, 2), w=some(5, 4), b=some(2, 3, 5))
    axes = infer_axes(graph)
    products = [n for n in graph.nodes if n.target is aten.linear.default]
    leaf = axes.of(graph.find_nodes(op="placeholder", target="low")[0])[1]
    cuts = {n: leaf for n in products if axes.bound[n].cuttable(leaf)}
    assert len(cuts) == len(products) - 1
    have = propagate(graph, axes, cuts, {})
    assert have[products[-1]][0].text("tp") == expected


def test_propagate_places_each_item_of_a_tuple() -> None:
    def make(call: Any, x: Any) -> Any:
        found = call(aten.split_with_sizes.default, x, [1, 2], 1)
        return tuple(call(operator.getitem, found, i) for i in (0, 1))

    graph = draft(make, x=VALUES["x"])
    axes, (place,) = infer_axes(graph), graph.find_nodes(op="placeholder")
    split = call_named(graph, "split_with_sizes")
    cut = propagate(graph, axes, {split: axes.of(place)[2]}, {})
    assert [cut[call_named(graph, "getitem", i)][0].text("tp") for i in (0, 1)] == ["@tp", "@tp"]
    assert [p.text("tp") for p in propagate(graph, axes, {}, {})[split]] == ["", ""]


def test_needs_grad_ends_at_detach_maximum_and_integers() -> None:
    """Not behind a detach or a maximum, not into integers, not from what nobody trains."""

    def make(call: Any, x: Any, w: Any, b: Any) -> Any:
        y = call(aten.linear.default, x, w)
        call(aten.argmax.default, y)
        call(aten.exp.default, call(aten.detach.default, y))
        call(aten.log.default, call(peak, y, 0))
        call(aten.sin.default, b)
        call(aten.cos.default, call(operator.getitem, call(aten.unbind.int, y), 0))
        return y

    graph = draft(make, **VALUES)
    trained = frozenset(graph.find_nodes(op="placeholder", target="w"))
    assert [node.name for node in graph.nodes if node in needs_grad(graph, trained)] == [
        "w", "linear_default", "unbind_int", "getitem", "cos_default"
    ]  # fmt: skip
