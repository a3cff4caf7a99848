"""exchange: writes the conjugates that move a value along a leaf, wherever the leaf is in its dimension.

    Before: gather of f32[b, s, (q: heads@tp x 64 | k: ... | v: ...)] along heads
    After:  split; gather each part in whole heads; cat

A collective moves contiguous blocks of one dimension. The blocks of a leaf that is major in its dimension are
contiguous. A leaf inside a product becomes major by a view, and each part of a concatenation is moved by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from autotp.ops.collectives import all_to_all, halo, reduce_scatter, scatter
from autotp.passes.lower.local_sizes import Local, value_of
from autotp.sharding.axis import ONE, Axis, Size, find, holds, open_product, touches

aten = torch.ops.aten
ConjugateFunction = Callable[..., Any]


def write_exchange(local: Local, x: fx.Node, axis: Axis, leaf: Axis, dim: int, move: ConjugateFunction) -> fx.Node:
    """Writes the conjugate `move` of `x`, whose dimension `dim` is `axis`, along the `leaf` inside it."""
    axis, leaf = find(axis), find(leaf)
    if axis.kind == "concat":
        return _parts(local, x, axis, leaf, dim, move)
    if (block := _block(axis, leaf)) is not None:
        return _blocks(local, x, axis, leaf, dim, move, block)
    part, *outer_sizes = _around(axis, leaf)
    return _inside(local, x, part, outer_sizes, leaf, dim, move)


def can_exchange(dims: Sequence[Axis], source: Axis, target: Axis) -> bool:
    """True if a value that is cut along `source` can become one that is cut along `target` by one `all_to_all`."""
    leaves = source, target
    places = [[dim for dim, axis in enumerate(dims) if touches(axis, leaf)] for leaf in leaves]
    alone = [len(at) == 1 and bool(open_product(dims[at[0]], leaf)) for at, leaf in zip(places, leaves, strict=True)]
    return all(alone) and places[0] != places[1]


def write_all_to_all(local: Local, x: fx.Node, dims: Sequence[Axis], source: Axis, target: Axis) -> fx.Node:
    """Writes the `all_to_all` of `x` from the cut of one leaf to that of another, which are in two dimensions.

    Args:
        dims: the axes of `x`, of which `can_exchange` is true.
    """
    value, places, split_dims = x.meta["val"], dict[Axis, tuple[int, int]](), list[int]()
    leaf_dims = {find(leaf): next(d for d, a in enumerate(dims) if touches(a, leaf)) for leaf in (source, target)}
    for leaf, dim in sorted(leaf_dims.items(), key=lambda item: -item[1]):
        axis = find(dims[dim])
        while (block := _block(axis, leaf)) is None:
            part, major, minor = _around(axis, leaf)
            lengths = [local.size(major), local.local_size(part.size, part, source), local.size(minor)]
            x = _unflattened(local, x, dim, lengths)
            # What was opened before is behind this dimension.
            places = {opened: (d + 2, n) for opened, (d, n) in places.items()}
            split_dims.append(dim)
            axis, dim = find(part), dim + 1
        places[leaf] = dim, block
    (dim, block), (to_dim, to_block) = (places[find(leaf)] for leaf in (source, target))
    blocks = () if block == to_block == 1 else (block, to_block)
    size, to_size = local.size(find(source).size * Size(block)), local.size(find(target).size * Size(to_block))
    moved = local.builder.raw(all_to_all, (x, local.to.axis, dim, size, to_dim, to_size, *blocks))
    kept = value_of(local.local_size(find(target).size, target, target)) * to_block
    moved.meta["val"] = local.resized(local.resized(x.meta["val"], dim, value_of(size)), to_dim, kept)
    for dim in reversed(split_dims):
        x, moved = moved, local.builder.raw(aten.flatten.using_ints, (moved, dim, dim + 2))
        shape = list(x.meta["val"].shape)
        moved.meta["val"] = local.empty([*shape[:dim], prod(shape[dim : dim + 3]), *shape[dim + 3 :]], value)
    return moved


def write_halo(local: Local, node: fx.Node, leaf: Axis) -> fx.Node:
    """Writes the `halo` of keys or values, for a `nearby` (`node`) that is cut along `leaf`."""
    x, dim, before, ends, chunk, after = local.builder.map(node.args)
    call = local.builder.raw(halo, (x, local.to.axis, dim, local.size(find(leaf).size), before, ends, chunk, after))
    call.meta["val"] = local.resized(x.meta["val"], dim, local.halo_length(leaf, before, after))
    return call


def _block(axis: Axis, leaf: Axis) -> int | None:
    """Returns the number of positions of an axis for each of its outermost leaf; None if this is another leaf."""
    if axis is leaf:
        return 1
    _, _, minor = _around(axis, leaf)
    # A collective takes the length of a block as a number.
    return minor.number if find(axis.parts[0]) is leaf and not minor.symbols else None


def _around(axis: Axis, leaf: Axis) -> tuple[Axis, Size, Size]:
    """Returns the part of a product that has a leaf, and the sizes of what is before and behind it."""
    index = next(i for i, part in enumerate(axis.parts) if holds(part, leaf))
    major, minor = ONE, ONE
    for i, part in enumerate(axis.parts):
        major, minor = (major * part.size if i < index else major), (minor * part.size if i > index else minor)
    return find(axis.parts[index]), major, minor


def _unflattened(local: Local, x: fx.Node, dim: int, lengths: list[Any]) -> fx.Node:
    """Splits a dimension into three."""
    split, value = local.builder.raw(aten.unflatten.int, (x, dim, lengths)), x.meta["val"]
    split.meta["val"] = local.empty([*value.shape[:dim], *map(value_of, lengths), *value.shape[dim + 1 :]], value)
    return split


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
    local: Local, x: fx.Node, part: Axis, outer_sizes: Sequence[Size], leaf: Axis, dim: int, move: ConjugateFunction
) -> fx.Node:
    """Splits a product into (major, the part with the leaf, minor), moves the part, and flattens the product again."""
    middle = local.local_size(part.size, part, None if _inward(move) else leaf)
    before, after = (local.size(size) for size in outer_sizes)
    split, value = _unflattened(local, x, dim, [before, middle, after]), x.meta["val"]
    moved = write_exchange(local, split, part, leaf, dim + 1, move)
    flat = local.builder.raw(aten.flatten.using_ints, (moved, dim, dim + 2))
    flat.meta["val"] = local.resized(value, dim, prod(moved.meta["val"].shape[dim : dim + 3]))
    return flat
