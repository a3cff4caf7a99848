"""dce: what nobody reads goes."""

from typing import Any

import pytest
import torch
from graphs import draft, expect_same, lines, ops, some

from autotp.ops import dropout
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.passes.lower.dce import dce

aten = torch.ops.aten
X = some(5, 4)


def unread(call: Any, x: Any) -> Any:
    call(aten.exp.default, call(aten.le.Tensor, x, x))
    call(aten.sym_size.int, x, 0)
    return call(aten.relu.default, x)


def test_dce_removes_unread_operators() -> None:
    assert ops(dce(draft(unread, x=X))) == ["relu"]


def test_dce_returns_the_same_graph_without_dead_operators() -> None:
    graph = dce(draft(unread, x=X))
    assert dce(graph) is graph


@pytest.mark.parametrize("draw", [aten.bernoulli.p, aten.rand_like.default, aten.dropout.default, dropout.fast_dropout])
def test_dce_keeps_random_draws(draw: Any) -> None:
    """A draw that nobody reads moves the generator: without it the next mask would be another."""
    arguments = {aten.bernoulli.p: (0.5,), aten.dropout.default: (0.5, True), dropout.fast_dropout: (0.5, 0)}

    def make(call: Any, x: Any) -> Any:
        call(draw, call(aten.relu.default, x), *arguments.get(draw, ()))
        return call(aten.dropout.default, x, 0.5, True)

    graph = draft(make, x=X)
    assert lines(dce(graph)) == lines(graph)
    expect_same(graph, dce(graph), [X])


def test_dce_removes_unread_dropout_in_evaluation() -> None:
    def make(call: Any, x: Any) -> Any:
        call(aten.dropout.default, x, 0.5, False)
        return x

    assert lines(dce(draft(make, x=X))) == ["return x"]


def test_dce_keeps_autocast_regions() -> None:
    """They are there for their effect; their own operators go like others."""

    def make(call: Any, x: Any) -> Any:
        region = call(enter_autocast, "cpu", torch.bfloat16, True, None)
        product, _ = call(aten.mm.default, x, x), call(aten.exp.default, x)
        call(exit_autocast, region)
        return product

    assert ops(dce(draft(make, x=some(3, 3)))) == ["enter_autocast", "mm", "exit_autocast"]


def test_dce_keeps_inputs() -> None:
    """A rank's graph is called with all of them."""
    graph = dce(draft(lambda call, x, y: call(aten.exp.default, x), x=X, y=X))
    assert [node.name for node in graph.nodes if node.op == "placeholder"] == ["x", "y"]
