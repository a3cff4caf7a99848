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

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import fx
from torch._ops import OpOverload

from autotp import collectives, parallel
from autotp.axis import ONE, Axis, Size, find, holds, leaves, open_product, product, touches
from autotp.call import bind, draws, is_tensor, operand_nodes, outputs_of
from autotp.errors import Error
from autotp.layout import Layout, Range, ranges
from autotp.operators import SIZE_ARGUMENTS
from autotp.passes.axes import Bound, Dims, Factor, infer_axes
from autotp.passes.local import Target
from autotp.placement import Copied, Partial, Placement, Replicate, Shard
from autotp.source import line_of

aten = torch.ops.aten
SPLIT, SLICE = aten.split_with_sizes.default, aten.slice.Tensor


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

    def fits(self, want: Placement) -> bool:
        """True if this can be read as `want`. See NOTE [No gradient, no difference]."""
        same = (Replicate(), Copied())
        return self.placement == want or (not self.flows and self.placement in same and want in same)

    def __str__(self) -> str:
        cut = [self.leaf is not None and touches(axis, self.leaf) for axis in self.dims]
        sizes = [f"{find(axis).size}{'@tp' * at}" for axis, at in zip(self.dims, cut, strict=True)]
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
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # Fail closed.
            proof.refuse(node, f"cannot be typed: {error!r}", got=_called(node.target, node.args))
    return proof.types


