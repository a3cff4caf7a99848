"""in_place: marks operators that may overwrite their input, because no other operator reads it.

    Before: p = reduce(linear(x, w), "tp")        After: p = reduce(linear(x, w), "tp", fresh=True)
    Before: c = copy(x, "tp"); linear(c, w)       After: c = copy(x, "tp", fresh=True): so is its gradient
    Before: class_terms(linear(x, w), m, t)       After: class_terms(linear(x, w), m, t, fresh=True)
    Before: index_copy(cache, 2, at, keys)        After: index_copy_(cache, 2, at, keys): the caller wants it changed

Products and sums do not save their result for backward, and a product's gradient is a new tensor. If this were wrong,
autograd would raise an error: it counts the writes to saved tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from autotp.ops import collectives
from autotp.ops.async_linear import async_linear
from autotp.ops.losses import cross_entropy
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.source_location import block_of

aten = torch.ops.aten
PRODUCTS = Trait.PRODUCT | Trait.ADDED_PRODUCT


def fresh(graph: fx.Graph) -> set[fx.Node]:
    """Returns the `copy`, `reduce` and `class_terms` nodes of a lowered graph that may work in place.

    The output of another block is not overwritten: under `fully_shard` a hook may be registered on it.
    """
    nodes = set()
    for node in graph.nodes:
        # A `copy` overwrites its gradient, and never its input, which may be that of another block.
        if any(block_of(n) != block_of(node) for n in node.all_input_nodes[:1]) and node.target is not collectives.copy:
            continue
        if node.target is collectives.reduce and len(node.args) == 2 and _is_new(node.args[0]):
            nodes.add(node)
        if node.target is collectives.copy and _gradient_is_new(node):
            nodes.add(node)
        if node.target is cross_entropy.class_terms and _is_new(node.args[0], PRODUCTS | Trait.SUM, 2):
            nodes.add(node)
    return nodes


def written(graph: fx.Graph, owned: Collection[str]) -> set[fx.Node]:
    """Returns the nodes that may write into an input, because the caller needs the new value there.

    Args:
        owned: placeholder names of such inputs.
    """
    updates = (node for node in graph.nodes if has(node.target, Trait.UPDATE))
    return {n for n in updates if n.args[0].op == "placeholder" and n.args[0].name in owned and _count(n.args[0]) == 1}


def _is_new(node: fx.Node, makers: Trait = PRODUCTS | Trait.UNSAVED, readers: int = 1) -> bool:
    """True for a new tensor that only one operator reads, possibly through views.

    Args:
        makers: traits, of which the operator that made the tensor has one.
        readers: number of its readers; the input of `class_terms` has a second one, the maximum before it.
    """
    while has(node.target, Trait.RESHAPE) and _count(node) == readers:
        node, readers = node.args[0], 1  # type: ignore[assignment]
    return (has(node.target, makers) or _is_item(node)) and _count(node) == readers


def _is_item(node: fx.Node) -> bool:
    """True for a product of the joined operator `async_linear`."""
    return node.target is operator.getitem and node.args[0].target is async_linear  # type: ignore[union-attr]


def _count(node: fx.Node) -> int:
    """Returns the number of operators that read a value's elements, and not only its sizes."""
    return len([user for user in node.users if user.target is not aten.sym_size.int])


def _gradient_is_new(node: fx.Node) -> bool:
    """True if every reader's backward returns a new tensor."""
    readers = list(node.users)
    while len(readers) == 1 and has(readers[0].target, Trait.RESHAPE):
        readers = list(readers[0].users)
    return bool(readers) and all(has(reader.target, Trait.PRODUCT) for reader in readers)
