"""The way through: model -> capture -> axes -> plan -> lower -> check, as one function of the model and its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from autotp.axis import find
from autotp.call import operand_nodes, returned
from autotp.layout import Layout, layout_of
from autotp.operators import USER_RULES
from autotp.passes.apart import apart
from autotp.passes.autocast import cast
from autotp.passes.axes import Axes, infer_axes
from autotp.passes.canonicalize import canonicalize
from autotp.passes.capture import OFF, Captured, capture
from autotp.passes.check import check
from autotp.passes.clean import clean
from autotp.passes.defer import defer
from autotp.passes.expand import expand
from autotp.passes.flow import flow, needs_grad
from autotp.passes.functionalize import functionalize
from autotp.passes.inline import inline
from autotp.passes.local import Target
from autotp.passes.lower import lower
from autotp.passes.match import match
from autotp.passes.pick import pick
from autotp.passes.plan import Decision, decide, decide_as
from autotp.passes.share import share
from autotp.placement import Shard
from autotp.prove import prove_node
from autotp.regions import Autocast

Outputs = Literal["auto", "full", "local"]


@dataclass(frozen=True)
class Analysis:
    """A model's graph with everything decided about it, before any rank's graph is made.

    Attributes:
        captured: the graph as it was captured, and what surrounds it.
        graph: the canonical graph, its mixing operators spelled out where they are cut.
        axes: the axes of `graph`.
        decision: what is cut.
        differentiable: the values of `graph` a gradient may flow through.
        updated: placeholder names of the buffers whose new values `graph` returns last.
        layouts: parameter name -> how it is held.
        local_outputs: positions of outputs that stay cut.
    """

    captured: Captured
    graph: fx.Graph
    axes: Axes
    decision: Decision
    differentiable: set[fx.Node]
    updated: list[str]
    layouts: dict[str, Layout]
    local_outputs: dict[int, Layout]
    tp: int


def analyse(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    outputs: Outputs = "auto",
    layouts: Mapping[str, Layout] | None = None,
    autocast: Autocast = OFF,
) -> Analysis:
    """Captures `skeleton` on these arguments and decides what is cut on `tp` ranks.

    Args:
        skeleton: the model on `meta`.
        outputs: whether cut outputs are gathered.
        layouts: how the parameters are held already, for a further graph of a parallel model.
        autocast: what is on around the model.
    """
    captured = capture(skeleton, args, kwargs, autocast)
    graph, updated = functionalize(cast(inline(captured.graph), autocast), captured.buffers)
    updated = [*captured.assigned, *updated]
    graph = apart(share(canonicalize(pick(graph, captured.constants))), captured.parameters)
    axes = infer_axes(graph)
    _prove_users_rules(graph, tp)
    candidates = match(graph, axes, captured.parameters, captured.inputs, tp)
    stay = _stay_cut(returned(graph)[: len(returned(graph)) - len(updated)], skeleton.training, outputs)
    if layouts is None:
        total = sum(n.meta["val"].numel() for n in graph.nodes if n.name in captured.parameters)
        trainable = needs_grad(graph, _sources(graph, captured))
        decision = decide(axes, candidates, trainable, total, tp, not stay)
    else:
        places = [node for node in graph.nodes if node.op == "placeholder" and node.name in captured.parameters]
        stored = {node: layouts[captured.parameters[node.name]] for node in places}
        decision = decide_as(axes, candidates, stored, tp)
    graph, axes, decision = expand(graph, axes, decision)
    graph, axes, decision = defer(graph, axes, decision)
    differentiable = needs_grad(graph, _sources(graph, captured))
    held = dict(layouts) if layouts is not None else _layouts(graph, axes, decision, captured, tp)
    given = returned(graph)[: len(returned(graph)) - len(updated)]  # A buffer's new value is no output.
    local = _cut_outputs(graph, given, axes, decision, tp) if stay else {}
    return Analysis(captured, graph, axes, decision, differentiable, updated, held, local, tp)


def rank_graph(analysis: Analysis, rank: int, randomness: Literal["exact", "fast"], axis: str = "tp") -> fx.Graph:
    """The lowered graph of one rank, checked: a graph whose types do not add up is refused with an Error."""
    to = Target(axis, analysis.tp, rank, randomness, frozenset(analysis.local_outputs))
    lowered = clean(lower(analysis.graph, analysis.axes, analysis.decision, analysis.differentiable, to))
    captured = analysis.captured
    held = {place: analysis.layouts[name] for place, name in captured.parameters.items()}
    check(lowered, analysis.graph, held, [*captured.parameters, *captured.inputs], to, analysis.local_outputs)
    return lowered


def _prove_users_rules(graph: fx.Graph, tp: int) -> None:
    """Tries each rule that a user registered on the examples the graph gives; raises Error where it is not true."""
    tried = set()
    for node in graph.nodes:
        if node.target in USER_RULES:
            shapes = [tuple(n.meta["val"].shape) for n in operand_nodes(node) if n is not None]
            if (case := (node.target, str(shapes))) not in tried:
                tried.add(case)
                prove_node(node, tp)


def _sources(graph: fx.Graph, captured: Captured) -> frozenset[fx.Node]:
    """What a gradient may be wanted of: parameters, and floating inputs."""
    names = {*captured.parameters, *captured.inputs}
    return frozenset(n for n in graph.nodes if n.op == "placeholder" and n.name in names)


def _layouts(graph: fx.Graph, axes: Axes, decision: Decision, captured: Captured, tp: int) -> dict[str, Layout]:
    names = {find(c.leaf): c.name for c in decision.chosen}
    found = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in captured.parameters:
            leaf = decision.held.get(node)
            name = names.get(find(leaf), "") if leaf is not None else ""
            shape = tuple(node.meta["val"].shape)
            found[captured.parameters[node.name]] = layout_of(shape, axes.of(node), leaf, tp, name)
    return found


def _stay_cut(found: Sequence[Any], training: bool, outputs: Outputs) -> bool:
    """True if outputs that are cut stay so: for "local", never for "full"; for "auto", beside a loss in training."""
    scalar_loss = any(isinstance(n, fx.Node) and _is_loss(n) for n in found)
    return outputs == "local" or (outputs == "auto" and training and scalar_loss)


def _cut_outputs(graph: fx.Graph, found: Sequence[Any], axes: Axes, decision: Decision, tp: int) -> dict[int, Layout]:
    """How the outputs that are cut are held."""
    have = flow(graph, axes, decision.cuts, decision.held)
    local = {}
    for i, node in enumerate(found):
        if isinstance(node, fx.Node) and isinstance(have.get(node, (None,))[0], Shard):
            shape = tuple(n if isinstance(n, int) else -1 for n in node.meta["val"].shape)
            local[i] = layout_of(shape, axes.of(node), have[node][0].axis, tp, "")  # type: ignore[union-attr]
    return local


def _is_loss(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
