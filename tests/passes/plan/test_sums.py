"""sums: the terms of a tree of additions, its root, and the views that make a term."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import call_named, draft, op, some

from autotp.passes.plan.sums import inside, is_sum, outermost, terms, views

aten = torch.ops.aten
X = {name: some(3, 4) for name in "abcd"}


def residual(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    add = aten.add.Tensor
    return call(aten.relu.default, call(add, call(add, a, b), call(add, c, d)))


def test_terms_of_a_tree_of_additions() -> None:
    graph = draft(residual, **X)
    first, second, root = (call_named(graph, "add", i) for i in range(3))
    assert [term.name for term in terms(root)] == ["a", "b", "c", "d"]
    assert outermost(first) is outermost(second) is outermost(root) is root
    assert [inside(node) for node in (first, second, root)] == [True, True, False]


def test_terms_end_at_a_sum_with_two_readers() -> None:
    def make(call: Any, a: Any, b: Any, c: Any) -> Any:
        both = call(aten.add.Tensor, a, b)
        return call(aten.add.Tensor, both, c), call(aten.exp.default, both)

    graph = draft(make, a=X["a"], b=X["b"], c=X["c"])
    inner, outer = call_named(graph, "add"), call_named(graph, "add", 1)
    assert [term.name for term in terms(outer)] == [inner.name, "c"]
    assert outermost(inner) is inner


def test_terms_end_at_another_shape_or_dtype() -> None:
    def make(call: Any, a: Any, b: Any, wide: Any, whole: Any) -> Any:
        small = call(aten.add.Tensor, a, a)
        return call(aten.add.Tensor, small, wide), call(aten.add.Tensor, call(aten.add.Tensor, b, b), whole)

    graph = draft(make, a=some(4), b=some(3, 4, dtype=torch.float32), wide=some(3, 4), whole=some(3, 4))
    found = [call_named(graph, "add", i) for i in range(4)]
    assert not any(map(inside, found))


def test_is_sum_takes_only_unscaled_tensor_additions() -> None:
    def make(call: Any, a: Any, b: Any) -> Any:
        add = aten.add.Tensor
        return call(add, a, b), call(add, a, 1.0), call(add, a, b, alpha=2), call(aten.sub.Tensor, a, b)

    graph = draft(make, a=X["a"], b=X["b"])
    assert [is_sum(node) for node in graph.nodes if node.op == "call_function"] == [True, False, False, False]


def viewed(call: Any, a: Any, w: Any) -> Any:
    x = call(aten.reshape.default, call(aten.linear.default, a, w), [2, 6, 4])
    return call(aten.permute.default, call(aten.transpose.int, x, 0, 1), [1, 0, -1])


def moved(call: Any, a: Any, w: Any) -> Any:
    """The transposition moves the last dimension."""
    x = call(aten.reshape.default, call(aten.linear.default, a, w), [2, 6, 4])
    return call(aten.permute.default, call(aten.transpose.int, x, 1, 2), [1, 0, 2])


def regrouped(call: Any, a: Any, w: Any) -> Any:
    """The view splits the last dimension."""
    return call(
        aten.reshape.default, call(aten.reshape.default, call(aten.linear.default, a, w), [2, 6, 4]), [2, 6, 2, 2]
    )


def read_twice(call: Any, a: Any, w: Any) -> Any:
    x = call(aten.reshape.default, call(aten.linear.default, a, w), [2, 6, 4])
    return call(aten.permute.default, x, [1, 0, 2]), call(aten.exp.default, x)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (viewed, ["permute", "transpose", "reshape"]),
        (moved, ["permute"]),
        (regrouped, []),
        (read_twice, ["permute"]),
    ],
)
def test_views_end_at_another_last_dimension_or_reader(make: Any, found: list[str]) -> None:
    """Outermost first; the chain ends where the last dimension changes, or where somebody else reads."""
    graph = draft(make, a=some(12, 5), w=some(4, 5))
    last = next(node for node in reversed(graph.nodes) if node.op == "call_function" and op(node) != "exp")
    assert [op(node) for node in views(last)] == found
