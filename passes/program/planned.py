"""The passes of the stage plan: each adds facts to a program, which then has a later type."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autotp.errors import Error
from autotp.passes.check.expert_rows import expect_expert_rows
from autotp.passes.lower.decompose import decompose
from autotp.passes.lower.defer_reductions import defer_reductions
from autotp.passes.lower.losses.linear_cross_entropy import linear_cross_entropy
from autotp.passes.lower.losses.logit_notes import logit_notes
from autotp.passes.lower.prove_rules import prove_node
from autotp.passes.pipeline.row_independence import expect_rows, expect_sums
from autotp.passes.plan.candidate import EXPERTS
from autotp.passes.plan.choose import choose, choose_as
from autotp.passes.plan.decouple import decouple
from autotp.passes.plan.experts.expert_parallel import described, expert_parallel
from autotp.passes.plan.experts.experts import experts, of_host
from autotp.passes.plan.experts.unsort import unsort
from autotp.passes.plan.hoist import hoist
from autotp.passes.plan.infer_axes import infer_axes
from autotp.passes.plan.match import match
from autotp.passes.plan.outputs import (
    layouts_of_caches,
    layouts_of_outputs,
    layouts_of_parameters,
    makers,
    new_values,
    note_on_caches,
    positions_that_stay,
    with_cut_caches,
)
from autotp.passes.plan.propagate import needs_grad, propagate
from autotp.passes.plan.sequence.sequence_parallel import sequence_parallel
from autotp.passes.plan.user_cuts import Choices
from autotp.passes.program.program import (
    CapturedProgram,
    Program,
    ProgramWithAxes,
    ProgramWithCandidates,
    ProgramWithDecision,
    ProgramWithPlacements,
)
from autotp.rules.call import operand_nodes, returned
from autotp.rules.registry import has_user_rule


def decoupled(p: CapturedProgram) -> ProgramWithAxes:
    """Returns the program with the axes of its graph."""
    graph, axes = decouple(p.graph, p.captured.parameters)
    return replace(p, graph=graph).with_facts(ProgramWithAxes, axes=axes)


def with_independent_rows(p: ProgramWithAxes) -> ProgramWithAxes:
    """Returns the program. Raises Error if a row of the batch depends on another, or a total is no sum of rows."""
    graph = unsort(p.graph)  # Experts that sort rows and put them back compute each row by itself.
    expect_rows(graph, p.axes if graph is p.graph else infer_axes(graph), p.rows)
    if p.totals is not None:
        expect_sums(p.totals.counts, infer_axes(p.totals.counts), p.rows)
    return p


def with_experts(p: ProgramWithAxes) -> ProgramWithAxes:
    """Returns the program in which each rank computes the rows of its experts, in the experts' order.

    Where experts are cut by width, only rows are sorted that the pass `unsort` has put out of that order.
    """
    options = p.options
    # Under `ep` experts that do not divide are an error, of the pass `expert_parallel`.
    by_expert = options.experts == "expert" or options.ep > 1 or options.capacity is not None
    tp = p.tp if by_expert and options.ep == 1 else 1
    graph, axes = experts(p.graph, p.axes, p.captured.parameters, tp, by_expert, options.capacity)
    notes = {} if options.capacity is None else {"experts": of_host(options.capacity)}
    return replace(p, graph=graph, axes=axes, notes={**p.notes, **notes})


def with_expert_parallelism(p: ProgramWithAxes) -> ProgramWithAxes:
    """Returns the program of a rank that has some experts, and computes the rows of all ranks along `ep` for them."""
    graph = expert_parallel(p.graph, p.axes, p.captured.parameters, p.options.ep)
    expect_expert_rows(p.graph, graph, p.captured.inputs, p.options.ep)
    notes = {**p.notes, "experts": described(graph, p.options.ep, p.captured.parameters)}
    return replace(p, graph=graph, axes=infer_axes(graph), notes=notes)


def with_proved_rules(p: ProgramWithAxes) -> ProgramWithAxes:
    """Returns the program. Raises Error if a rule that a user registered is not true on the shapes of the graph."""
    tried = set()
    for node in p.graph.nodes:
        if has_user_rule(node.target):
            shapes = [tuple(n.meta["val"].shape) for n in operand_nodes(node) if n is not None]
            if (case := (node.target, str(shapes))) not in tried:
                tried.add(case)
                prove_node(node, max(p.tp, 2))  # On one rank, rows may still be cut into microbatches and replicas.
    return p


def matched(p: ProgramWithAxes) -> ProgramWithCandidates:
    """Returns the program with the axes that may be cut."""
    captured, graph, results = p.captured, p.graph, returned(p.graph)
    stay = positions_that_stay(graph, captured, len(p.updated), p.call.training, p.options.outputs)
    # What a call writes into its arguments is an output, and those outputs are whole (`positions_that_stay`).
    if any(i in p.call.cut_inputs for i, _ in captured.outputs.into):
        raise Error("the model writes into an argument that is cut", fix="autotp.gather it before the call")
    # The last outputs are the new values of buffers (`functionalize`).
    moved = {node for node in results[len(results) - len(p.updated) :] if isinstance(node, fx.Node)}
    stay_cut = makers(graph, captured.outputs.kept | captured.outputs.stays) | moved
    candidates = match(graph, p.axes, captured.parameters, captured.inputs, p.tp, stay_cut)
    # Rows may be in the order of experts that are cut by width, or that `tp` does not divide: see `with_experts`.
    whole = p.options.experts == "width"
    candidates = [
        candidate for candidate in candidates
        if candidate.pattern != EXPERTS or not (whole or candidate.leaf.size.number % p.tp)
    ]  # fmt: skip
    return p.with_facts(ProgramWithCandidates, stay=stay, candidates=candidates)


def decided(p: ProgramWithCandidates) -> ProgramWithDecision:
    """Returns the program with the decision what is cut."""
    program = _with_cuts(p)
    # `distribute` splits a batch into parts, which share no cache; a loop of training reads buffers on one rank.
    if p.call.training or p.options.summed or p.tp == 1:
        return program
    return replace(program, decision=with_cut_caches(p.graph, p.axes, program.decision, p.updated))


def _with_cuts(p: ProgramWithCandidates) -> ProgramWithDecision:
    """Returns the program with the cuts of operators and parameters."""
    graph, captured = p.graph, p.captured
    if p.call.layouts is None:
        total = sum(n.meta["val"].numel() for n in graph.nodes if n.name in captured.parameters)
        local = makers(graph, captured.outputs.kept) | makers(graph, p.stay)
        choices = Choices.of(graph, p.options.cut, captured.parameters)
        allowed = choices.allowed(p.candidates, p.axes)
        decision = choose(p.axes, allowed, needs_grad(graph, p.sources), total, p.tp, local, choices)
        choices.expect(decision.held, p.candidates, p.axes)
        return p.with_facts(ProgramWithDecision, candidates=allowed, decision=decision)
    # A further graph of a model whose parameters are cut: the cuts have to give each rank the parts that it has.
    stored = {place: p.call.layouts[name] for place, name in captured.parameters.items()} | p.local_inputs
    stored |= p.local_caches
    places = {node: stored[node.name] for node in graph.nodes if node.op == "placeholder" and node.name in stored}
    return p.with_facts(ProgramWithDecision, decision=choose_as(p.axes, p.candidates, places, p.tp))


def with_linear_cross_entropy(p: ProgramWithDecision) -> ProgramWithDecision:
    """Returns the program with heads and losses in one operator."""
    graph, axes, decision, refused = linear_cross_entropy(p.graph, p.axes, p.decision)
    notes = logit_notes(p.graph, graph, decision, refused, p.tp)
    return replace(p, graph=graph, axes=axes, decision=decision, notes={**p.notes, **notes})


def decomposed(p: ProgramWithDecision) -> ProgramWithDecision:
    """Returns the program with operators in parts, where only the parts can be cut."""
    graph, axes, decision = decompose(p.graph, p.axes, p.decision)
    return replace(p, graph=graph, axes=axes, decision=decision)


def with_deferred_reductions(p: ProgramWithDecision) -> ProgramWithDecision:
    """Returns the program with sums over ranks after what does not need them."""
    graph, axes, decision = defer_reductions(p.graph, p.axes, p.decision)
    return replace(p, graph=graph, axes=axes, decision=decision)


def propagated(p: ProgramWithDecision) -> ProgramWithPlacements:
    """Returns the program with the placement of each value."""
    have = propagate(p.graph, p.axes, p.decision.cuts, p.decision.held)
    return p.with_facts(ProgramWithPlacements, differentiable=needs_grad(p.graph, p.sources), have=have)


def hoisted(p: ProgramWithPlacements) -> ProgramWithPlacements:
    """Returns the program with the operators that all ranks compute whole, from copies."""
    return replace(p, hoisted=hoist(p.graph, p.axes, p.decision.cuts, p.have, p.differentiable))


def with_sequence_parallelism(p: ProgramWithPlacements) -> ProgramWithPlacements:
    """Returns the program in which values between a block's products are cut along the sequence."""
    decision = sequence_parallel(p.graph, p.axes, p.decision, p.differentiable, set(p.hoisted))
    # Other cuts give other placements, of which copies are hoisted.
    p = propagated(replace(p, decision=decision))
    return hoisted(p) if p.options.optional("hoist") else p


