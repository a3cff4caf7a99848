"""sequence_order: each fault in how a sequence is brought into the order of `zigzag`, and back, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import TwoStreams, gpt, two_streams
from torch import fx, nn

from autotp.compiler import analyse
from autotp.diagnostics.verify import find_inputs
from autotp.errors import Error
from autotp.ops.attention.zigzag import in_order, zigzag, zigzag_rows
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.check.sequence_order import expect_sequence_order
from autotp.passes.plan.sequence.balance import balance
from autotp.passes.program import sequences

aten = torch.ops.aten
Fault = Callable[[fx.Graph, fx.Node], None]


def proved(model: nn.Module, given: Any, monkeypatch: pytest.MonkeyPatch, fault: Any = None) -> list[fx.Node]:
    """Plans for two ranks with a fault in the balanced graph; returns the nodes of the graph as it was before."""
    nodes: list[fx.Node] = []

    def broken(*args: Any) -> Any:
        found = balance(*args)
        nodes.extend(found.graph.nodes)
        if fault is not None:
            fault(found.graph)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(sequences, "balance", broken)
        args, kwargs = find_inputs(model, given)
        analyse(skeleton_of(model), args, kwargs, 1, Options(cp=2))
    return nodes


def left_out(graph: fx.Graph, node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)


def turned(graph: fx.Graph, node: fx.Node) -> None:
    node.target = in_order if node.target is zigzag else zigzag


def for_three(graph: fx.Graph, node: fx.Node) -> None:
    at = 3 if node.target is zigzag_rows else 2
    node.args = (*node.args[:at], 3, *node.args[at + 1 :])


def along_another(graph: fx.Graph, node: fx.Node) -> None:
    node.args = (node.args[0], (node.args[1] + 1) % node.meta["val"].dim(), node.args[2])  # type: ignore[operator]


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt": lambda: (gpt(n_layer=1), None),
    "two": lambda: (TwoStreams().double(), two_streams()),
}


@pytest.mark.parametrize("fault", [left_out, turned, for_three, along_another])
@pytest.mark.parametrize("name", MODELS)
def test_sequence_order_refuses_a_fault_in_any_move(name: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = MODELS[name]()
    nodes = proved(model, given, monkeypatch)
    moves = [i for i, node in enumerate(nodes) if node.target in (zigzag, in_order)]
    assert len(moves) >= 5
    for i in moves:
        if fault is along_another and nodes[i].meta["val"].dim() == 1:
            continue
        with pytest.raises(Error):
            proved(model, given, monkeypatch, lambda graph, i=i: fault(graph, list(graph.nodes)[i]))


def first(graph: fx.Graph, target: Any) -> fx.Node:
    return next(node for node in graph.nodes if node.target is target)


def another_rank_count(graph: fx.Graph) -> None:
    for_three(graph, first(graph, zigzag_rows))


def another_scale(graph: fx.Graph) -> None:
    node = first(graph, zigzag_rows)
    node.args = (*node.args[:5], 0.5, *node.args[6:])


def another_operator(graph: fx.Graph) -> None:
    first(graph, aten.gelu.default).target = aten.relu.default


def keys_as_values(graph: fx.Graph) -> None:
    node = first(graph, zigzag_rows)
    node.args = (node.args[0], node.args[1], node.args[1], *node.args[3:])


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param(another_rank_count, "is for 3 ranks, and there are 2", id="ranks"),
        pytest.param(another_scale, "is not an operator of the graph", id="scale"),
        pytest.param(another_operator, "`aten.relu.default` is not an operator of the graph", id="operator"),
        pytest.param(keys_as_values, "`zigzag_rows` is not an operator of the graph", id="values"),
    ],
)
def test_sequence_order_refuses_another_computation(fault: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Error, match=told):
        proved(gpt(n_layer=1), None, monkeypatch, fault)


def test_sequence_order_refuses_a_missing_operator() -> None:
    args, kwargs = find_inputs(gpt(), None)
    program = analyse(skeleton_of(gpt()), args, kwargs, 1, Options())
    shorter = fx.Graph()
    shorter.graph_copy(program.graph, {})
    with pytest.raises(Error, match="is missing"):
        expect_sequence_order(program.graph, shorter, program.axes, {}, (), 2)
