"""report: makes the plan of an analysed model, and counts the collectives of its graph."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autotp.compiler import flat_graph
from autotp.diagnostics.attention_kernels import AttentionRow, attention_rows
from autotp.diagnostics.node_text import size_text, sizes_of
from autotp.diagnostics.plan import CutRow, KeptRow, MemoryPlan, Plan, StepCollective, Traffic, WholeRow
from autotp.diagnostics.reasons import Reasons, read_by
from autotp.display.text_table import bytes_text
from autotp.ops import collectives
from autotp.ops.async_linear import async_linear
from autotp.ops.attention.documents import keys_seen
from autotp.ops.coalesced import together
from autotp.passes.canonicalize.custom_vjp import backward_of
from autotp.passes.capture.replacements.opaque_call import OpaqueCall
from autotp.passes.check.types import Typed
from autotp.passes.emit.memory.budget import MemoryChoice, budget_of
from autotp.passes.lower.local_sizes import value_of
from autotp.passes.lower.overlap import separate
from autotp.passes.plan.candidate import contracts
from autotp.passes.plan.propagate import needs_grad
from autotp.passes.plan.sequence.halos import number_at_capture
from autotp.passes.program.program import CapturedProgram, Program
from autotp.rules.call import elements_of, nbytes_of, outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import find
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_size
from autotp.sharding.placement import JOINED, Partial, Shard
from autotp.source_location import block_in, layer_of, line_of

FORWARD = {
    "reduce": "all-reduce", "gather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "halo": "all-to-all",
}  # fmt: skip
BACKWARD = {
    "copy": "all-reduce", "share": "all-reduce", "together": "all-reduce", "scatter": "all-gather",
    "all_gather": "reduce-scatter", "reduce_scatter": "all-gather",
    "all_to_all": "all-to-all", "halo": "all-to-all",
}  # fmt: skip
"""The collective of each conjugate, in forward and in backward."""


LARGEST = 8
"""The rows of the table of kept values."""


def memory_plan(module: fx.GraphModule) -> MemoryPlan | None:
    """Returns what the budget of an emitted graph did in the last call; None without a budget."""
    budget = budget_of(module)
    choice = None if budget is None else budget.latest
    return None if choice is None else plan_of_choice(choice)


def plan_of_choice(choice: MemoryChoice) -> MemoryPlan:
    """Returns what a budget did, by line of the model."""
    rows: dict[str, list[tuple[int, int, str]]] = {}
    for call, made in zip(choice.table.calls, choice.chosen.choices, strict=True):
        for name, value in choice.table.tables[call.kind].values.items():
            if value.kept:
                row = value.kept, made.after.kept.get(name, 0), made.fates.get(name, "keep")
                rows.setdefault(line_of(value.node), []).append(row)
    for memory, node in choice.table.outside.items():
        rows.setdefault(line_of(node), []).append((choice.table.sizes[memory],) * 2 + ("keep",))
    largest = []
    for line, values in rows.items():
        bytes_made, bytes_staying, fates = zip(*values, strict=True)
        largest.append(KeptRow(line, sum(bytes_made), sum(bytes_staying), dict(Counter(fates))))
    collectives = Counter[str]()
    for value in (value for made in choice.chosen.choices for value in made.after.runs if value.collectives):
        collectives[line_of(value.node)] += value.collectives
    return MemoryPlan(
        memory=choice.allowance.memory, needed=choice.needed, fixed=choice.allowance.fixed, kept=choice.kept,
        kept_without=choice.kept_without, seconds=choice.chosen.seconds, collectives=dict(collectives),
        gigabyte=choice.gigabyte, largest=tuple(sorted(largest, key=lambda row: -row.bytes)[:LARGEST]),
    )  # fmt: skip


def report(analysis: Program, model: str, first: fx.Graph | None = None, emitted: fx.GraphModule | None = None) -> Plan:
    """Returns the plan of an analysed model.

    Args:
        first: the lowered graph of rank 0, if the caller has it.
        emitted: the graph that runs, if there is one: it has what a budget did.
    """
    places = {n.name: n for n in analysis.graph.nodes if n.op == "placeholder"}
    nodes = {name: places[place] for place, name in analysis.captured.parameters.items()}
    dtypes = {name: node.meta["val"].dtype.itemsize for name, node in nodes.items()}
    layouts = analysis.layouts.items()
    graded = _learning(analysis.graph, analysis)[1]
    cuts = tuple(
        _cut(name, nodes[name], layout, analysis, graded) for name, layout in layouts if layout.dim is not None
    )
    reasons = Reasons(analysis)
    whole = [_whole(name, nodes[name], analysis, reasons) for name, layout in layouts if layout.dim is None]
    total = sum(math.prod(layout.shape) * dtypes[name] for name, layout in layouts)
    ranks = [sum(math.prod(lay.local_shape(r)) * dtypes[n] for n, lay in layouts) for r in range(analysis.tp)]
    first = first or flat_graph(analysis, 0, "fast")
    count = traffic(first, analysis)
    # Behind these come the new values of buffers.
    outputs = tuple(x for i, x in sorted(analysis.local_outputs.items()) if i < analysis.outputs_before_buffers)
    everything = (*whole, *_unknown(analysis), *_needs_whole(analysis))
    return Plan(
        model, analysis.tp, cuts, everything, total, max(ranks), count, _along_sequence(analysis), outputs,
        cp=analysis.options.cp, in_sequence=analysis.sequences.operators, types=_types_along_sequences(analysis),
        balanced=analysis.sequences.balanced, unbalanced=analysis.sequences.unbalanced,
        notes={**analysis.notes, **_suggestions(analysis)}, attention=_attention(first, analysis),
        memory=None if emitted is None else memory_plan(emitted),
    )  # fmt: skip


def _attention(graph: fx.Graph, analysis: Program) -> tuple[AttentionRow, ...]:
    """Returns the attentions of a rank's graph beside those of one device."""
    whole = analysis.sequences.uncut_graph or analysis.graph
    (_, learning), (_, learning_in_whole) = (_learning(x, analysis) for x in (graph, whole))
    return attention_rows(graph, learning, whole, learning_in_whole, analysis.options.randomness == "exact")


