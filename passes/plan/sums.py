"""Finds the terms of a tree of additions, for `propagate` and `defer_reductions`.

(x + (attention + b1)) + (mlp + b2) has the terms x, attention, b1, mlp, b2: the only reader of each inner sum is its
outer sum, of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autotp.rules.row import Trait
from autotp.rules.traits import has

aten = torch.ops.aten


def is_sum(node: fx.Node) -> bool:
    """True for a plain sum of two tensors."""
    are_nodes = all(isinstance(arg, fx.Node) for arg in node.args)
    return node.target is aten.add.Tensor and not node.kwargs and are_nodes and len(node.args) == 2


def inside(node: fx.Node) -> bool:
    """True for a sum whose only reader is a sum of the same shape."""
    reader = next(iter(node.users), None)
    return len(node.users) == 1 and reader is not None and is_sum(reader) and _alike(node, reader)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    # As text: `==` of symbolic sizes would assume its outcome for all calls.
    return x.dtype == y.dtype and [str(n) for n in x.shape] == [str(n) for n in y.shape]


def terms(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the terms of a tree of sums, left to right."""
    summands: Any = node.args
    for arg in summands:
        if is_sum(arg) and inside(arg):
            yield from terms(arg)
        else:
            yield arg


def outermost(node: fx.Node) -> fx.Node:
    """Returns the root of the tree that a sum belongs to."""
    while inside(node):
        node = next(iter(node.users))
    return node


def views(node: fx.Node) -> list[fx.Node]:
    """Returns the chain of views that make a value, outermost first, if they keep the last dimension."""
    chain: list[Any] = []
    while _keeps_last(node) and (not chain or len(node.users) == 1):
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return chain


def _keeps_last(node: fx.Node) -> bool:
    """True for a view that keeps the last dimension of its operand."""
    x: Any = node.args[0] if has(node.target, Trait.MOVABLE) else None
    if x is None:
        return False
    rest: Any = node.args[1:]
    before, after = x.meta["val"], node.meta["val"]
    if node.target is aten.transpose.int:
        return before.dim() - 1 not in [d % before.dim() for d in rest]
    if node.target is aten.permute.default:
        return rest[0][-1] % before.dim() == before.dim() - 1
    return has(node.target, Trait.RESHAPE) and str(before.shape[-1:]) == str(after.shape[-1:])
