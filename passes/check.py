"""check: the type of every value in one rank's graph, and so of its gradient; a graph that does not type is refused.

    Before: c = copy(x); y = linear(c, w); z = linear(gelu(y), v); r = reduce(z); add(r, b)
    After:  c f32[B, T, 768]{tp}, y f32[B, T, 3072@tp], z f32[B, T, 768]{+tp}, r f32[B, T, 768]

NOTE [What is proved]
Erasure: without its conjugates, its local numbers made global, the rank's graph is the model's graph, operator for
operator, in order. Typing: every operator reads placements that its rule allows, and every conjugate stands between
those of its row of the table. Together, on all ranks: the numbers and the gradients of one device. Nothing that was
planned is looked at; cuts enter by the layouts of the parameters alone. Taken on trust are the rules, `infer_axes`,
the slicing by layouts and the conjugates, which have tests of their own.

NOTE [No gradient, no difference]
Replicate and Copied are the same number on every rank and differ in the gradient. What has none is either.

NOTE [Why not by local sizes]
A shard of one row looks like something to broadcast, and a shard of none like anything. So axes and shapes are the
model's, and local sizes are checked against them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import fx
from torch._ops import OpOverload

from autotp import collectives, parallel
from autotp.axis import ONE, Axis, Size, find, holds, leaves, product, touches
from autotp.call import bind, is_tensor, operand_nodes, outputs_of
from autotp.errors import Error
from autotp.layout import Layout, Range, ranges
from autotp.operators import SIZE_ARGUMENTS
from autotp.partition import chunk_bounds
from autotp.passes.axes import Bound, Dims, Factor, infer_axes
from autotp.passes.lower import Target
from autotp.placement import Copied, Partial, Placement, Replicate, Shard
from autotp.source import line_of

aten = torch.ops.aten

CONJUGATES: dict[Any, tuple[type[Placement], type[Placement]]] = {
    collectives.copy: (Replicate, Copied),
    collectives.reduce: (Partial, Replicate),
    collectives.scatter: (Replicate, Shard),
    collectives.gather: (Shard, Replicate),
    collectives.all_gather: (Shard, Copied),
    collectives.reduce_scatter: (Partial, Shard),
}
NO_GRADIENT = (aten.detach.default, parallel.peak)
SPLITS = ("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::tensor_split")
SLICES = ("aten::slice", "aten::narrow")


@dataclass(frozen=True)
class Typed:
    """The type of one tensor of a rank's graph.

    Attributes:
        dtype: its dtype.
        dims: the axes of its dimensions.
        placement: which part of the value this is.
        flows: a gradient may flow through it.
    """

    dtype: torch.dtype
    dims: Dims
    placement: Placement
    flows: bool

    @property
    def leaf(self) -> Axis | None:
        """The axis that is cut, or None."""
        return self.placement.axis if isinstance(self.placement, Shard) else None

    def fits(self, kind: type[Placement]) -> bool:
        """True if this can be read as `kind`. See NOTE [No gradient, no difference]."""
        whole = (Replicate, Copied)
        return isinstance(self.placement, whole if kind in whole and not self.flows else kind)

    def __str__(self) -> str:
        leaf = self.leaf
        sizes = [f"{find(d).size}{'@tp' if leaf is not None and touches(d, leaf) else ''}" for d in self.dims]
        kind = str(self.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        name = "" if isinstance(self.placement, Shard) else str(self.placement)
        return f"{type(self.placement).__name__} {kind}[{', '.join(sizes)}]{name}"


def check(
    lowered: fx.Graph,
    graph: fx.Graph,
    held: Mapping[str, Layout],
    trainable: Collection[str],
    to: Target,
    local_outputs: Mapping[int, Layout] | None = None,
) -> dict[fx.Node, tuple[Typed, ...]]:
    """The types of all tensors in `lowered`: for each node one for each tensor that it gives.

    Args:
        lowered: one rank's graph.
        graph: the model's graph, from which it was made.
        held: placeholder name -> how the tensor is held; one that is not in it is whole on every rank.
        trainable: placeholder names of what a gradient may be wanted of: the parameters and the inputs.
        to: whose graph it is.
        local_outputs: output position -> the layout of an output that stays cut.

    Raises:
        Error: the graph does not type; names the node, its source line, the rule, the types expected and got.
    """
    proof = _Proof(graph, held, trainable, to, local_outputs or {})
    for node in lowered.nodes:
        proof.visit(node)
    return proof.types


class _Proof:
    """What has been proved of a rank's nodes so far."""

    def __init__(
        self, graph: fx.Graph, held: Mapping[str, Layout], trainable: Collection[str], to: Target, local: Mapping[int, Layout]
    ) -> None:
        self.axes = infer_axes(graph)
        self.model: Iterator[fx.Node] = (node for node in graph.nodes if not _is_number(node))
        self.held, self.trainable, self.to, self.local = held, trainable, to, local
        self.types: dict[fx.Node, tuple[Typed, ...]] = {}
        self.whole: dict[fx.Node, fx.Node] = {}  # The node of the model's graph whose value, or part of it, this is.
        self.numbers: dict[fx.Node, Any] = {}
        self.opened: dict[fx.Node, fx.Node] = {}  # What puts a value together again -> what took it apart.

    def visit(self, node: fx.Node) -> None:
        if _is_number(node):
            self.numbers[node] = self._number(node)
        elif node.target in CONJUGATES:
            self._conjugate(node, *CONJUGATES[node.target])
        elif node in self.opened:
            self._close(node, self.opened[node])
        elif (end := _closing(node)) is not None:
            self._open(node, end)
        elif node.target is operator.getitem and self.whole.get(node.args[0]) is node.args[0]:  # type: ignore[arg-type]
            self._give(node, node.args[0], (self.types[node.args[0]][node.args[1]],))  # type: ignore[arg-type, index]
        else:
            self._compute(node, next(self.model, None))

    def _refuse(self, node: fx.Node, problem: str, **facts: Any) -> NoReturn:
        problem = f"rank {self.to.rank} of {self.to.tp}: `{node}` {problem}"
        raise Error(problem, **{label: str(fact) for label, fact in facts.items()}, at=line_of(node))

    def _give(self, node: fx.Node, whole: fx.Node, types: tuple[Typed, ...]) -> None:
        """Remembers what was proved of a node, once the example values that it carries agree."""
        for value, typed in zip(outputs_of(node), types, strict=True):
            shape = [self._local(axis, typed.leaf) for axis in typed.dims]
            if _plain(tuple(value.shape)) != _plain(shape) or value.dtype != typed.dtype:
                got = f"{value.dtype} [{', '.join(map(str, value.shape))}]"
                self._refuse(node, f"is not this rank's part: {typed}", expected=f"[{', '.join(map(str, shape))}]", got=got)
        self.types[node], self.whole[node] = types, whole

    # ---- numbers

    def _local(self, axis: Axis, leaf: Axis | None) -> Size:
        """The length of an axis on this rank where `leaf` is cut."""
        size = find(axis).size
        if leaf is None or not touches(axis, leaf):
            return size
        start, stop = chunk_bounds(find(leaf).size.number, self.to.tp, self.to.rank)
        return Size(stop - start) * (size.divided(find(leaf).size) or ONE)

    def _pieces(self, axis: Axis, leaf: Axis) -> tuple[tuple[Range, ...], ...] | None:
        """The positions of an axis that each rank holds; None where they depend on the inputs' sizes."""
        if find(axis).size.symbols:
            return None
        return tuple(tuple(ranges(axis, leaf, self.to.tp, rank)) for rank in range(self.to.tp))

    def _number(self, node: fx.Node) -> Any:
        """A size, or what is computed from sizes."""
        if node.target is not aten.sym_size.int:
            return node.target(*self._erased(node.args), **self._erased(node.kwargs))  # type: ignore[operator]
        (typed,), dim = self.types[node.args[0]], node.args[1]  # type: ignore[index]
        if typed.leaf is None or not touches(typed.dims[dim], typed.leaf):  # type: ignore[index]
            return self.whole[node.args[0]].meta["val"].shape[dim]  # type: ignore[index]
        local = self._local(typed.dims[dim], typed.leaf)  # type: ignore[index]
        return local.number if not local.symbols else self._refuse(node, "reads a size that is cut", got=typed)

    def _erased(self, value: Any) -> Any:
        """Arguments in terms of the model's graph: values as its nodes, sizes as numbers."""
        return fx.map_arg(value, lambda n: self.numbers[n] if n in self.numbers else self.whole[n])

    # ---- nodes of the model's graph

    def _compute(self, node: fx.Node, model: fx.Node | None) -> None:
        """A node that must be the next one of the model's graph."""
        if model is None or node.op != model.op:
            self._refuse_call(node, model)
        if node.op in ("placeholder", "get_attr"):
            self._stored(node, model)
        elif node.op == "output":
            self._output(node, model)
        elif model in self.axes.bound:
            self._operator(node, model, self.axes.bound[model])
        else:
            self._other(node, model)

    def _refuse_call(self, node: fx.Node, model: fx.Node | None, call: tuple[Any, Any] | None = None) -> NoReturn:
        target, arguments = call or ((model.target, bind(model)) if model is not None else ("nothing", {}))
        got = _printed(node.target, [*node.args, *node.kwargs.values()])
        expected = _printed(target, arguments.values() if isinstance(arguments, dict) else arguments or ["?"])
        self._refuse(node, "does not compute this rank's part of the model", expected=expected, got=got)

    def _is_call(self, node: fx.Node, target: Any, arguments: Any) -> bool:
        """True if `node` calls `target` on these arguments, which are of the model's graph."""
        got = self._erased(bind(node) if isinstance(arguments, dict) else [*node.args, *node.kwargs.items()])
        return node.target is target and _plain(got) == _plain(_valued(arguments))

    def _stored(self, node: fx.Node, model: fx.Node) -> None:
        """A parameter, a buffer, an input, a constant."""
        if node.target != model.target:
            self._refuse(node, "is not what the model's graph reads here", expected=model.target)
        leaf = self._held(node, model, self.held[node.name]) if node.name in self.held else None
        placement = Replicate() if leaf is None else Shard(leaf)
        flows = node.name in self.trainable
        types = (Typed(v.dtype, self.axes.of(model), placement, flows and _is_floating(v)) for v in outputs_of(model))
        self._give(node, model, tuple(types))

    def _held(self, node: fx.Node, model: fx.Node, layout: Layout) -> Axis | None:
        """The axis that a layout cuts: the one whose cut gives every rank just these pieces."""
        axis = None if layout.dim is None else self.axes.of(model)[layout.dim]
        if layout.shape == tuple(outputs_of(model)[0].shape):
            if axis is None:
                return None
            for leaf in dict.fromkeys(leaves(axis)):
                if holds(axis, leaf) and self._pieces(axis, leaf) == layout.pieces:
                    return leaf
        self._refuse(node, "is not held as one of its axes is cut", expected=f"dimension {layout.dim} cut as {axis}", got=layout)

    def _output(self, node: fx.Node, model: fx.Node) -> None:
        for i, (got, expected) in enumerate(zip(node.args[0], model.args[0], strict=True)):  # type: ignore[arg-type]
            if _plain(self._erased(got)) != _plain(_valued(expected)):
                self._refuse(node, f"returns something else at {i}", expected=expected, got=got)
            for typed in self.types.get(got, ()):
                self._returned(node, i, typed, self.local.get(i))

    def _returned(self, node: fx.Node, i: int, typed: Typed, layout: Layout | None) -> None:
        if layout is None and not typed.fits(Replicate):
            self._refuse(node, f"returns at {i} what is not whole", expected=replace(typed, placement=Replicate()), got=typed)
        if layout is not None:
            at = [d for d, axis in enumerate(typed.dims) if typed.leaf is not None and touches(axis, typed.leaf)]
            if at != [layout.dim] or self._pieces(typed.dims[at[0]], typed.leaf) != layout.pieces:  # type: ignore[arg-type]
                self._refuse(node, f"returns at {i} what does not stay cut as declared", expected=layout, got=typed)

    def _other(self, node: fx.Node, model: fx.Node) -> None:
        """A node without a rule: one of several outputs, a number read out of a tensor, the edge of a region."""
        if not self._is_call(node, model.target, bind(model)):
            self._refuse_call(node, model)
        if model in self.axes.dims and outputs_of(model):
            source, at = node.args
            tensors = [isinstance(value, torch.Tensor) for value in source.meta["val"]]  # type: ignore[union-attr]
            return self._give(node, model, (self.types[source][sum(tensors[:at])],))  # type: ignore[index, misc]
        for operand in node.all_input_nodes:
            for typed in self.types.get(operand, ()):
                if not (typed.fits(Replicate) or typed.fits(Copied)):
                    self._refuse_read(node, operand, typed, Replicate())
        self.whole[node] = model
        if model.meta.get("val") is not None:
            self.numbers[node] = model.meta["val"]

    # ---- operators

    def _operator(self, node: fx.Node, model: fx.Node, bound: Bound) -> None:
        operands = [n for n in _operands(node) if n is not None]
        types = [typed for operand in operands for typed in self.types.get(operand, ())]
        if len(types) != len(bound.operands):
            self._refuse_call(node, model)
        leaf, factor = self._cut(node, model, bound, types)
        if factor is None:
            wants, placement = self._whole(node, bound, types)
            placements: list[Placement] = [placement] * len(bound.rule.outs)
        else:
            cut, lost = Shard(leaf), Partial(bound.rule.reducer)  # type: ignore[arg-type]
            wants = [cut if i in factor.ins else Copied() for i in range(len(types))]
            placements = [cut if o in factor.outs else lost for o in range(len(bound.rule.outs))]
        for operand, typed, want in zip(operands, types, wants, strict=True):
            if not (typed.fits(type(want)) and (typed.placement == want or isinstance(want, Replicate | Copied))):
                self._refuse_read(node, operand, typed, want, bound)
        self._give(node, model, tuple(self._outputs(node, model, bound, types, placements)))

    def _refuse_read(self, node: fx.Node, operand: fx.Node, typed: Typed, want: Placement, bound: Bound | None = None) -> NoReturn:
        rule = {} if bound is None else {"rule": bound.rule}
        self._refuse(node, f"reads `{operand}`", **rule, expected=replace(typed, placement=want), got=typed)

    def _outputs(
        self, node: fx.Node, model: fx.Node, bound: Bound, types: list[Typed], placements: list[Placement]
    ) -> Iterator[Typed]:
        flows = any(typed.flows for typed in types) and model.target not in NO_GRADIENT
        for value, dims, placement in zip(outputs_of(model), self.axes.dims[model], placements, strict=True):
            typed = Typed(value.dtype, dims, placement, flows and _is_floating(value))
            if typed.flows and isinstance(placement, Partial) and placement.reducer != "sum":
                self._refuse(node, "loses its gradient where it is reduced", rule=bound.rule, got=typed)
            yield typed

    def _whole(self, node: fx.Node, bound: Bound, types: list[Typed]) -> tuple[list[Placement], Placement]:
        """The placements that an operator which is not cut reads, and the one that it gives."""
        partial = frozenset(i for i, typed in enumerate(types) if isinstance(typed.placement, Partial))
        if partial:
            if partial not in bound.rule.linear:
                got = ", ".join(map(str, types))
                self._refuse(node, "is not linear in what it reads as partial sums", rule=bound.rule, got=got)
            return [Partial() if i in partial else Copied() for i in range(len(types))], Partial()
        copied = any(isinstance(typed.placement, Copied) and typed.flows for typed in types)
        kind: Placement = Copied() if copied else Replicate()
        return [kind] * len(types), kind

    def _cut(self, node: fx.Node, model: fx.Node, bound: Bound, types: list[Typed]) -> tuple[Axis | None, Factor | None]:
        """The leaf and the factor that the operator is cut along, (None, None) for none; its arguments are as they must be."""
        found = [typed.leaf for typed in types if typed.leaf is not None]
        if not found and self._is_call(node, model.target, bind(model)):
            return None, None
        new = dict.fromkeys(leaf for f in bound.factors if not f.ins and not f.mark for leaf in leaves(f.axis))
        for leaf in found[:1] or new:
            factor = _factor(bound, leaf)
            if factor is None and found:
                at = _values_of(types, leaf)
                self._refuse(node, "cannot be cut along the axis of what it reads", rule=bound.rule, got=at)
            call = self._local_call(node, model, bound, leaf, factor) if factor is not None else None
            if call is not None and self._is_call(node, *call):
                return leaf, factor
            if found:
                self._refuse_call(node, model, call or (f"a parallel form of {model.target}", None))
        self._refuse_call(node, model)

    def _local_call(self, node: fx.Node, model: fx.Node, bound: Bound, leaf: Axis, factor: Factor) -> tuple[Any, Any] | None:
        """The call that computes this rank's part: its target, and its arguments in terms of the model's graph."""
        arguments = bind(model)
        if factor.mark == "!":
            form = FORMS.get(node.target)
            usable = form is not None and form[0] is model.target and form[1] in ("", self.to.randomness)
            found = form[2](self, arguments, bound.dims[0], leaf) if usable and form is not None else None
            return None if found is None else (node.target, list(found))
        outs = self.axes.dims[model]
        name = model.target._schema.name if isinstance(model.target, OpOverload) else ""
        if name in SPLITS:
            dim = arguments["dim"] % len(outs[0])
            sizes = [self._local(dims[dim], leaf) for dims in outs]
            return aten.split_with_sizes.default, {"self": arguments["self"], "split_sizes": sizes, "dim": dim}
        if name in SLICES and touches(bound.dims[0][0][arguments["dim"]], leaf):
            return self._local_slice(model, arguments, bound.dims[0][0], leaf)
        if (at := SIZE_ARGUMENTS.get(name.replace("::", "."))) is not None:
            start = arguments["dim"] % len(bound.dims[0][0]) if name == "aten::unflatten" else len(outs[0]) - len(arguments[at])
            dims = outs[0][start : start + len(arguments[at])]
            arguments[at] = [self._local(axis, leaf) for axis in dims]
        return model.target, arguments

    def _local_slice(self, model: fx.Node, arguments: dict[str, Any], dims: Dims, leaf: Axis) -> tuple[Any, Any] | None:
        """A slice of a dimension that is cut takes what the rank holds between its bounds."""
        dim, start = arguments["dim"] % len(dims), arguments["start"] or 0
        length, pieces = find(dims[dim]).size.number, self._pieces(dims[dim], leaf)
        first = max(start + length, 0) if start < 0 else start
        last = first + outputs_of(model)[0].shape[dim]
        mine = [i for a, b in (pieces or [()] * self.to.tp)[self.to.rank] for i in (a, b)]
        ends = [sum(max(min(b, bound) - a, 0) for a, b in zip(mine[::2], mine[1::2], strict=True)) for bound in (first, last)]
        if pieces is None or arguments.get("step", 1) != 1:
            return None
        return aten.slice.Tensor, {"self": arguments["self"], "dim": dim, "start": ends[0], "end": ends[1], "step": 1}

    # ---- conjugates

    def _conjugate(self, node: fx.Node, before: type[Placement], after: type[Placement]) -> None:
        """A row of the table of conjugates, in its place and over the right dimension."""
        x, axis, *rest = node.args
        types = self.types.get(x, ())  # type: ignore[arg-type]
        if len(types) != 1 or axis != self.to.axis or node.kwargs:
            self._refuse(node, f"is no conjugate over `{self.to.axis}`", got=node.format_node())
        (typed,) = types
        if not typed.fits(before):
            self._refuse(node, f"reads `{x}`", expected=before.__name__, got=typed)
        leaf = None
        if Shard in (before, after):
            leaf = self._exchanged(typed, *self._erased(rest)) if len(rest) in (2, 3) else None
            allowed = leaf is not None
        else:
            allowed = rest in ([], ["sum"]) or (isinstance(typed.placement, Partial) and rest == ["max"])
        reducer = typed.placement.reducer if isinstance(typed.placement, Partial) else "sum"
        wanted = "max" if rest == ["max"] else "sum"
        if not allowed or reducer != wanted:
            self._refuse(node, "moves another part than the one that is cut", expected=typed, got=_printed(node.target, node.args))
        placement = Shard(leaf) if leaf is not None and after is Shard else after()
        self._give(node, self.whole[x], (replace(typed, placement=placement),))  # type: ignore[index]

    def _exchanged(self, typed: Typed, dim: int, size: int, block: int = 1) -> Axis | None:
        """The leaf that a conjugate cuts or joins: the outermost of its dimension, in blocks of the rest of it."""
        axis, minor = find(typed.dims[dim]), ONE
        whole = axis.size
        while axis.kind == "product":
            for part in axis.parts[1:]:
                minor = minor * part.size
            axis = find(axis.parts[0])
        fits = (whole, minor) == (Size(size), Size(block)) and axis.kind == "leaf" and holds(axis, axis)
        alone = sum(touches(other, axis) for other in typed.dims) == 1
        return axis if fits and alone and typed.leaf in (None, axis) else None

    def _open(self, node: fx.Node, end: fx.Node) -> None:
        """A dimension taken apart, so that one part of it can be cut or joined."""
        (typed,) = self.types[node.args[0]]  # type: ignore[index]
        dim, sizes = (node.args[2], node.args[1]) if node.target is SPLIT else (node.args[1], node.args[2])
        for parts in _openings(node.target, find(typed.dims[dim])):  # type: ignore[index]
            if _plain([self._local(part, typed.leaf) for part in parts]) == _plain(self._erased(sizes)):
                break
        else:
            self._refuse(node, "does not split a dimension as its axis is made up", expected=typed, got=sizes)
        before, after = typed.dims[:dim], typed.dims[dim + 1 :]  # type: ignore[operator, misc]
        opened = [[part] for part in parts] if node.target is SPLIT else [parts]
        self.opened[end] = node
        self._give(node, node, tuple(replace(typed, dims=(*before, *inner, *after)) for inner in opened))

    def _close(self, node: fx.Node, opening: fx.Node) -> None:
        """The dimension put together again, all its parts moved alike."""
        x = opening.args[0]
        found = [typed for operand in node.all_input_nodes for typed in self.types.get(operand, ())]
        if any(typed.placement != found[0].placement for typed in found):
            self._refuse(node, "joins parts that were moved differently", got=", ".join(map(str, found)))
        (typed,) = self.types[x]  # type: ignore[index]
        self._give(node, self.whole[x], (replace(typed, placement=found[0].placement),))  # type: ignore[index]