class _Model:
    """The model's graph: the nodes whose order counts; the others by region, operator and operands, in order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.pure: dict[Any, list[fx.Node]] = {}
        ordered, region, live = [], 0, _live(graph)
        for node in graph.nodes:
            if _is_ordered(node):
                ordered.append(node)
                region += not outputs_of(node)
            elif node in live and not _is_number(node):
                self.pure.setdefault((region, _family(node), *_operands(node)), []).append(node)
        self.ordered = iter(ordered)


class _Proof:
    """What has been proved of a rank's nodes so far."""

    def __init__(self, graph: fx.Graph, held: Any, trainable: Any, to: Target, local_outputs: Any) -> None:
        self.held, self.trainable, self.to, self.local_outputs = held, trainable, to, local_outputs
        self.axes, self.region = infer_axes(graph), 0
        self.model = _Model(graph)
        self.types: dict[fx.Node, tuple[Typed, ...]] = {}
        self.whole: dict[fx.Node, fx.Node] = {}  # The node of the model's graph whose value, or part of it, this is.
        self.numbers: dict[fx.Node, Any] = {}
        self.opened: dict[fx.Node, fx.Node] = {}  # What puts a value together again -> what took it apart.

    def visit(self, node: fx.Node) -> None:
        if _is_number(node):
            self.numbers[node] = self._number(node)
        elif node.target in CONJUGATES:
            self._conjugate(node)
        elif node in self.opened:
            self._close(node, self.opened[node])
        elif (end := _closing(node)) is not None:
            self._open(node, end)
        elif node.target is operator.getitem and node.args[0] in self.opened.values():
            self._give(node, node.args[0], (self.types[node.args[0]][node.args[1]],))  # type: ignore[index, arg-type]
        else:
            self._compute(node)

    def _give(self, node: fx.Node, whole: fx.Node, types: tuple[Typed, ...]) -> None:
        """Remembers what was proved of a node, if the example values that it carries agree."""
        for value, typed in zip(outputs_of(node), types, strict=True):
            shape = [self._local(axis, typed.leaf) for axis in typed.dims]
            if _plain(list(value.shape)) != _plain(shape) or value.dtype != typed.dtype:
                self.refuse(node, f"is not this rank's {typed}", expected=_listed(shape), got=_listed(value.shape))
        self.types[node], self.whole[node] = types, whole

    def refuse(self, node: fx.Node, problem: str, **facts: Any) -> NoReturn:
        where = f"rank {self.to.rank} of {self.to.tp}: `{node}` "
        raise Error(where + problem, **{label: str(fact) for label, fact in facts.items()}, at=line_of(node))

    # ---- numbers

    def _local(self, axis: Axis, leaf: Axis | None) -> Size:
        """The length of an axis on this rank where `leaf` is cut."""
        if leaf is None or not touches(axis, leaf):
            return find(axis).size
        return Size(self.to.length(leaf)) * (find(axis).size.divided(find(leaf).size) or ONE)

    def _pieces(self, axis: Axis, leaf: Axis) -> tuple[tuple[Range, ...], ...] | None:
        """The positions of an axis that each rank holds; None where they depend on the inputs' sizes."""
        if find(axis).size.symbols:
            return None
        return tuple(tuple(ranges(axis, leaf, self.to.tp, rank)) for rank in range(self.to.tp))

    def _number(self, node: fx.Node) -> Any:
        """A size, or what is computed from sizes."""
        if node.target is not aten.sym_size.int:
            return node.target(*self._erased(node.args), **self._erased(node.kwargs))  # type: ignore[operator]
        x, dim = _arguments(node)
        (typed,), size = self.types[x], self.whole[x].meta["val"].shape[dim]
        if _plain(self._local(typed.dims[dim], typed.leaf)) != _plain(size):
            self.refuse(node, f"reads from `{x}` a size that is cut", got=typed)
        return size

    def _erased(self, value: Any) -> Any:
        """Arguments in terms of the model's graph: values as its nodes, sizes as numbers."""
        return fx.map_arg(value, lambda n: self.numbers[n] if n in self.numbers else self.whole[n])

    # ---- what stands for a node of the model's graph

    def _compute(self, node: fx.Node) -> None:
        """Finds the model's node that `node` stands for: the next one, or for a pure operator one on its operands."""
        if node.target in BIASED and len(node.args) == 3:
            return self._biased(node)
        if _is_ordered(node):
            self.region += not outputs_of(node)
            return self._stands_for(node, next(self.model.ordered, None))
        candidates = self.model.pure.get((self.region, _family(node), *(self.whole[n] for n in _operands(node))), [])
        errors = []
        for model in candidates:
            try:
                self._stands_for(node, model)
                return candidates.remove(model)
            except Error as error:
                errors.append(error)
        raise errors[0] if errors else self._stands_for(node, None)

    def _stands_for(self, node: fx.Node, model: fx.Node | None) -> Any:
        if model is None or node.op != model.op:
            self.refuse(node, "is not what the model computes", expected=model, got=_called(node.target, node.args))
        if node.op in ("placeholder", "get_attr"):
            self._stored(node, model)
        elif node.op == "output":
            self._output(node, model)
        elif model in self.axes.bound:
            self._operator(node, model, self.axes.bound[model])
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
        axis = None if layout.dim is None else self.axes.of(model)[layout.dim]
        if layout.shape == tuple(outputs_of(model)[0].shape):
            for leaf in [None] if axis is None else dict.fromkeys(leaves(axis)):
                if axis is None or leaf is None or (holds(axis, leaf) and self._pieces(axis, leaf) == layout.pieces):
                    return leaf
        self.refuse(node, "is not held as one of its axes is cut", expected=f"{axis}, cut by one of these", got=layout)

    def _output(self, node: fx.Node, model: fx.Node) -> None:
        for i, (got, expected) in enumerate(zip(node.args[0], model.args[0], strict=True)):  # type: ignore[arg-type]
            if _plain(self._erased(got)) != _valued(expected):
                self.refuse(node, f"returns something else at {i}", expected=expected, got=got)
            for typed in self.types.get(got, ()):
                whole, layout = replace(typed, placement=Replicate()), self.local_outputs.get(i)
                if layout is None and not typed.fits(Replicate()):
                    self.refuse(node, f"returns at {i} what is not whole", expected=whole, got=typed)
                at = [d for d, axis in enumerate(typed.dims) if typed.leaf is not None and touches(axis, typed.leaf)]
                cut = typed.leaf is not None and self._pieces(typed.dims[at[0]], typed.leaf)
                if layout is not None and (at != [layout.dim] or cut != layout.pieces):
                    self.refuse(node, f"returns at {i} what is not cut as declared", expected=layout, got=typed)

    def _other(self, node: fx.Node, model: fx.Node) -> None:
        """A node without a rule: one of several outputs, a number read out of a tensor, the edge of a region."""
        self._expect_call(node, model.target, bind(model))
        if outputs_of(model):
            source, at = node.args
            tensors = [isinstance(value, torch.Tensor) for value in source.meta["val"]]  # type: ignore[union-attr]
            return self._give(node, model, (self.types[source][sum(tensors[:at])],))  # type: ignore[index]
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
            got = _called(node.target, bind(node).values())
            self.refuse(node, "is not this rank's part", expected=_called(target, arguments.values()), got=got)

    def _operator(self, node: fx.Node, model: fx.Node, bound: Bound) -> None:
        reads = [(operand, self.types[operand][0]) for operand in _operands(node)]
        leaf = next((typed.leaf for _, typed in reads if typed.leaf is not None), None) or self._new_leaf(
            node, model, bound
        )
        factor = self._factor(node, bound, leaf) if leaf is not None else None
        self._expect_call(node, *self._local_call(node, model, bound, leaf, factor))
        self._give(node, model, self._typing(node, model, reads, leaf, factor))

    def _biased(self, node: fx.Node) -> None:
        """A product with the bias that was put back into it (`passes/clean.py`): product, then sum."""
        target, places = BIASED[node.target]  # type: ignore[index]
        x, w, bias = (_arguments(node)[i] for i in places)
        for model in self.model.pure.get((self.region, target, self.whole[x], self.whole[w]), ()):
            for terms in ((model, self.whole[bias]), (self.whole[bias], model)):
                sums = self.model.pure.get((self.region, aten.add.Tensor, *terms), ())
                if sums and bind(sums[0])["alpha"] == 1:
                    (made,) = self._plainly(node, model, [(n, self.types[n][0]) for n in (x, w)])
                    reads = [(node, made) if term is model else (bias, self.types[bias][0]) for term in terms]
                    return self._give(node, sums[0], self._plainly(node, sums.pop(0), reads))
        self._stands_for(node, None)

    def _plainly(self, node: fx.Node, model: fx.Node, reads: Reads) -> tuple[Typed, ...]:
        """The types that an operator gives whose arguments no cut changes."""
        leaf = next((typed.leaf for _, typed in reads if typed.leaf is not None), None)
        factor = self._factor(node, self.axes.bound[model], leaf) if leaf is not None else None
        return self._typing(node, model, reads, leaf, factor)

    def _typing(
        self, node: fx.Node, model: fx.Node, reads: Reads, leaf: Axis | None, factor: Factor | None
    ) -> tuple[Typed, ...]:
        """The types that an operator gives, cut along `factor` or whole, if it may read its operands in theirs."""
        bound = self.axes.bound[model]
        wants, gives = _uncut(bound, reads) if factor is None else _cut(bound, factor, Shard(leaf), reads)  # type: ignore[arg-type]
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

    def refuse_read(self, node: fx.Node, operand: fx.Node, typed: Typed, want: Placement, **facts: Any) -> NoReturn:
        expected, got = (f"{type(t.placement).__name__} {t}" for t in (replace(typed, placement=want), typed))
        self.refuse(node, f"reads `{operand}`", **facts, expected=expected, got=got)

    def _factor(self, node: fx.Node, bound: Bound, leaf: Axis) -> Factor:
        """The factor along which an operator is cut, the leaf in one dimension at most of each operand and output."""
        factor = bound.cuttable(leaf)
        for places, terms in zip((factor.ins, factor.outs) if factor else (), bound.dims, strict=False):
            for i, dims in enumerate(terms):
                has = [d for d, axis in enumerate(dims) if touches(axis, leaf)]
                if has != [places[j] for j in (i,) if j in places] or not all(holds(dims[d], leaf) for d in has):
                    factor = None
        return factor or self.refuse(node, f"cannot be cut along {find(leaf)} of what it reads", rule=bound.rule)

    def _new_leaf(self, node: fx.Node, model: fx.Node, bound: Bound) -> Axis | None:
        """The axis that is cut in a value made of nothing cut, as zeros and expand can: local sizes tell."""
        made = [factor.axis for factor in bound.factors if not factor.ins and not factor.mark]
        for leaf in dict.fromkeys(leaf for axis in made for leaf in leaves(axis) if not leaf.size.symbols):
            factor = bound.cuttable(leaf)
            local = factor and self._local_call(node, model, bound, leaf, factor)
            if local and self._is_call(node, *local) and not self._is_call(node, model.target, bind(model)):
                return leaf
        return None

    def _local_call(
        self, node: fx.Node, model: fx.Node, bound: Bound, leaf: Axis | None, factor: Factor | None
    ) -> tuple[Any, dict[str, Any]]:
        """The call that computes this rank's part: its target, and its arguments in terms of the model's graph."""
        arguments, target = bind(model), model.target
        if leaf is None or factor is None:
            return target, arguments
        if factor.mark == "!":
            return self._form(node, model, bound, leaf)
        dims, outs = bound.dims[0][0] if bound.dims[0] else (), self.axes.dims[model]
        name = str(target).rsplit(".", 1)[0]
        if _family(model) is SPLIT:
            dim = arguments["dim"] % len(dims)
            sizes = [self._local(out[dim], leaf) for out in outs]
            return SPLIT, {"self": arguments["self"], "split_sizes": sizes, "dim": dim}
        if _family(model) is SLICE and touches(dims[arguments["dim"]], leaf):
            return SLICE, self._local_slice(model, arguments, dims, leaf)
        if name in SIZE_ARGUMENTS:
            at, out = SIZE_ARGUMENTS[name], outs[0]
            first = arguments["dim"] % len(dims) if name == "aten.unflatten" else len(out) - len(arguments[at])
            arguments[at] = [self._local(axis, leaf) for axis in out[first : first + len(arguments[at])]]
        return target, arguments

    def _local_slice(self, model: fx.Node, arguments: dict[str, Any], dims: Dims, leaf: Axis) -> dict[str, Any]:
        """A slice of a dimension that is cut takes what the rank holds between its bounds."""
        dim, start = arguments["dim"] % len(dims), arguments["start"] or 0
        pieces = self._pieces(dims[dim], leaf) or ()
        first = max(start + find(dims[dim]).size.number, 0) if start < 0 else start
        bounds = first, first + outputs_of(model)[0].shape[dim]
        at = [sum(max(min(b, bound) - a, 0) for a, b in pieces[self.to.rank]) for bound in bounds]
        return {"self": arguments["self"], "dim": dim, "start": at[0], "end": at[1], "step": arguments.get("step", 1)}

    # ---- parallel forms

    def _form(self, node: fx.Node, model: fx.Node, bound: Bound, leaf: Axis) -> tuple[Any, dict[str, Any]]:
        """The parallel form of a call, its arguments by position."""
        of, names, only = FORMS.get(node.target, (None, (), ""))
        arguments, dims = bind(model), bound.dims[0]
        if of is not model.target or only not in ("", self.to.randomness) or not arguments.get("train", True):
            self.refuse(node, "needs its parallel form where it is cut", rule=bound.rule)
        arguments["start"] = self._start(dims[0][arguments.get("dim", 0)], leaf)
        given = [arguments[name] for name in names]
        if only:
            drawn = dims[0] if of is not SDPA else (*dims[0][:-1], dims[1][-2])
            given += [self.to.rank] if only == "fast" else self._mask(drawn, leaf)
        return node.target, {str(i): value for i, value in enumerate(given)}

    def _start(self, axis: Axis, leaf: Axis) -> int | None:
        """Where this rank's rows start, if they are in one piece."""
        pieces = self._pieces(axis, leaf)
        if pieces is None or len(pieces[self.to.rank]) > 1:
            return None
        return pieces[self.to.rank][0][0] if pieces[self.to.rank] else find(axis).size.number

    def _mask(self, dims: Dims, leaf: Axis) -> list[Any]:
        """The shape of one device's mask, the cut axis opened; its dimension; and what this rank keeps of it."""
        (dim,) = (d for d, axis in enumerate(dims) if touches(axis, leaf))
        sizes: list[Any] = [find(axis).size for axis in dims]
        opened = open_product(dims[dim], leaf)
        if opened is None:
            return [sizes, dim, (self._pieces(dims[dim], leaf) or ())[self.to.rank]]
        sizes[dim : dim + 1] = [opened[0], find(leaf).size, opened[1]]
        return [sizes, dim + 1, (self.to.chunk(leaf),)]

    # ---- conjugates

    def _conjugate(self, node: fx.Node) -> None:
        """A row of the table of conjugates, in its place and over the dimension that is cut."""
        x, axis, *rest = _arguments(node)
        (typed,), kinds = self.types[x], CONJUGATES[node.target]
        leaf = self._moved(typed, *rest) if Shard in kinds else None
        shapeless: dict[Any, Any] = {collectives.copy: ([],), collectives.reduce: ([], ["sum"], ["max"])}
        allowed = shapeless.get(node.target, ())
        if axis != self.to.axis or node.kwargs or (leaf is None and rest not in allowed):
            got = f"{_called(node.target, node.args)} of {typed}"
            self.refuse(node, "does not move along the axis that is cut", got=got)
        reducer = rest if leaf is None else ()
        made: dict[Any, Any] = {Shard: leaf and Shard(leaf), Partial: Partial(*reducer)}
        want, give = (made.get(kind) or (Copied() if kind is Copied else Replicate()) for kind in kinds)
        if not typed.fits(want):
            self.refuse_read(node, x, typed, want)
        self._give(node, self.whole[x], (replace(typed, placement=give),))

    def _moved(self, typed: Typed, dim: int, size: int, block: int = 1) -> Axis | None:
        """The leaf that a conjugate cuts or joins: the outermost of its dimension, in blocks of the rest of it."""
        axis = outermost = find(typed.dims[dim])
        while outermost.kind == "product":
            outermost = find(outermost.parts[0])
        blocks = axis.size == Size(size) and axis.size.divided(outermost.size) == Size(block)
        alone = [d for d, other in enumerate(typed.dims) if touches(other, outermost)] == [dim % len(typed.dims)]
        return outermost if blocks and alone and holds(axis, outermost) else None

    def _open(self, node: fx.Node, end: fx.Node) -> None:
        """A dimension taken apart, so that one part of it can be cut or joined."""
        x, *rest = _arguments(node)
        (typed,), (sizes, dim) = self.types[x], rest if node.target is SPLIT else reversed(rest)
        for parts in _openings(node.target, find(typed.dims[dim])):
            if _plain([self._local(part, typed.leaf) for part in parts]) == _plain(self._erased(sizes)):
                break
        else:
            self.refuse(node, "does not take a dimension apart as its axis is made up", expected=typed, got=sizes)
        inner = [[part] for part in parts] if node.target is SPLIT else [parts]
        types = (replace(typed, dims=(*typed.dims[:dim], *axes, *typed.dims[dim + 1 :])) for axes in inner)
        self.opened[end] = node
        self._give(node, node, tuple(types))

    def _close(self, node: fx.Node, opening: fx.Node) -> None:
        """The dimension put together again, all its parts moved alike."""
        x = _arguments(opening)[0]
        (typed,), found = self.types[x], [self.types[n][0] for n in node.all_input_nodes if n in self.types]
        if any(one.placement != found[0].placement for one in found):
            self.refuse(node, "joins parts that were moved differently", got=", ".join(map(str, found)))
        self._give(node, self.whole[x], (replace(typed, placement=found[0].placement),))


