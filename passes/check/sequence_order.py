"""sequence_order: proves that a graph with sequences in the order of `zigzag` computes the graph before.

    in_order(apart(k)): f64[b, t, 4]     k is cut along a sequence in that order, and attention reads all keys in order

Two facts are derived from the new graph alone. Without the moves between orders it is the old graph, operator by
operator. And each operator reads its operands in the order in which it computes: one that is cut along such a sequence
reads the operands that it is cut along in the order of `zigzag`, and everything else is read in the model's order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from autotp.errors import Error
from autotp.ops.attention.zigzag import in_order, zigzag, zigzag_rows
from autotp.ops.placement_moves import apart
from autotp.passes.check.erase import SDPA, target_name
from autotp.passes.plan.infer_axes import Axes, is_getitem
from autotp.rules.call import arguments_of, operand_nodes
from autotp.rules.traits import draws
from autotp.sharding.axis import Axis, find
from autotp.source_location import line_of

MOVES = (zigzag, in_order)
IN_ORDER: dict[Any, tuple[Any, dict[str, Any]]] = {zigzag_rows: (SDPA, {"attn_mask": None, "is_causal": True})}
"""Attention of queries in the order of `zigzag` -> the operator of the model, and its arguments that say the same."""
Order = Axis | None
"""The sequence in whose order of `zigzag` a value is; None: the model's order."""


def expect_sequence_order(
    before: fx.Graph, graph: fx.Graph, axes: Axes, cuts: Mapping[fx.Node, Axis], sequences: Collection[Axis], parts: int
) -> None:
    """Raises Error unless `graph` computes what `before` does.

    Args:
        before: the graph in the model's order.
        axes: those of `graph`.
        cuts: the operators of `graph` that are cut -> the sequence.
        sequences: those in the order of `zigzag`.
        parts: the number of ranks.
    """
    _expect_same_operators(before, graph)
    orders: dict[fx.Node, tuple[Order, ...]] = {}
    for node in graph.nodes:
        orders[node] = _orders(node, orders, axes, cuts, sequences, parts)


def _not_the_model(node: fx.Node, problem: str) -> NoReturn:
    raise Error(
        f"a balanced sequence would not compute the model: `{target_name(node.target)}` {problem}",
        fix='without=("balance",), and a report of it',
        at=line_of(node),
    )


# ---- the same operators


def _expect_same_operators(before: fx.Graph, graph: fx.Graph) -> None:
    old = iter(before.nodes)
    old_nodes: dict[fx.Node, fx.Node] = {}  # A node of the new graph -> that of the old graph.
    for node in graph.nodes:
        if node.target in MOVES:
            old_nodes[node] = old_nodes[node.args[0]]
            continue
        model = next(old, None)
        if model is None or _call(model, {}) != _call(node, old_nodes):
            _not_the_model(node, "is not an operator of the graph in the model's order")
        old_nodes[node] = model
    if (missing := next(old, None)) is not None:
        _not_the_model(missing, "is missing")


def _call(node: fx.Node, old_nodes: Mapping[fx.Node, fx.Node]) -> Any:
    """Returns a node's operator and arguments, with the nodes of the old graph in place of those of the new one."""
    target, arguments = node.target, arguments_of(node) if node.op == "call_function" else {"args": node.args}
    if target in IN_ORDER:
        del arguments["parts"], arguments["rank"]
        target, arguments = IN_ORDER[target][0], arguments | IN_ORDER[target][1]
    return node.op, target, fx.map_arg(arguments, lambda n: old_nodes.get(n, n))


# ---- orders


def _orders(
    node: fx.Node,
    orders: Mapping[fx.Node, tuple[Order, ...]],
    axes: Axes,
    cuts: Mapping[fx.Node, Axis],
    sequences: Collection[Axis],
    parts: int,
) -> tuple[Order, ...]:
    """Returns the order of each output of a node."""
    if node.target in MOVES:
        return (_moved(node, orders, axes, sequences, parts),)
    if is_getitem(node):
        source, index = node.args
        return (orders[source][index],) if len(orders[source]) > 1 else orders[source]  # type: ignore[index]
    if node.target is apart:
        return (_apart(node, orders, axes),)
    bound = axes.bound.get(node)
    leaf = next((sequence for sequence in sequences if node in cuts and find(sequence) is find(cuts[node])), None)
    factor = bound.cuttable(leaf) if bound is not None and leaf is not None else None
    if bound is None or factor is None or leaf is None:
        if node.target is not torch.ops.aten.sym_size.int:  # A size is the same in each order.
            _expect(node, node.all_input_nodes, [], orders)
        return (None,) * len(axes.dims.get(node, ((),)))
    if node.target in IN_ORDER and arguments_of(node)["parts"] != parts:
        _not_the_model(node, f"is for {arguments_of(node)['parts']} ranks, and there are {parts}")
    if not factor.ins or (factor.mark and node.target not in IN_ORDER and not draws(node)):
        _not_the_model(node, "depends on the order of rows, and reads them in another one")
    operands = [operand for operand in operand_nodes(node) if operand is not None]
    _expect(node, operands, [leaf if i in factor.ins else None for i in range(len(operands))], orders)
    return tuple(leaf if i in factor.outs else None for i in range(len(bound.rule.outs)))


def _expect(
    node: fx.Node, operands: Sequence[fx.Node], expected: Sequence[Order], orders: Mapping[fx.Node, tuple[Order, ...]]
) -> None:
    """Raises Error unless the operands are in these orders; without any, in the model's."""
    for operand, order in zip(operands, expected or [None] * len(operands), strict=True):
        if any((have and find(have)) is not (order and find(order)) for have in orders[operand]):
            _not_the_model(node, f"reads `{operand}` in another order than it computes in")


def _moved(
    node: fx.Node,
    orders: Mapping[fx.Node, tuple[Order, ...]],
    axes: Axes,
    sequences: Collection[Axis],
    parts: int,
) -> Order:
    x, dim, number = node.args
    (have,), axis = orders[x], axes.of(x)[dim]  # type: ignore[index, arg-type]
    leaf = next((sequence for sequence in sequences if find(sequence) is find(axis)), None)
    wrong = have is not None or leaf is None if node.target is zigzag else have is None or find(have) is not find(axis)
    if wrong or number != parts:
        _not_the_model(node, f"moves `{x}`, which is not in the order that it is moved from")
    return leaf if node.target is zigzag else None


def _apart(node: fx.Node, orders: Mapping[fx.Node, tuple[Order, ...]], axes: Axes) -> Order:
    """Returns the order of a value that is read whole: its positions have an axis of their own."""
    x: Any = node.args[0]
    have = orders[x][0]
    dims = [dim for dim, axis in enumerate(axes.of(x)) if have is not None and find(axis) is find(have)]
    if have is not None and not dims:
        _not_the_model(node, f"reads `{x}`, in which a sequence is inside of a larger dimension")
    return axes.of(node)[dims[0]] if dims else None
