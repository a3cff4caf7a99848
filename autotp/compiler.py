"""The order of a model's passes: capture, canonicalize, plan, lower, check, emit. No other file knows this order.

`parallelize`, `distribute`, `explain`, `verify` and `stages` all take it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autotp.display.progress import progress
from autotp.errors import REPORT, Error
from autotp.extensions import chosen_extensions
from autotp.model_library import library
from autotp.ops.eager_mode import uncollected
from autotp.ops.placement_moves import apart
from autotp.options import DEFAULTS, Options
from autotp.passes.builder import size_assumptions
from autotp.passes.canonicalize import autocast as autocasts
from autotp.passes.canonicalize.canonical_order import canonical_order
from autotp.passes.canonicalize.canonicalize import canonicalize
from autotp.passes.canonicalize.causal_attention import causal_attention
from autotp.passes.canonicalize.constant_index import constant_index
from autotp.passes.canonicalize.cse import cse
from autotp.passes.canonicalize.custom_vjp import fuse, mark
from autotp.passes.canonicalize.functionalize import functionalize
from autotp.passes.canonicalize.relocate import relocate
from autotp.passes.canonicalize.value_reads import value_reads
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.capture import ALWAYS, OFF, capture
from autotp.passes.capture.captured import NOTHING_OPENED, Attempt, Captured, Opened
from autotp.passes.capture.guards.gradient_queries import GradientsWanted
from autotp.passes.capture.guards.values import NO_VALUES, KnownValues, place_text
from autotp.passes.capture.python_state.attribute_writes import AddedHook, AnyChange, make_changes
from autotp.passes.capture.python_state.walk import Path
from autotp.passes.capture.unsupported.long_sizes import FEWER, Symbols
from autotp.passes.check.check import check
from autotp.passes.check.sequence_order import expect_sequence_order
from autotp.passes.check.types import Typed
from autotp.passes.emit.bind import COMMUNICATING, bind
from autotp.passes.emit.late_sums import late_sums
from autotp.passes.emit.python_calls import call_python
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.emit.recompute import recompute
from autotp.passes.lower.bucket import bucket
from autotp.passes.lower.dce import dce
from autotp.passes.lower.decompose import decompose, has_expansion
from autotp.passes.lower.defer_reductions import defer_reductions
from autotp.passes.lower.fuse_bias import fuse_bias
from autotp.passes.lower.local_sizes import Target, has_unknown_sizes
from autotp.passes.lower.localize import has_form
from autotp.passes.lower.lower import lower
from autotp.passes.lower.overlap import overlap
from autotp.passes.lower.prove_rules import prove_node
from autotp.passes.pipeline.loss_totals import Totals, loss_totals
from autotp.passes.pipeline.row_independence import batched, expect_rows, expect_sums, one_batch
from autotp.passes.plan.candidate import Candidate
from autotp.passes.plan.choose import Decision, choose, choose_as
from autotp.passes.plan.decouple import decouple
from autotp.passes.plan.experts import experts
from autotp.passes.plan.hoist import hoist
from autotp.passes.plan.infer_axes import Axes, Factor, infer_axes
from autotp.passes.plan.match import match
from autotp.passes.plan.outputs import (
    is_loss,
    layouts_of_outputs,
    layouts_of_parameters,
    makers,
    positions_that_stay,
)
from autotp.passes.plan.propagate import Have, needs_grad, propagate
from autotp.passes.plan.sequence.balance import Balanced, balance
from autotp.passes.plan.sequence.causal_masks import causal_masks
from autotp.passes.plan.sequence.context_parallel import context_parallel
from autotp.passes.plan.sequence.equal_inputs import equal_inputs
from autotp.passes.plan.sequence.separate_keys import joined_again
from autotp.passes.plan.sequence.sequence_parallel import sequence_parallel
from autotp.passes.plan.user_cuts import Choices, resolved
from autotp.rules.call import operand_nodes, operator_name, placeholders, returned
from autotp.rules.registry import USER_RULES
from autotp.rules.traits import sparse_argument
from autotp.sharding.axis import Axis
from autotp.sharding.layout import Layout
from autotp.source_location import line_of


class _Unknown:
    """Stands for a fact that a later pass finds."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"`{name}` of a fact that is found by a later pass")


UNKNOWN: Any = _Unknown()


