"""defer_reductions: terms that are sums over ranks are added up first, and reduced once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import call_named, draft, expect_same, lines, ops, some
from torch import Tensor

from autotp.passes.lower.defer_reductions import defer_reductions
from autotp.passes.lower.local_sizes import Target
from autotp.passes.lower.lower import lower
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import infer_axes

aten = torch.ops.aten
VALUES = {"x": some(3, 4), "v": some(4, 6), "w": some(4, 6), "a": some(3, 6), "b": some(3, 6), "bias": some(4)}
add, linear = aten.add.Tensor, aten.linear.default


def deferred(make: Callable[..., Any], partial: int, **other: Tensor) -> tuple[torch.fx.Graph, torch.fx.Graph, Any]:
    """The graph before and behind the pass, its first `partial` products cut where they sum; what else it gives."""
    graph = draft(make, **VALUES | other)
    axes, decision = infer_axes(graph), Decision()
    for product in (call_named(graph, "linear", i) for i in range(partial)):
        decision.cuts[product] = axes.of(product.args[1])[1]
        for operand in product.args[:2]:
            decision.held[operand] = axes.of(operand)[1]
    after, *rest = defer_reductions(graph, axes, decision)
    expect_same(graph, after, list((VALUES | other).values()))
    return graph, after, ((axes, decision), tuple(rest))


def reductions(graph: torch.fx.Graph, known: Any) -> int:
    return ops(lower(graph, *known, set(), Target("tp", 2, 0))).count("reduce")


def branches(call: Any, x: Any, v: Any, w: Any, a: Any, b: Any, bias: Any) -> Any:
    """`(x + (attention + bias)) + (mlp + bias)`, as GPT-J and GPT-NeoX compute it."""
    attention = call(add, call(linear, a, v), bias)
    mlp = call(add, call(linear, b, w), bias)
    return call(add, call(add, x, attention), mlp)


def biases_of_its_shape(call: Any, x: Any, v: Any, w: Any, a: Any, b: Any, bias: Any) -> Any:
    return call(add, call(add, x, call(linear, a, v)), call(linear, b, w))


def test_defer_reductions_does_the_docstring_s_example() -> None:
    before, after, (old, new) = deferred(branches, 2)
    assert lines(after) == [
        "linear(a, v)",
        "linear_1 = linear(b, w)",
        "add(linear, linear_1)",
        "add_1 = add(add, x)",
        "add_2 = add(add_1, bias)",
        "add_3 = add(add_2, bias)",
        "return add_3",
    ]
    assert (reductions(before, old), reductions(after, new)) == (2, 1)


def test_defer_reductions_keeps_axes_and_cuts() -> None:
    """The regrouped graph has axes for every value, and the same cuts."""
    _, after, (_, (axes, decision)) = deferred(biases_of_its_shape, 2)
    assert all(node in axes.dims for node in after.nodes if node.op == "call_function")
    assert {node.name for node in decision.cuts} == {"linear_default", "linear_default_1"}
    assert {node.name for node in decision.held} == {"a", "v", "b", "w"}


def stream_read_too(call: Any, x: Any, v: Any, w: Any, a: Any, b: Any, bias: Any) -> Any:
    """The stream is a partial sum itself, a vocab-parallel embedding, reduced already for its norm."""
    stream, attention, mlp = call(linear, a, v), call(linear, b, w), call(linear, b, v)
    return call(add, call(add, stream, attention), mlp), call(aten.exp.default, stream)


def behind_views(call: Any, x: Any, v: Any, w: Any, a: Any, b: Any, bias: Any) -> Any:
    """The bias is inside of views, as in GPT-2's Conv1D and in torch's MultiheadAttention."""
    inner = call(aten.reshape.default, call(add, call(linear, a, v), bias), [1, 3, 4])
    return call(add, call(aten.transpose.int, inner, 0, 1), call(aten.reshape.default, call(linear, b, w), [3, 1, 4]))


@pytest.mark.parametrize(
    ("make", "partial", "before", "after"),
    [
        pytest.param(stream_read_too, 3, 3, 2, id="stream-read-too"),
        pytest.param(behind_views, 2, 2, 1, id="bias-behind-views"),
    ],
)
def test_defer_reductions_reduces_a_sum_once(make: Callable[..., Any], partial: int, before: int, after: int) -> None:
    graphs = deferred(make, partial)
    counts = [reductions(graph, known) for graph, known in zip(graphs[:2], graphs[2], strict=True)]
    assert counts == [before, after]


def inner_read_too(call: Any, x: Any, v: Any, w: Any, a: Any, b: Any, bias: Any) -> Any:
    """The residual stream between the branches is a value of its own."""
    between = call(add, x, call(linear, a, v))
    return call(add, between, call(linear, b, w)), between


def scaled(call: Any, x: Any, v: Any, w: Any, a: Any, b: Any, bias: Any) -> Any:
    return call(add, call(add, x, call(linear, a, v)), call(linear, b, w), alpha=2)


def two_terms(call: Any, x: Any, v: Any, w: Any, a: Any, b: Any, bias: Any) -> Any:
    return call(add, call(linear, a, v), call(linear, b, w))


def wider(call: Any, x: Any, v: Any, w: Any, a: Any, b: Any, bias: Any) -> Any:
    """The inner sum is smaller than the outer: adding it last would cost more work, and its reduction more."""
    return call(add, call(add, bias, call(linear, a, v)), call(linear, b, w))


@pytest.mark.parametrize(
    ("make", "partial", "other"),
    [
        pytest.param(branches, 1, {}, id="one-partial"),
        pytest.param(branches, 0, {}, id="none-partial"),
        pytest.param(inner_read_too, 2, {}, id="inner-sum-read-too"),
        pytest.param(scaled, 2, {}, id="alpha"),
        pytest.param(two_terms, 2, {}, id="two-terms"),
        pytest.param(wider, 2, {"a": some(1, 6)}, id="inner-sum-broadcast"),
        pytest.param(
            biases_of_its_shape,
            2,
            {"x": some(3, 4, dtype=torch.float32), "a": some(3, 6, dtype=torch.float32), "v": VALUES["v"].float()},
            id="inner-sum-of-another-dtype",
        ),
    ],
)
def test_defer_reductions_leaves_what_it_cannot_join(
    make: Callable[..., Any], partial: int, other: dict[str, Tensor]
) -> None:
    before, after, _ = deferred(make, partial, **other)
    assert after is before