def with_layouts(p: ProgramWithPlacements) -> Program:
    """Returns the program with the layouts of parameters, and of the outputs that stay cut."""
    if p.call.layouts is not None:
        layouts = dict(p.call.layouts)
    else:
        layouts = layouts_of_parameters(p.graph, p.axes, p.decision, p.captured.parameters, p.tp)
    caches = layouts_of_caches(p.graph, p.axes, p.decision, p.captured.buffers, p.tp) | p.local_caches
    local = layouts_of_outputs(p.graph, p.stay, p.axes, p.have, p.tp)
    first = len(returned(p.graph)) - len(p.updated)
    cached = {first + i: caches[name] for i, name in enumerate(p.updated) if name in caches}
    new = layouts_of_outputs(p.graph, list(cached), p.axes, p.have, p.tp)
    # A cache keeps its cut: a new value that is cut otherwise is gathered.
    local |= {
        i: layout for i, layout in new.items() if (layout.dim, layout.pieces) == (cached[i].dim, cached[i].pieces)
    }
    note = note_on_caches(new_values(p.graph, p.updated), p.captured.buffers, caches, p.decision, p.have)
    notes = {**p.notes, **note}
    return replace(p, notes=notes).with_facts(Program, layouts=layouts, local_outputs=local, caches=caches)
