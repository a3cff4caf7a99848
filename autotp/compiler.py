"""The road of a model: capture, canonicalize, plan, lower, check, emit. No other file knows the order of the passes.

`parallelize`, `distribute`, `explain`, `verify` and `stages` all take it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from autotp.errors import Error
from autotp.ops.eager_mode import uncollected
from autotp.options import DEFAULTS, Options
from autotp.passes.canonicalize import autocast as autocasts
from autotp.passes.canonicalize.canonical_order import canonical_order
from autotp.passes.canonicalize.canonicalize import canonicalize
from autotp.passes.canonicalize.constant_index import constant_index
from autotp.passes.canonicalize.cse import cse
from autotp.passes.canonicalize.custom_vjp import fuse, mark
from autotp.passes.canonicalize.functionalize import functionalize
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.capture import ALWAYS, OFF, capture
from autotp.passes.capture.captured import NOTHING_OPENED, Captured, Opened
from autotp.passes.capture.guards.attribute_paths import Path
from autotp.passes.capture.guards.attribute_writes import Change, add_hooks, apply_changes
from autotp.passes.capture.guards.python_state import GradientsWanted
from autotp.passes.check.check import check
from autotp.passes.check.types import Typed
from autotp.passes.emit.bind import bind
from autotp.passes.emit.recompute import recompute
from autotp.passes.lower.bucket import bucket
from autotp.passes.lower.dce import dce
from autotp.passes.lower.decompose import decompose
from autotp.passes.lower.defer_reductions import defer_reductions
from autotp.passes.lower.fuse_bias import fuse_bias
from autotp.passes.lower.local_sizes import Target
from autotp.passes.lower.lower import lower
from autotp.passes.lower.overlap import overlap
from autotp.passes.lower.prove_rules import prove_node
from autotp.passes.pipeline.loss_totals import loss_totals
from autotp.passes.pipeline.row_independence import batched, expect_rows, one_batch
from autotp.passes.plan.choose import Decision, choose, choose_as
from autotp.passes.plan.decouple import decouple
from autotp.passes.plan.experts import experts
from autotp.passes.plan.hoist import hoist
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.match import Candidate, match
from autotp.passes.plan.outputs import (
    is_loss,
    layouts_of_outputs,
    layouts_of_parameters,
    makers,
    positions_that_stay,
)
from autotp.passes.plan.propagate import Have, needs_grad, propagate
from autotp.passes.plan.sequence_parallel import sequence_parallel
from autotp.rules.call import operand_nodes, returned
from autotp.rules.registry import USER_RULES
from autotp.sharding.layout import Layout


class _Unknown:
    """Stands for a fact that no pass has found yet."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"`{name}` of a fact that is found by a later pass")