@dataclass(frozen=True, kw_only=True)
class CallState:
    """The state around a captured call, beside its arguments.

    Attributes:
        autocast: the settings of autocast around the model.
        layouts: the layouts of parameters that are cut already, for a further graph; None for a model's first graph.
        given: layouts of input tensors that are cut: by place among the arguments' tensors, or by path of an attribute.
        opened: the attributes that change from call to call.
        wanted: the answers to the model's questions about gradients.
        rows: places, among the arguments' tensors, of those with the rows of a batch; None: those as long as the first.
        values: what is known of the values that Python reads of tensors.
        looks: whether the graph may be one for batches with padding, or without: NOTE [Looks at masks]
        training: whether the model is in training; the capture notes it.
    """

    autocast: Autocast = OFF
    layouts: Mapping[str, Layout] | None = None
    given: Mapping[int | Path, Layout] = field(default_factory=dict)
    opened: Opened = NOTHING_OPENED
    wanted: GradientsWanted = ALWAYS
    rows: frozenset[int] | None = None
    values: KnownValues = NO_VALUES
    looks: bool = True
    training: bool = True


FIRST_CALL = CallState()


@dataclass(frozen=True, kw_only=True)
class SequenceFacts:
    """What `context_parallel` did to a program.

    Attributes:
        whole: the graph before sequences are cut over the axis `cp`; None if none is cut.
        operators: the number of operators that are cut.
        balanced: the number of causal attentions in which all ranks have equal work.
        unbalanced: why other causal attentions are not so: a sentence for each reason.
    """

    whole: fx.Graph | None = None
    operators: int = 0
    balanced: int = 0
    unbalanced: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model's graph and the facts about it, between two passes, before any rank's graph is made.

    Attributes:
        captured: the captured graph and its facts.
        graph: the graph after the last pass.
        tp: number of ranks.
        options: the user's options.
        cp_rank: the rank on the axis `cp`, whose graph is made, if sequences are cut over this axis.
        sequences: then, what is cut.
        undivided: the operators that read all of what other operators divide, each with the reason.
        notes: what the user is told of a pass: the beginning of a line -> the rest of it.
        call: the state around the captured call.
        updated: placeholder names of the buffers whose new values `graph` returns last (functionalize).
        totals: how a part of the batch contributes to the totals of a summed loss (loss_totals).
        axes: the axes of `graph` (decouple).
        stay: positions of the outputs that stay cut if they are cut (match).
        candidates: the axes that may be cut, best first (match).
        decision: the decision what is cut (choose).
        differentiable: the values of `graph` that a gradient may flow through (propagate).
        have: the placement of each value (propagate).
        hoisted: operators of `graph` that all ranks compute whole, from copies (hoist).
        layouts: parameter name -> layout (outputs).
        local_outputs: position -> layout, for outputs that stay cut (outputs).
    """

    captured: Captured
    graph: fx.Graph
    tp: int
    options: Options
    call: CallState
    cp_rank: int = 0
    sequences: SequenceFacts = SequenceFacts()
    undivided: tuple[tuple[fx.Node, str], ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    updated: Sequence[str] = ()
    totals: Totals | None = None
    axes: Axes = UNKNOWN
    stay: Sequence[int] = ()
    candidates: list[Candidate] = UNKNOWN
    decision: Decision = UNKNOWN
    differentiable: set[fx.Node] = UNKNOWN
    have: Have = UNKNOWN
    hoisted: Collection[fx.Node] = ()
    layouts: dict[str, Layout] = UNKNOWN
    local_outputs: dict[int, Layout] = UNKNOWN

    @property
    def rows(self) -> list[str]:
        """The names of the inputs that are a batch."""
        inputs, places = self.captured.inputs, self.call.rows
        return batched(inputs, self.captured.example) if places is None else [inputs[i] for i in sorted(places)]

    @property
    def cut_inputs(self) -> dict[str, Layout]:
        """Placeholder name -> layout of a cut input, with the sizes of the call that was cut."""
        names: dict[int | Path, str] = dict(enumerate(self.captured.inputs))
        names.update(self.captured.input_at)
        return {names[i]: layout for i, layout in self.call.given.items() if i in names}

    @property
    def local_inputs(self) -> dict[str, Layout]:
        """Placeholder name -> layout of a cut input, with its sizes in this graph."""
        shapes = {n.name: tuple(n.meta["val"].shape) for n in self.graph.find_nodes(op="placeholder")}
        return {n: replace(how, shape=shapes[n]) for n, how in self.cut_inputs.items() if n in shapes}


@dataclass(frozen=True)
class Pass:
    """A row of the table of passes.

    Attributes:
        stage: the folder of `passes/` with its file; of an extension's pass, the one with the passes beside it.
        name: the name of its file.
        run: the function that runs it.
        wanted: returns whether it runs under the user's options.
        by_tp: whether it depends on the number of tensor-parallel ranks, or on the options that `_for_any_tp` resets.
    """

    stage: str
    name: str
    run: Callable[..., Any]
    wanted: Callable[[Options], bool] = lambda choices: True
    by_tp: bool = False


T = TypeVar("T")
Amend = Callable[[str, Program], Program]
"""(name of a pass, the program after it) -> the program that the next pass gets."""


def _unless_left_out(name: str) -> Callable[[Options], bool]:
    return lambda options: options.optional(name)


# ---- canonicalize


def _autocast(p: Program) -> Program:
    return replace(p, graph=autocasts.autocast(p.graph, p.call.autocast))


def _functionalize(p: Program) -> Program:
    graph, updated = functionalize(p.graph, p.captured.buffers, p.captured.owned, p.captured.constants)
    return replace(p, graph=graph, updated=[*p.captured.outputs.assigned, *updated])


def _value_reads(p: Program) -> Program:
    if not p.captured.asked:
        return p
    graph, captured = value_reads(p.graph, p.captured, len(p.updated), p.cut_inputs)
    return replace(p, graph=graph, captured=captured)


def _constant_index(p: Program) -> Program:
    return replace(p, graph=constant_index(p.graph, p.captured.constants))


def _canonical_order(p: Program) -> Program:
    return replace(p, graph=canonical_order(p.graph, p.captured.constants, p.captured.inputs))


def _loss_totals(p: Program) -> Program:
    """Keeps only the loss, as a sum over the batch, and the graph of the totals that divide it."""
    graph, rows = p.graph, p.rows
    loss = _loss_of(p)
    _expect_one_batch(p, loss)
    assert loss is not None
    one_batch(graph, rows)
    totals = loss_totals(graph, loss, rows)
    # Only the loss is returned now, so no cache and no new value of an attribute is.
    of_loss = replace(p.captured.outputs, kept=frozenset(), stays=frozenset(), results=1)
    alone = replace(p.captured, outputs=of_loss)
    return replace(p, captured=alone, graph=totals.graph, totals=totals)


def _loss_of(p: Program) -> fx.Node | None:
    every = returned(p.graph)
    # Behind the results stand new values of attributes and of buffers, which are no loss.
    numbers = [node for node in every[: p.captured.outputs.results] if isinstance(node, fx.Node) and is_loss(node)]
    return loss_among(numbers, p.captured.outputs(every, ()) if numbers[1:] else None)


def loss_among(numbers: Sequence[T], result: Any) -> T | None:
    """Returns the loss among a model's outputs: the one that is named "loss", or the first number.

    Args:
        numbers: the outputs that are floating tensors without dimensions.
        result: what the model returns, with these outputs in it.

    Raises:
        Error: the outputs have names, there are several numbers, and none is named "loss".
    """
    if len(numbers) < 2:
        return numbers[0] if numbers else None
    named_tuple = result._asdict() if hasattr(result, "_asdict") else {}
    names = result if isinstance(result, Mapping) else named_tuple or getattr(result, "__dict__", {})
    if not names:
        return numbers[0]
    # `is`, because `==` of tensors is a tensor.
    named = [number for number in numbers if number is names.get("loss")]
    if not named:
        raise Error("the model returns several numbers, and none is named `loss`", fix='{"loss": loss, ...}')
    return named[0]


def _expect_one_batch(p: Program, loss: fx.Node | None) -> None:
    """Raises Error for a model with side effects, without a loss, or without a batch."""
    captured = p.captured
    if reads := [read for read in captured.asked if not (read.look and read.of_inputs)]:
        raise Error(
            "Python reads values of tensors in forward, which may be others in each part of a batch",
            at=place_text(reads[0].outcome.place),
            fix="torch.where, or a mask",
            alternative="autotp.parallelize(model, tp), which takes the whole batch at once",
        )
    if captured.outputs.into:
        raise Error(
            "the model writes into its inputs, and each part of a batch has other inputs",
            fix="write the new value to a new tensor",
        )
    if written := _changed_by(captured):
        names = ", ".join(sorted({f"`{change}`" for change in written}))
        raise Error(
            f"the model sets {names} in forward, which parts of a batch cannot share",
            fix="return it as a part of the loss, or compute it in the training loop (trainer.steps counts)",
            alternative="autotp.parallelize(model, tp), which keeps attributes",
        )
    if p.updated:
        names = ", ".join(captured.buffers[place] for place in p.updated)
        raise Error(
            f"the model changes its buffers ({names}), which parts of a batch cannot share",
            fix="a norm without running statistics",
            alternative="autotp.parallelize(model, tp), which takes the whole batch at once",
        )
    if (sparse := next(filter(sparse_argument, p.graph.nodes), None)) is not None:
        raise Error(
            f"`{operator_name(sparse)}` has a sparse gradient, which replicas and stages cannot sum",
            fix=f"{sparse_argument(sparse)}=False: the gradient has the same numbers",
            alternative="autotp.parallelize(model, tp)",
            at=line_of(sparse),
        )
    if loss is None:
        raise Error(
            "the model returns no loss (a tensor without dimensions)",
            fix="a model that takes labels, and returns its loss",
        )
    if not captured.example or not captured.example[0]:
        raise Error(
            "the model's first input has no rows, and so there is no batch",
            fix="the batch as the first dimension of the first argument",
        )


def _changed_by(captured: Captured) -> list[AnyChange]:
    """Returns what a call changes, except hooks of libraries, which parts of a batch can share."""
    return [change for change in captured.changes if not isinstance(change, AddedHook)]


CANONICALIZE = (
    Pass("canonicalize", "relocate", lambda p: replace(p, graph=relocate(p.graph, p.call.autocast.device))),
    Pass("canonicalize", "autocast", _autocast),
    Pass("canonicalize", "functionalize", _functionalize),
    # Behind `functionalize`, which says how many of the last outputs are new values of buffers.
    Pass("canonicalize", "value_reads", _value_reads),
    Pass("canonicalize", "constant_index", _constant_index),
    Pass("canonicalize", "canonicalize", lambda p: replace(p, graph=canonicalize(p.graph))),
    Pass("canonicalize", "causal_attention", lambda p: replace(p, graph=causal_attention(p.graph))),
    Pass("canonicalize", "custom_vjp", lambda p: replace(p, graph=mark(p.graph))),
    Pass("canonicalize", "canonical_order", _canonical_order),
    Pass("pipeline", "loss_totals", _loss_totals, lambda options: options.summed),
    Pass("canonicalize", "cse", lambda p: replace(p, graph=cse(p.graph)), _unless_left_out("cse")),
)


# ---- plan, over the axis cp


def _cuts_sequences(options: Options) -> bool:
    return options.cp > 1


def _equal_inputs(p: Program) -> Program:
    equal_inputs(p.graph, p.captured.inputs)
    return p


def _context_parallel(p: Program) -> Program:
    """Returns the program of one context-parallel rank: its graph has that rank's parts, and conjugates over `cp`.

    NOTE [Two mesh axes]
    A lowered graph is again a graph of operators with rules, and its conjugates have rules, too. So the graph is
    planned, lowered and checked for the axis `cp` by the same functions as for the axis `tp`, and then the passes for
    `tp` get the result as they get any graph. `check` proves for each axis that a rank's graph computes the graph
    before; together, that both cuts do.
    """
    cut = context_parallel(dce(p.graph), lambda graph: sources_of(p, graph), can_be_divided)
    if cut is None and p.call.layouts is not None:
        return p  # For example one token, in generation: every rank computes it. `warn_of_whole_sequences` says so.
    if cut is None:
        raise Error(
            "the model has no sequence that can be cut over cp: no attention has it in its queries and in its keys",
            fix="cp=1, and more tensor-parallel ranks",
        )
    graph, axes, decision = cut.graph, cut.axes, cut.decision
    graph, axes, decision = decompose(graph, axes, decision)
    if p.options.optional("defer_reductions"):
        graph, axes, decision = defer_reductions(graph, axes, decision)
    balanced = Balanced(graph, axes, decision)
    if p.options.optional("balance"):
        balanced = balance(graph, axes, decision, p.options.cp, p.options.randomness)
        cuts = balanced.decision.cuts
        if balanced.sequences:
            expect_sequence_order(graph, balanced.graph, balanced.axes, cuts, balanced.sequences, p.options.cp)
    graph, axes, decision = balanced.graph, balanced.axes, balanced.decision
    differentiable = needs_grad(graph, sources_of(p, graph))
    have = propagate(graph, axes, decision.cuts, decision.held)
    hoisted = balanced.keys | {node for node in graph.nodes if node.target is apart}
    if p.options.optional("hoist"):
        hoisted |= hoist(graph, axes, decision.cuts, have, differentiable)
    to = Target("cp", p.options.cp, p.cp_rank, p.options.randomness)
    lowered = dce(lower(graph, axes, decision, differentiable, to, hoisted))
    # No layouts: every rank of `cp` has the parameters and the inputs whole.
    check(lowered, graph, {}, [*p.captured.parameters, *p.captured.inputs], to, {})
    return replace(
        p,
        graph=joined_again(lowered),
        sequences=SequenceFacts(
            whole=p.graph,
            operators=len(cut.decision.cuts),
            balanced=balanced.balanced,
            unbalanced=balanced.reasons,
        ),
        undivided=tuple((node, "it needs whole sequences: on every cp rank") for node in cut.whole),
    )


def can_be_divided(node: fx.Node, factor: Factor, leaf: Axis) -> bool:
    """True for an operator of which `lower` has a form that is cut along this factor."""
    return has_form(node, factor, leaf) or has_expansion(node, factor, leaf)


# ---- plan


def decoupled(p: Program) -> Program:
    """Returns the program with the axes of its graph."""
    graph, axes = decouple(p.graph, p.captured.parameters)
    return replace(p, graph=graph, axes=axes)


def _row_independence(p: Program) -> Program:
    expect_rows(p.graph, p.axes, p.rows)
    if p.totals is not None:
        expect_sums(p.totals.counts, infer_axes(p.totals.counts), p.rows)
    return p


def _experts(p: Program) -> Program:
    graph, axes = experts(p.graph, p.axes, p.captured.parameters, p.tp)
    return replace(p, graph=graph, axes=axes)


def _prove_rules(p: Program) -> Program:
    """Tests each rule that a user registered on the shapes of the graph; raises Error if it is not true."""
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
    stay = positions_that_stay(graph, captured, len(p.updated), p.call.training, p.options.outputs)
    # What a call writes into its arguments is an output, and those outputs are whole (`positions_that_stay`).
    if any(i in p.call.given for i, _ in captured.outputs.into):
        raise Error("the model writes into an argument that is cut", fix="autotp.gather it before the call")
    # The last outputs are the new values of buffers (`functionalize`).
    moved = {node for node in results[len(results) - len(p.updated) :] if isinstance(node, fx.Node)}
    stay_cut = makers(graph, captured.outputs.kept) | moved
    candidates = match(graph, p.axes, captured.parameters, captured.inputs, p.tp, stay_cut)
    return replace(p, stay=stay, candidates=candidates)


def _choose(p: Program) -> Program:
    graph, captured = p.graph, p.captured
    if p.call.layouts is None:
        total = sum(n.meta["val"].numel() for n in graph.nodes if n.name in captured.parameters)
        trainable = needs_grad(graph, _sources(p))
        local = makers(graph, captured.outputs.kept) | makers(graph, p.stay)
        choices = Choices.of(graph, p.options.cut, captured.parameters)
        allowed = choices.allowed(p.candidates, p.axes)
        decision = choose(p.axes, allowed, trainable, total, p.tp, local, choices)
        choices.expect(decision.held, p.candidates, p.axes)
        return replace(p, candidates=allowed, decision=decision)
    # A further graph of a model whose parameters are cut: the cuts have to give each rank the parts that it has.
    stored = {place: p.call.layouts[name] for place, name in captured.parameters.items()} | p.local_inputs
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
    # Other cuts give other placements, of which copies are hoisted.
    p = _propagate(replace(p, decision=decision))
    return _hoist(p) if p.options.optional("hoist") else p


def _outputs(p: Program) -> Program:
    if p.call.layouts is not None:
        layouts = dict(p.call.layouts)
    else:
        layouts = layouts_of_parameters(p.graph, p.axes, p.decision, p.captured.parameters, p.tp)
    local = layouts_of_outputs(p.graph, p.stay, p.axes, p.have, p.tp)
    return replace(p, layouts=layouts, local_outputs=local)


PLAN = (
    Pass("plan", "equal_inputs", _equal_inputs, _cuts_sequences),
    Pass("plan", "causal_masks", lambda p: replace(p, graph=causal_masks(p.graph)), _cuts_sequences),
    Pass("plan", "context_parallel", _context_parallel, _cuts_sequences),
    Pass("plan", "decouple", decoupled),
    Pass("pipeline", "row_independence", _row_independence, lambda options: options.summed),
    Pass("plan", "experts", _experts, lambda options: options.experts == "expert", by_tp=True),
    Pass("lower", "prove_rules", _prove_rules, by_tp=True),
    Pass("plan", "match", _match, by_tp=True),
    Pass("plan", "choose", _choose, by_tp=True),
    Pass("lower", "decompose", _decompose, by_tp=True),
    Pass("lower", "defer_reductions", _defer_reductions, _unless_left_out("defer_reductions"), by_tp=True),
    Pass("plan", "propagate", _propagate, by_tp=True),
    Pass("plan", "hoist", _hoist, _unless_left_out("hoist"), by_tp=True),
    Pass("plan", "sequence_parallel", _sequence_parallel, lambda options: options.sequence_parallel, by_tp=True),
    Pass("plan", "outputs", _outputs, by_tp=True),
)


def _sources(p: Program) -> frozenset[fx.Node]:
    """Returns the nodes that may require a gradient: parameters and inputs."""
    return sources_of(p, p.graph)


def sources_of(p: Program, graph: fx.Graph) -> frozenset[fx.Node]:
    """Returns the nodes of another graph of the program that may require a gradient."""
    names = {*p.captured.parameters, *p.captured.inputs}
    return frozenset(n for n in graph.nodes if n.op == "placeholder" and n.name in names)


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


# ---- emit


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a rank's graph runs.

    Attributes:
        settings: the options under which it runs: of a training, or of a model without one.
        device: the rank's device.
        groups: mesh axis -> name of the process group; empty for a simulation.
    """

    settings: Options
    device: torch.device
    groups: Mapping[str, str | None]


