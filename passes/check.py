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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        proof.visit(node)
    return proof.types


class _Proof:
    """What has been proved of a rank's nodes so far."""

    def __init__(self, graph: fx.Graph, held: Any, trainable: Any, to: Target, local_outputs: Any) -> None:
        self.held, self.trainable, self.to, self.local_outputs = held, trainable, to, local_outputs
        self.axes, self.region = infer_axes(graph), 0
        self.ordered, self.pure = _sorted(graph)
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
                self._refuse(node, f"is not this rank's {typed}", expected=_listed(shape), got=_listed(value.shape))
        self.types[node], self.whole[node] = types, whole

    def _refuse(self, node: fx.Node, problem: str, **facts: Any) -> NoReturn:
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
        x, dim = node.args
        (typed,) = self.types[x]  # type: ignore[index]
        size = self.whole[x].meta["val"].shape[dim]  # type: ignore[index]
        return size if _plain(self._local(typed.dims[dim], typed.leaf)) == _plain(size) else self._refuse(  # type: ignore[index]
            node, f"reads from `{x}` a size that is cut", got=typed)  # fmt: skip

    def _erased(self, value: Any) -> Any:
        """Arguments in terms of the model's graph: values as its nodes, sizes as numbers."""
        return fx.map_arg(value, lambda n: self.numbers[n] if n in self.numbers else self.whole[n])

    # ---- what stands for a node of the model's graph

    def _compute(self, node: fx.Node) -> None:
        """Finds the model's node that `node` stands for: the next one, or for a pure operator one on its operands."""
        if node.target in PRODUCTS and len(node.args) == 3:
            return self._biased(node)
        if _is_ordered(node):
            self.region += not outputs_of(node)
            return self._stands_for(node, next(self.ordered, None))
        operands = tuple(self.whole[n] for n in _operands(node))
        candidates = self.pure.get((self.region, _family(node.target), operands), [])
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
            self._refuse(node, "is not what the model computes", expected=model, got=_called(node.target, node.args))
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
            self._refuse(node, "is not what the model reads here", expected=model.target)
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
        self._refuse(node, "is not held as one of its axes is cut", expected=f"{axis}, cut by one of these", got=layout)

    def _output(self, node: fx.Node, model: fx.Node) -> None:
        for i, (got, expected) in enumerate(zip(node.args[0], model.args[0], strict=True)):  # type: ignore[arg-type]
            if _plain(self._erased(got)) != _plain(_valued(expected)):
                self._refuse(node, f"returns something else at {i}", expected=expected, got=got)
            for typed in self.types.get(got, ()):
                whole, layout = replace(typed, placement=Replicate()), self.local_outputs.get(i)
                if layout is None and not typed.fits(Replicate()):
                    self._refuse(node, f"returns at {i} what is not whole", expected=whole, got=typed)
                at = [d for d, axis in enumerate(typed.dims) if typed.leaf is not None and touches(axis, typed.leaf)]
                cut = typed.leaf is not None and self._pieces(typed.dims[at[0]], typed.leaf)
                if layout is not None and (at != [layout.dim] or cut != layout.pieces):
                    self._refuse(node, f"returns at {i} what is not cut as declared", expected=layout, got=typed)

    def _other(self, node: fx.Node, model: fx.Node) -> None:
        """A node without a rule: one of several outputs, a number read out of a tensor, the edge of a region."""
        self._expect_call(node, model.target, bind(model))
        if outputs_of(model):
            source, at = node.args
            tensors = [isinstance(value, torch.Tensor) for value in source.meta["val"]]  # type: ignore[union-attr]
            return self._give(node, model, (self.types[source][sum(tensors[:at])],))  # type: ignore[index, misc]
        for operand in node.all_input_nodes:
            for typed in self.types.get(operand, ()):
                if isinstance(typed.placement, Partial | Shard):
                    self._refuse_read(node, operand, typed, Replicate())
        self.whole[node], self.numbers[node] = model, model.meta.get("val", model)

    # ---- operators

    def _is_call(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> bool:
        """True if `node` calls `target` on these arguments, which are the model's."""
        return node.target is target and _plain(self._erased(bind(node))) == _plain(_valued(arguments))

    def _expect_call(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> None:
        if not self._is_call(node, target, arguments):
            got = _called(node.target, bind(node).values())
            self._refuse(node, "is not this rank's part", expected=_called(target, arguments.values()), got=got)

    def _operator(self, node: fx.Node, model: fx.Node, bound: Bound) -> None:
        operands = _operands(node)
        types = [self.types[operand][0] for operand in operands]
        cut = [typed.leaf for typed in types if typed.leaf is not None]
        leaf = cut[0] if cut else self._new_leaf(node, model, bound)
        factor = self._factor(node, bound, leaf) if leaf is not None else None
        call = self._local_call(node, model, bound, leaf, factor) if leaf is not None and factor is not None else None
        self._expect_call(node, *(call or (model.target, bind(model))))
        self._give(node, model, self._typing(node, model, bound, operands, types, leaf, factor))

    def _biased(self, node: fx.Node) -> None:
        """A product that a bias was put back into, as product and sum (`passes/clean.py`)."""
        product_of, places = PRODUCTS[node.target]
        x, w, bias = (node.args[i] for i in places)
        found = self.pure.get((self.region, product_of, (self.whole[x], self.whole[w])), [])  # type: ignore[index]
        for product_ in found:
            (total, *others) = product_.users
            terms = [product_, self.whole[bias]]  # type: ignore[index]
            if others or total.target is not aten.add.Tensor or total.kwargs or {*total.args} != {*terms}:
                continue
            types = [self.types[n][0] for n in (x, w, bias)]  # type: ignore[index]
            for model, operands, read in ((product_, [x, w], types[:2]), (total, [node, bias], types[2:])):
                bound = self.axes.bound[model]
                leaf = next((typed.leaf for typed in read if typed.leaf is not None), None)
                factor = self._factor(node, bound, leaf) if leaf is not None else None
                types[2:2] = self._typing(node, model, bound, operands, read, leaf, factor)