SPLIT, JOIN, UNFLATTEN, FLATTEN = (
    aten.split_with_sizes.default,
    aten.cat.default,
    aten.unflatten.int,
    aten.flatten.using_ints,
)


def _closing(node: fx.Node) -> fx.Node | None:
    """What undoes a split or an unflatten between which and it there are conjugates only; None for other nodes."""
    if node.target is UNFLATTEN:
        dim, moved = node.args[1], _moved(node)
        end = _reader(moved)
        return end if end is not None and end.target is FLATTEN and end.args == (moved, dim, dim + 2) else None  # type: ignore[operator]
    if node.target is not SPLIT or len(node.args) != 3:
        return None
    items = {item.args[1]: item for item in node.users if item.target is operator.getitem}
    ends = [_moved(items[i]) if i in items else None for i in range(len(node.args[1]))]  # type: ignore[arg-type]
    end = _reader(ends[0]) if ends else None
    together = end is not None and end.target is JOIN and list(end.args) == [ends, node.args[2]]
    return end if together and len(node.users) == len(ends) and all(_reader(e) is end for e in ends) else None


def _reader(node: fx.Node | None) -> fx.Node | None:
    """The only reader of a value."""
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _moved(node: fx.Node) -> fx.Node | None:
    """What a value is once conjugates, and nothing else, have moved it."""
    reader = _reader(node)
    if reader is None or reader.target in CONJUGATES:
        return reader
    return _closing(reader)