def _bind(p: Program, site: Site, graph: fx.Graph) -> fx.Graph:
    return bind(graph, site.device, site.groups, p.captured.owned, site.settings.optional("in_place"))


def _recompute(p: Program, site: Site, graph: fx.Graph) -> fx.GraphModule:
    # Backward recomputes blocks, so without blocks there is nothing to recompute.
    if not site.settings.optional("outline"):
        return fx.GraphModule(nn.Module(), graph)
    return recompute(graph, site.settings.recompute, p.updated)


EMIT = (
    # `bind` is first because the next two take a bound graph, and `python_calls` last because all others ask what an
    # operator is. `recompute` makes a module of the graph.
    Pass("emit", "bind", _bind),
    Pass("emit", "late_sums", lambda p, site, graph: late_sums(graph), _unless_left_out("late_sums")),
    Pass("emit", "recompute", _recompute),
    Pass("emit", "python_calls", lambda p, site, module: call_python(module)),
)


# ---- all stages


def passes_of(table: Sequence[Pass], options: Options) -> list[Pass]:
    """Returns the passes of a table that run under the user's options, with those of extensions behind theirs."""
    added = [extension.passes for extension in chosen_extensions(options)]
    rows = (row for own in table for row in (own, *(more for passes in added for more in passes.get(own.name, ()))))
    return [row for row in rows if row.wanted(options)]


