"""reuse: the all-reduces that may take the memory of what they sum, because nobody else reads it.

    Before: p = reduce(linear(x, w), "tp")        After: p = reduce(linear(x, w), "tp", fresh=True)
    Before: c = copy(x, "tp"); linear(c, w)       After: c = copy(x, "tp", fresh=True): so is its gradient

A product does not keep its result for backward, and its gradient is a new tensor. If that were ever wrong, autograd
would say so: it counts the writes to what it has saved.
"""

from __future__ import annotations

import torch
from torch import fx

from autotp import collectives, parallel

aten = torch.ops.aten
PRODUCTS = {aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default}
NEW = {*PRODUCTS, aten.addmm.default, parallel.embedding, parallel.class_terms}
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints}


def fresh(graph: fx.Graph) -> set[fx.Node]:
    """The `copy` and `reduce` nodes of a lowered graph that may work in place."""
    found = set()
    for node in graph.nodes:
        if node.target is collectives.reduce and len(node.args) == 2 and _is_new(node.args[0]):
            found.add(node)
        if node.target is collectives.copy and _gradient_is_new(node):
            found.add(node)
    return found


def _is_new(node: fx.Node) -> bool:
    """True for a value that one operator has just made and only one reads, views of it included."""
    while node.target in VIEWS and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    return node.target in NEW and len(node.users) == 1


def _gradient_is_new(node: fx.Node) -> bool:
    """True if every reader sends back a tensor of its own."""
    readers = list(node.users)
    while len(readers) == 1 and readers[0].target in VIEWS:
        readers = list(readers[0].users)
    return bool(readers) and all(reader.target in PRODUCTS for reader in readers)