UNKNOWN: Any = _Unknown()


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is known of a model's graph on its road, before any rank's graph is made.

    Attributes:
        captured: the graph as it was captured, and what surrounds it.
        graph: the graph behind the last pass.
        tp: ranks.
        options: what the user chose.
        training: whether the model was in training.
        autocast: what was on around the model.
        stored: how the parameters are held already, for a further graph of a parallel model; None for its first.
        given: how those tensors are held that come cut, by their place among the arguments', or below attributes.
        updated: placeholder names of the buffers whose new values `graph` returns last (functionalize).
        counts: what a part of the batch adds to each total that a summed loss is divided by (loss_totals).
        axes: the axes of `graph` (decouple).
        stay: positions of the outputs that stay cut if they are (match).
        local_inputs: placeholder names of inputs that come cut (match).
        candidates: the axes that may be cut, best first (match).
        decision: what is cut (choose).
        differentiable: the values of `graph` a gradient may flow through (propagate).
        have: the placement that each value comes in (propagate).
        hoisted: operators of `graph` that all ranks compute alike, from copies of what they read (hoist).
        layouts: parameter name -> how it is held (outputs).
        local_outputs: positions of outputs that stay cut (outputs).
    """

    captured: Captured
    graph: fx.Graph
    tp: int
    options: Options
    training: bool
    autocast: Autocast
    stored: Mapping[str, Layout] | None
    given: Mapping[int | Path, Layout]
    updated: Sequence[str] = ()
    counts: fx.Graph | None = None
    axes: Axes = UNKNOWN
    stay: Sequence[int] = ()
    local_inputs: dict[str, Layout] = UNKNOWN
    candidates: list[Candidate] = UNKNOWN
    decision: Decision = UNKNOWN
    differentiable: set[fx.Node] = UNKNOWN
    have: Have = UNKNOWN
    hoisted: Collection[fx.Node] = ()
    layouts: dict[str, Layout] = UNKNOWN
    local_outputs: dict[int, Layout] = UNKNOWN


@dataclass(frozen=True)
class Pass:
    """One pass, as the road calls it.

    Attributes:
        stage: the folder of `passes/` that it belongs to.
        name: its file's.
        run: what it does.
        wanted: whether the user's choices ask for it.
    """

    stage: str
    name: str
    run: Callable[..., Any]
    wanted: Callable[[Options], bool] = lambda choices: True


def _unless_left_out(name: str) -> Callable[[Options], bool]:
    return lambda options: options.optional(name)


# ---- canonicalize


def _autocast(p: Program) -> Program:
    return replace(p, graph=autocasts.autocast(p.graph, p.autocast))


def _functionalize(p: Program) -> Program:
    graph, updated = functionalize(p.graph, p.captured.buffers, p.captured.owned, p.captured.constants)
    return replace(p, graph=graph, updated=[*p.captured.assigned, *updated])


def _constant_index(p: Program) -> Program:
    return replace(p, graph=constant_index(p.graph, p.captured.constants))


def _canonical_order(p: Program) -> Program:
    return replace(p, graph=canonical_order(p.graph, p.captured.constants, p.captured.inputs))


def _loss_totals(p: Program) -> Program:
    """The loss alone, as a sum over the batch; and what it is divided by."""
    captured, graph = p.captured, p.graph
    loss = next((node for node in returned(graph) if isinstance(node, fx.Node) and is_loss(node)), None)
    _expect_one_batch(p, loss)
    assert loss is not None
    one_batch(graph, batched(captured.inputs, captured.example))
    found = loss_totals(graph, loss, batched(captured.inputs, captured.example))
    alone = replace(captured, kept=frozenset(), stays=frozenset(), results=1)
    return replace(p, captured=alone, graph=found.graph, counts=found.counts)


def _expect_one_batch(p: Program, loss: fx.Node | None) -> None:
    """Raises Error for a model that does more with a batch than to return its loss."""
    captured = p.captured
    if captured.into:
        raise Error("the model writes into its inputs, and each part of a batch has inputs of its own")
    if written := [*captured.changes, *(name for name, _ in captured.sets)]:
        names = ", ".join(sorted({f"`{one}`" for one in written}))
        raise Error(
            f"the model sets {names} in forward, which parts of a batch cannot share",
            fix="add it to the returned loss, if it is a part of that",
            alternative="autotp.parallelize(model, tp)",
        )
    if p.updated:
        names = ", ".join(captured.buffers[place] for place in p.updated)
        raise Error(f"the model changes its buffers ({names}), which parts of a batch cannot share")
    if loss is None:
        raise Error("the model returns no loss, a tensor of no dimension", fix="labels among the inputs")
    if not captured.example or not captured.example[0]:
        raise Error("the model's first input has no rows, and so there is no batch", fix="the batch first")


CANONICALIZE = (
    Pass("canonicalize", "autocast", _autocast),
    Pass("canonicalize", "functionalize", _functionalize),
    Pass("canonicalize", "constant_index", _constant_index),
    Pass("canonicalize", "canonicalize", lambda p: replace(p, graph=canonicalize(p.graph))),
    Pass("canonicalize", "custom_vjp", lambda p: replace(p, graph=mark(p.graph))),
    Pass("canonicalize", "canonical_order", _canonical_order),
    Pass("pipeline", "loss_totals", _loss_totals, lambda options: options.summed),
    Pass("canonicalize", "cse", lambda p: replace(p, graph=cse(p.graph)), _unless_left_out("cse")),
)


# ---- plan


def _decouple(p: Program) -> Program:
    graph, axes = decouple(p.graph, p.captured.parameters)
    return replace(p, graph=graph, axes=axes)


def _row_independence(p: Program) -> Program:
    expect_rows(p.graph, p.axes, batched(p.captured.inputs, p.captured.example))
    return p


def _experts(p: Program) -> Program:
    graph, axes = experts(p.graph, p.axes, p.captured.parameters, p.tp)
    return replace(p, graph=graph, axes=axes)


def _prove_rules(p: Program) -> Program:
    """Tries each rule that a user registered on the examples the graph gives; raises Error where it is not true."""
    tried = set()
    for node in p.graph.nodes:
        if node.target in USER_RULES:
            shapes = [tuple(n.meta["val"].shape) for n in operand_nodes(node) if n is not None]
            if (case := (node.target, str(shapes))) not in tried:
                tried.add(case)
                prove_node(node, p.tp)
    return p


def _match(p: Program) -> Program:
    captured, graph, results = p.captured, p.graph, returned(p.graph)
    stay = positions_that_stay(graph, captured, len(p.updated), p.training, p.options.outputs)
    if any(i in p.given for i, _ in captured.into):
        raise Error("the model writes into an argument that comes in parts", fix="autotp.gather it before")
    moved = {node for node in results[len(results) - len(p.updated) :] if isinstance(node, fx.Node)}
    kept = makers(graph, captured.kept) | moved
    candidates = match(graph, p.axes, captured.parameters, captured.inputs, p.tp, kept)
    return replace(p, stay=stay, candidates=candidates, local_inputs=_local_inputs(p))


def _choose(p: Program) -> Program:
    graph, captured = p.graph, p.captured
    if p.stored is None:
        total = sum(n.meta["val"].numel() for n in graph.nodes if n.name in captured.parameters)
        trainable = needs_grad(graph, _sources(p))
        local = makers(graph, captured.kept) | makers(graph, p.stay)
        return replace(p, decision=choose(p.axes, p.candidates, trainable, total, p.tp, local))
    stored = {place: p.stored[name] for place, name in captured.parameters.items()} | p.local_inputs
    places = {node: stored[node.name] for node in graph.nodes if node.op == "placeholder" and node.name in stored}
    return replace(p, decision=choose_as(p.axes, p.candidates, places, p.tp))


def _decompose(p: Program) -> Program:
    graph, axes, decision = decompose(p.graph, p.axes, p.decision)
    return replace(p, graph=graph, axes=axes, decision=decision)


def _defer_reductions(p: Program) -> Program:
    graph, axes, decision = defer_reductions(p.graph, p.axes, p.decision)
    return replace(p, graph=graph, axes=axes, decision=decision)


def _propagate(p: Program) -> Program:
    have = propagate(p.graph, p.axes, p.decision.cuts, p.decision.held)
    return replace(p, differentiable=needs_grad(p.graph, _sources(p)), have=have)


def _hoist(p: Program) -> Program:
    return replace(p, hoisted=hoist(p.graph, p.axes, p.decision.cuts, p.have, p.differentiable))


def _sequence_parallel(p: Program) -> Program:
    decision = sequence_parallel(p.graph, p.axes, p.decision, p.differentiable, set(p.hoisted))
    p = _propagate(replace(p, decision=decision))
    return _hoist(p) if p.options.optional("hoist") else p


def _outputs(p: Program) -> Program:
    if p.stored is not None:
        layouts = dict(p.stored)
    else:
        layouts = layouts_of_parameters(p.graph, p.axes, p.decision, p.captured.parameters, p.tp)
    local = layouts_of_outputs(p.graph, p.stay, p.axes, p.have, p.tp)
    return replace(p, layouts=layouts, local_outputs=local)


PLAN = (
    Pass("plan", "decouple", _decouple),
    Pass("pipeline", "row_independence", _row_independence, lambda options: options.summed),
    Pass("plan", "experts", _experts, lambda options: options.experts == "expert"),
    Pass("lower", "prove_rules", _prove_rules),
    Pass("plan", "match", _match),
    Pass("plan", "choose", _choose),
    Pass("lower", "decompose", _decompose),
    Pass("lower", "defer_reductions", _defer_reductions, _unless_left_out("defer_reductions")),
    Pass("plan", "propagate", _propagate),
    Pass("plan", "hoist", _hoist, _unless_left_out("hoist")),
    Pass("plan", "sequence_parallel", _sequence_parallel, lambda options: options.sequence_parallel),
    Pass("plan", "outputs", _outputs),
)


def _sources(p: Program) -> frozenset[fx.Node]:
    """What a gradient may be wanted of: parameters, and floating inputs."""
    names = {*p.captured.parameters, *p.captured.inputs}
    return frozenset(n for n in p.graph.nodes if n.op == "placeholder" and n.name in names)


def _local_inputs(p: Program) -> dict[str, Layout]:
    """Placeholder name -> how it is held, with the sizes that it has in this graph."""
    places = {node.name: node for node in p.graph.nodes if node.op == "placeholder"}
    known: dict[int | Path, str] = dict(enumerate(p.captured.inputs))
    known.update(p.captured.input_at)
    names = {known[i]: layout for i, layout in p.given.items() if i in known}
    return {n: replace(how, shape=tuple(places[n].meta["val"].shape)) for n, how in names.items() if n in places}


# ---- lower


def _lower(p: Program, to: Target, _: fx.Graph) -> fx.Graph:
    return lower(p.graph, p.axes, p.decision, p.differentiable, to, p.hoisted)


LOWER = (
    Pass("lower", "lower", _lower),
    Pass("lower", "dce", lambda p, to, graph: dce(graph)),
    Pass("lower", "fuse_bias", lambda p, to, graph: fuse_bias(graph), _unless_left_out("fuse_bias")),
    Pass("lower", "bucket", lambda p, to, graph: bucket(graph), _unless_left_out("bucket")),
    Pass("lower", "overlap", lambda p, to, graph: overlap(graph), _unless_left_out("overlap")),
)


# ---- the road


def analyse(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    options: Options = DEFAULTS,
    layouts: Mapping[str, Layout] | None = None,
    autocast: Autocast = OFF,
    given: Mapping[int | Path, Layout] | None = None,
    opened: Opened = NOTHING_OPENED,
    wanted: GradientsWanted = ALWAYS,
) -> Program:
    """Captures `skeleton` on these arguments and decides what is cut on `tp` ranks.

    Args:
        skeleton: the model on `meta`.
        options: what the user chose.
        layouts: how the parameters are held already, for a further graph of a parallel model.
        autocast: what is on around the model.
        given: how those tensors are held that come cut, by their place among the arguments', or below attributes.
        opened: what of the model's attributes changes from call to call.
        wanted: of what gradients are wanted in the call, should the model ask.
    """
    with uncollected():
        program = captured(skeleton, args, kwargs, tp, options, layouts, autocast, given, opened, wanted)
        for _, found in behind_each_pass(program):
            program = found
    return program


def captured(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    options: Options = DEFAULTS,
    layouts: Mapping[str, Layout] | None = None,
    autocast: Autocast = OFF,
    given: Mapping[int | Path, Layout] | None = None,
    opened: Opened = NOTHING_OPENED,
    wanted: GradientsWanted = ALWAYS,
) -> Program:
    """The program behind its first stage. Arguments as for `analyse`."""

    def found() -> Captured:
        return capture(skeleton, args, kwargs, autocast, options.optional("repeats"), opened, wanted)

    it = found()
    if options.summed and (it.changes or it.sets) and not it.computes_changes:
        # What a first call settles for good, as which kind of labels there are.
        modules = dict(skeleton.named_modules())
        apply_changes([c for c in it.changes if isinstance(c, Change)], modules, lambda x: x)
        add_hooks(it.hooks, modules, lambda module, _: vars(module))
        for name, value in it.sets:
            name.scope.put(name.name, value)
        it = found()
    return Program(
        captured=it, graph=it.graph, tp=tp, options=options, training=skeleton.training, autocast=autocast,
        stored=layouts, given=given or {},
    )  # fmt: skip


def behind_each_pass(program: Program) -> Iterator[tuple[Pass, Program]]:
    """A captured program after each pass of the stages canonicalize and plan."""
    for each in (*CANONICALIZE, *PLAN):
        if each.wanted(program.options):
            program = each.run(program)
            yield each, program


def rank_graph(program: Program, rank: int, randomness: Literal["exact", "fast"], axis: str = "tp") -> fx.Graph:
    """The lowered graph of one rank, checked: a graph whose types do not add up is refused.

    Raises:
        Error: names the value, and the pass that got it wrong.
    """
    return fuse(flat_graph(program, rank, randomness, axis))


def flat_graph(program: Program, rank: int, randomness: Literal["exact", "fast"], axis: str = "tp") -> fx.Graph:
    """The lowered graph of one rank, checked, with the operators of own backwards among the others.

    Raises:
        Error: names the value, and the pass that got it wrong.
    """
    to = Target(axis, program.tp, rank, randomness, frozenset(program.local_outputs))
    with uncollected():
        for _, graph in lowered_by_each_pass(program, to):
            lowered = graph
        try:
            expect_typed(lowered, program, to)
        except Error as error:
            graphs = lowered_by_each_pass(program, to)
            error.facts["after"] = next(each.name for each, graph in graphs if not _is_typed(dce(graph), program, to))
            raise
    return lowered


def lowered_by_each_pass(program: Program, to: Target) -> Iterator[tuple[Pass, fx.Graph]]:
    """One rank's graph after each pass of the stage lower."""
    graph = program.graph
    for each in LOWER:
        if each.wanted(program.options):
            graph = each.run(program, to, graph)
            yield each, graph


def expect_typed(graph: fx.Graph, program: Program, to: Target) -> dict[fx.Node, tuple[Typed, ...]]:
    """The stage check: the types of all tensors in a rank's graph. Raises Error where these do not add up."""
    captured = program.captured
    held = {place: program.layouts[name] for place, name in captured.parameters.items()} | program.local_inputs
    return check(graph, program.graph, held, [*captured.parameters, *captured.inputs], to, program.local_outputs)


def _is_typed(graph: fx.Graph, program: Program, to: Target) -> bool:
    try:
        expect_typed(graph, program, to)
    except Error:
        return False
    return True


def emitted(
    graph: fx.Graph, program: Program, settings: Options, device: torch.device, groups: Mapping[str, str | None]
) -> fx.GraphModule:
    """A rank's graph, or that of one of its stages, as a module that runs: on its device, its blocks submodules.

    Args:
        groups: mesh axis -> name of the process group; none of them for a simulation.
    """
    bound = bind(graph, device, groups, program.captured.owned, settings.optional("in_place"))
    if not settings.optional("outline"):
        return fx.GraphModule(nn.Module(), bound)
    return recompute(bound, settings.recompute, program.updated)