class Captures:
    """What was captured of a model, for programs of one call that differ only in how the model is cut.

    These programs share the symbols of sizes, and what passes assume of them, which is true of this call. So they are
    for calls of one size, as those of `autotp.search`. Where sequences are cut, passes assume more (`equal_inputs`):
    such programs are analysed after the others.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Captured] = {}
        self._planned: dict[Any, tuple[Captured, Program]] = {}

    def of(self, key: Any, capture: Callable[[], Captured]) -> Captured:
        """Returns what was captured for a key; captures it if nothing was."""
        if key not in self._known:
            self._known[key] = capture()
        return self._known[key]

    def planned(self, program: Program) -> Program:
        """Returns a captured program after the passes that do not depend on tensor-parallel ranks.

        They run once for all numbers of ranks. Axes are inferred for each: later passes refine them.
        """
        any_tp = _for_any_tp(program)
        key = id(program.captured), program.cp_rank, any_tp.options
        if key not in self._planned:
            # `tp` is unknown here, so that no pass whose row lacks `by_tp` can compute with it.
            for pass_ in _before_tp(program.options):
                any_tp = pass_.run(any_tp)
            self._planned[key] = program.captured, any_tp  # The first is kept, so that its `id` stays its own.
        _, planned = self._planned[key]
        axes = UNKNOWN if planned.axes is UNKNOWN else infer_axes(planned.graph)
        return replace(planned, tp=program.tp, options=program.options, axes=axes)


def _for_any_tp(program: Program) -> Program:
    """Returns the program without what only passes of `Pass.by_tp` may read."""
    return replace(program, tp=UNKNOWN, options=replace(program.options, sequence_parallel=False, recompute="none"))


def _wanted(options: Options) -> list[Pass]:
    return passes_of((*CANONICALIZE, *PLAN), options)


def _before_tp(options: Options) -> list[Pass]:
    """Returns the passes before the first that depends on tensor-parallel ranks."""
    return list(itertools.takewhile(lambda pass_: not pass_.by_tp, _wanted(options)))


TESTED_TORCH = "2.13."
"""The beginning of the version of torch with which all tests run."""


def analyse(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    options: Options = DEFAULTS,
    call: CallState = FIRST_CALL,
    amend: Amend | None = None,
    cp_rank: int = 0,
    captures: Captures | None = None,
    last: str = "",
) -> Program:
    """Captures `skeleton` on these arguments and decides what is cut on `tp` ranks.

    Args:
        skeleton: the model on `meta`.
        options: the user's options.
        call: the state around the call.
        amend: changes the program after a pass, to find out what a difference comes from (`bisect.py`).
        cp_rank: the rank on the axis `cp`, if `options.cp` is more than 1.
        captures: takes what is captured, and has what was captured for another number of ranks.
        last: the name of the last pass to run, for a caller that wants only what it finds; "" runs all.
    """
    options = replace(options, cut=resolved(options.cut, _parameter_names(skeleton)))
    library().add_operators()
    with uncollected(), progress(f"capture of {type(skeleton).__name__}") as line:
        symbols: Symbols | None = "all"
        while symbols is not None:
            program = captured_program(skeleton, args, kwargs, tp, options, call, symbols, captures)
            # What capture assumed is among the conditions of the graph already; passes may assume more.
            by_capture = len(size_assumptions(program.graph))
            call, symbols = _next_capture(program, amend)
        program, done = replace(program, cp_rank=cp_rank), 0
        # A pass that `amend` changes gives another program, which no other analysis may share.
        if captures is not None and amend is None:
            program, done = captures.planned(program), len(_before_tp(options))
        for pass_, later in programs_after_passes(program, amend, done):
            line.begin(pass_.stage)
            program = later
            if pass_.name == last:
                break
    return _for_assumed_sizes(program, by_capture)


def _parameter_names(module: nn.Module) -> dict[str, str]:
    """Returns each name of a parameter -> the first name of the same parameter."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}