def _openings(target: Any, axis: Axis) -> Iterator[list[Axis]]:
    """The ways in which an axis can be split: into the parts of a concatenation, around one part of a product."""
    if target is SPLIT and axis.kind == "concat":
        yield list(axis.parts)
    if target is UNFLATTEN and axis.kind == "product":
        for i, part in enumerate(axis.parts):
            yield [product(axis.parts[:i]), part, product(axis.parts[i + 1 :])]


def _is_number(node: fx.Node) -> bool:
    """True for a size, and for what is computed from sizes alone."""
    number = isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
    sizes = node.target is aten.sym_size.int or not any(map(is_tensor, node.all_input_nodes))
    return node.op == "call_function" and number and sizes


def _is_floating(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _operands(node: fx.Node) -> Sequence[fx.Node | None]:
    """The tensor operands in order. A value that a parallel form reads twice is there twice."""
    return operand_nodes(node) if isinstance(node.target, OpOverload) else [arg for arg in node.args if is_tensor(arg)]


def _factor(bound: Bound, leaf: Axis) -> Factor | None:
    """The factor along which an operator can be cut, if every operand and output has the leaf in one dimension at most."""
    factor = bound.cuttable(leaf)
    for at, dims in zip((factor.ins, factor.outs) if factor else (), bound.dims, strict=False):
        for i, axes in enumerate(dims):
            has = [d for d, axis in enumerate(axes) if touches(axis, leaf)]
            if has != [at[i] for i in (i,) if i in at] or not all(holds(axes[d], leaf) for d in has):
                return None
    return factor


def _valued(arguments: Any) -> Any:
    """Arguments of the model's graph with sizes as numbers."""
    return fx.map_arg(arguments, lambda n: n.meta["val"] if _is_number(n) else n)


def _plain(value: Any) -> Any:
    """A form in which arguments of two graphs can be compared."""
    if isinstance(value, torch.SymInt):
        value = Size.of(value)
    if isinstance(value, Size):
        return 0 if value.number == 0 else value.number if not value.symbols else value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float | torch.SymFloat | torch.SymBool) else value


