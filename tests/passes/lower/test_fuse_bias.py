"""fuse_bias: they go back into their products where no reduction waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import draft, expect_same, lines, some
from torch import Tensor

from autotp.ops import collectives
from autotp.passes.lower.fuse_bias import fuse_bias

aten = torch.ops.aten
VALUES = {"x": some(5, 4), "w": some(4, 4), "b": some(4)}


def linear(call: Any, x: Any, w: Any, b: Any) -> Any:
    return call(aten.add.Tensor, call(aten.linear.default, x, w), b)


def bias_first(call: Any, x: Any, w: Any, b: Any) -> Any:
    return call(aten.add.Tensor, b, call(aten.linear.default, x, w))


def mm(call: Any, x: Any, w: Any, b: Any) -> Any:
    return call(aten.add.Tensor, call(aten.mm.default, x, w), b)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(linear, "linear(x, w, b)", id="linear"),
        pytest.param(bias_first, "linear(x, w, b)", id="bias-first"),
        pytest.param(mm, "addmm(b, x, w)", id="mm"),
    ],
)
def test_fuse_bias_joins_a_bias_with_its_product(make: Callable[..., Any], expected: str) -> None:
    graph = draft(make, **VALUES)
    assert lines(fuse_bias(graph)) == [expected, f"return {expected.split('(')[0]}"]
    expect_same(graph, fuse_bias(graph), list(VALUES.values()))


def reduced(call: Any, x: Any, w: Any, b: Any) -> Any:
    """NOTE [Why the bias leaves the linear]"""
    return call(aten.add.Tensor, call(collectives.reduce, call(aten.linear.default, x, w), "tp"), b)


def read_twice(call: Any, x: Any, w: Any, b: Any) -> Any:
    product = call(aten.linear.default, x, w)
    return call(aten.add.Tensor, product, b), product


def scaled(call: Any, x: Any, w: Any, b: Any) -> Any:
    return call(aten.add.Tensor, call(aten.linear.default, x, w), b, alpha=2)


def computed_later(call: Any, x: Any, w: Any, b: Any) -> Any:
    """What is added is made behind the product."""
    product = call(aten.linear.default, x, w)
    return call(aten.add.Tensor, product, call(aten.exp.default, b))


def biased_already(call: Any, x: Any, w: Any, b: Any) -> Any:
    return call(aten.add.Tensor, call(aten.linear.default, x, w, b), b)


@pytest.mark.parametrize(
    ("make", "other"),
    [
        pytest.param(reduced, {}, id="behind-a-reduction"),
        pytest.param(read_twice, {}, id="product-read-twice"),
        pytest.param(scaled, {}, id="alpha"),
        pytest.param(computed_later, {}, id="bias-computed"),
        pytest.param(biased_already, {}, id="biased-already"),
        pytest.param(linear, {"x": some(4, 4), "b": some(4, 4)}, id="bias-is-a-matrix"),
        pytest.param(linear, {"b": some(1)}, id="bias-of-one"),
        pytest.param(linear, {"b": some(4, dtype=torch.float32)}, id="bias-of-another-dtype"),
        pytest.param(linear, {"x": some(4)}, id="product-is-a-vector"),
    ],
)
def test_fuse_bias_leaves_other_additions(make: Callable[..., Any], other: dict[str, Tensor]) -> None:
    graph = draft(make, **VALUES | other)
    assert lines(fuse_bias(graph)) == lines(graph)