def _for_assumed_sizes(program: Program, by_capture: int) -> Program:
    """Returns the program with a graph that fits only sizes of which all that its passes assumed is true."""
    captured = program.captured
    assumed = size_assumptions(captured.graph)[by_capture:]
    return replace(program, captured=replace(captured, fits=captured.fits.narrowed(assumed))) if assumed else program


@contextmanager
def _expect_no_assumptions(graph: fx.Graph) -> Iterator[None]:
    """Raises Error if a pass assumes something about sizes: it is too late to make it a condition of the graph."""
    before = len(size_assumptions(graph))
    yield
    if assumed := size_assumptions(graph)[before:]:
        raise Error(f"a pass assumes {assumed[0]} of all calls", fix=REPORT)


def _next_capture(program: Program, amend: Amend | None) -> tuple[CallState, Symbols | None]:
    """Returns what a further capture has to know and its symbols; None if the present graph can be a rank's.

    NOTE [Sizes that become numbers] in `long_sizes.py` says of which sizes a rank cannot compute its own.
    """
    call, captured = program.call, program.captured
    symbols = captured.attempt.symbols
    unknown = symbols in FEWER and has_unknown_sizes(program.graph)
    places = captured.symbolic - call.values.places
    if not (unknown or places) or _is_lowered(program, amend):
        return call, None
    if unknown:
        return call, FEWER[symbols]
    return replace(call, values=replace(call.values, places=call.values.places | places)), symbols


