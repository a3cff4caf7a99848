"""lower: the graph of one rank. Cut values become local, and a conjugate stands wherever placements differ.

    Before: y = linear(x, w); z = gelu(y); o = linear(z, v); r = add(x, o)        w, v cut by width
    After:  c = copy(x); y = linear(c, w); z = gelu(y); o = linear(z, v); p = reduce(o); r = add(x, p)

Every communication is a row of the table of conjugates (`autotp/collectives.py`). A value that several cut
operators read has one copy. Graphs name the mesh axis; `autotp/run.py` binds the name to a process group.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from autotp import collectives, parallel
from autotp.axis import Axis, Size, find, holds, touches
from autotp.builder import Builder, fake_mode_of
from autotp.call import bind
from autotp.errors import Error
from autotp.layout import ranges
from autotp.operators import SIZE_ARGUMENTS
from autotp.passes.axes import Axes, Bound, is_getitem
from autotp.passes.flow import needs
from autotp.passes.plan import Decision
from autotp.placement import Copied, Partial, Placement, Replicate, Shard
from autotp.source import line_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Target:
    """Whose graph is made.

    Attributes:
        axis: the mesh axis's name.
        tp, rank: its size, and the place of this rank on it.
        randomness: "exact" draws the masks one device would, "fast" masks of the rank's own.
        local_outputs: output positions that stay cut; the others are gathered.
    """

    axis: str
    tp: int
    rank: int
    randomness: Literal["exact", "fast"] = "fast"
    local_outputs: frozenset[int] = frozenset()


def lower(graph: fx.Graph, axes: Axes, decision: Decision, differentiable: Collection[fx.Node], target: Target) -> fx.Graph:
    """The graph that `target.rank` runs.

    Args:
        differentiable: values a gradient may flow through; only these need their conjugate's backward.
    """
    lowering = _Lowering(graph, axes, decision, differentiable, target)
    for node in graph.nodes:
        lowering.visit(node)
    return lowering.builder.graph


class _Lowering:
    """The new graph, and for every old value the forms in which the new one has it."""

    def __init__(self, graph: fx.Graph, axes: Axes, decision: Decision, differentiable: Collection[fx.Node], to: Target) -> None:
        self.axes, self.decision, self.differentiable, self.to = axes, decision, differentiable, to
        self.builder = Builder(fake_mode_of(graph))
        self.forms: dict[fx.Node, dict[Placement, fx.Node]] = {}
        self.have: dict[fx.Node, tuple[Placement, ...]] = {}
        self.symbols: dict[str, tuple[fx.Node, int]] = {}

    # ---- one node

    def visit(self, node: fx.Node) -> None:
        self.builder.origin = node
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "output":
            self.builder.graph.output(tuple(self._output(n, i) for i, n in enumerate(node.args[0])))
        elif is_getitem(node) and node.args[0] in self.have:
            self._getitem(node)
        elif node in self.axes.bound:
            self._operator(node, self.axes.bound[node])
        else:
            self._plain(node)

    def _placeholder(self, node: fx.Node) -> None:
        new = self.builder.copy(node)
        leaf = self.decision.held.get(node)
        if leaf is not None:
            new.meta["val"] = self._local_value(node.meta["val"], self.axes.of(node), leaf)
        self._give(node, 0, new, Shard(leaf) if leaf is not None else Replicate())
        if isinstance(node.meta.get("val"), torch.Tensor):
            for d, size in enumerate(node.meta["val"].shape):
                if not isinstance(size, int) and size.node.expr.is_Symbol:
                    self.symbols.setdefault(str(size.node.expr), (new, d))

    def _output(self, node: Any, position: int) -> Any:
        if not isinstance(node, fx.Node) or node not in self.have:
            return self.builder.map(node)
        self.builder.origin = node
        if position in self.to.local_outputs and isinstance(self.have[node][0], Shard):
            return self.forms[node][self.have[node][0]]
        return self.read(node, Replicate())

    def _getitem(self, node: fx.Node) -> None:
        source, at = node.args
        placement = self.have[source][at]  # type: ignore[index]
        new = self.builder.raw(operator.getitem, (self.forms[source][placement], at))  # type: ignore[index]
        new.meta["val"] = new.args[0].meta["val"][at]  # type: ignore[union-attr]
        self._give(node, 0, new, placement)

    def _plain(self, node: fx.Node) -> None:
        """A node without tensors of its own: sizes, arithmetic on them, regions."""
        for operand in node.all_input_nodes:
            if operand in self.have:
                self.builder.env[operand] = self._sized(operand, node)
        self.builder.copy(node)

    def _sized(self, operand: fx.Node, node: fx.Node) -> fx.Node:
        """Any form of a value will do where only a size is read that no cut changes."""
        placement = self.have[operand][0]
        return self.forms[operand][placement] if not isinstance(placement, Shard) else self.read(operand, Replicate())

    def _operator(self, node: fx.Node, bound: Bound) -> None:
        leaf = self.decision.cuts.get(node)
        wants = needs(node, bound, leaf, self.have)
        for operand, placement in zip(bound.operands, wants.operands, strict=True):
            self.builder.env[operand] = self.read(operand, placement)
        new = self._local_call(node, bound, leaf) if leaf is not None else self.builder.copy(node)
        self.have[node] = wants.outputs
        self.forms[node] = {placement: new for placement in wants.outputs}
        self.builder.env[node] = new

    def _give(self, node: fx.Node, at: int, new: fx.Node, placement: Placement) -> None:
        self.have[node] = (placement,)
        self.forms[node] = {placement: new}
        self.builder.env[node] = new

    # ---- conversions

    def read(self, node: fx.Node, want: Placement) -> fx.Node:
        """The form of a value in which a reader wants it, converted once however many readers there are."""
        forms, have = self.forms[node], self.have[node][0]
        if want not in forms:
            forms[want] = self._converted(node, have, want)
        return forms[want]

    def _converted(self, node: fx.Node, have: Placement, want: Placement) -> fx.Node:
        flows = node in self.differentiable
        match have, want:
            case Replicate(), Copied():
                return self._collective(collectives.copy, self.forms[node][have]) if flows else self.forms[node][have]
            case Partial(reducer), Replicate():
                extra = (reducer,) if reducer != "sum" else ()
                return self._collective(collectives.reduce, self.forms[node][have], *extra)
            case Replicate(), Shard(leaf):
                return self._cut(node, self.forms[node][have], leaf, collectives.scatter)
            case Shard(leaf), Replicate():
                return self._cut(node, self.forms[node][have], leaf, collectives.gather)
            case Shard(leaf), Copied() if Replicate() not in self.forms[node]:
                return self._cut(node, self.forms[node][have], leaf, collectives.all_gather)
            case Partial("sum"), Shard(leaf) if Replicate() not in self.forms[node]:
                return self._cut(node, self.forms[node][have], leaf, collectives.reduce_scatter)
            case _:  # Through the replicated form.
                whole = self.read(node, Replicate())
                self.forms[node][Replicate()] = whole
                return self._converted(node, Replicate(), want)

    def _collective(self, kind: Callable[..., Any], x: fx.Node, *args: Any) -> fx.Node:
        new = self.builder.raw(kind, (x, self.to.axis, *args))
        new.meta["val"] = x.meta["val"]
        return new

    def _cut(self, node: fx.Node, x: fx.Node, leaf: Axis, kind: Callable[..., Any]) -> fx.Node:
        """A collective along `leaf`, which may lie inside a product or in each part of a concatenation."""
        dim = self.axes.dim_of(node, leaf)
        if dim is None:
            raise Error(f"cannot move `{node}` along the axis of {leaf}", at=line_of(node))
        return self._along(x, self.axes.of(node)[dim], leaf, dim, kind)

    def _along(self, x: fx.Node, axis: Axis, leaf: Axis, dim: int, kind: Callable[..., Any]) -> fx.Node:
        axis, leaf, inward = find(axis), find(leaf), kind in (collectives.scatter, collectives.reduce_scatter)
        if axis is leaf:
            return self._exchange(x, kind, dim, leaf.size.number, 1, inward)
        if axis.kind == "concat":
            lengths = [_length(part, None if inward else leaf, self.to) for part in axis.parts]
            pieces = self.builder.raw(aten.split_with_sizes.default, (x, lengths, dim))
            pieces.meta["val"] = [self._resized(x.meta["val"], dim, n) for n in lengths]
            moved = [self._along(self._item(pieces, i), part, leaf, dim, kind) for i, part in enumerate(axis.parts)]
            return self._sized_call(aten.cat.default, (moved, dim), x, dim, sum(_known(m, dim) for m in moved))
        at = next(i for i, part in enumerate(axis.parts) if holds(part, leaf))
        minor = Size(1)
        for part in axis.parts[at + 1 :]:
            minor = minor * part.size
        if at == 0 and find(axis.parts[0]) is leaf and not minor.symbols:
            return self._exchange(x, kind, dim, axis.size.number, minor.number, inward)
        return self._inside(x, axis, at, leaf, dim, kind)

    def _inside(self, x: fx.Node, axis: Axis, at: int, leaf: Axis, dim: int, kind: Callable[..., Any]) -> fx.Node:
        """Splits a product into major, the part that has the leaf, and minor; moves that part; joins them again."""
        inward = kind in (collectives.scatter, collectives.reduce_scatter)
        minor = Size(1)
        for part in axis.parts[at + 1 :]:
            minor = minor * part.size
        middle = _length(axis.parts[at], None if inward else leaf, self.to)
        whole = self._size(x.meta["val"].shape[dim])
        per = self._times(middle, self._symbolic(minor))
        major = whole // per if isinstance(whole, int) and isinstance(per, int) else self._call(operator.floordiv, whole, per)
        split = self.builder.call(aten.unflatten.int, x, dim, [major, middle, self._symbolic(minor)])
        moved = self._along(split, axis.parts[at], leaf, dim + 1, kind)
        return self.builder.call(aten.flatten.using_ints, moved, dim, dim + 2)

    def _exchange(self, x: fx.Node, kind: Callable[..., Any], dim: int, size: int, block: int, inward: bool) -> fx.Node:
        args = (dim, size) if block == 1 else (dim, size, block)
        new = self.builder.raw(kind, (x, self.to.axis, *args))
        local = _chunk(size // block, self.to) * block
        new.meta["val"] = self._resized(x.meta["val"], dim, local if inward else size)
        return new

    def _item(self, pieces: fx.Node, i: int) -> fx.Node:
        new = self.builder.raw(operator.getitem, (pieces, i))
        new.meta["val"] = pieces.meta["val"][i]
        return new

    def _sized_call(self, op: Any, args: tuple[Any, ...], like: fx.Node, dim: int, length: int) -> fx.Node:
        new = self.builder.raw(op, args)
        new.meta["val"] = self._resized(like.meta["val"], dim, length)
        return new

    # ---- local calls

    def _local_call(self, node: fx.Node, bound: Bound, leaf: Axis) -> fx.Node:
        """The call on local operands, its size arguments and example value local."""
        factor = bound.cuttable(leaf)
        assert factor is not None
        form = LOCAL_FORMS.get(node.target) if factor.mark == "!" else None
        if factor.mark == "!" and form is None:
            raise Error(f"{node.target} has no parallel form along `{factor.name}`", at=line_of(node))
        if form is not None:
            new = self.builder.raw(*form(self, node, bound, leaf))
        else:
            new = self.builder.graph.node_copy(node, lambda old: self.builder.env[old])
            new.meta = {key: value for key, value in node.meta.items() if key in ("stack_trace", "nn_module_stack")}
            with self.builder.graph.inserting_before(new):
                self._localize(new, node, leaf)
        values = [self._local_value(v, dims, leaf) for v, dims in zip(_tensors(node), self.axes.dims[node], strict=True)]
        new.meta["val"] = values if isinstance(node.meta["val"], list | tuple) else values[0]
        return new

    def _localize(self, new: fx.Node, node: fx.Node, leaf: Axis) -> None:
        """Makes the size arguments of a cut call local ones."""
        name = str(node.target).rsplit(".", 1)[0]
        arguments = bind(node)
        dims = self.axes.dims[node]
        if name in ("aten.split", "aten.chunk", "aten.tensor_split", "aten.split_with_sizes"):
            dim = arguments["dim"] % len(dims[0])
            lengths = [self._local_size(v.shape[dim], d[dim], leaf) for v, d in zip(_tensors(node), dims, strict=True)]
            new.target, new.args, new.kwargs = aten.split_with_sizes.default, (new.args[0], lengths, dim), {}
        elif name in ("aten.slice", "aten.narrow"):
            self._localize_slice(new, node, arguments, leaf)
        elif name in SIZE_ARGUMENTS:
            at = SIZE_ARGUMENTS[name]
            sizes = self._local_sizes(node, arguments[at], leaf, new)
            place = next(i for i, arg in enumerate(node.target._schema.arguments) if arg.name == at)  # type: ignore[union-attr]
            new.args = (*new.args[:place], sizes, *new.args[place + 1 :])

    def _local_sizes(self, node: fx.Node, given: Any, leaf: Axis, new: fx.Node) -> list[Any]:
        """The size argument for the local output: explicit everywhere, since -1 is ambiguous on an empty shard."""
        shape, dims = node.meta["val"].shape, self.axes.of(node)
        offset = len(shape) - len(given)
        if str(node.target).startswith("aten.unflatten"):
            at = bind(node)["dim"] % node.args[0].meta["val"].dim()  # type: ignore[union-attr]
            shape, dims, offset = shape[at : at + len(given)], dims[at : at + len(given)], 0
        return [self._local_size(shape[i + offset], dims[i + offset], leaf) for i in range(len(given))]

    def _local_size(self, size: Any, axis: Axis, leaf: Axis) -> Any:
        """One size of a local tensor: a number, or a node where it is symbolic."""
        if not touches(axis, leaf):
            return self._size(size)
        if isinstance(size, int):
            return sum(b - a for a, b in ranges(axis, leaf, self.to.tp, self.to.rank))
        rest = find(axis).size.divided(leaf.size)
        return self._times(_chunk(find(leaf).size.number, self.to), self._symbolic(rest or Size(1)))

    def _localize_slice(self, new: fx.Node, node: fx.Node, arguments: dict[str, Any], leaf: Axis) -> None:
        """A slice out of a concatenation starts where the local parts before it end."""
        x, dim = node.args[0], arguments["dim"] % node.meta["val"].dim()
        axis, taken = self.axes.of(x)[dim], self.axes.of(node)[dim]  # type: ignore[arg-type]
        if not touches(axis, leaf):
            return
        start = arguments["start"] or 0
        length = node.args[0].meta["val"].shape[dim]  # type: ignore[union-attr]
        start = max(start + length, 0) if start < 0 else start
        mine = ranges(axis, leaf, self.to.tp, self.to.rank)
        before = sum(max(min(b, start) - a, 0) for a, b in mine)
        count = sum(b - a for a, b in ranges(taken, leaf, self.to.tp, self.to.rank))
        new.target, new.kwargs = aten.slice.Tensor, {}
        new.args = (new.args[0], dim, before, before + count)

    # ---- sizes and example values

    def _local_value(self, value: Any, dims: tuple[Axis, ...], leaf: Axis) -> Any:
        """An example value with the cut dimension local."""
        for d, axis in enumerate(dims):
            if touches(axis, leaf):
                return self._resized(value, d, _length(axis, leaf, self.to, value.shape[d]))
        return value

    def _resized(self, value: Any, dim: int, length: Any) -> Any:
        shape = [length if d == dim else n for d, n in enumerate(value.shape)]
        with self.builder.mode:
            return torch.empty(shape, dtype=value.dtype, device=value.device)

    def _size(self, size: Any) -> Any:
        """A size as an argument: a number, or nodes that compute it from the inputs' sizes."""
        return size if isinstance(size, int) else self._symbolic(Size.of(size))

    def _symbolic(self, size: Size) -> Any:
        found: Any = size.number
        for symbol in size.symbols:
            if symbol not in self.symbols:
                raise Error(f"the size {size} cannot be computed from the inputs' shapes", at=line_of(self.builder.origin))
            source, d = self.symbols[symbol]
            found = self._times(found, self._call(aten.sym_size.int, source, d))
        return found

    def _times(self, a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if 1 in (a, b):
            return b if a == 1 else a
        return self._call(operator.mul, a, b)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        values = fx.map_arg(args, lambda n: n.meta["val"])
        new = self.builder.raw(target, args)
        new.meta["val"] = values[0].shape[values[1]] if target is aten.sym_size.int else target(*values)
        return new


def _tensors(node: fx.Node) -> list[Any]:
    value = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]


