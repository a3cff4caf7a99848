"""What can be done wrong to a parallel model: changes to its ranks' graphs, and what `verify` then sees.

Nodes are told by name, since a graph is made anew for each run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autotp.diagnostics.verify import Change, Report, Trial, compare
from autotp.ops import collectives
from autotp.ops.coalesced import together
from autotp.passes.lower.overlap import separate


def red(trial: Trial, change: Change) -> bool:
    """True if verify reports a difference, or the ranks cannot even run."""
    try:
        return not compare(trial, change).ok
    except RuntimeError:
        return True


def wrong(report: Report) -> set[str]:
    """The parameters and inputs whose gradient is wrong."""
    return {d.name for d in report.gradients if not d.error <= report.tolerance}


def calls(trial: Trial, *targets: Any) -> list[fx.Node]:
    """The calls of these functions in a rank's graph, in order."""
    return [node for node in trial.graphs[0].nodes if node.target in targets]


def on(name: str, edit: Callable[[fx.Graph, fx.Node, int], None]) -> Change:
    """The change that edits the node called `name`, on every rank."""

    def change(graph: fx.Graph, rank: int) -> fx.Graph:
        node = next(n for n in graph.nodes if n.name == name)
        with graph.inserting_after(node):
            edit(graph, node, rank)
        return graph

    return change


def drop(graph: fx.Graph, node: fx.Node, rank: int) -> None:
    """A conjugate, or one of several parameters that are read together."""
    source: Any = node.args[0]
    node.replace_all_uses_with(source.args[0][node.args[1]] if source.target is together else source)
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


def apart(trial: Trial) -> Trial:
    """The same, its groups of products taken apart: so every conjugate is a node, and can be broken."""
    return replace(trial, graphs=tuple(map(separate, trial.graphs)))


def resliced(trial: Trial, name: str, pieces: list[tuple[int, int]]) -> Trial:
    """The same with a parameter cut elsewhere."""
    layout = replace(trial.analysis.layouts[name], pieces=tuple((piece,) for piece in pieces))
    return replace(trial, analysis=replace(trial.analysis, layouts=trial.analysis.layouts | {name: layout}))
