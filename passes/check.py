"""check: the type of every value in one rank's graph, and of its gradient; a graph that does not type is refused.

    Before: c = copy(x); y = linear(c, w); z = linear(gelu(y), v); r = reduce(z); add(r, b)
    After:  c f32[B, T, 768]{tp}, y f32[B, T, 3072@tp], z f32[B, T, 768]{+tp}, r f32[B, T, 768]

NOTE [What is proved]
Erasure: without its conjugates, its local numbers made global, the rank's graph is the model's graph, operator for
operator, in order. Typing: every operator reads placements that its rule allows, and every conjugate stands where its
row of the table does. Both together, over all ranks: the numbers and the gradients of one device. Taken on trust are
the rules, `infer_axes`, the layouts (parameters are sliced by them) and the conjugates, which have tests of their own.
What was planned is not looked at: cuts enter by the layouts alone.

NOTE [No gradient, no difference]
Replicate and Copied hold the same number on every rank; they differ in the gradient. A value that has none is either.

NOTE [Why not by local sizes]
A shard of one row looks like something to broadcast, a shard of none like anything. So axes and shapes are the model's
own, and local sizes are what is checked against them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any, NoReturn

import torch
from torch import fx
from torch._ops import OpOverload

from autotp import collectives, parallel
from autotp.axis import Axis, Size, find, holds, leaves, touches
from autotp.call import bind, is_tensor, operand_nodes, outputs_of
from autotp.errors import Error
from autotp.layout import Layout, Range, ranges
from autotp.operators import SIZE_ARGUMENTS
from autotp.partition import chunk_bounds
from autotp.passes.axes import Axes, Bound, Dims, Factor, infer_axes, is_getitem
from autotp.passes.lower import Target
from autotp.placement import Copied, Partial, Placement, Replicate, Shard
from autotp.source import line_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Typed:
    """The type of one tensor of a rank's graph.

    Attributes:
        dtype: its dtype.
        dims: the axes of its dimensions.
        placement: which part of the whole value this is.
        flows: a gradient may flow through it. See NOTE [No gradient, no difference].
    """

    dtype: torch.dtype
    dims: Dims
    placement: Placement
    flows: bool

    def leaf(self) -> Axis | None:
        """The axis that is cut, or None."""
        return self.placement.axis if isinstance(self.placement, Shard) else None

    def is_a(self, kind: type[Placement]) -> bool:
        same = (Replicate, Copied)
        return isinstance(self.placement, same if kind in same and not self.flows else kind)

    def __str__(self) -> str:
        leaf, mark = self.leaf(), str(self.placement)
        sizes = [f"{find(d).size}{'@tp' if leaf is not None and touches(d, leaf) else ''}" for d in self.dims]
        kind = str(self.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        return f"{kind}[{', '.join(sizes)}]{'' if leaf is not None else mark}"


def check(
    lowered: fx.Graph,
    graph: fx.Graph,
    held: Mapping[str, Layout],
    trainable: Collection[str],
    to: Target,
    local_outputs: Mapping[int, Layout] | None = None,
) -> dict[fx.Node, tuple[Typed, ...]]:
    """The types of all tensors in `lowered`, for each node one for each tensor it gives.

    Args:
        lowered: one rank's graph.
        graph: the model's graph that it was made from.
        held: placeholder name -> how the tensor is held; those not in it are whole on every rank.
        trainable: placeholder names that a gradient may be wanted of: the parameters, and the inputs.
        to: whose graph it is.
        local_outputs: output position -> the layout of an output that stays cut.

    Raises:
        Error: the graph does not type; names the node, its source line, and the placements expected and got.
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
        self.axes: Axes = infer_axes(graph)
        self.held, self.trainable, self.to, self.local = held, trainable, to, local
        self.model: Iterator[fx.Node] = (node for node in graph.nodes if not _is_number(node))
        self.types: dict[fx.Node, tuple[Typed, ...]] = {}
        self.whole: dict[fx.Node, fx.Node] = {}  # What a node computes (a part of), in the model's graph.
        self.numbers: dict[fx.Node, Any] = {}
        self.opened: dict[fx.Node, fx.Node] = {}  # What joins the pieces of a value -> what took it apart.

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
            self._give(node, node.args[0], (self.types[node.args[0]][node.args[1]],))  # type: ignore[index]
        else:
            self._compute(node, next(self.model, None))

    def _refuse(self, node: fx.Node, problem: str, **facts: Any) -> NoReturn:
        where = f"rank {self.to.rank} of {self.to.tp}: `{node}`"
        raise Error(f"{where} {problem}", **{k: str(v) for k, v in facts.items()}, at=line_of(node))

    def _give(self, node: fx.Node, whole: fx.Node, types: tuple[Typed, ...]) -> None:
        """Remembers what was proved, after comparing it with the example values the node carries."""
        for value, typed in zip(outputs_of(node), types, strict=True):
            shape = [self._local(axis, typed.leaf()) for axis in typed.dims]
            if _plain(tuple(value.shape)) != _plain(shape) or value.dtype != typed.dtype:
                self._refuse(node, "has another shape than this rank's part", expected=typed, got=list(value.shape))
        self.types[node], self.whole[node] = types, whole

    # ---- nodes of the model's graph

    def _compute(self, node: fx.Node, model: fx.Node | None) -> None:
        """A node that stands for the next one of the model's graph."""
        if model is None or node.op != model.op:
            self._refuse(node, "is not in the model's graph", expected=model, got=node.format_node())
        if node.op in ("placeholder", "get_attr"):
            self._held(node, model)
        elif node.op == "output":
            self._output(node, model)
        elif model in self.axes.bound:
            self._operator(node, model, self.axes.bound[model])
        else:
            self._other(node, model)

    def _held(self, node: fx.Node, model: fx.Node) -> None:
        if node.target != model.target:
            self._refuse(node, "is not in the model's graph", expected=model.target)
        layout, values = self.held.get(node.name), outputs_of(model)
        leaf = self._stored(node, model, layout) if layout is not None and layout.dim is not None else None
        placement = Shard(leaf) if leaf is not None else Replicate()
        flows = node.name in self.trainable
        types = (Typed(v.dtype, self.axes.of(model), placement, flows and _is_floating(v)) for v in values)
        self._give(node, model, tuple(types))

    def _stored(self, node: fx.Node, model: fx.Node, layout: Layout) -> Axis:
        """The axis that a layout cuts: the one that gives every rank just these pieces."""
        axis = self.axes.of(model)[layout.dim or 0]
        for leaf in dict.fromkeys(leaves(axis)):
            if holds(axis, leaf) and not axis.size.symbols and layout.shape == tuple(outputs_of(model)[0].shape):
                if all(tuple(ranges(axis, leaf, self.to.tp, r)) == layout.pieces[r] for r in range(self.to.tp)):
                    return leaf
        got = f"{layout}, of which this rank holds {list(layout.pieces[self.to.rank])}"
        self._refuse(node, "is not held as any of its axes is cut", expected=f"dimension {layout.dim} as {axis}", got=got)

    def _output(self, node: fx.Node, model: fx.Node) -> None:
        for i, (got, expected) in enumerate(zip(node.args[0], model.args[0], strict=True)):  # type: ignore[arg-type]
            if _plain(self._erased(got)) != _plain(_values(expected)):
                self._refuse(node, f"returns something else at {i}", expected=expected, got=got)
            if got in self.types:
                self._returned(node, i, got, outputs_of(expected)[0].shape)

    def _returned(self, node: fx.Node, i: int, got: fx.Node, shape: Sequence[Any]) -> None:
        (typed,), layout = self.types[got], self.local.get(i)
        if layout is None and not typed.is_a(Replicate):
            self._refuse(node, f"returns `{got}` at {i}", expected=replace(typed, placement=Replicate()), got=typed)
        if layout is not None:
            leaf = typed.leaf()
            at = [d for d, axis in enumerate(typed.dims) if leaf is not None and touches(axis, leaf)]
            if leaf is None or at != [layout.dim] or layout.pieces != self._all_pieces(typed.dims[at[0]], leaf):
                self._refuse(node, f"returns `{got}` at {i}, which was to stay cut", expected=layout, got=typed)

    def _other(self, node: fx.Node, model: fx.Node) -> None:
        """A node without a rule: getitem, a region's end, a number read out of a tensor."""
        if not self._is_call(node, model.target, bind(model)):
            self._refuse_call(node, model)
        if is_getitem(node) and node.args[0] in self.types:
            before = outputs_of(node.args[0])  # type: ignore[arg-type]
            picked = [v is model.meta["val"] for v in model.args[0].meta["val"]]
            at = sum(isinstance(v, torch.Tensor) for v in node.args[0].meta["val"][: node.args[1]])  # type: ignore[index, union-attr]
            del before, picked
            return self._give(node, model, (self.types[node.args[0]][at],))  # type: ignore[index]
        for operand in node.all_input_nodes:
            for typed in self.types.get(operand, ()):
                if not (typed.is_a(Replicate) or typed.is_a(Copied)):
                    self._refuse(node, f"reads `{operand}`", expected=replace(typed, placement=Replicate()), got=typed)
        self.whole[node] = model
        self.numbers[node] = model.meta.get("val")
