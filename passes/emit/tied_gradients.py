"""tied_gradients: the gradient of a lookup is added into that of the head with the same table, which is in memory once.

    Before: h = embedding(w, ids); ...; l = linear_loss_sum(w, x, t, ...)
    After:  h, v = tied_embedding(w, ids, 0, 151936, -1); ...; l = linear_loss_sum(v, x, t, ...)

The rows of `w` and `v` are the same memory. Backward of the lookup runs last. It has the gradient of `v`, which is new
memory that nobody else reads, and adds to its rows. Otherwise autograd would fill a second table, and add the two.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from autotp.ops import lookup
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import has

NEW_GRADIENT = Trait.PRODUCT | Trait.HEAD
"""Operators with one of these traits return a new tensor as the gradient of a table."""


def tied_gradients(module: fx.GraphModule) -> fx.GraphModule:
    """Replaces lookups in a graph, outside of its blocks, in place; returns the graph."""
    for node in list(module.graph.nodes):
        arguments = _lookup(node)
        if arguments is not None and (readers := _later_readers(node, arguments[0])):
            _tie(module.graph, node, arguments, readers)
    module.recompile()
    return module


def _lookup(node: fx.Node) -> tuple[Any, ...] | None:
    """Returns the arguments of `tied_embedding` for a lookup; None for another operator."""
    args = arguments_of(node) if has(node.target, Trait.LOOKUP) else {}
    if "indices" not in args or "offsets" in args or args.get("scale_grad_by_freq") or args.get("sparse"):
        return None
    rows = args["weight"].meta["val"].shape[0]
    return args["weight"], args["indices"], args.get("start", 0), args.get("size", rows), args["padding_idx"]


def _later_readers(node: fx.Node, table: fx.Node) -> list[fx.Node]:
    """Returns the later readers of a table whose gradient of it is a new tensor."""
    return [user for user in table.users if node < user and _makes_gradient(user, table)]


def _makes_gradient(reader: fx.Node, table: fx.Node) -> bool:
    if has(reader.target, Trait.LOOKUP):
        # The next lookup of the table, whose gradient is then that of the head.
        return _lookup(reader) is not None and bool(_later_readers(reader, table))
    is_cast = has(reader.target, Trait.CAST) and reader.meta["val"].dtype != table.meta["val"].dtype
    return is_cast or has(reader.target, NEW_GRADIENT)


def _tie(graph: fx.Graph, node: fx.Node, arguments: tuple[Any, ...], readers: list[fx.Node]) -> None:
    table = arguments[0]
    with graph.inserting_before(node):
        tied = graph.call_function(lookup.tied_embedding, arguments)
        rows, alias = (graph.call_function(operator.getitem, (tied, i)) for i in range(2))
    rows.meta, alias.meta = dict(node.meta), dict(table.meta)
    for reader in readers:
        reader.replace_input_with(table, alias)
    node.replace_all_uses_with(rows)
    graph.erase_node(node)