Reads = Sequence[tuple[fx.Node, Typed]]


def _cut(bound: Bound, factor: Factor, cut: Shard, reads: Reads) -> tuple[list[Placement], list[Placement]]:
    """The placements that an operator reads and gives which is cut along a factor."""
    lost = Partial(bound.rule.reducer)
    wants: list[Placement] = [cut if i in factor.ins else Copied() for i in range(len(reads))]
    return wants, [cut if i in factor.outs else lost for i in range(len(bound.rule.outs))]


def _uncut(bound: Bound, reads: Reads) -> tuple[list[Placement], list[Placement]]:
    """The placements that an operator reads and gives which is not cut."""
    placements = [typed.placement for _, typed in reads]
    partial = frozenset(i for i, placement in enumerate(placements) if placement == Partial())
    copied = any(typed.flows and typed.placement == Copied() for _, typed in reads)
    kind: Placement = Copied() if copied or partial in bound.rule.linear else Replicate()
    if partial not in bound.rule.linear:
        return [kind] * len(reads), [kind] * len(bound.rule.outs)
    return [Partial() if i in partial else kind for i in range(len(reads))], [Partial()] * len(bound.rule.outs)


# ---- dimensions taken apart and put together around a conjugate (`passes/exchange.py`)


def _closing(node: fx.Node) -> fx.Node | None:
    """What undoes a split or an unflatten, with nothing but conjugates between; None for other nodes."""
    if node.target is aten.unflatten.int:
        moved = _after(node)
        end = _reader(moved)
        undone = end is not None and end.target is aten.flatten.using_ints
        return end if undone and end.args == (moved, node.args[1], node.args[1] + 2) else None  # type: ignore
    if node.target is not SPLIT or len(node.args) != 3:
        return None
    items = {item.args[1]: item for item in node.users if item.target is operator.getitem}
    ends = [_after(items.get(i)) for i in range(len(_arguments(node)[1]))]
    end = _reader(ends[0])
    undone = end is not None and end.target is aten.cat.default and list(end.args) == [ends, node.args[2]]
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
    target = node.target
    if target is operator.getitem:
        return target, node.args[1]
    packet = getattr(target, "overloadpacket", target)
    splits, slices = (aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split), (aten.slice, aten.narrow)
    return SPLIT if packet in splits else SLICE if packet in slices else FORMS.get(target, (target,))[0]


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


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


