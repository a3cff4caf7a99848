"""count_load: counts how many rows choose each expert, and how many are dropped.

    Before: p = dispatch(chosen, 8, ...); ... ; return loss
    After:  p = dispatch(chosen, 8, ...); n = load_of_choice(chosen, 8, ...); ... ; load_notes(n); return loss

Counts are outputs of blocks like other values, so blocks that compute alike stay one module. `load_notes` is the only
operator that remembers something, and it stands outside of blocks: what backward computes again is not counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autotp.ops import collectives
from autotp.ops.experts import rows as routing
from autotp.ops.experts.load import LoadNotes, load_of_choice, load_of_ends
from autotp.passes.emit.bind import COMMUNICATING
from autotp.passes.plan.infer_axes import is_getitem
from autotp.rules.call import arguments_of, operand_nodes
from autotp.rules.registry import is_grouped

MAKE_WHOLE = (collectives.copy, collectives.reduce, collectives.gather, collectives.all_gather)
"""Conjugates whose result every rank has whole."""


def count_load(graph: fx.Graph, names: Mapping[str, str]) -> fx.Graph:
    """Returns the graph, which counts the rows of its experts.

    Args:
        names: placeholder -> parameter.
    """
    layers = dict(layers_of_experts(graph, names))
    if not layers:
        return graph
    counts = []
    for _, (target, args, number) in layers.items():
        with graph.inserting_after(args[0]):
            node = graph.call_function(target, args)
        node.meta = {key: value for key, value in args[0].meta.items() if key != "val"}
        node.meta["val"] = args[0].meta["val"].new_empty(number + 1, dtype=torch.int64)
        counts.append(node)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(LoadNotes([name for name, _ in layers]), tuple(counts))
    return graph


def layers_of_experts(graph: fx.Graph, names: Mapping[str, str]) -> Iterator[tuple[Any, Any]]:
    """Yields, for each choice of rows, the module of the experts with the choice, and the call that counts its rows.

    Args:
        names: placeholder -> parameter.

    Yields:
        (name of the module, choice), (function, arguments, number of experts)
    """
    for node in graph.nodes:
        counted = _counted(node)
        if counted is None:
            continue
        weight, target, args, number = counted
        if (name := names.get(_parameter(weight).name)) is not None:
            yield (name.rpartition(".")[0], args[0]), (target, args, number)


def experts_of_all(graph: fx.Graph, names: Mapping[str, str], axis: str) -> frozenset[str]:
    """Returns the modules of experts whose rows are the same on all ranks along a mesh axis, where these have parts.

    Args:
        graph: with the conjugates of this axis.
        names: placeholder -> parameter.
    """
    parts = values_of_parts(graph, axis)
    return frozenset(name for (name, choice), _ in layers_of_experts(graph, names) if choice not in parts)


def values_of_parts(graph: fx.Graph, axis: str) -> set[fx.Node]:
    """Returns the values of which ranks along a mesh axis have parts, or what is computed of their parts."""
    parts = set[fx.Node]()
    for node in graph.nodes:
        if node.target in COMMUNICATING and node.args[1] == axis:
            is_part = node.target not in MAKE_WHOLE
        else:
            is_part = not parts.isdisjoint(node.all_input_nodes)
        if is_part:
            parts.add(node)
    return parts


def _parameter(weight: Any) -> Any:
    """Returns the placeholder that a value is a view, a copy or a part of."""
    while weight.op != "placeholder":
        copies = weight.args[0]
        # Several weights are copied together, as a tuple.
        source = copies.args[0][weight.args[1]] if is_getitem(weight) and isinstance(copies.args[0], tuple) else copies
        if not isinstance(source, fx.Node):
            break
        weight = source
    return weight


def _counted(node: fx.Node) -> tuple[Any, Any, tuple[Any, ...], int] | None:
    """Returns the experts' weights that a node reads, and the function, arguments and number that count their rows."""
    operands = operand_nodes(node) if node.op == "call_function" else []
    if node.target is routing.grouped_mm or node.target is routing.spread:
        weight, count = operands[:2] if node.target is routing.spread else operands[1:3]
        choice: Any = count if count.target is routing.counts else count.args[0]  # type: ignore[union-attr]
        arguments = arguments_of(choice)
        args = (arguments["chosen"], arguments["number"], arguments["grouped"], arguments["capacity"])
        return weight, load_of_choice, args, arguments["number"]
    if node.op == "call_function" and is_grouped(node.target):
        ends: Any = operands[2]
        return operands[1], load_of_ends, (ends,), int(ends.meta["val"].shape[0])
    if node.target is torch.ops.aten.index.Tensor:
        weight, indices = operands[0], arguments_of(node)["indices"]
        value = weight.meta["val"]  # type: ignore[union-attr]
        # A table of vectors is an embedding; experts have matrices.
        if len(indices) == 1 and value.dim() > 2 and indices[0].meta["val"].dim() == 1:
            number = int(value.shape[0])
            return weight, load_of_choice, (indices[0], number, False, None), number
    return None