def _chunk(n: int, to: Target) -> int:
    from autotp.partition import chunk_bounds

    start, stop = chunk_bounds(n, to.tp, to.rank)
    return stop - start


def _length(axis: Axis, leaf: Axis | None, to: Target, size: Any = None) -> Any:
    """The local length of an axis where `leaf` is cut (the global one for None)."""
    axis = find(axis)
    if leaf is None:
        return axis.size.number
    if axis.size.symbols:
        return size // find(leaf).size.number * _chunk(find(leaf).size.number, to)
    return sum(b - a for a, b in ranges(axis, leaf, to.tp, to.rank))


def _known(node: fx.Node, dim: int) -> int:
    return node.meta["val"].shape[dim]


# ---- parallel forms

Form = tuple[Callable[..., Any], tuple[Any, ...]]


def _start(lowering: _Lowering, leaf: Axis) -> int:
    from autotp.partition import chunk_bounds

    return chunk_bounds(find(leaf).size.number, lowering.to.tp, lowering.to.rank)[0]


def _embedding(lowering: _Lowering, node: fx.Node, bound: Bound, leaf: Axis) -> Form:
    args = lowering.builder.map(bind(node))
    return parallel.embedding, (args["weight"], args["indices"], _start(lowering, leaf), args["padding_idx"])