def _suggestions(analysis: Program) -> dict[str, str]:
    """Returns the line on what looks for rules of operators of the user's that have none."""
    unknown = [node.target for node, bound in analysis.axes.bound.items() if not bound.known]
    user_operators = [
        op for op in unknown if isinstance(op, OpOverload) and op.namespace not in ("aten", "prims", "autotp")
    ]
    call = f"autotp.suggest_rule(torch.ops.{user_operators[0].overloadpacket}, ...)" if user_operators else ""
    return {"rules": f"{call} looks for the rule of an operator without one"} if user_operators else {}


def _is_along(value: fx.Node, analysis: Program) -> bool:
    """True for a value that is cut along a sequence."""
    leaf = analysis.decision.cuts.get(value)
    return leaf is not None and find(leaf) in {find(sequence) for sequence in analysis.decision.scattered.values()}


def _along_sequence(analysis: Program) -> int | None:
    """Returns the number of operators that are cut along a sequence; None without `sequence_parallel`."""
    sequences = {find(leaf) for leaf in analysis.decision.scattered.values()}
    cut = [leaf for leaf in analysis.decision.cuts.values() if find(leaf) in sequences]
    return len(cut) if analysis.options.sequence_parallel else None


def _types_along_sequences(analysis: Program) -> dict[str, int]:
    """Returns the types of values that are cut along a sequence over cp, with both cuts -> how many values have it."""
    letters, counts = sizes_of(analysis.graph), Counter[str]()
    for node in analysis.graph.nodes if analysis.options.cp > 1 else ():
        values = zip(outputs_of(node), analysis.axes.dims.get(node, ()), analysis.have.get(node, ()), strict=False)
        for value, dims, placement in values:
            sizes = size_text(Typed(value.dtype, dims, placement, flows=True), letters).partition("[")[2]
            if value.is_floating_point() and "@cp" in sizes:
                counts[f"[{sizes.partition(']')[0]}]"] += 1
    return dict(counts)