def _is_lowered(program: Program, amend: Amend | None) -> bool:
    """True if a rank can have a graph in which sizes are made of values that it does not know."""
    try:
        for _, later in programs_after_passes(program, amend):
            program = later
        flat_graph(program, 0, "fast")
    # The second is torch's, for a comparison of sizes whose outcome depends on values.
    except (Error, GuardOnDataDependentSymNode):
        return False
    return True


def _warn_of_untested_torch() -> None:
    """Warns once: what torch's exporter records differs between versions, and not every difference fails."""
    if not torch.__version__.startswith(TESTED_TORCH):
        warnings.warn(
            f"autotp is tested with torch {TESTED_TORCH}x, and this is {torch.__version__}: compare the model's "
            "gradients first, by autotp.verify; docs/versions.md says what was tried",
            stacklevel=2,
        )


def warn_of_whole_sequences(program: Program, call: str) -> bool:
    """Warns if every cp rank computes the whole of a call with gradients; returns whether it did.

    Args:
        call: the name of the call.
    """
    whole = program.options.cp > 1 and program.sequences.whole is None and torch.is_grad_enabled()
    if whole:
        warnings.warn(
            f"{call}: no sequence of this call can be cut over cp, so every cp rank computes and keeps the whole call: "
            "no attention has it in its queries and in its keys. The numbers are right. Train such batches with cp=1",
            stacklevel=2,
        )
    return whole