def _listed(values: Any) -> str:
    return f"[{', '.join(map(str, values))}]"


def _called(target: Any, arguments: Any) -> str:
    name = str(target) if isinstance(target, OpOverload | str) else target.__name__
    return name + "(" + ", ".join(_listed(a) if isinstance(a, list | tuple) else str(a) for a in arguments) + ")"


CONJUGATES: dict[Any, tuple[type[Placement], type[Placement]]] = {
    collectives.copy: (Replicate, Copied),
    collectives.reduce: (Partial, Replicate),
    collectives.scatter: (Replicate, Shard),
    collectives.gather: (Shard, Replicate),
    collectives.all_gather: (Shard, Copied),
    collectives.reduce_scatter: (Partial, Shard),
}
"""The placements that each conjugate reads and gives."""

SDPA = aten.scaled_dot_product_attention.default
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
FORMS: dict[Any, tuple[Any, tuple[str, ...], str]] = {
    parallel.embedding: (aten.embedding.default, ("weight", "indices", "start", "padding_idx"), ""),
    parallel.gather: (aten.gather.default, ("self", "dim", "index", "start"), ""),
    parallel.exact_dropout: (aten.dropout.default, ("input", "p"), "exact"),
    parallel.fast_dropout: (aten.dropout.default, ("input", "p"), "fast"),
    parallel.exact_attention: (SDPA, _ATTENTION, "exact"),
    parallel.fast_attention: (SDPA, _ATTENTION, "fast"),
}
"""A parallel form -> what it is the form of, the arguments it takes over, the randomness it is for."""

BIASED = {aten.linear.default: (aten.linear.default, (0, 1, 2)), aten.addmm.default: (aten.mm.default, (1, 2, 0))}
"""A product with a bias -> the bare product, and the places of its operands and of the bias."""

NO_GRADIENT = (aten.detach.default, parallel.peak)
"""Operators that no gradient passes."""
