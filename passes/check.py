"""check: the type of every value in one rank's graph, and so of its gradient; a graph that does not type is refused.

    Before: c = copy(x); y = linear(c, w); z = linear(gelu(y), v); r = reduce(z); add(r, b)
    After:  c f32[B, T, 768]{tp}, y f32[B, T, 3072@tp], z f32[B, T, 768]{+tp}, r f32[B, T, 768]

NOTE [What is proved]
Erasure: without conjugates, and with local numbers made global, the rank's graph is the model's: each of its operators
is one of the model's on the same operands, random draws in the same order. Typing: every operator reads placements that
its rule allows, and every conjugate stands between those of its row of the table. Together, on all ranks: the numbers
and the gradients of one device. Nothing that was planned is looked at; cuts come from the parameters' layouts alone.
On trust are the rules, `infer_axes`, slicing by layouts and the conjugates: these have tests of their own.

NOTE [No gradient, no difference]
Replicate and Copied are the same number on every rank and differ in the gradient. A value that has none is either.

NOTE [Why not by local sizes]
A shard of one row looks like something to broadcast, a shard of none like anything. So axes and shapes are the model's,
and local sizes are checked against them.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import fx
from torch._ops import OpOverload

from autotp import collectives, parallel
from autotp.axis import Axis, Size, find, holds, leaves, open_product, product, touches
from autotp.call import bind, draws, is_tensor, operand_nodes, outputs_of
from autotp.errors import Error
from autotp.layout import Layout, Range, ranges
from autotp.operators import SIZE_ARGUMENTS
from autotp.passes.axes import Axes, Bound, Dims, Factor, infer_axes
from autotp.passes.local import Target
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
"""The placements that each conjugate reads and gives."""
NO_GRADIENT = (aten.detach.default, parallel.peak)
"""Operators that no gradient passes."""


@dataclass(frozen=True)
class Typed:
    """The type of one tensor of a rank's graph.

    Attributes:
        dtype: its dtype.
        dims: the axes of its dimensions.
        placement: which part of the whole value it is.
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

    def cut_dims(self, leaf: Axis | None) -> list[int]:
        """The dimensions that have `leaf` anywhere."""
        return [d for d, axis in enumerate(self.dims) if leaf is not None and touches(axis, leaf)]

    def fits(self, want: Placement) -> bool:
        """True if this can be read as `want`. See NOTE [No gradient, no difference]."""
        same = (Replicate(), Copied())
        return self.placement == want or (not self.flows and self.placement in same and want in same)

    def __str__(self) -> str:
        sizes = [f"{find(a).size}{'@tp' * (d in self.cut_dims(self.leaf))}" for d, a in enumerate(self.dims)]
        dtype = str(self.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        return f"{dtype}[{', '.join(sizes)}]{str(self.placement) * (self.leaf is None)}"


def check(
    lowered: fx.Graph,
    graph: fx.Graph,
    held: Mapping[str, Layout],
    trainable: Collection[str],
    to: Target,
    local_outputs: Mapping[int, Layout],
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
    proof = _Proof(graph, held, trainable, to, local_outputs)
    for node in lowered.nodes:
        try:
            proof.visit(node)
        except Error:
            raise
        except Exception as error:  # Whatever it is, it is no proof.
            proof.refuse(node, f"cannot be typed: {error!r}", got=_called(node))
    return proof.types


@dataclass(frozen=True)
class _Cut:
    """What an operator is cut along: the leaf, and the factor that has it."""

    leaf: Axis
    factor: Factor


Reads = Sequence[tuple[fx.Node, Typed]]


class _Proof:
    """What has been proved of a rank's nodes so far."""

    def __init__(self, graph: fx.Graph, held: Any, trainable: Any, to: Target, local_outputs: Any) -> None:
        self.held, self.trainable, self.to, self.local_outputs = held, trainable, to, local_outputs
        self.axes = infer_axes(graph)
        self.model = _Model(graph)
        self.types: dict[fx.Node, tuple[Typed, ...]] = {}
        self.whole: dict[fx.Node, fx.Node] = {}  # The node of the model's graph whose value, or part of it, this is.
        self.numbers: dict[fx.Node, Any] = {}
        self.opened: dict[fx.Node, fx.Node] = {}  # What puts a value together again -> what took it apart.

    def visit(self, node: fx.Node) -> None:
        source: Any = node.args[0] if node.args else None
        if _is_number(node):
            self.numbers[node] = self._number(node)
        elif node.target in CONJUGATES:
            self._conjugate(node, *node.args)
        elif node in self.opened:
            self._close(node, self.opened[node])
        elif (end := _closing(node)) is not None:
            self._open(node, end)
        elif node.target is operator.getitem and source in self.opened.values():
            self._give(node, source, (self.types[source][node.args[1]],))  # type: ignore[index]
        else:
            self._compute(node)

    def _give(self, node: fx.Node, whole: fx.Node, types: tuple[Typed, ...]) -> None:
        """Remembers what was proved of a node, if the example values that it carries agree."""
        for value, typed in zip(outputs_of(node), types, strict=True):
            shape = [_length(self.to, axis, typed.leaf) for axis in typed.dims]
            if _plain(list(value.shape)) != _plain(shape) or value.dtype != typed.dtype:
                self.refuse(node, f"is not this rank's {typed}", expected=_listed(shape), got=_listed(value.shape))
        self.types[node], self.whole[node] = types, whole

    def refuse(self, node: fx.Node, problem: str, **facts: Any) -> NoReturn:
        where = f"rank {self.to.rank} of {self.to.tp}: `{node}` "
        raise Error(where + problem, **{label: str(fact) for label, fact in facts.items()}, at=line_of(node))

    def refuse_read(self, node: fx.Node, operand: fx.Node, typed: Typed, want: Placement, **facts: Any) -> NoReturn:
        expected, got = (f"{type(t.placement).__name__} {t}" for t in (replace(typed, placement=want), typed))
        self.refuse(node, f"reads `{operand}`", **facts, expected=expected, got=got)

    def _number(self, node: fx.Node) -> Any:
        """A size, or what is computed from sizes."""
        if node.target is not aten.sym_size.int:
            return node.target(*self._erased(node.args), **self._erased(node.kwargs))  # type: ignore[operator]
        x, dim = node.args
        (typed,), size = self.types[x], self.whole[x].meta["val"].shape[dim]  # type: ignore[index]
        if typed.leaf is not None and touches(typed.dims[dim], typed.leaf):  # type: ignore[index]
            self.refuse(node, f"reads from `{x}` a size that is cut", got=typed)
        return size

    def _erased(self, value: Any) -> Any:
        """Arguments in terms of the model's graph: values as its nodes, sizes as numbers."""
        return fx.map_arg(value, lambda n: self.numbers[n] if n in self.numbers else self.whole[n])

    # ---- nodes that stand for one of the model's graph

    def _compute(self, node: fx.Node) -> None:
        """Finds the node that `node` stands for: the next one, or of pure operators one on the same operands."""
        if node.target in BIASED and len(node.args) == 3:
            return self._biased(node, *(node.args[i] for i in BIASED[node.target][1]))  # type: ignore[arg-type]
        if _is_ordered(node):
            return self._stands_for(node, self.model.next())
        candidates, errors = self.model.on(_family(node), *(self.whole[n] for n in _operands(node))), []
        for model in candidates:
            try:
                self._stands_for(node, model)
                return candidates.remove(model)
            except Error as error:
                errors.append(error)
        raise errors[0] if errors else self._stands_for(node, None)

    def _stands_for(self, node: fx.Node, model: fx.Node | None) -> Any:
        if model is None or node.op != model.op:
            self.refuse(node, "is not what the model computes", expected=model and _called(model), got=_called(node))
        if node.op in ("placeholder", "get_attr"):
            self._stored(node, model)
        elif node.op == "output":
            self._output(node, model)
        elif model in self.axes.bound:
            self._operator(node, model)
        else:
            self._other(node, model)

    def _stored(self, node: fx.Node, model: fx.Node) -> None:
        """A parameter, a buffer, an input, a constant."""
        if node.target != model.target:
            self.refuse(node, "is not what the model reads here", expected=model.target)
        leaf = self._held(node, model, self.held[node.name]) if node.name in self.held else None
        placement, flows = Replicate() if leaf is None else Shard(leaf), node.name in self.trainable
        types = (Typed(v.dtype, self.axes.of(model), placement, flows and _is_floating(v)) for v in outputs_of(model))
        self._give(node, model, tuple(types))

    def _held(self, node: fx.Node, model: fx.Node, layout: Layout) -> Axis | None:
        """The axis that a layout cuts: the one whose cut gives every rank just these pieces."""
        dims, shape = self.axes.of(model), tuple(outputs_of(model)[0].shape)
        if layout.dim is None and layout.shape == shape:
            return None
        for leaf in leaves(dims[layout.dim]) if layout.dim is not None and layout.shape == shape else ():
            if holds(dims[layout.dim], leaf) and _pieces(self.to, dims[layout.dim], leaf) == layout.pieces:  # type: ignore[index]
                return leaf
        self.refuse(
            node, "is not held as one of its axes is cut", expected=f"[{', '.join(map(str, dims))}]", got=layout
        )

    def _output(self, node: fx.Node, model: fx.Node) -> None:
        for i, (got, expected) in enumerate(zip(node.args[0], model.args[0], strict=True)):  # type: ignore[arg-type]
            if _plain(self._erased(got)) != _valued(expected):
                self.refuse(node, f"returns something else at {i}", expected=expected, got=got)
            for typed in self.types.get(got, ()):
                layout, at = self.local_outputs.get(i), typed.cut_dims(typed.leaf)
                if layout is None and not typed.fits(Replicate()):
                    self.refuse_read(node, got, typed, Replicate())
                if layout is not None and (at != [layout.dim] or self._cut_at(typed, at[0]) != layout.pieces):
                    self.refuse(node, f"returns at {i} what is not cut as declared", expected=layout, got=typed)

    def _cut_at(self, typed: Typed, dim: int) -> Any:
        return _pieces(self.to, typed.dims[dim], typed.leaf) if typed.leaf is not None else None

    def _other(self, node: fx.Node, model: fx.Node) -> None:
        """A node without a rule: one of several outputs, a number read out of a tensor, the edge of a region."""
        self._expect_call(node, model.target, bind(model))
        if outputs_of(model):
            source: Any = node.args[0]
            before = source.meta["val"][: node.args[1]]
            types = self.types[source][sum(isinstance(value, torch.Tensor) for value in before)]
            return self._give(node, model, (types,))
        for operand in node.all_input_nodes:
            for typed in self.types.get(operand, ()):
                if isinstance(typed.placement, Partial | Shard):
                    self.refuse_read(node, operand, typed, Replicate())
        self.whole[node], self.numbers[node] = model, model.meta.get("val", model)

    # ---- operators

    def _is_call(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> bool:
        """True if `node` calls `target` on these arguments, which are the model's."""
        return node.target is target and _plain(self._erased(bind(node))) == _valued(arguments)

    def _expect_call(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> None:
        if not self._is_call(node, target, arguments):
            expected = f"{_name(target)}({', '.join(map(_listed, arguments.values()))})"
            self.refuse(node, "is not this rank's part", expected=expected, got=_called(node))

    def _operator(self, node: fx.Node, model: fx.Node) -> None:
        reads = [(operand, self.types[operand][0]) for operand in _operands(node)]
        cut = self._cut(node, model, reads) or self._new_cut(node, model)
        self._expect_call(node, *_local_call(self.to, self.axes, node, model, cut))
        self._give(node, model, self._typing(node, model, reads, cut))

    def _biased(self, node: fx.Node, x: fx.Node, w: fx.Node, bias: fx.Node) -> None:
        """A product with the bias that was put back into it (`passes/clean.py`): product, then sum."""
        read = {n: (n, self.types[n][0]) for n in (x, w, bias)}
        for model in self.model.on(BIASED[node.target][0], self.whole[x], self.whole[w]):  # type: ignore[index]
            for terms in ((model, self.whole[bias]), (self.whole[bias], model)):
                sums = self.model.on(aten.add.Tensor, *terms)
                if sums and bind(sums[0])["alpha"] == 1:
                    factors = [read[x], read[w]]
                    (made,) = self._typing(node, model, factors, self._cut(node, model, factors))
                    reads = [(node, made) if term is model else read[bias] for term in terms]
                    total = sums.pop(0)
                    return self._give(node, total, self._typing(node, total, reads, self._cut(node, total, reads)))
        self._stands_for(node, None)

    def _cut(self, node: fx.Node, model: fx.Node, reads: Reads) -> _Cut | None:
        """Along what an operator is cut that reads something cut; None for one that does not."""
        leaf = next((typed.leaf for _, typed in reads if typed.leaf is not None), None)
        factor = _factor(self.axes.bound[model], leaf) if leaf is not None else None
        if leaf is not None and factor is None:
            rule, got = self.axes.bound[model].rule, ", ".join(str(typed) for _, typed in reads)
            self.refuse(node, "cannot be cut along the axis of what it reads", rule=rule, got=got)
        return None if leaf is None or factor is None else _Cut(leaf, factor)

    def _new_cut(self, node: fx.Node, model: fx.Node) -> _Cut | None:
        """Along what an operator is cut that makes a dimension, as zeros and expand do: its local sizes tell."""
        bound = self.axes.bound[model]
        made = [factor.axis for factor in bound.factors if not factor.ins and not factor.mark]
        for leaf in [leaf for axis in made for leaf in leaves(axis) if not leaf.size.symbols]:
            factor = _factor(bound, leaf)
            local = factor and _local_call(self.to, self.axes, node, model, _Cut(leaf, factor))
            if factor and local and self._is_call(node, *local) and not self._is_call(node, model.target, bind(model)):
                return _Cut(leaf, factor)
        return None

    def _typing(self, node: fx.Node, model: fx.Node, reads: Reads, cut: _Cut | None) -> tuple[Typed, ...]:
        """The types that an operator gives, if it may read its operands in theirs."""
        bound = self.axes.bound[model]
        wants, gives = _placements(bound, [typed for _, typed in reads], cut)
        for (operand, typed), want in zip(reads, wants, strict=True):
            if not typed.fits(want):
                self.refuse_read(node, operand, typed, want, rule=bound.rule)
        flows = model.target not in NO_GRADIENT and any(typed.flows for _, typed in reads)
        values = zip(outputs_of(model), self.axes.dims[model], gives, strict=True)
        types = tuple(Typed(v.dtype, dims, placement, flows and _is_floating(v)) for v, dims, placement in values)
        for typed in types:
            if typed.flows and typed.placement == Partial("max"):
                self.refuse(node, "loses its gradient where it is reduced", rule=bound.rule, got=typed)
        return types

    # ---- conjugates

    def _conjugate(self, node: fx.Node, x: Any, axis: Any, *rest: Any) -> None:
        """A row of the table of conjugates, in its place and over the dimension that is cut."""
        (typed,), kinds = self.types[x], CONJUGATES[node.target]
        leaf = _moved(typed, *rest) if Shard in kinds else None
        allowed = {collectives.copy: ([],), collectives.reduce: ([], ["sum"], ["max"])}.get(node.target, ())  # type: ignore[arg-type]
        if axis != self.to.axis or node.kwargs or (leaf is None and list(rest) not in allowed):
            self.refuse(node, "does not move along the axis that is cut", got=f"{_called(node)} of {typed}")
        make: dict[type[Placement], Any] = {Shard: lambda: Shard(leaf), Partial: lambda: Partial(*rest[: leaf is None])}  # type: ignore[arg-type]
        want, give = (make.get(kind, kind)() for kind in kinds)
        if not typed.fits(want):
            self.refuse_read(node, x, typed, want)
        self._give(node, self.whole[x], (replace(typed, placement=give),))

    def _open(self, node: fx.Node, end: fx.Node) -> None:
        """A dimension taken apart, so that one part of it can be cut or joined (`passes/exchange.py`)."""
        x: Any
        dim: Any
        x, *rest = node.args
        sizes, dim = rest if node.target is SPLIT else reversed(rest)
        (typed,) = self.types[x]
        for parts in _openings(node.target, find(typed.dims[dim])):
            if _plain([_length(self.to, part, typed.leaf) for part in parts]) == _plain(self._erased(sizes)):
                break
        else:
            self.refuse(
                node, "does not take a dimension apart as its axis is made up", expected=typed, got=_called(node)
            )
        inner = [[part] for part in parts] if node.target is SPLIT else [parts]
        types = (replace(typed, dims=(*typed.dims[:dim], *axes, *typed.dims[dim + 1 :])) for axes in inner)
        self.opened[end] = node
        self._give(node, node, tuple(types))

    def _close(self, node: fx.Node, opening: fx.Node) -> None:
        """The dimension put together again, all its parts moved alike."""
        x: Any = opening.args[0]
        (typed,), moved = self.types[x], [self.types[n][0] for n in node.all_input_nodes if n in self.types]
        if any(part.placement != moved[0].placement for part in moved):
            self.refuse(node, "joins parts that were moved differently", got=", ".join(map(str, moved)))
        self._give(node, self.whole[x], (replace(typed, placement=moved[0].placement),))


# ---- placements


def _placements(bound: Bound, types: list[Typed], cut: _Cut | None) -> tuple[list[Placement], list[Placement]]:
    """The placements that an operator reads and gives, cut or whole."""
    n_outs = len(bound.rule.outs)
    if cut is not None:
        shard, lost = Shard(cut.leaf), Partial(bound.rule.reducer)
        wants: list[Placement] = [shard if i in cut.factor.ins else Copied() for i in range(len(types))]
        return wants, [shard if i in cut.factor.outs else lost for i in range(n_outs)]
    partial = frozenset(i for i, typed in enumerate(types) if typed.placement == Partial())
    if partial in bound.rule.linear:
        return [Partial() if i in partial else Copied() for i in range(len(types))], [Partial()] * n_outs
    copied = any(typed.flows and typed.placement == Copied() for typed in types)
    kind: Placement = Copied() if copied else Replicate()
    return [kind] * len(types), [kind] * n_outs


def _factor(bound: Bound, leaf: Axis) -> Factor | None:
    """The factor along which an operator can be cut, the leaf in one dimension at most of each operand and output."""
    factor = bound.cuttable(leaf)
    for places, terms in zip((factor.ins, factor.outs) if factor else (), bound.dims, strict=False):
        for i, dims in enumerate(terms):
            has = [d for d, axis in enumerate(dims) if touches(axis, leaf)]
            if has != [places[j] for j in (i,) if j in places] or not all(holds(dims[d], leaf) for d in has):
                return None
    return factor


def _moved(typed: Typed, dim: int, size: int, block: int = 1) -> Axis | None:
    """The leaf that a conjugate cuts or joins: the outermost of its dimension, in blocks of the rest of it."""
    axis = outermost = find(typed.dims[dim])
    while outermost.kind == "product":
        outermost = find(outermost.parts[0])
    blocks = axis.size == Size(size) and axis.size.divided(outermost.size) == Size(block)
    alone = typed.cut_dims(outermost) == [dim % len(typed.dims)]
    return outermost if blocks and alone and holds(axis, outermost) else None


# ---- what a rank has of a call, in terms of the model's graph


def _length(to: Target, axis: Axis, leaf: Axis | None) -> Size:
    """The length of an axis on this rank where `leaf` is cut."""
    size = find(axis).size
    if leaf is None or not touches(axis, leaf):
        return size
    rest = size.divided(find(leaf).size)
    if rest is None:
        raise ValueError(f"{axis} is not whole times {leaf}")
    return Size(to.length(leaf)) * rest


def _pieces(to: Target, axis: Axis, leaf: Axis) -> tuple[tuple[Range, ...], ...] | None:
    """The positions of an axis that each rank holds; None where they depend on the inputs' sizes."""
    if find(axis).size.symbols:
        return None
    return tuple(tuple(ranges(axis, leaf, to.tp, rank)) for rank in range(to.tp))


def _local_call(to: Target, axes: Axes, node: fx.Node, model: fx.Node, cut: _Cut | None) -> tuple[Any, dict[str, Any]]:
    """The call that computes this rank's part: its target and its arguments."""
    arguments, target, name = bind(model), model.target, str(model.target).rsplit(".", 1)[0]
    if cut is None:
        return target, arguments
    ins, outs, leaf = axes.bound[model].dims[0], axes.dims[model], cut.leaf
    if cut.factor.mark == "!":
        return _form(to, node.target, model.target, arguments, ins, leaf)
    if _family(model) is SPLIT:
        dim = arguments["dim"] % len(ins[0])
        sizes = [_length(to, out[dim], leaf) for out in outs]
        return SPLIT, {"self": arguments["self"], "split_sizes": sizes, "dim": dim}
    if _family(model) is SLICE and touches(ins[0][arguments["dim"]], leaf):
        return SLICE, _local_slice(to, model, arguments, ins[0], leaf)
    if name in SIZE_ARGUMENTS:
        at, out = SIZE_ARGUMENTS[name], outs[0]
        first = arguments["dim"] % len(ins[0]) if name == "aten.unflatten" else len(out) - len(arguments[at])
        arguments[at] = [_length(to, axis, leaf) for axis in out[first : first + len(arguments[at])]]
    return target, arguments


def _local_slice(to: Target, model: fx.Node, arguments: dict[str, Any], dims: Dims, leaf: Axis) -> dict[str, Any]:
    """A slice of a dimension that is cut takes what the rank holds between its bounds; every k-th place, to the end."""
    dim, start = arguments["dim"] % len(dims), arguments["start"] or 0
    if arguments.get("step", 1) != 1:
        return arguments | {"dim": dim, "start": start, "end": sys.maxsize}
    pieces = _pieces(to, dims[dim], leaf) or ()
    first = max(start + find(dims[dim]).size.number, 0) if start < 0 else start
    bounds = first, first + outputs_of(model)[0].shape[dim]
    at = [sum(max(min(b, bound) - a, 0) for a, b in pieces[to.rank]) for bound in bounds]
    return {"self": arguments["self"], "dim": dim, "start": at[0], "end": at[1], "step": 1}


SDPA = aten.scaled_dot_product_attention.default
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
FORMS: dict[Any, tuple[Any, tuple[str, ...], str]] = {
    parallel.embedding: (aten.embedding.default, ("weight", "indices", "start", "padding_idx"), ""),
    parallel.gather: (aten.gather.default, ("self", "dim", "index", "start"), ""),
    parallel.class_terms: (parallel.class_terms, ("x", "top", "classes", "dim", "start"), ""),
    parallel.exact_dropout: (aten.dropout.default, ("input", "p"), "exact"),
    parallel.fast_dropout: (aten.dropout.default, ("input", "p"), "fast"),
    parallel.exact_attention: (SDPA, _ATTENTION, "exact"),
    parallel.fast_attention: (SDPA, _ATTENTION, "fast"),
}
"""A parallel form -> what it is the form of, the arguments it takes over, the randomness it is for."""


def _form(
    to: Target, form: Any, target: Any, arguments: dict[str, Any], ins: Sequence[Dims], leaf: Axis
) -> tuple[Any, dict[str, Any]]:
    """The call of a parallel form, by position; one that no graph has where `form` is not the right one."""
    of, names, only = FORMS.get(form, (None, (), ""))
    if of is not target or only not in ("", to.randomness) or not arguments.get("train", True):
        return f"a parallel form of {target}", {}
    arguments["start"] = _start(to, ins[0][arguments.get("dim", 0)], leaf)
    given = [arguments[name] for name in names]
    if only:
        drawn = ins[0] if of is not SDPA else (*ins[0][:-1], ins[1][-2])
        given += [to.rank] if only == "fast" else _mask(to, drawn, leaf)
    return form, dict(zip(inspect.signature(form).parameters, given, strict=True))


def _start(to: Target, axis: Axis, leaf: Axis) -> int | None:
    """Where this rank's rows start, if they are in one piece."""
    pieces = _pieces(to, axis, leaf)
    if pieces is None or len(pieces[to.rank]) > 1:
        return None
    return pieces[to.rank][0][0] if pieces[to.rank] else find(axis).size.number


def _mask(to: Target, dims: Dims, leaf: Axis) -> list[Any]:
    """The shape of one device's mask, the axis that is cut opened; its dimension; what this rank keeps of it."""
    (dim,) = (d for d, axis in enumerate(dims) if touches(axis, leaf))
    sizes, opened = [find(axis).size for axis in dims], open_product(dims[dim], leaf)
    if opened is None:
        return [sizes, dim, (_pieces(to, dims[dim], leaf) or ())[to.rank]]
    return [[*sizes[:dim], opened[0], find(leaf).size, opened[1], *sizes[dim + 1 :]], dim + 1, (to.chunk(leaf),)]


# ---- a dimension taken apart and put together around a conjugate

SPLIT, SLICE = aten.split_with_sizes.default, aten.slice.Tensor


def _closing(node: fx.Node) -> fx.Node | None:
    """What undoes a split or an unflatten, with nothing but conjugates between; None for other nodes."""
    args: Any = node.args
    if node.target is aten.unflatten.int:
        end = _reader(moved := _after(node))
        undone = end is not None and end.target is aten.flatten.using_ints and end.args == (moved, args[1], args[1] + 2)
        return end if undone else None
    if node.target is not SPLIT or len(args) != 3:
        return None
    items = {item.args[1]: item for item in node.users if item.target is operator.getitem}
    ends = [_after(items.get(i)) for i in range(len(args[1]))]
    end = _reader(ends[0])
    undone = end is not None and end.target is aten.cat.default and list(end.args) == [ends, args[2]]
    return end if undone and len(node.users) == len(ends) and all(_reader(one) is end for one in ends) else None


def _after(node: fx.Node | None) -> fx.Node | None:
    """What a value is once conjugates, and nothing else, have moved it."""
    reader = _reader(node)
    return reader if reader is None or reader.target in CONJUGATES else _closing(reader)


def _reader(node: fx.Node | None) -> fx.Node | None:
    """The only reader of a value."""
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def _openings(target: Any, axis: Axis) -> Iterator[list[Axis]]:
    """The ways in which an axis can be taken apart: a concatenation into its parts, a product around one of them."""
    if target is SPLIT and axis.kind == "concat":
        yield list(axis.parts)
    if target is not SPLIT and axis.kind == "product":
        for i, part in enumerate(axis.parts):
            yield [product(axis.parts[:i]), part, product(axis.parts[i + 1 :])]


# ---- nodes and their arguments

BIASED = {aten.linear.default: (aten.linear.default, (0, 1, 2)), aten.addmm.default: (aten.mm.default, (1, 2, 0))}
"""A product with a bias -> the bare product, and the places of its operands and of the bias."""


class _Model:
    """The model's graph: the nodes whose order counts; the others by region, operator and operands, in order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.region, self.ordered = 0, iter([n for n in graph.nodes if _is_ordered(n)])
        self.pure: dict[Any, Any] = {}
        region, live = 0, _live(graph)
        for node in graph.nodes:
            region += _is_ordered(node) and not outputs_of(node)
            if node in live and not _is_ordered(node) and not _is_number(node):
                self.pure.setdefault((region, _family(node), *_operands(node)), []).append(node)

    def next(self) -> fx.Node | None:
        """The next node whose order counts; an effect, such as entering an autocast region, begins a region."""
        node = next(self.ordered, None)
        self.region += node is not None and not outputs_of(node)
        return node

    def on(self, family: Any, *operands: fx.Node) -> list[fx.Node]:
        """The pure operators on these operands that nothing has stood for yet."""
        return self.pure.get((self.region, family, *operands), [])


def _live(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that something needs whose order counts; to know a size, no tensor is needed."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (_is_ordered(node) or node in live) and node.target is not aten.sym_size.int:
            live.update([node, *node.all_input_nodes])
    return live


def _is_ordered(node: fx.Node) -> bool:
    """True for inputs and outputs, random draws, and calls for their effect."""
    return node.op != "call_function" or draws(node) or node.meta.get("val") is None


def _is_number(node: fx.Node) -> bool:
    """True for a size, and for what is computed from sizes alone."""
    number = isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
    return number and (node.target is aten.sym_size.int or not any(map(is_tensor, node.all_input_nodes)))


def _is_floating(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operands that are tensors, in order; one that a parallel form reads twice is there twice."""
    if isinstance(node.target, OpOverload):
        return [operand for operand in operand_nodes(node) if operand is not None]
    return [arg for arg in node.args if isinstance(arg, fx.Node) and outputs_of(arg)]


def _family(node: Any) -> Any:
    """What a node's operator is called in the model's graph, or one name for operators that a cut makes one."""
    if node.target is operator.getitem:
        return node.target, node.args[1]
    packet = getattr(node.target, "overloadpacket", node.target)
    splits, slices = (aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split), (aten.slice, aten.narrow)
    return SPLIT if packet in splits else SLICE if packet in slices else FORMS.get(node.target, (node.target,))[0]


def _valued(arguments: Any) -> Any:
    """Arguments of the model's graph, sizes as numbers."""
    return _plain(fx.map_arg(arguments, lambda n: n.meta["val"] if _is_number(n) else n))


def _plain(value: Any) -> Any:
    """A form in which arguments of two graphs are equal if they mean the same."""
    if isinstance(value, torch.SymInt | Size):
        size = Size.of(value)
        return size if size.symbols and size.number else size.number
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float | torch.SymFloat | torch.SymBool) else value


def _name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload | str) else str(target.__name__)


def _called(node: fx.Node) -> str:
    return f"{_name(node.target)}({', '.join(map(_listed, [*node.args, *node.kwargs.values()]))})"


def _listed(value: Any) -> str:
    return f"[{', '.join(map(_listed, value))}]" if isinstance(value, list | tuple) else str(value)
