"""The way through: model -> capture -> axes -> plan -> lower -> check, as one function of the model and its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from autotp.errors import Error
from autotp.ops.eager_mode import uncollected
from autotp.options import AS_USUAL, Choices, Outputs
from autotp.passes.canonicalize.autocast import cast
from autotp.passes.canonicalize.canonical_order import ordered
from autotp.passes.canonicalize.canonicalize import canonicalize
from autotp.passes.canonicalize.constant_index import pick
from autotp.passes.canonicalize.cse import share
from autotp.passes.canonicalize.custom_vjp import fused, marked
from autotp.passes.canonicalize.functionalize import functionalize
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.capture import ALWAYS, OFF, capture
from autotp.passes.capture.captured import NOTHING, Captured, Opened
from autotp.passes.capture.guards.attribute_writes import Change, apply
from autotp.passes.capture.guards.attributes import Path
from autotp.passes.capture.guards.python_state import Wanted
from autotp.passes.check.check import check
from autotp.passes.lower.bucket import bundle
from autotp.passes.lower.dce import clean
from autotp.passes.lower.decompose import expand
from autotp.passes.lower.defer_reductions import defer
from autotp.passes.lower.fuse_bias import biased
from autotp.passes.lower.local_sizes import Target
from autotp.passes.lower.lower import lower
from autotp.passes.lower.overlap import grouped
from autotp.passes.lower.prove_rules import prove_node
from autotp.passes.pipeline.loss_totals import totals
from autotp.passes.pipeline.row_independence import batched, expect_rows, one_batch
from autotp.passes.plan.choose import Decision, decide, decide_as
from autotp.passes.plan.decouple import apart
from autotp.passes.plan.experts import experts as route
from autotp.passes.plan.hoist import hoisted
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.match import maker, match
from autotp.passes.plan.propagate import Have, flow, needs_grad
from autotp.passes.plan.sequence_parallel import sequence
from autotp.rules.call import operand_nodes, returned
from autotp.rules.table import USER_RULES
from autotp.sharding.axis import find
from autotp.sharding.layout import Layout, layout_of
from autotp.sharding.placement import Shard


@dataclass(frozen=True)
class Analysis:
    """A model's graph with everything decided about it, before any rank's graph is made.

    Attributes:
        captured: the graph as it was captured, and what surrounds it.
        graph: the canonical graph, its mixing operators spelled out where they are cut.
        axes: the axes of `graph`.
        decision: what is cut.
        differentiable: the values of `graph` a gradient may flow through.
        hoisted: operators of `graph` that all ranks compute alike, from copies of what they read.
        updated: placeholder names of the buffers whose new values `graph` returns last.
        layouts: parameter name -> how it is held.
        local_outputs: positions of outputs that stay cut.
        local_inputs: placeholder names of inputs that come cut.
        tp: ranks.
        choices: what the user chose.
        counts: what a part of the batch adds to each total that a summed loss is divided by.
    """

    captured: Captured
    graph: fx.Graph
    axes: Axes
    decision: Decision
    differentiable: set[fx.Node]
    hoisted: set[fx.Node]
    updated: list[str]
    layouts: dict[str, Layout]
    local_outputs: dict[int, Layout]
    local_inputs: dict[str, Layout]
    tp: int
    choices: Choices
    counts: fx.Graph | None = None


def analyse(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    choices: Choices = AS_USUAL,
    layouts: Mapping[str, Layout] | None = None,
    autocast: Autocast = OFF,
    given: Mapping[int | Path, Layout] | None = None,
    opened: Opened = NOTHING,
    wanted: Wanted = ALWAYS,
) -> Analysis:
    """Captures `skeleton` on these arguments and decides what is cut on `tp` ranks.

    Args:
        skeleton: the model on `meta`.
        choices: what the user chose.
        layouts: how the parameters are held already, for a further graph of a parallel model.
        autocast: what is on around the model.
        given: how those tensors are held that come cut, by their place among the arguments', or below attributes.
        opened: what of the model's attributes changes from call to call.
        wanted: of what gradients are wanted in the call, should the model ask.
    """
    with uncollected():
        captured = capture(skeleton, args, kwargs, autocast, choices.optional("repeats"), opened, wanted)
        if choices.summed and (captured.changes or captured.sets) and not captured.computes_changes:
            # What a first call settles for good, as which kind of labels there are.
            apply([c for c in captured.changes if isinstance(c, Change)], dict(skeleton.named_modules()), lambda x: x)
            for name, value in captured.sets:
                name.scope.put(name.name, value)
            captured = capture(skeleton, args, kwargs, autocast, choices.optional("repeats"), opened, wanted)
        return _analysed(captured, skeleton.training, tp, choices, layouts, autocast, given or {})


def _analysed(
    captured: Captured,
    training: bool,
    tp: int,
    choices: Choices,
    layouts: Mapping[str, Layout] | None,
    autocast: Autocast,
    given: Mapping[int | Path, Layout],
) -> Analysis:
    graph, updated = functionalize(cast(captured.graph, autocast), captured.buffers, captured.owned)
    updated = [*captured.assigned, *updated]
    graph, counts = marked(canonicalize(pick(graph, captured.constants))), None
    graph = ordered(graph, captured.constants, captured.inputs)
    if choices.summed:
        captured, graph, counts = _summed(captured, graph, updated)
    graph, axes = apart(share(graph) if choices.optional("share") else graph, captured.parameters)
    if choices.summed:
        expect_rows(graph, axes, batched(captured.inputs, captured.example))
    if choices.experts == "expert":
        graph, axes = route(graph, axes, captured.parameters, tp)
    _prove_users_rules(graph, tp)
    stay = _stay_cut(graph, captured, len(updated), training, choices.outputs)
    of_states = _makers(graph, captured.kept)
    moved = {node for node in returned(graph)[len(returned(graph)) - len(updated) :] if isinstance(node, fx.Node)}
    candidates = match(graph, axes, captured.parameters, captured.inputs, tp, of_states | moved)
    if any(i in given for i, _ in captured.into):
        raise Error("the model writes into an argument that comes in parts", **{"try": "autotp.gather it before"})
    local_inputs = _local_inputs(graph, captured, given)
    if layouts is None:
        total = sum(n.meta["val"].numel() for n in graph.nodes if n.name in captured.parameters)
        trainable = needs_grad(graph, _sources(graph, captured))
        decision = decide(axes, candidates, trainable, total, tp, of_states | _makers(graph, stay))
    else:
        stored = {place: layouts[name] for place, name in captured.parameters.items()} | local_inputs
        places = [node for node in graph.nodes if node.op == "placeholder" and node.name in stored]
        decision = decide_as(axes, candidates, {node: stored[node.name] for node in places}, tp)
    graph, axes, decision = expand(graph, axes, decision)
    if choices.optional("defer"):
        graph, axes, decision = defer(graph, axes, decision)
    differentiable = needs_grad(graph, _sources(graph, captured))
    have, up = _flow(graph, axes, decision, differentiable, choices)
    if choices.sequence_parallel:
        decision = sequence(graph, axes, decision, differentiable, up)
        have, up = _flow(graph, axes, decision, differentiable, choices)
    held = dict(layouts) if layouts is not None else _layouts(graph, axes, decision, captured, tp)
    local = _cut_outputs(graph, stay, axes, have, tp)
    known = (graph, axes, decision, differentiable, up, updated, held, local, local_inputs)
    return Analysis(captured, *known, tp, choices, counts)


def _summed(captured: Captured, graph: fx.Graph, updated: Sequence[str]) -> tuple[Captured, fx.Graph, fx.Graph]:
    """What was captured, with its loss alone, as a sum over the batch; and what it is divided by."""
    if captured.into:
        raise Error("the model writes into its inputs, of which each part of a batch has its own")
    if written := [*captured.changes, *(name for name, _ in captured.sets)]:
        names = ", ".join(sorted({f"`{one}`" for one in written}))
        raise Error(
            f"the model sets {names} in forward, which parts of a batch cannot share",
            **{"try": "add it to the returned loss, if it is a part of that", "or": "autotp.parallelize(model, tp)"},
        )
    if updated:
        names = ", ".join(captured.buffers[place] for place in updated)
        raise Error(f"the model changes its buffers ({names}), which parts of a batch cannot share")
    loss = next((node for node in returned(graph) if isinstance(node, fx.Node) and _is_loss(node)), None)
    if loss is None:
        raise Error("the model returns no loss, a tensor of no dimension", **{"try": "labels among the inputs"})
    if not captured.example or not captured.example[0]:
        raise Error("the model's first input has no rows, and so there is no batch", **{"try": "the batch first"})
    one_batch(graph, batched(captured.inputs, captured.example))
    found = totals(graph, loss, batched(captured.inputs, captured.example))
    return replace(captured, kept=frozenset(), stays=frozenset(), results=1), found.graph, found.counts


def _flow(
    graph: fx.Graph, axes: Axes, decision: Decision, differentiable: set[fx.Node], choices: Choices
) -> tuple[Have, set[fx.Node]]:
    """The placements that values come in, and the operators that are computed from copies."""
    have = flow(graph, axes, decision.cuts, decision.held)
    return have, hoisted(graph, axes, decision.cuts, have, differentiable) if choices.optional("hoist") else set()


def rank_graph(analysis: Analysis, rank: int, randomness: Literal["exact", "fast"], axis: str = "tp") -> fx.Graph:
    """The lowered graph of one rank, checked: a graph whose types do not add up is refused.

    Raises:
        Error: names the value, and the pass that got it wrong.
    """
    return fused(flat_graph(analysis, rank, randomness, axis))


def flat_graph(analysis: Analysis, rank: int, randomness: Literal["exact", "fast"], axis: str = "tp") -> fx.Graph:
    """The lowered graph of one rank, checked, with the operators of own backwards among the others.

    Raises:
        Error: names the value, and the pass that got it wrong.
    """
    to = Target(axis, analysis.tp, rank, randomness, frozenset(analysis.local_outputs))
    captured = analysis.captured
    held = {place: analysis.layouts[name] for place, name in captured.parameters.items()} | analysis.local_inputs
    known = analysis.graph, held, [*captured.parameters, *captured.inputs], to, analysis.local_outputs
    with uncollected():
        for stage in _lowered(analysis, to):
            lowered = stage[1]
        try:
            check(lowered, *known)
        except Error as error:
            stages = _lowered(analysis, to)
            error.facts["after"] = next(name for name, graph in stages if not _is_right(graph, *known))
            raise
    return lowered


def _is_right(graph: fx.Graph, *known: Any) -> bool:
    try:
        check(graph, *known)
    except Error:
        return False
    return True


def _lowered(analysis: Analysis, to: Target) -> Iterator[tuple[str, fx.Graph]]:
    """One rank's graph, after each pass that it goes through."""
    lowered = lower(analysis.graph, analysis.axes, analysis.decision, analysis.differentiable, to, analysis.hoisted)
    yield "lower", (lowered := clean(lowered))
    for name, optional in (("biases", biased), ("bundle", bundle), ("columns", grouped)):
        if analysis.choices.optional(name):
            yield name, (lowered := optional(lowered))


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