def captured_program(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tp: int,
    options: Options = DEFAULTS,
    call: CallState = FIRST_CALL,
    symbols: Symbols = "all",
    captures: Captures | None = None,
) -> Program:
    """Captures `skeleton` on these arguments; returns the program before the first pass. Arguments as for `analyse`.

    Args:
        symbols: the dimensions of inputs that are symbols at most.
        captures: as for `analyse`.
    """
    _warn_of_untested_torch()

    attempt = Attempt(
        opened=call.opened, values=call.values, symbols=symbols, looks=call.looks,
        blocks="by objects" if options.optional("repeats") else "each",
    )  # fmt: skip

    def one_call() -> Captured:
        return capture(skeleton, args, kwargs, call.autocast, call.wanted, attempt)

    def captured() -> Captured:
        first = one_call()
        # Parts of a batch cannot share changes (`_expect_one_batch`), unless a second call no longer makes them.
        if not options.summed or not _changed_by(first) or first.computes_changes:
            return first
        # Changes that only a first call makes, for example the kind of labels.
        make_changes(first.changes, dict(skeleton.named_modules()), lambda x: x, lambda module, _: vars(module))
        return one_call()

    key = skeleton, options.summed, call.autocast, call.wanted, attempt
    result = captured() if captures is None else captures.of(key, captured)
    call = replace(call, training=skeleton.training)
    return Program(captured=result, graph=result.graph, tp=tp, options=options, call=call)


def programs_after_passes(
    program: Program, amend: Amend | None = None, done: int = 0
) -> Iterator[tuple[Pass, Program]]:
    """Yields each pass of the stages canonicalize and plan, with the program after it, which `amend` may change.

    Args:
        done: the number of passes that have run.
    """
    for pass_ in _wanted(program.options)[done:]:
        program = pass_.run(program)
        program = program if amend is None else amend(pass_.name, program)
        yield pass_, program