def traffic(graph: fx.Graph, analysis: CapturedProgram) -> Traffic:
    """Returns the collectives of a lowered graph, forward and backward."""
    again = _gathered_again(graph, analysis)
    graph, sends = separate(graph), []
    learnt, graded = _learning(graph, analysis)
    in_backward = backward_of(graph)
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.target is not together and getattr(collectives, name, None) is not node.target:
            continue
        for side, table in enumerate((FORWARD, BACKWARD if node in graded else {})):
            if name in table:
                read, back = node.all_input_nodes, bool(side) or node in in_backward
                # The larger side of a conjugate is the whole, which its collective makes or takes.
                size = max(sum(map(nbytes_of, outputs_of(n))) for n in ((node,) if len(read) > 1 else (node, *read)))
                size = _halo_bytes(node, analysis.options.cp) if node.target is collectives.halo else size
                # `tp/4` is a group of neighbours along `tp`.
                own_axis = str(node.args[1]).partition("/")[0]
                of_parameters = all(_placeholder(n) in learnt for n in read)
                is_gather = bool(
                    {*node.args[2:]} & {*JOINED}
                )  # Of each rank's part: they are reduced where they arrive.
                collective = "all-gather" if is_gather and not side else table[name]
                sends.append(StepCollective(collective, layer_of(node), size, back, of_parameters, own_axis))
    return Traffic((*sends, *again), analysis.captured.example)


def _halo_bytes(node: fx.Node, parts: int) -> int:
    """Returns the bytes of the largest halo that a rank reads: in the graph of the first rank it is empty."""
    x: Any
    dim: Any
    before: Any
    x, _, dim, length, before, _, _, after = node.args
    size = elements_of([value_of(length)])
    before, after = (number_at_capture(value_of(side), size) for side in (before, after))
    keys = keys_seen(size, parts, before, None, after=after)
    longest = max(stop - first - chunk_size(size, parts, rank) for rank, (first, stop) in enumerate(keys))
    return nbytes_of(x.meta["val"]) // max(elements_of(x.meta["val"].shape[dim : dim + 1]), 1) * longest


def _placeholder(value: fx.Node) -> fx.Node:
    """Returns the placeholder that a value is a copy of, over any mesh axis; another value itself."""
    while True:
        source: Any = value.args[0] if value.args else None
        if value.target in (collectives.copy, collectives.share):
            value = source
        elif value.target is operator.getitem and source.target is together:
            value = source.args[0][value.args[1]]
        else:
            return value


def _learning(graph: fx.Graph, analysis: CapturedProgram) -> tuple[frozenset[fx.Node], set[fx.Node]]:
    """Returns the parameters of a graph, and the values that a gradient flows through to them."""
    learnt = frozenset(node for node in graph.nodes if node.name in analysis.captured.parameters)
    return learnt, needs_grad(graph, learnt)


def _gathered_again(graph: fx.Graph, analysis: CapturedProgram) -> list[StepCollective]:
    """Returns the all-gathers in backward of joined products, which gather their input again."""
    (_, graded), sends = _learning(graph, analysis), []
    for node in graph.nodes:
        # Its arguments: x, group, gathered (dim, size, ...), flattened, weights, ...
        if node.target is async_linear and node.args[2] is not None and any(w in graded for w in node.args[4]):
            x, (dim, length, *_) = node.args[0], node.args[2]
            whole = list(x.meta["val"].shape)
            whole[dim] = length.meta["val"] if isinstance(length, fx.Node) else length
            size = elements_of(whole) * x.meta["val"].dtype.itemsize
            sends.append(StepCollective("all-gather", layer_of(node), size, True, False))
    return sends


