"""clean: biases go back into their products where no reduction waits, and what nobody reads goes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import draft, expect_same, lines, ops, some
from torch import Tensor

from autotp import collectives, parallel
from autotp.passes.clean import clean
from autotp.regions import enter_autocast, exit_autocast

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
def test_joined(make: Callable[..., Any], expected: str) -> None:
    graph = draft(make, **VALUES)
    assert lines(clean(graph)) == [expected, f"return {expected.split('(')[0]}"]
    expect_same(graph, clean(graph), list(VALUES.values()))


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
def test_not_joined(make: Callable[..., Any], other: dict[str, Tensor]) -> None:
    graph = draft(make, **VALUES | other)
    assert lines(clean(graph)) == lines(graph)


def unread(call: Any, x: Any, w: Any, b: Any) -> Any:
    call(aten.exp.default, call(aten.le.Tensor, x, x))
    call(aten.sym_size.int, x, 0)
    return linear(call, x, w, b)


def test_what_nobody_reads_goes() -> None:
    assert ops(clean(draft(unread, **VALUES))) == ["linear"]


@pytest.mark.parametrize(
    "draw", [aten.bernoulli.p, aten.rand_like.default, aten.dropout.default, parallel.fast_dropout]
)
def test_draws_stay(draw: Any) -> None:
    """A draw that nobody reads moves the generator: without it the next mask would be another."""
    arguments = {aten.bernoulli.p: (0.5,), aten.dropout.default: (0.5, True), parallel.fast_dropout: (0.5, 0)}

    def make(call: Any, x: Any) -> Any:
        call(draw, call(aten.relu.default, x), *arguments.get(draw, ()))
        return call(aten.dropout.default, x, 0.5, True)

    graph = draft(make, x=VALUES["x"])
    assert lines(clean(graph)) == lines(graph)
    expect_same(graph, clean(graph), [VALUES["x"]])


def test_dropout_in_evaluation_draws_nothing() -> None:
    def make(call: Any, x: Any) -> Any:
        call(aten.dropout.default, x, 0.5, False)
        return x

    assert lines(clean(draft(make, x=VALUES["x"]))) == ["return x"]


def test_regions_stay() -> None:
    """They are there for their effect; their own operators go like others."""

    def make(call: Any, x: Any) -> Any:
        region = call(enter_autocast, "cpu", torch.bfloat16, True, None)
        product, _ = call(aten.mm.default, x, x), call(aten.exp.default, x)
        call(exit_autocast, region)
        return product

    assert ops(clean(draft(make, x=some(3, 3)))) == ["enter_autocast", "mm", "exit_autocast"]


def test_inputs_stay() -> None:
    """A rank's graph is called with all of them."""
    graph = clean(draft(lambda call, x, y: call(aten.exp.default, x), x=VALUES["x"], y=VALUES["x"]))
    assert [node.name for node in graph.nodes if node.op == "placeholder"] == ["x", "y"]