def _gather(lowering: _Lowering, node: fx.Node, bound: Bound, leaf: Axis) -> Form:
    args = lowering.builder.map(bind(node))
    return parallel.gather, (args["self"], args["dim"], args["index"], _start(lowering, leaf))


def _dropout(lowering: _Lowering, node: fx.Node, bound: Bound, leaf: Axis) -> Form:
    x, p = lowering.builder.env[node.args[0]], node.args[1]
    if lowering.to.randomness == "fast":
        return parallel.fast_dropout, (x, p, lowering.to.rank)
    return parallel.exact_dropout, (x, p, *_global_part(lowering, node.meta["val"].shape, lowering.axes.of(node), leaf))


def _global_part(lowering: _Lowering, shape: Any, dims: Any, leaf: Axis) -> tuple[Any, ...]:
    """The global shape, the cut dimension, and this rank's ranges of it."""
    dim = next(d for d, axis in enumerate(dims) if touches(axis, leaf))
    return [lowering._size(n) for n in shape], dim, tuple(ranges(dims[dim], leaf, lowering.to.tp, lowering.to.rank))


def _attention(lowering: _Lowering, node: fx.Node, bound: Bound, leaf: Axis) -> Form:
    raw = bind(node)
    args = lowering.builder.map(raw)
    shared = (args["query"], args["key"], args["value"], args["attn_mask"], args["dropout_p"], args["is_causal"])
    shared = (*shared, args["scale"], args.get("enable_gqa", False))
    if lowering.to.randomness == "fast":
        return parallel.fast_attention, (*shared, lowering.to.rank)
    query, key = raw["query"], raw["key"]
    shape = [*query.meta["val"].shape[:-1], key.meta["val"].shape[-2]]
    dims = (*lowering.axes.of(query)[:-1], lowering.axes.of(key)[-2])
    return parallel.exact_attention, (*shared, *_global_part(lowering, shape, dims, leaf))


LOCAL_FORMS: dict[Any, Callable[[_Lowering, fx.Node, Bound, Axis], Form]] = {
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    aten.dropout.default: _dropout,
    aten.scaled_dot_product_attention.default: _attention,
}
