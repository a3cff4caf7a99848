"""lower: makes the graph of one rank, with local values where they are cut, and conjugates where placements differ.

    Before: y = linear(x, w); z = gelu(y); o = linear(z, v); r = add(x, o)        w, v cut by width
    After:  c = copy(x); y = linear(c, w); z = gelu(y); o = linear(z, v); p = reduce(o); r = add(x, p)

Every communication is a row of the table of conjugates (`autotp/ops/collectives.py`). All cut operators that read a
value share one copy. Graphs name the mesh axis; `bind` replaces the name by a process group.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from autotp.errors import REPORT, Error
from autotp.ops.collectives import all_gather, copy, gather, reduce, reduce_scatter, scatter, share
from autotp.ops.placement_moves import first, nearby, place, take
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.lower.exchange import can_exchange, write_all_to_all, write_exchange, write_halo
from autotp.passes.lower.local_sizes import Local, Target
from autotp.passes.lower.localize import localize
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import Axes, Bound, is_getitem
from autotp.passes.plan.propagate import needs, stored_placement
from autotp.rules.call import operator_name
from autotp.rules.traits import sparse_argument
from autotp.sharding.axis import Axis, find, touches
from autotp.sharding.grid import holders_axis, same_cut
from autotp.sharding.layout import Layout, layout_of
from autotp.sharding.placement import Copied, Partial, Placement, Replicate, Shard, StoredShard
from autotp.source_location import line_of


def lower(
    graph: fx.Graph,
    axes: Axes,
    decision: Decision,
    differentiable: Collection[fx.Node],
    to: Target,
    hoisted: Collection[fx.Node] = (),
) -> fx.Graph:
    """Returns the graph that `to.rank` runs.

    Args:
        differentiable: values that a gradient may flow through; only these need their conjugate's backward.
        hoisted: whole operators that read copies (`passes/plan/hoist.py`).
    """
    lowering = _Lowering(graph, axes, decision, differentiable, to, hoisted)
    for node in graph.nodes:
        lowering.visit(node)
    return lowering.builder.graph


class _Lowering:
    """The new graph.

    Attributes:
        have: old node -> placements of its outputs.
        forms: old node -> (placement -> new node).
    """

    def __init__(
        self,
        graph: fx.Graph,
        axes: Axes,
        decision: Decision,
        differentiable: Collection[fx.Node],
        to: Target,
        hoisted: Collection[fx.Node],
    ) -> None:
        self.axes, self.decision, self.to = axes, decision, to
        self.differentiable, self.hoisted = differentiable, hoisted
        self.builder = Builder(fake_mode_of(graph))
        self.local = Local(self.builder, to)
        self.have: dict[fx.Node, tuple[Placement, ...]] = {}
        self.forms: dict[fx.Node, dict[Placement, fx.Node]] = {}

    # ---- nodes

    def visit(self, node: fx.Node) -> None:
        self.builder.origin = node
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "output":
            self.builder.graph.output(tuple(self._output(n, i) for i, n in enumerate(node.args[0])))  # type: ignore[arg-type]
        elif is_getitem(node) and node.args[0] in self.have:
            self._getitem(node)
        elif node in self.axes.bound:
            self._operator(node, self.axes.bound[node])
        else:
            self._plain(node)

    def _placeholder(self, node: fx.Node) -> None:
        form, leaf = self.builder.copy(node), self.decision.held.get(node)
        self.local.learn(form, node.meta.get("val"))
        if leaf is not None:
            form.meta["val"] = self.local.value(node.meta["val"], self.axes.of(node), leaf)
        self._give(node, form, stored_placement(self.axes.of(node), leaf) if leaf is not None else Replicate())

    def _output(self, node: Any, position: int) -> Any:
        if not isinstance(node, fx.Node) or node not in self.have:
            return self.builder.map(node)
        self.builder.origin = node
        have = self.have[node][0]
        if position not in self.to.local_outputs or not isinstance(have, Shard):
            return self.read(node, Replicate())
        return self.read(node, stored_placement(self.axes.of(node), have.axis))

    def _getitem(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        index: Any = node.args[1]
        placement = self.have[source][index]
        pieces = self.forms[source][placement]
        item = self.builder.raw(operator.getitem, (pieces, index))
        item.meta["val"] = pieces.meta["val"][index]
        leaf = placement.axis if isinstance(placement, Shard) else None
        cut = [d for d, axis in enumerate(self.axes.of(node)) if leaf is not None and touches(axis, leaf)]
        self.local.learn(item, node.meta["val"], cut)
        self._give(node, item, placement)

    def _plain(self, node: fx.Node) -> None:
        """Copies a node without tensors: a size, arithmetic on sizes, the edge of a region. It reads cut values whole.

        The size of an uncut dimension is the same on every rank, so nothing is gathered to read it.
        """
        if self._is_cut_size(node):
            self.builder.env[node] = self.local.size(node.meta["val"])
            return
        for operand in node.all_input_nodes:
            if operand in self.have:
                have = self.have[operand][0]
                whole = isinstance(have, Shard) and not self._is_uncut_size(node, have.axis)
                self.builder.env[operand] = self.read(operand, Replicate()) if whole else self.forms[operand][have]
        self.builder.copy(node)

    def _is_uncut_size(self, node: fx.Node, leaf: Axis) -> bool:
        x: Any = node.args[0]
        dim: Any = node.args[1] if node.target is torch.ops.aten.sym_size.int else None
        return dim is not None and not touches(self.axes.of(x)[dim], leaf)

    def _is_cut_size(self, node: fx.Node) -> bool:
        """True for the size of a cut dimension; the graph needs its global size."""
        x: Any = node.args[0] if node.target is torch.ops.aten.sym_size.int else None
        have = self.have[x][0] if x in self.have else None
        return isinstance(have, Shard) and not self._is_uncut_size(node, have.axis)

    def _operator(self, node: fx.Node, bound: Bound) -> None:
        leaf = self.decision.cuts.get(node)
        wants = needs(node, self.axes, leaf, self.have, self.hoisted)
        for operand, placement in zip(bound.operands, wants.operands, strict=True):
            # `env` is set anew for each operator, because readers may need one value in several placements.
            self.builder.env[operand] = self.read(operand, placement)
        self._expect_dense_gradient(node, bound)
        factor = bound.cuttable(leaf) if leaf is not None else None
        if node.target is nearby and leaf is not None:
            call = self.builder.env[node] = write_halo(self.local, node, leaf)
            self._give(node, call, Copied())
            return
        if leaf is None or factor is None:
            call = self.builder.copy(node)
        else:
            call = self.builder.env[node] = localize(self.local, node, self.axes, factor, leaf)
        cut = [d for dims in self.axes.dims[node] for d, axis in enumerate(dims) if leaf and touches(axis, leaf)]
        self.local.learn(call, node.meta["val"], cut)
        self.have[node] = wants.outputs
        # Outputs of several placements are items of one call.
        self.forms[node] = dict.fromkeys(wants.outputs, call)

    def _expect_dense_gradient(self, node: fx.Node, bound: Bound) -> None:
        """Raises Error if a conjugate would get a sparse gradient, which ranks cannot exchange."""
        argument = sparse_argument(node)
        table = bound.operands[0] if argument else None
        if table is None or table not in self.differentiable:
            return
        if self.builder.env[table] is not self.forms[table][self.have[table][0]]:
            raise Error(
                f"`{operator_name(node)}` has a sparse gradient, and ranks cannot exchange it",
                fix=f"{argument}=False: the gradient has the same numbers",
                at=line_of(node),
            )

    def _give(self, node: fx.Node, form: fx.Node, placement: Placement) -> None:
        self.have[node], self.forms[node], self.builder.env[node] = (placement,), {placement: form}, form

    # ---- conversions

    def read(self, node: fx.Node, want: Placement) -> fx.Node:
        """Returns a value in the placement that a reader needs; each conversion is made once for all readers."""
        forms = self.forms[node]
        if want not in forms:
            forms[want] = self._converted(node, self.have[node][0], want)
        return forms[want]

    def _converted(self, node: fx.Node, have: Placement, want: Placement) -> fx.Node:
        """Writes one conjugate, or two with the replicated value between them."""
        x, through_whole = self.forms[node][have], Replicate() in self.forms[node]
        if any(isinstance(placement, Shard) and find(placement.axis).kind == "grid" for placement in (have, want)):
            return self._on_grid(node, have, want)
        match have, want:
            case Copied(), Replicate():
                # The gradient of the result is the same on all ranks, and that of a Copied value is summed over ranks:
                # rank 0 alone passes it on.
                return self._kept(self.builder.raw(first, (x, self.to.axis, 0, None if self.to.rank == 0 else ())), x)
            case Replicate(), Copied():
                # Without a gradient the two placements are one.
                return self._same_shape(copy, x) if node in self.differentiable else x
            case Partial("sum"), Replicate() | Copied() if node in self.decision.scattered:
                leaf = self.decision.scattered[node]
                self.read(node, Shard(leaf))
                return self._converted(node, Shard(leaf), want)
            case Partial("sum"), Replicate():
                return self._same_shape(reduce, x)
            case Partial(reducer), Replicate():
                return self._same_shape(reduce, x, reducer)
            case Replicate(), Shard(leaf):
                return self._along(node, x, leaf, scatter)
            case Shard(leaf), Replicate():
                return self._along(node, x, leaf, gather)
            # If another reader has the value whole already, a copy of that costs no further gather.
            case Shard(leaf), Copied() if not through_whole:
                return self._along(node, x, leaf, all_gather)
            case Shard(leaf), Shard(to_leaf) if not through_whole and can_exchange(self.axes.of(node), leaf, to_leaf):
                return write_all_to_all(self.local, x, self.axes.of(node), leaf, to_leaf)
            case Partial("sum"), Shard(leaf) if not through_whole:
                return self._along(node, x, leaf, reduce_scatter)
            case _:
                self.read(node, Replicate())
                return self._converted(node, Replicate(), want)

    def _on_grid(self, node: fx.Node, have: Placement, want: Placement) -> fx.Node:
        """Writes a conversion for a value that a grid cuts, of which several ranks may hold the same part.

        It is a conjugate, a sum over ranks of disjoint parts, or two steps with the replicated value between them.
        """
        x = self.forms[node][have]
        match have, want:
            case StoredShard(leaf), Shard(target_leaf) if type(want) is Shard and same_cut(leaf, target_leaf):
                dim, layout = self._layout(node, leaf)
                axis = holders_axis(self.to.axis, leaf, self.to.tp)
                return self._kept(self.builder.raw(share, (x, axis, dim, tuple(layout.shared(self.to.rank)))), x)
            case Shard(leaf), StoredShard():
                dim, layout = self._layout(node, leaf)
                return self._kept(self.builder.raw(first, (x, self.to.axis, dim, tuple(layout.first(self.to.rank)))), x)
            case StoredShard(leaf), _:
                self.read(node, Shard(leaf))
                return self._converted(node, Shard(leaf), want)
            case Shard(leaf), Replicate():
                return self._same_shape(reduce, self._placed(node, x, leaf))
            case Replicate(), Shard(leaf):
                dim, layout = self._layout(node, leaf)
                part = self.builder.raw(
                    take, (self.read(node, Copied()), self.to.axis, dim, layout.pieces, self.to.rank)
                )
                part.meta["val"] = self.local.value(node.meta["val"], self.axes.of(node), leaf)
                return part
            case _:
                self.read(node, Replicate())
                return self._converted(node, Replicate(), want)

    def _placed(self, node: fx.Node, x: fx.Node, leaf: Axis) -> fx.Node:
        """Writes a rank's part into a tensor of zeros of full size: a summand of the whole value."""
        dim, layout = self._layout(node, leaf)
        ranges = layout.first(self.to.rank)
        places = layout.places(self.to.rank, ranges)
        summand = self.builder.raw(place, (x, self.to.axis, dim, tuple(ranges), tuple(places), layout.shape[dim]))
        summand.meta["val"] = self.local.resized(x.meta["val"], dim, layout.shape[dim])
        return summand

    def _layout(self, node: fx.Node, leaf: Axis) -> tuple[int, Layout]:
        """Returns the dimension of a value that a grid cuts, and its layout."""
        dims = self.axes.of(node)
        dim = self._dim(node, leaf)
        shape = tuple(n if isinstance(n, int) else -1 for n in node.meta["val"].shape)
        return dim, layout_of(shape, dims, leaf, self.to.tp, "")

    def _kept(self, call: fx.Node, x: fx.Node) -> fx.Node:
        call.meta["val"] = x.meta["val"]
        return call

    def _same_shape(self, conjugate: Callable[..., Any], x: fx.Node, *args: Any) -> fx.Node:
        call = self.builder.raw(conjugate, (x, self.to.axis, *args))
        call.meta["val"] = x.meta["val"]
        return call

    def _along(self, node: fx.Node, x: fx.Node, leaf: Axis, conjugate: Callable[..., torch.Tensor]) -> fx.Node:
        dim = self._dim(node, leaf)
        return write_exchange(self.local, x, self.axes.of(node)[dim], leaf, dim, conjugate)

    def _dim(self, node: fx.Node, leaf: Axis) -> int:
        dim = self.axes.dim_of(node, leaf)
        if dim is None:
            problem = f"cannot move `{node}` along an axis of {leaf}, in several dimensions"
            raise Error(problem, at=line_of(node), fix=REPORT)
        return dim
