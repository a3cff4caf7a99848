"""expert_rows: each fault in how rows travel to their experts, and back, is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graphs import canonical
from small_models import AttendingMixtures, Mixture
from torch import fx, nn

from autotp.compiler import analyse
from autotp.errors import Error
from autotp.ops.collectives import copy
from autotp.ops.experts import exchange
from autotp.ops.experts import rows as routing
from autotp.ops.grouped_mm import OPERATOR
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.check.expert_rows import expect_expert_rows
from autotp.passes.plan.experts.expert_parallel import CP_COPIES, expert_parallel
from autotp.passes.plan.experts.experts import experts
from autotp.passes.plan.infer_axes import infer_axes

Fault = Callable[[fx.Graph, Callable[[Any, int], fx.Node]], None]
aten = torch.ops.aten


def proved(fault: Fault | None) -> None:
    """Two layers of experts on two ranks, with a fault."""
    captured, graph = canonical(nn.Sequential(Mixture(OPERATOR), Mixture()), torch.randn(6, 8))
    before, axes = experts(graph, infer_axes(graph), captured.parameters, 2)
    made = expert_parallel(before, axes, captured.parameters, 2)
    if fault is not None:
        fault(made, lambda target, i=0: [node for node in made.nodes if node.target is target][i])
    expect_expert_rows(before, made, captured.inputs, 2)


def left_out(move: Any) -> Fault:
    def fault(graph: fx.Graph, at: Any) -> None:
        node = at(move, 0)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    return fault


def changed(target: Any, position: int, other: Callable[[Any], Any], layer: int = 1) -> Fault:
    def fault(graph: fx.Graph, at: Any) -> None:
        node = at(target, layer)
        node.args = (*node.args[:position], other(at), *node.args[position + 1 :])

    return fault


def also_read_whole(graph: fx.Graph, at: Any) -> None:
    """A penalty on all weights of the experts, of which a rank stores its own."""
    own, end = at(exchange.own, 0), next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(end):
        penalty = graph.call_function(aten.sum.default, (own.args[0],))
    penalty.meta["val"] = own.args[0].meta["val"].new_empty(())


def without_its_experts(graph: fx.Graph, at: Any) -> None:
    at(exchange.own, 0).meta["val"] = at(exchange.own, 0).args[0].meta["val"]


def twice_activated(graph: fx.Graph, at: Any) -> None:
    gelu = at(aten.gelu.default, 0)
    with graph.inserting_after(gelu):
        again = graph.call_function(aten.relu.default, (gelu,))
    again.meta["val"] = gelu.meta["val"]
    gelu.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def part_of_rows(graph: fx.Graph, at: Any) -> None:
    at(exchange.own, 0).target = exchange.select_own
    at(exchange.select_own, 0).args = (at(aten.index_select.default, 0), "ep", 2)


def part_of_three(graph: fx.Graph, at: Any) -> None:
    own = at(exchange.own, 0)
    own.target, own.args = exchange.select_own, (own.args[0], "ep", 3)


def test_expert_rows_proves_copies_of_experts_along_cp() -> None:
    """And refuses others: gradients of experts over all of cp, and of routers over a part of it."""
    inputs = torch.randn(4, 6, 8), torch.randn(4, 6, 3)
    program = analyse(skeleton_of(AttendingMixtures()), inputs, {}, 1, Options(cp=2, ep=2), last="experts")
    before, captured = program.graph, program.captured
    for of_experts, axis in ((None, ""), (True, "cp"), (False, CP_COPIES)):
        made = expert_parallel(before, program.axes, captured.parameters, 2)
        if of_experts is not None:
            copies = [node for node in made.nodes if node.target is copy]
            chosen = next(node for node in copies if (node.args[0].target is exchange.own) == of_experts)
            chosen.args = (chosen.args[0], axis)
        with nullcontext() if of_experts is None else pytest.raises(Error, match=f"ranks along `{axis}`"):
            expect_expert_rows(before, made, captured.inputs, 2)


FAULTS: dict[str, Fault] = {
    "rows-stay": left_out(exchange.to_experts),
    "rows-do-not-come-back": left_out(exchange.to_rows),
    "whole-weights": left_out(exchange.own),
    "another-table-there": changed(exchange.to_experts, 2, lambda at: at(exchange.exchange_counts, 0)),
    "another-table-back": changed(exchange.to_rows, 2, lambda at: at(exchange.exchange_counts, 0)),
    "other-places": changed(exchange.to_experts, 3, lambda at: at(exchange.arrival, 0)),
    "other-counts": changed(routing.grouped_mm, 2, lambda at: at(exchange.arrival, 0)),
    "rows-of-this-rank-inside": changed(routing.grouped_mm, 0, lambda at: at(aten.index_select.default, 0)),
    "another-choice": changed(exchange.exchange_counts, 0, lambda at: at(exchange.exchange_counts, 0).args[0]),
    "another-number": changed(exchange.exchange_counts, 2, lambda at: 8),
    "counted-from-the-end": changed(exchange.exchange_counts, 3, lambda at: True),
    "three-ranks": changed(exchange.own, 1, lambda at: 3),
    "own-of-all": without_its_experts,
    "another-operator": twice_activated,
    "read-whole": also_read_whole,
    "part-of-rows": part_of_rows,
    "part-of-three": part_of_three,
}


def test_expert_rows_proves_what_the_pass_makes() -> None:
    proved(None)


@pytest.mark.parametrize("name", FAULTS)
def test_expert_rows_refuses(name: str) -> None:
    with pytest.raises(Error, match="rows that travel would not compute the model"):
        proved(FAULTS[name])