def _printed(target: Any, arguments: Any) -> str:
    name = str(target) if isinstance(target, OpOverload | str) else target.__name__
    return f"{name}({', '.join(str(list(a)) if isinstance(a, list | tuple) else str(a) for a in arguments)})"


# ---- parallel forms: what each is of, and its arguments on this rank

Form = Callable[[_Proof, dict[str, Any], Sequence[Dims], Axis], Sequence[Any] | None]


def _start(proof: _Proof, axis: Axis, leaf: Axis) -> int | None:
    """Where this rank's positions start; None unless they are in one piece."""
    pieces = (proof._pieces(axis, leaf) or ())[proof.to.rank :][:1]
    if not pieces or len(pieces[0]) > 1:
        return None
    return pieces[0][0][0] if pieces[0] else find(axis).size.number


def _embedding(proof: _Proof, a: dict[str, Any], dims: Sequence[Dims], leaf: Axis) -> Sequence[Any] | None:
    start = _start(proof, dims[0][0], leaf)
    whole = a["scale_grad_by_freq"] or a["sparse"] or start is None
    return None if whole else (a["weight"], a["indices"], start, a["padding_idx"])


def _gather(proof: _Proof, a: dict[str, Any], dims: Sequence[Dims], leaf: Axis) -> Sequence[Any] | None:
    start = _start(proof, dims[0][a["dim"]], leaf)
    return None if a["sparse_grad"] or start is None else (a["self"], a["dim"], a["index"], start)