def communication(graph: fx.Graph) -> str:
    """Returns the collectives of a rank's graph in order, as text: ranks that meet must have the same."""
    return "\n".join(
        f"{getattr(node.target, '__name__', '')} {node.args[1]}" for node in graph.nodes if node.target in COMMUNICATING
    )


def rank_graph(program: Program, rank: int, randomness: Literal["exact", "fast"], checked: bool = True) -> fx.Graph:
    """Returns the lowered graph of one rank; arguments and errors as of `flat_graph`."""
    return fuse(flat_graph(program, rank, randomness, checked=checked))


def flat_graph(
    program: Program,
    rank: int,
    randomness: Literal["exact", "fast"],
    axes: Axes | None = None,
    checked: bool = True,
) -> fx.Graph:
    """Returns the lowered graph of one rank before `fuse`: backwards are not separate graphs.

    Args:
        axes: `infer_axes(program.graph)`, if the caller has it.
        checked: whether its types are checked: only a graph that nobody runs may go without.

    Raises:
        Error: the graph's types do not fit; names the value, and the pass after which they do not.
    """
    to = Target("tp", program.tp, rank, randomness, frozenset(program.local_outputs))
    with uncollected(), _expect_no_assumptions(program.graph):
        for _, graph in graphs_after_passes(program, to):
            lowered = graph
        try:
            if checked:
                expect_typed(lowered, program, to, axes)
        except Error as error:
            # Only now is the graph after each pass checked, to name the first that does not fit. Until the pass `dce`
            # there are dead operators.
            graphs = graphs_after_passes(program, to)
            error.facts["after"] = next(pass_.name for pass_, graph in graphs if not _is_typed(dce(graph), program, to))
            raise
    return lowered


def flat_graphs(program: Program, randomness: Literal["exact", "fast"]) -> Iterator[fx.Graph]:
    """Yields `flat_graph` of each rank. The check infers the axes of the model once for all."""
    axes = infer_axes(program.graph)
    yield from (flat_graph(program, rank, randomness, axes) for rank in range(program.tp))


def graphs_after_passes(program: Program, to: Target) -> Iterator[tuple[Pass, fx.Graph]]:
    """Yields each pass of the stage lower, with one rank's graph after it."""
    graph = program.graph
    for pass_ in passes_of(LOWER, program.options):
        graph = pass_.run(program, to, graph)
        yield pass_, graph


def expect_typed(
    graph: fx.Graph, program: Program, to: Target, axes: Axes | None = None
) -> dict[fx.Node, tuple[Typed, ...]]:
    """The stage check: returns the types of all tensors in a rank's graph. Raises Error if they do not fit.

    Args:
        axes: `infer_axes(program.graph)`, if the caller has it.
    """
    captured = program.captured
    layouts = {place: program.layouts[name] for place, name in captured.parameters.items()} | program.local_inputs
    trainable = [*captured.parameters, *captured.inputs]
    return check(graph, program.graph, layouts, trainable, to, program.local_outputs, axes)


def _is_typed(graph: fx.Graph, program: Program, to: Target) -> bool:
    try:
        expect_typed(graph, program, to)
    except Error:
        return False
    return True


def rank_program(
    graph: fx.Graph, program: Program, settings: Options, device: torch.device, groups: Mapping[str, str | None]
) -> RankProgram:
    """Returns a rank's graph, or that of one of its stages, as it runs, with the sources of its placeholders.

    There is no other way to make a graph that runs: `verify` sees what each pass does to it.

    Args:
        groups: mesh axis -> name of the process group; empty for a simulation.
    """
    module = _emitted(EMIT, graph, program, Site(settings=settings, device=device, groups=groups))
    captured = program.captured
    sources: dict[str, str | Tensor] = {**captured.parameters, **captured.buffers, **captured.constants}
    read = {name: sources[name] for name in placeholders(graph) if name in sources}
    return RankProgram(
        module=module, parameters=captured.parameters,
        sources={name: x.to(device) if isinstance(x, Tensor) else x for name, x in read.items()},
    )  # fmt: skip


def emitted_operators(
    graph: fx.Graph, program: Program, settings: Options, device: torch.device, groups: Mapping[str, str | None]
) -> fx.GraphModule:
    """Returns the module of `rank_program` before the last pass: for readers, who ask what an operator is."""
    return _emitted(EMIT[:-1], graph, program, Site(settings=settings, device=device, groups=groups))


def _emitted(passes: Sequence[Pass], graph: fx.Graph, program: Program, site: Site) -> fx.GraphModule:
    emission: Any = graph
    for pass_ in passes_of(passes, site.settings):
        emission = pass_.run(program, site, emission)
    return emission