def _local_inputs(graph: fx.Graph, captured: Captured, given: Mapping[int | Path, Layout]) -> dict[str, Layout]:
    """Placeholder name -> how it is held, with the sizes that it has in this graph."""
    places = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    known: dict[int | Path, str] = dict(enumerate(captured.inputs))
    known.update(captured.input_at)
    names = {known[i]: layout for i, layout in given.items() if i in known}
    return {n: replace(how, shape=tuple(places[n].meta["val"].shape)) for n, how in names.items() if n in places}


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


def _stay_cut(graph: fx.Graph, captured: Captured, updated: int, training: bool, outputs: Outputs) -> list[int]:
    """Positions of the outputs that stay cut if they are: all that the model returns for "local", none for "full".

    For "auto" what is given back some day (of a state, of attributes that the next call reads) and what was made of
    parameters alone; in training also what a loss is computed from that is returned beside it.

    Args:
        updated: how many of what is returned are no outputs, but the new values of buffers.
    """
    found = returned(graph)[: len(returned(graph)) - updated]
    if outputs == "full":
        return []
    kept = set(captured.kept | captured.stays)
    if outputs == "local":
        kept |= set(range(captured.results))
    elif training:
        losses = [n for n in found[: captured.results] if isinstance(n, fx.Node) and _is_loss(n)]
        before = _ancestors(losses)
        kept |= {i for i, n in enumerate(found[: captured.results]) if isinstance(n, fx.Node) and maker(n) in before}
    given = set(captured.inputs)
    for i, node in list(enumerate(found))[captured.results :]:
        if isinstance(node, fx.Node) and not any(n.name in given for n in (node, *_ancestors([node]))):
            kept.add(i)
    kept -= {at for _, at in captured.into}
    return [i for i in sorted(kept) if isinstance(found[i], fx.Node)]


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that some nodes are computed from."""
    found, queue = set[fx.Node](), list(nodes)
    while queue:
        new = set(queue.pop().all_input_nodes) - found
        found |= new
        queue += new
    return found


def _makers(graph: fx.Graph, positions: Iterable[int]) -> set[fx.Node]:
    """What makes the outputs at these positions."""
    found = (returned(graph)[i] for i in positions)
    return {maker(node) for node in found if isinstance(node, fx.Node)}


def _cut_outputs(graph: fx.Graph, stay: Sequence[int], axes: Axes, have: Have, tp: int) -> dict[int, Layout]:
    """How the outputs that stay cut are held, where they are cut."""
    local = {}
    for i in stay:
        node = returned(graph)[i]
        placement = have.get(node, (None,))[0]
        if isinstance(placement, Shard) and not find(placement.axis).size.symbols:
            shape = tuple(n if isinstance(n, int) else -1 for n in node.meta["val"].shape)
            local[i] = layout_of(shape, axes.of(node), placement.axis, tp, "")
    return local


def _is_loss(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
