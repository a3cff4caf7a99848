"""The passes over the mesh axis `cp`: the program of a rank that computes a part of every sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import fx

from autotp.errors import Error
from autotp.ops.placement_moves import apart
from autotp.passes.check.check import check
from autotp.passes.check.sequence_order import expect_sequence_order
from autotp.passes.lower.dce import dce
from autotp.passes.lower.decompose import decompose, has_expansion
from autotp.passes.lower.defer_reductions import defer_reductions
from autotp.passes.lower.local_sizes import Target
from autotp.passes.lower.localize import has_form
from autotp.passes.lower.lower import lower
from autotp.passes.plan.hoist import hoist
from autotp.passes.plan.infer_axes import Factor
from autotp.passes.plan.propagate import needs_grad, propagate
from autotp.passes.plan.sequence.balance import Balanced, balance
from autotp.passes.plan.sequence.context_parallel import context_parallel
from autotp.passes.plan.sequence.equal_inputs import equal_inputs
from autotp.passes.plan.sequence.halos import read_halos
from autotp.passes.plan.sequence.heads import exchange_heads
from autotp.passes.plan.sequence.separate_keys import joined_again
from autotp.passes.program.program import CapturedProgram, SequenceFacts
from autotp.sharding.axis import Axis


def with_equal_inputs(p: CapturedProgram) -> CapturedProgram:
    """Returns the program, in whose calls inputs that have one shape now always have one shape."""
    equal_inputs(p.graph, p.captured.inputs)
    return p


def with_cut_sequences(p: CapturedProgram) -> CapturedProgram:
    """Returns the program of one context-parallel rank: its graph has that rank's parts, and conjugates over `cp`.

    NOTE [Two mesh axes]
    A lowered graph is again a graph of operators with rules, and its conjugates have rules, too. So the graph is
    planned, lowered and checked for the axis `cp` by the same functions as for the axis `tp`, and then the passes for
    `tp` get the result as they get any graph. `check` proves for each axis that a rank's graph computes the graph
    before; together, that both cuts do.
    """
    has_cut = partial(can_be_divided, p.options.randomness)
    cut = context_parallel(dce(p.graph), p.sources_of, has_cut)
    if cut is None and p.call.layouts is not None:
        return p  # For example one token, in generation: every rank computes it. `warn_of_whole_sequences` says so.
    if cut is None:
        raise Error(
            "the model has no sequence that can be cut over cp: no attention has it in its queries and in its keys",
            fix="cp=1, and more tensor-parallel ranks",
        )
    exchanged = exchange_heads(cut, p.tp, p.options.cp, p.options.cp_attention, p.sources_of, has_cut)
    cut = exchanged.cut
    graph, axes, decision = cut.graph, cut.axes, cut.decision
    graph, axes, decision = decompose(graph, axes, decision)
    if p.options.optional("defer_reductions"):
        graph, axes, decision = defer_reductions(graph, axes, decision)
    halos = read_halos(graph, axes, decision)
    graph, axes, decision = halos.graph, halos.axes, halos.decision
    balanced = Balanced(graph, axes, decision)
    if p.options.optional("balance"):
        balanced = balance(graph, axes, decision, p.options.cp, p.options.randomness)
        cuts = balanced.decision.cuts
        if balanced.sequences:
            expect_sequence_order(graph, balanced.graph, balanced.axes, cuts, balanced.sequences, p.options.cp)
    graph, axes, decision = balanced.graph, balanced.axes, balanced.decision
    differentiable = needs_grad(graph, p.sources_of(graph))
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
            uncut_graph=p.graph,
            operators=len(cut.decision.cuts) - len(exchanged.nodes),
            balanced=balanced.balanced,
            unbalanced=balanced.reasons,
        ),
        notes={**p.notes, **({"attention": exchanged.note} if exchanged.note else {})},
        undivided=tuple((node, "it needs whole sequences: on every cp rank") for node in cut.whole),
    )


def can_be_divided(randomness: str, node: fx.Node, factor: Factor, leaf: Axis) -> bool:
    """True for an operator of which `lower` has a form that is cut along this factor, with this randomness."""
    return has_form(node, factor, leaf, randomness) or has_expansion(node, factor, leaf)
