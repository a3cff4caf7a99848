"""outputs: decides which outputs stay cut, and the layouts of outputs and parameters.

Before: outputs (logits, loss), training; logits are cut by vocabulary
After:  {0: Layout(vocab)}: the logits stay cut, because a loss is computed from them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from autotp.options import Outputs
from autotp.passes.capture.captured import Captured
from autotp.passes.plan.candidate import maker
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.propagate import Have
from autotp.rules.call import is_loss, operand_nodes, returned
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import find
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
