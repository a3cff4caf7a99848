"""outputs: decides which outputs and caches stay cut, and the layouts of outputs, parameters and caches.

Before: outputs (logits, loss), training; logits are cut by vocabulary
After:  {0: Layout(vocab)}: the logits stay cut, because a loss is computed from them

NOTE [Caches]
A cache is a buffer that forward writes into, and of which attention reads heads. If all that read it are cut by its
heads, and so is its new value, a rank keeps its heads alone. Other buffers, such as moving averages, are whole on every
rank: a loop reads them on one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import fx

from autotp.options import Outputs
from autotp.passes.capture.captured import Captured
from autotp.passes.plan.candidate import ATTENTION, maker
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.propagate import Have, propagate
from autotp.rules.call import is_loss, operand_nodes, returned
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, find
from autotp.sharding.layout import Layout, layout_of
from autotp.sharding.placement import Shard


def positions_that_stay(
    graph: fx.Graph, captured: Captured, updated: int, training: bool, outputs: Outputs
) -> list[int]:
    """Returns the positions of the outputs that stay cut if they are cut.

    For "local" these are all results of the model, for "full" none. For "auto" they are the outputs that a later call
    gets as inputs (of states, of attributes) and those made of parameters alone; in training also the results that a
    returned loss is computed from.

    Args:
        updated: number of the last outputs, which are new values of buffers.
    """
    values = returned(graph)[: len(returned(graph)) - updated]
    if outputs == "full":
        return []
    positions = set(captured.outputs.kept | captured.outputs.stays)
    if outputs == "local":
        positions |= set(range(captured.outputs.results))
    elif training:
        losses = [n for n in values[: captured.outputs.results] if isinstance(n, fx.Node) and is_loss(n)]
        before = _ancestors(losses)
        results = enumerate(values[: captured.outputs.results])
        positions |= {i for i, n in results if isinstance(n, fx.Node) and all(maker(x) in before for x in _parts(n))}
    input_names = set(captured.inputs)
    for i, node in list(enumerate(values))[captured.outputs.results :]:
        if isinstance(node, fx.Node) and not any(n.name in input_names for n in (node, *_ancestors([node]))):
            positions.add(i)
    # The caller's tensor that is written into is whole, and Python reads whole values.
    positions -= {*(position for _, position in captured.outputs.into), *captured.read_at}
    return [i for i in sorted(positions) if isinstance(values[i], fx.Node)]


def _parts(node: fx.Node) -> Sequence[fx.Node]:
    """Returns the parts, of a batch or of a sequence, that a value is put together of; the value itself if of none."""
    if not has(node.target, Trait.JOIN):
        return [node]
    operands = [operand for operand in operand_nodes(node) if operand is not None]
    return [part for operand in operands for part in _parts(operand)]


def makers(graph: fx.Graph, positions: Iterable[int]) -> set[fx.Node]:
    """Returns the operators that make the outputs at these positions."""
    outputs = (returned(graph)[i] for i in positions)
    return {maker(node) for node in outputs if isinstance(node, fx.Node)}


def layouts_of_outputs(graph: fx.Graph, stay: Sequence[int], axes: Axes, have: Have, tp: int) -> dict[int, Layout]:
    """Position -> layout, for the outputs that stay cut."""
    local = {}
    for i in stay:
        node = returned(graph)[i]
        placement = have.get(node, (None,))[0]
        # A layout has numbers, and only a call knows the length of such an axis.
        if isinstance(placement, Shard) and not find(placement.axis).size.symbols:
            # -1 for a size that only a call knows.
            shape = tuple(n if isinstance(n, int) else -1 for n in node.meta["val"].shape)
            local[i] = layout_of(shape, axes.of(node), placement.axis, tp, "")
    return local


def with_cut_caches(graph: fx.Graph, axes: Axes, decision: Decision, updated: Sequence[str]) -> Decision:
    """Returns the decision in which caches are stored cut: see NOTE [Caches].

    Args:
        updated: placeholder names of the buffers whose new values are the last outputs.
    """
    heads = _leaves_of_attention(decision)
    for buffer, value in new_values(graph, updated):
        for leaf in heads if buffer not in decision.held else ():
            held = {**decision.held, buffer: leaf}
            if axes.dim_of(buffer, leaf) is not None and _read_by_heads(buffer, leaf, decision):
                have = propagate(graph, axes, decision.cuts, held)[value]
                if isinstance(have[0], Shard) and find(have[0].axis) is find(leaf):
                    decision = replace(decision, held=held)
                    break
    return decision


def layouts_of_caches(
    graph: fx.Graph, axes: Axes, decision: Decision, buffers: Mapping[str, str], tp: int
) -> dict[str, Layout]:
    """Placeholder name -> layout, for the buffers that are stored cut. buffers: placeholder name -> buffer name"""
    names = {find(c.leaf): c.name for c in decision.chosen}
    layouts = {}
    for node, leaf in decision.held.items():
        if node.name in buffers:
            shape = tuple(node.meta["val"].shape)
            layouts[node.name] = layout_of(shape, axes.of(node), leaf, tp, names.get(find(leaf), ""))
    return layouts


def note_on_caches(
    values: Sequence[tuple[fx.Node, fx.Node]],
    buffers: Mapping[str, str],
    caches: Mapping[str, Layout],
    decision: Decision,
    have: Have,
) -> dict[str, str]:
    """Returns the line of the plan on caches: how many are cut, and which new values are gathered.

    Args:
        values: `new_values` of the buffers.
        buffers: placeholder name -> buffer name.
        caches: `layouts_of_caches`.
        have: the placement of each value.
    """
    texts, heads = [], {find(leaf) for leaf in _leaves_of_attention(decision)}
    if rows := list(caches.values()):
        size, part = sum(prod(x.shape) for x in rows), sum(prod(x.local_shape(0)) for x in rows)
        texts.append(f"{len(caches)} buffers are cut: the first rank holds {part / size:.1%} of them")
    placed = [(buffer.name, have[value][0]) for buffer, value in values if value in have and buffer.name not in caches]
    if gathered := [buffers[name] for name, now in placed if isinstance(now, Shard) and find(now.axis) in heads]:
        texts.append(f"gathered whole in each call: {', '.join(gathered)}")
    return {"caches": "; ".join(texts)} if texts else {}


def new_values(graph: fx.Graph, updated: Sequence[str]) -> list[tuple[fx.Node, fx.Node]]:
    """Returns each buffer that a graph writes into, and its new value. updated: as for `with_cut_caches`"""
    by_name = {node.name: node for node in graph.find_nodes(op="placeholder")}
    results = returned(graph)[len(returned(graph)) - len(updated) :]
    pairs = zip(updated, results, strict=True)
    return [(by_name[name], value) for name, value in pairs if isinstance(value, fx.Node) and name in by_name]


def _leaves_of_attention(decision: Decision) -> list[Axis]:
    """Returns the axes along which attention is cut."""
    return [
        candidate.leaf
        for candidate in decision.chosen
        if candidate.pattern == ATTENTION or any(has(node.target, Trait.ATTENTION) for node, _ in candidate.nodes)
    ]


def _read_by_heads(buffer: fx.Node, leaf: Axis, decision: Decision) -> bool:
    cuts = [decision.cuts.get(reader) for reader in buffer.users]
    return bool(cuts) and all(cut is not None and find(cut) is find(leaf) for cut in cuts)


def layouts_of_parameters(
    graph: fx.Graph, axes: Axes, decision: Decision, parameters: Mapping[str, str], tp: int
) -> dict[str, Layout]:
    """Parameter name -> layout. parameters: placeholder name -> parameter name"""
    names = {find(c.leaf): c.name for c in decision.chosen}
    layouts = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in parameters:
            leaf = decision.held.get(node)
            name = names.get(find(leaf), "") if leaf is not None else ""
            shape = tuple(node.meta["val"].shape)
            layouts[parameters[node.name]] = layout_of(shape, axes.of(node), leaf, tp, name)
    return layouts


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns all nodes that some nodes depend on."""
    ancestors, queue = set[fx.Node](), list(nodes)
    while queue:
        operands = set(queue.pop().all_input_nodes) - ancestors
        ancestors |= operands
        queue += operands
    return ancestors
