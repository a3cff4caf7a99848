"""localize: rewrites a call for local operands: with local sizes, or as the parallel form of a lookup or dropout.

Before: view(x, [b, s, 12, 64]); embedding(w, t); dropout(x, 0.1)              cut by heads, vocab, heads
After:  view(x, [b, s, 6, 64]); parallel.embedding(w, t, 25129); parallel.fast_dropout(x, 0.1, rank)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autotp.errors import REPORT, Error
from autotp.ops import dropout, lookup
from autotp.ops.attention.causal_rows import causal_rows
from autotp.ops.attention.zigzag import zigzag_rows
from autotp.ops.experts import rows as routing
from autotp.ops.losses import cross_entropy
from autotp.ops.losses.argmax import argmax_key, linear_argmax_key
from autotp.ops.losses.linear_cross_entropy import linear_class_terms
from autotp.passes.lower.local_sizes import Local
from autotp.passes.plan.infer_axes import Axes, Factor
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has, size_argument
from autotp.sharding.axis import ONE, Axis, find, is_major, open_product, touches
from autotp.sharding.layout import ranges
from autotp.sharding.partition import chunk_start, chunk_stop
from autotp.sharding.strides import order_at_capture
from autotp.source_location import line_of

aten = torch.ops.aten


def localize(local: Local, node: fx.Node, axes: Axes, factor: Factor, leaf: Axis) -> fx.Node:
    """Writes the call of `node`, cut along `leaf`, on this rank's operands in `local.builder.env`.

    Raises:
        Error: the operator mixes the factor and has no parallel form.
    """
    if factor.mark != "!":
        call = local.builder.raw(*_localized(local, node, axes, leaf))
    elif node.target in FORMS:
        call = local.builder.raw(*FORMS[node.target](local, node, axes, leaf))
    else:
        raise Error(f"{node.target} has no parallel form along `{factor.name}`", at=line_of(node), fix=REPORT)
    values = node.meta["val"]
    tensors = list(values) if isinstance(values, list | tuple) else [values]
    local_values = [local.value(v, dims, leaf) for v, dims in zip(tensors, axes.dims[node], strict=True)]
    call.meta["val"] = local_values if isinstance(values, list | tuple) else local_values[0]
    return call


Called = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _localized(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Called:
    """Returns target and arguments of the local call, in the new graph."""
    args, kwargs = local.builder.map(node.args), local.builder.map(node.kwargs)
    if has(node.target, Trait.SPLIT):
        return _split(local, node, axes, leaf)
    if has(node.target, Trait.SLICE):
        return _slice(local, node, axes, leaf)
    if name := size_argument(node.target):
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        position = next(i for i, arg in enumerate(schema) if arg.name == name)
        args = (*args[:position], _sizes(local, node, axes, leaf, len(node.args[position])), *args[position + 1 :])  # type: ignore[arg-type]
    return node.target, args, kwargs  # type: ignore[return-value]


def _sizes(local: Local, node: fx.Node, axes: Axes, leaf: Axis, count: int) -> list[Any]:
    """Returns the size argument for the local output, without -1, which is ambiguous for an empty shard."""
    shape, dims = node.meta["val"].shape, axes.of(node)
    start = len(shape) - count
    if str(node.target).startswith("aten.unflatten"):
        start = arguments_of(node)["dim"] % node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return [local.local_size(shape[i], dims[i], leaf) for i in range(start, start + count)]


def _split(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Called:
    """Returns a split into the local lengths of the parts."""
    dims, dim = axes.dims[node], arguments_of(node)["dim"] % len(axes.dims[node][0])
    lengths = [local.local_size(v.shape[dim], d[dim], leaf) for v, d in zip(node.meta["val"], dims, strict=True)]
    return aten.split_with_sizes.default, (local.builder.env[node.args[0]], lengths, dim), {}  # type: ignore[index]


def _slice(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Called:
    """Returns a slice that starts after the local parts before it; a slice with a step takes the same step."""
    x, arguments = node.args[0], arguments_of(node)
    dim = arguments["dim"] % node.meta["val"].dim()
    axis, sliced_axis = axes.of(x)[dim], axes.of(node)[dim]  # type: ignore[arg-type]
    if not touches(axis, leaf):
        return node.target, local.builder.map(node.args), local.builder.map(node.kwargs)  # type: ignore[return-value]
    if find(axis) is find(sliced_axis):  # It takes all positions, as the last 127 of a sequence that is shorter.
        return aten.slice.Tensor, (local.builder.env[x], dim, 0, sys.maxsize), {}  # type: ignore[index]
    start, length = arguments["start"] or 0, x.meta["val"].shape[dim]  # type: ignore[union-attr]
    if arguments.get("step", 1) != 1:
        return aten.slice.Tensor, (local.builder.env[x], dim, start, sys.maxsize, arguments["step"]), {}  # type: ignore[index]
    start = max(start + length, 0) if start < 0 else start
    before = sum(max(min(b, start) - a, 0) for a, b in ranges(axis, leaf, local.to.tp, local.to.rank))
    count = local.local_size(sliced_axis.size, sliced_axis, leaf)
    return aten.slice.Tensor, (local.builder.env[x], dim, before, before + count), {}  # type: ignore[index]


# ---- parallel forms

Form = Callable[[Local, fx.Node, Axes, Axis], tuple[Callable[..., Any], tuple[Any, ...]]]


def _embedding(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    args = local.builder.map(arguments_of(node))
    axis = axes.of(arguments_of(node)["weight"])[0]
    return lookup.embedding, (
        args["weight"], args["indices"], start_of_part(local, node, axis, leaf), local.size(find(axis).size),
        args["padding_idx"],
    )  # fmt: skip


def _gather(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    args = local.builder.map(arguments_of(node))
    axis = axes.of(arguments_of(node)["self"])[args["dim"]]
    start = start_of_part(local, node, axis, leaf)
    return lookup.gather, (args["self"], args["dim"], args["index"], start, local.size(find(axis).size))


def _class_terms(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    x, top, classes, dim, _, size = local.builder.map(node.args)
    start = start_of_part(local, node, axes.of(arguments_of(node)["x"])[dim], leaf)
    return cross_entropy.class_terms, (x, top, classes, dim, start, size)


def _argmax_key(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    x, dim, _ = local.builder.map(node.args)
    return argmax_key, (x, dim, start_of_part(local, node, axes.of(arguments_of(node)["x"])[dim], leaf))


def _of_own_classes(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    """A head with its loss, or with another reader of its logits: the weight has the classes first."""
    args = local.builder.map(arguments_of(node))
    start = start_of_part(local, node, axes.of(arguments_of(node)["weight"])[0], leaf)
    return node.target, tuple((args | {"start": start}).values())


def _routed(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    factor = axes.bound[node].cuttable(leaf)
    assert factor is not None
    start, args = start_of_part(local, node, factor.axis, leaf), local.builder.map(arguments_of(node))
    stop = start + local.local_size(factor.axis.size, factor.axis, leaf)
    return node.target, (args["chosen"], args["number"], args["grouped"], start, stop, args["capacity"])


def start_of_part(local: Local, node: fx.Node, axis: Axis, leaf: Axis) -> Any:
    """Returns the start of this rank's positions of `axis`, which must be contiguous: the leaf is major in the axis.

    Raises:
        Error: they are not.
    """
    opened = open_product(axis, leaf)
    if opened is None or not is_major(axis, leaf):
        raise Error(f"{node.target} cannot be cut inside an axis of {axis}", at=line_of(node), fix=REPORT)
    start = local.part(chunk_start, leaf)
    return start if opened[1] == ONE else local.times(start, local.size(opened[1]))


def _dropout(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    operand, p = node.args[:2]
    x, value = local.builder.env[operand], operand.meta["val"]  # type: ignore[index, union-attr]
    if local.to.randomness == "fast":
        return dropout.fast_dropout, (x, p, local.to.rank)
    sizes = [local.size(n) for n in value.shape]
    return dropout.exact_dropout, (x, p, sizes, (_cut(local, axes.of(node), leaf),), order_at_capture(value))


ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _attention(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    raw = arguments_of(node)
    args = local.builder.map(raw)
    fast, of_queries = local.to.randomness == "fast", touches(axes.of(raw["query"])[-2], leaf)
    if not raw["dropout_p"] or (fast and raw["is_causal"] and of_queries):
        named = (args[name] for name in ("query", "key", "value"))
        start = start_of_part(local, node, axes.of(raw["query"])[-2], leaf)
        rows = *named, start, args["scale"], args["enable_gqa"]
        drops = args["dropout_p"], local.to.rank
        return (dropout.fast_causal_rows, (*rows, *drops)) if raw["dropout_p"] else (causal_rows, rows)
    shared = tuple(args.get(name) for name in ATTENTION)
    if fast:
        return dropout.fast_attention, (*shared, local.to.rank)
    query, key = raw["query"], raw["key"]
    sizes = [local.size(n) for n in (*query.meta["val"].shape[:-1], key.meta["val"].shape[-2])]
    return dropout.exact_attention, (*shared, sizes, (_cut(local, _weights(node, axes), leaf),))


def zigzag_of_rank(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    """Attention of queries in the order of `zigzag`: those of this rank."""
    args = local.builder.map(arguments_of(node)) | {"rank": local.to.rank}
    if args.get("dropout_p") and node.target is zigzag_rows:
        return dropout.fast_zigzag_rows, (*args.values(), local.to.rank)
    return node.target, tuple(args.values())


def fast_again(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    """A fast form that is cut over another mesh axis already: its rank counts the ranks of both axes."""
    *shared, rank = local.builder.map(node.args)
    return node.target, (*shared, rank * local.to.tp + local.to.rank)


def _exact_again(local: Local, node: fx.Node, axes: Axes, leaf: Axis) -> Any:
    """An exact form that is cut over another mesh axis already: this cut is one of that part."""
    args = local.builder.map(arguments_of(node))
    dims = axes.of(node) if node.target is dropout.exact_dropout else _weights(node, axes)
    return node.target, tuple((args | {"cuts": (*args["cuts"], _cut(local, dims, leaf))}).values())


def _weights(node: fx.Node, axes: Axes) -> tuple[Axis, ...]:
    """Returns the axes of the weights of an attention: of query heads, queries and keys."""
    arguments = arguments_of(node)
    return (*axes.of(arguments["query"])[:-1], axes.of(arguments["key"])[-2])


def _cut(local: Local, dims: tuple[Axis, ...], leaf: Axis) -> tuple[Any, ...]:
    """Returns the dimension that is cut, its sizes (major, cut, minor), and this rank's ranges of the middle one.

    In a dimension that is a concatenation, the ranges are positions of the dimension itself.
    """
    dim = next(d for d, axis in enumerate(dims) if touches(axis, leaf))
    opened = open_product(dims[dim], leaf)
    if opened is None:
        ranged = tuple(ranges(dims[dim], leaf, local.to.tp, local.to.rank))
        return dim, (1, local.size(find(dims[dim]).size), 1), ranged
    major, minor = opened
    sizes = local.size(major), local.size(find(leaf).size), local.size(minor)
    return dim, sizes, ((local.part(chunk_start, leaf), local.part(chunk_stop, leaf)),)


FORMS: dict[Any, Form] = {
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    cross_entropy.class_terms: _class_terms,
    linear_class_terms: _of_own_classes,
    argmax_key: _argmax_key,
    linear_argmax_key: _of_own_classes,
    aten.dropout.default: _dropout,
    aten.scaled_dot_product_attention.default: _attention,
    zigzag_rows: zigzag_of_rank,
    dropout.fast_dropout: fast_again,
    dropout.fast_attention: fast_again,
    dropout.fast_causal_rows: fast_again,
    dropout.fast_zigzag_rows: fast_again,
    dropout.exact_dropout: _exact_again,
    dropout.exact_attention: _exact_again,
    routing.dispatch: _routed,
    routing.counts: _routed,
}


FAST_ONLY = set[Any]()
"""Operators that draw by a mask of their own, which no part repeats: they have forms with randomness="fast" alone."""


def has_form(node: fx.Node, factor: Factor, leaf: Axis, randomness: str) -> bool:
    """Returns whether an operator has a parallel form along a leaf of a factor that it mixes.

    A form that compares positions knows those of a rank by their start, so they must follow one another.
    """
    arguments = arguments_of(node)
    if randomness == "exact" and node.target in FAST_ONLY and draws(node):
        return False
    of_queries = factor.name == "s" and (arguments.get("is_causal") or node.target in FAST_ONLY)
    return node.target in FORMS and ((draws(node) and not of_queries) or is_major(factor.axis, leaf))
