"""exchange: writes the conjugates that move a value along a leaf, wherever the leaf is in its dimension.

    Before: gather of f32[b, s, (q: heads@tp x 64 | k: ... | v: ...)] along heads
    After:  split; gather each part in whole heads; cat

A collective moves contiguous blocks of one dimension. The blocks of a leaf that is major in its dimension are
contiguous. A leaf inside a product becomes major by a view, and each part of a concatenation is moved by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx

from autotp.ops.collectives import reduce_scatter, scatter
from autotp.passes.lower.local_sizes import Local
from autotp.sharding.axis import ONE, Axis, Size, find, holds

aten = torch.ops.aten
ConjugateFunction = Callable[..., Any]


def write_exchange(local: Local, x: fx.Node, axis: Axis, leaf: Axis, dim: int, move: ConjugateFunction) -> fx.Node:
    """Writes the conjugate `move` of `x`, whose dimension `dim` is `axis`, along the `leaf` inside it."""
    axis, leaf = find(axis), find(leaf)
    if axis is leaf:
        return _blocks(local, x, axis, leaf, dim, move, 1)
    if axis.kind == "concat":
        return _parts(local, x, axis, leaf, dim, move)
    index = next(i for i, part in enumerate(axis.parts) if holds(part, leaf))
    major, minor = ONE, ONE
    for i, part in enumerate(axis.parts):
        major, minor = (major * part.size if i < index else major), (minor * part.size if i > index else minor)
    # A collective takes the length of a block as a number.
    if index == 0 and find(axis.parts[0]) is leaf and not minor.symbols:
        return _blocks(local, x, axis, leaf, dim, move, minor.number)
    return _inside(local, x, axis.parts[index], (major, minor), leaf, dim, move)


def _inward(move: ConjugateFunction) -> bool:
    """True for a conjugate that cuts a value, False for one that joins the parts."""
    return move in (scatter, reduce_scatter)


def _blocks(local: Local, x: fx.Node, axis: Axis, leaf: Axis, dim: int, move: ConjugateFunction, block: int) -> fx.Node:
    """Writes the collective itself; `block` consecutive positions of the dimension are not divided."""
    size = local.size(axis.size)
    args = (dim, size) if block == 1 else (dim, size, block)
    length = local.local_size(axis.size, axis, leaf if _inward(move) else None)
    moved = local.builder.raw(move, (x, local.to.axis, *args))
    moved.meta["val"] = local.resized(x.meta["val"], dim, length.meta["val"] if isinstance(length, fx.Node) else length)
    return moved


def _parts(local: Local, x: fx.Node, axis: Axis, leaf: Axis, dim: int, move: ConjugateFunction) -> fx.Node:
    """Splits a concatenation, moves each part by itself, and joins them."""
    # A cut gets whole parts, and a join gets those of this rank.
    lengths = [local.local_size(part.size, part, None if _inward(move) else leaf) for part in axis.parts]
    pieces = local.builder.raw(aten.split_with_sizes.default, (x, lengths, dim))
    pieces.meta["val"] = [local.resized(x.meta["val"], dim, n) for n in lengths]
    moved = []
    for i, part in enumerate(axis.parts):
        piece = local.builder.raw(operator.getitem, (pieces, i))
        piece.meta["val"] = pieces.meta["val"][i]
        moved.append(write_exchange(local, piece, part, leaf, dim, move))
    whole = local.builder.raw(aten.cat.default, (moved, dim))
    whole.meta["val"] = local.resized(x.meta["val"], dim, sum(m.meta["val"].shape[dim] for m in moved))
    return whole


def _inside(
    local: Local, x: fx.Node, part: Axis, outer_sizes: tuple[Size, Size], leaf: Axis, dim: int, move: ConjugateFunction
) -> fx.Node:
    """Splits a product into (major, the part with the leaf, minor), moves the part, and flattens the product again."""
    middle = local.local_size(part.size, part, None if _inward(move) else leaf)
    before, after = (local.size(size) for size in outer_sizes)
    lengths = [before, middle, after]
    split = local.builder.raw(aten.unflatten.int, (x, dim, lengths))
    value = x.meta["val"]
    inside = fx.map_arg(lengths, lambda node: node.meta["val"])
    split.meta["val"] = local.empty([*value.shape[:dim], *inside, *value.shape[dim + 1 :]], value)
    moved = write_exchange(local, split, part, leaf, dim + 1, move)
    flat = local.builder.raw(aten.flatten.using_ints, (moved, dim, dim + 2))
    flat.meta["val"] = local.resized(value, dim, prod(moved.meta["val"].shape[dim : dim + 3]))
    return flat