def _mask(proof: _Proof, dims: Dims, leaf: Axis) -> Sequence[Any] | None:
    """The shape of one device's mask, and which part of it the rank keeps (exact); the rank (fast)."""
    if proof.to.randomness == "fast":
        return (proof.to.rank,)
    (dim,) = (d for d, axis in enumerate(dims) if touches(axis, leaf))
    pieces = proof._pieces(dims[dim], leaf)
    return None if pieces is None else ([find(axis).size for axis in dims], dim, pieces[proof.to.rank])


def _dropout(proof: _Proof, a: dict[str, Any], dims: Sequence[Dims], leaf: Axis) -> Sequence[Any] | None:
    mask = _mask(proof, dims[0], leaf)
    return (a["input"], a["p"], *mask) if a["train"] and mask is not None else None


def _attention(proof: _Proof, a: dict[str, Any], dims: Sequence[Dims], leaf: Axis) -> Sequence[Any] | None:
    mask = _mask(proof, (*dims[0][:-1], dims[1][-2]), leaf)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    return None if mask is None else (*(a.get(name, False) for name in names), *mask)


SDPA = aten.scaled_dot_product_attention.default
FORMS: dict[Any, tuple[Any, str, Form]] = {
    parallel.embedding: (aten.embedding.default, "", _embedding),
    parallel.gather: (aten.gather.default, "", _gather),
    parallel.exact_dropout: (aten.dropout.default, "exact", _dropout),
    parallel.fast_dropout: (aten.dropout.default, "fast", _dropout),
    parallel.exact_attention: (SDPA, "exact", _attention),
    parallel.fast_attention: (SDPA, "fast", _attention),
}
