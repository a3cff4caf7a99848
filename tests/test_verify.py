"""The oracle can see: whatever is done wrong to a parallel model, verify says so, and says where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from architectures import Architecture
from torch import Tensor, fx, nn
from transformer import arguments, model

import autotp
from autotp import collectives, parallel
from autotp.layout import Layout
from autotp.models.bert import BERT, BERTConfig
from autotp.models.gpt import GPT, GPTConfig
from autotp.partition import chunk_bounds
from autotp.passes.flow import needs_grad
from autotp.verify import Change, Difference, Report, Trial, compare, prepare

CONJUGATES = (
    collectives.copy, collectives.reduce, collectives.scatter, collectives.gather, collectives.all_gather,
    collectives.reduce_scatter,
)  # fmt: skip
SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 61, "n_layer": 1, "n_head": 4, "n_embd": 16}


@cache
def gpt() -> Trial:
    trained = GPT(GPTConfig(**SIZES))
    return prepare(trained, (), trained.dummy_inputs, 2)


@cache
def bert() -> Trial:
    trained = BERT(BERTConfig(**SIZES))
    return prepare(trained, (), trained.dummy_inputs, 2)


@cache
def alibi() -> Trial:
    """Logits that are gathered, and slopes of heads that are scattered."""
    arch = Architecture(positions="alibi", vocab=61, loss="none", train=False)
    return prepare(model(arch), (), arguments(arch), 2)


TRIALS = pytest.mark.parametrize("trial", [gpt, bert, alibi], ids=["gpt", "bert", "alibi"])


def red(trial: Trial, change: Change) -> bool:
    """True if verify reports a difference, or the ranks cannot even run."""
    try:
        return not compare(trial, change).ok
    except RuntimeError:
        return True


def wrong(report: Report) -> set[str]:
    """The parameters and inputs whose gradient is wrong."""
    return {d.name for d in report.gradients if not d.error <= report.tolerance}


# ---- changes to a rank's graph; nodes are told by name, since a graph is made anew for each run


def calls(trial: Trial, *targets: Any) -> list[fx.Node]:
    """The calls of these functions in a rank's graph, in order."""
    seen: list[fx.Node] = []
    compare(trial, lambda graph, rank: seen.extend(n for n in graph.nodes if rank == 0 and n.target in targets) or graph)
    return seen


def on(name: str, edit: Callable[[fx.Graph, fx.Node, int], None]) -> Change:
    """The change that edits the node called `name`, on every rank."""

    def change(graph: fx.Graph, rank: int) -> fx.Graph:
        node = next(n for n in graph.nodes if n.name == name)
        with graph.inserting_after(node):
            edit(graph, node, rank)
        return graph

    return change


def drop(graph: fx.Graph, node: fx.Node, rank: int) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)


def repeat(graph: fx.Graph, node: fx.Node, rank: int) -> None:
    """Applies a function to its own result."""
    behind(node.target, *node.args[1:])(graph, node, rank)


def behind(function: Any, *args: Any) -> Callable[[fx.Graph, fx.Node, int], None]:
    """Puts a call of `function` between a node and its readers."""

    def edit(graph: fx.Graph, node: fx.Node, rank: int) -> None:
        new = graph.call_function(function, (node, *args))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    return edit


def conjugate(graph: fx.Graph, node: fx.Node, rank: int) -> None:
    """A copy where a reduce belongs, and a reduce where a copy does."""
    node.target = collectives.copy if node.target is collectives.reduce else collectives.reduce
    node.args = node.args[:2]


def argument(at: int, change: Callable[[Any], Any]) -> Callable[[fx.Graph, fx.Node, int], None]:
    def edit(graph: fx.Graph, node: fx.Node, rank: int) -> None:
        node.update_arg(at, change(node.args[at]))

    return edit


def bias_before_reduce(graph: fx.Graph, node: fx.Node, rank: int) -> None:
    """add(reduce(x), b) -> reduce(add(x, b)): every rank adds the bias."""
    (add,) = node.users
    bias = next(arg for arg in add.args if arg is not node)
    product = node.args[0]
    with graph.inserting_before(node):
        node.update_arg(0, graph.call_function(torch.ops.aten.add.Tensor, (product, bias)))
    add.replace_all_uses_with(node)
    graph.erase_node(add)


# ---- conjugates


@TRIALS
def test_nothing_changed(trial: Callable[[], Trial]) -> None:
    assert compare(trial()).ok


@TRIALS
def test_each_conjugate_dropped(trial: Callable[[], Trial]) -> None:
    nodes = calls(trial(), *CONJUGATES)
    assert len(nodes) >= 5
    assert [str(n) for n in nodes if not red(trial(), on(n.name, drop))] == []


@TRIALS
def test_each_conjugate_twice(trial: Callable[[], Trial]) -> None:
    """The maximum of maxima is the maximum; all others count."""
    nodes = [n for n in calls(trial(), *CONJUGATES) if n.args[2:] != ("max",)]
    assert [str(n) for n in nodes if not red(trial(), on(n.name, repeat))] == []


@TRIALS
def test_each_conjugate_for_the_other(trial: Callable[[], Trial]) -> None:
    nodes = calls(trial(), collectives.copy, collectives.reduce)
    assert [str(n) for n in nodes if not red(trial(), on(n.name, conjugate))] == []


@pytest.mark.parametrize("kind", [collectives.copy, collectives.reduce], ids=["copy", "reduce"])
def test_a_conjugate_too_many(kind: Any) -> None:
    """Behind any value that a gradient flows through."""
    graph: list[fx.Graph] = []
    compare(gpt(), lambda g, rank: graph.append(g) or g)  # type: ignore[func-returns-value]
    parameters = frozenset(n for n in graph[0].nodes if n.name in gpt().analysis.captured.parameters)
    values = needs_grad(graph[0], parameters) - parameters
    tensors = [n.name for n in graph[0].nodes if n in values and isinstance(n.meta["val"], Tensor)]
    assert len(tensors) > 30
    assert [name for name in tensors if not red(gpt(), on(name, behind(kind, "tp")))] == []