def _cut(name: str, node: fx.Node, layout: Layout, analysis: Program, graded: set[fx.Node]) -> CutRow:
    """Returns the row of a cut parameter. Its product sums the gradient of its operand only if that is in `graded`."""
    leaf = analysis.decision.held.get(node)
    if leaf is None:  # A further graph does not read it: its decision says nothing of it.
        return CutRow(name, layout, "", "", "as it is stored; no operator of this graph reads it")
    chosen = next(c for c in analysis.decision.chosen if find(c.leaf) is find(leaf))
    forward = backward = ""
    for read, reader in read_by(node):
        factor = analysis.axes.bound[reader].cuttable(leaf) if reader in analysis.axes.bound else None
        product = contracts(analysis.axes.bound.get(reader))
        weighs = product or has(reader.target, Trait.LOOKUP)
        # The axis is summed over (a row-parallel product): the result is Partial.
        if factor is not None and weighs and not factor.outs and factor.summed:
            forward = "reduce-scatter" if reader in analysis.decision.scattered else "all-reduce"
        # The axis is in the result (a column-parallel product): the operand's gradient is Partial.
        elif factor is not None and product:
            along = any(_is_along(operand, analysis) for operand in reader.all_input_nodes)
            forward = "all-gather" if along else forward
            if any(operand in graded for operand in reader.all_input_nodes if operand is not read):
                backward = "reduce-scatter" if along else "all-reduce"
    size = find(leaf).size
    why = chosen.pattern or f"an axis of {size} that all its readers divide"
    why = f"{size} {chosen.name}: {why}" if chosen.name else why
    return CutRow(name, layout, forward, backward, why)


def _whole(name: str, node: fx.Node, analysis: Program, reasons: Reasons) -> WholeRow:
    reader = next((user for _, user in read_by(node)), None)
    shape = tuple(node.meta["val"].shape)
    if reader is None:
        return WholeRow(name, shape, "?", "unused with these inputs")
    matrix = len(shape) > 1 and not has(reader.target, Trait.LOOKUP)
    in_block = matrix and block_in(name) != ""
    reason, because = reasons.of(node, reader)
    return WholeRow(name, shape, line_of(reader), reason, in_block, because=because)


def _needs_whole(analysis: Program) -> Iterator[WholeRow]:
    """Yields the operators that are not cut along the sequence or the batch, although a gradient flows through them."""
    for node, why in analysis.undivided:
        value = node.meta["val"]
        shape = tuple(n if isinstance(n, int) else n.node.hint for n in getattr(value, "shape", ()))
        name = f"{layer_of(node)} {node.target}".strip()
        yield WholeRow(name, shape, line_of(node), why, operator=True)


def _unknown(analysis: Program) -> Iterator[WholeRow]:
    for node, bound in analysis.axes.bound.items():
        if not bound.known or (isinstance(node.target, OpaqueCall) and not node.target.has_user_rule):
            value = node.meta["val"]
            sizes = value.shape if isinstance(value, torch.Tensor) else ()
            shape = tuple(str(n) if isinstance(n, int) else "?" for n in sizes)
            why = "its size depends on values" if any(map(free_unbacked_symbols, sizes)) else "no rule"
            cost = _cost(node, analysis) if isinstance(node.target, OpaqueCall) else ""
            name = f"{layer_of(node)} {node.target}".strip()
            yield WholeRow(name, shape, line_of(node), f"{why}: replicated{cost}", operator=True)  # type: ignore[arg-type]


def _cost(node: fx.Node, analysis: Program) -> str:
    """Returns what it costs that every rank runs an opaque call whole, as text."""
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    moved = [n for n in operands if any(isinstance(have, Shard | Partial) for have in analysis.have.get(n, ()))]
    weights = [n for n in operands if n.name in analysis.captured.parameters]
    count: Any = node.target.flops  # type: ignore[union-attr]
    number = count.node.hint if isinstance(count, torch.SymInt) else count
    flops = "" if number is None else f", {number:,} FLOPs"
    gathered_bytes, weight_bytes = (sum(nbytes_of(n.meta["val"]) for n in nodes) for nodes in (moved, weights))
    return f"; {bytes_text(gathered_bytes)} made whole for it, {bytes_text(weight_bytes)} of parameters{flops}"
