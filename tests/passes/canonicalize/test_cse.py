"""cse: one operator where the same is computed twice, and only there."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import draft, expect_same, lines, ops, some

from autotp.passes.canonicalize.cse import cse
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast

aten = torch.ops.aten
X = some(2, 3, 4)


def test_cse_does_the_docstring_s_example() -> None:
    def products(call: Any, x: Any, q: Any, k: Any) -> Any:
        first = call(aten.mm.default, call(aten.reshape.default, x, [6, 4]), q)
        return first, call(aten.mm.default, call(aten.reshape.default, x, [6, 4]), k)

    values = {"x": X, "q": some(4, 5), "k": some(4, 2)}
    graph = draft(products, **values)
    assert lines(cse(graph)) == ["reshape(x, [6, 4])", "mm(reshape, q)", "mm_1 = mm(reshape, k)", "return mm, mm_1"]
    expect_same(graph, cse(graph), list(values.values()))
    assert ops(graph).count("reshape") == 2, "the old graph stays as it is"


def twice(target: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda call, x: (call(target, x, *args, **kwargs), call(target, x, *args, **kwargs))


def each(target: Any, first: Any, second: Any) -> Callable[..., Any]:
    return lambda call, x: (call(target, x, first), call(target, x, second))


def chain(call: Any, x: Any) -> Any:
    return tuple(call(aten.exp.default, call(aten.relu.default, x)) for _ in range(2))


def items(call: Any, x: Any) -> Any:
    return tuple(call(operator.getitem, call(aten.split.Tensor, x, 2, -1), i) for i in (0, 0, 1))


def numbers(call: Any, x: Any) -> Any:
    """Equal in Python, of three dtypes in torch."""
    return tuple(call(aten.full.default, [2], value) for value in (1, 1.0, True))


@pytest.mark.parametrize(
    ("make", "left"),
    [
        pytest.param(chain, 2, id="what-reads-the-same"),
        pytest.param(items, 3, id="items-of-a-tuple"),
        pytest.param(twice(aten.sum.default), 1, id="no-arguments"),
        pytest.param(each(aten.mul.Tensor, 2.0, 3.0), 2, id="other-arguments"),
        pytest.param(twice(aten.sum.dim_IntList, [0], dtype=torch.float64), 1, id="same-keywords"),
        pytest.param(each(operator.getitem, slice(1), slice(1)), 1, id="same-slices"),
        pytest.param(each(operator.getitem, slice(1), slice(2)), 2, id="other-slices"),
        pytest.param(numbers, 3, id="1-and-1.0-and-True"),
        pytest.param(twice(aten.dropout.default, 0.5, True), 2, id="draws"),
        pytest.param(twice(aten.dropout.default, 0.5, False), 1, id="dropout-in-evaluation"),
        pytest.param(twice(aten.rand_like.default), 2, id="draws-like"),
    ],
)
def test_cse_leaves_as_many_operators_as_differ(make: Callable[..., Any], left: int) -> None:
    graph = draft(make, x=X)
    shared = cse(graph)
    assert len(ops(shared)) == left
    expect_same(graph, shared, [X])


def test_cse_never_shares_across_an_autocast_region() -> None:
    """The same operator computes something else under autocast; within one region it is shared."""

    def regions(call: Any, x: Any) -> Any:
        before = call(aten.mm.default, x, x)
        region = call(enter_autocast, "cpu", torch.bfloat16, True, None)
        inside = [call(aten.mm.default, x, x) for _ in range(2)]
        call(exit_autocast, region)
        return before, *inside, call(aten.mm.default, x, x)

    graph, x = draft(regions, x=some(3, 3, dtype=torch.float32)), some(3, 3, dtype=torch.float32)
    shared = cse(graph)
    assert ops(shared) == ["mm", "enter_autocast", "mm", "exit_autocast", "mm"]
    expect_same(graph, shared, [x])
