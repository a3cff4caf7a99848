"""check: derives the type of every value in one rank's graph, and raises Error if types do not fit.

    Before: c = copy(x); y = linear(c, w); z = linear(gelu(y), v); r = reduce(z); add(r, b)
    After:  c f32[B, T, 768]{tp}, y f32[B, T, 3072@tp], z f32[B, T, 768]{+tp}, r f32[B, T, 768]

NOTE [What is proved]
Erasure: without conjugates, and with local numbers made global, the rank's graph is the model's graph: each operator is
an operator of the model on the same operands, with random draws in the same order. Typing: every operator reads
placements that its rule allows, and every conjugate reads and gives the placements of its row in the table. Together,
on all ranks, this gives the numbers and the gradients of one device. The plan is not read; cuts come from the
parameters' layouts alone. So the files of this folder import nothing of choose, lower and localize. The lists of
operators that split, slice, take a bias or stop a gradient are written here a second time, and not read from the
table's traits. Trusted are the rules, `infer_axes`, slicing by layouts and the conjugates, which have separate tests.

NOTE [Why not by local sizes]
A shard of one row looks like a dimension to broadcast, and an empty shard fits anything. So axes and shapes are those
of the model, and local sizes are checked against them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autotp.errors import Error
from autotp.ops import collectives, custom_vjp
from autotp.ops.coalesced import together
from autotp.ops.losses import cross_entropy
from autotp.ops.placement_moves import nearby
from autotp.passes.check.erase import (
    BIASED,
    SPLIT,
    called,
    closing,
    family,
    is_along,
    is_number,
    is_ordered,
    listed,
    openings,
    plain,
    target_name,
    tensor_operands,
    valued,
)
from autotp.passes.check.local_calls import local_call, local_length, pieces_by_rank
from autotp.passes.check.proof import Proof
from autotp.passes.check.replication import LOCAL_MOVES, cut_of, extended, joint_cut, moved, shares, stored
from autotp.passes.check.types import CONJUGATES, OperatorCut, Typed, cut_factor, moved_leaf, placements
from autotp.passes.lower.local_sizes import Target
from autotp.passes.lower.overlap import separate
from autotp.passes.plan.infer_axes import Axes
from autotp.rules.call import arguments_of, call_of, outputs_of
from autotp.rules.traits import reach_of
from autotp.sharding.axis import Axis, find, leaves, touches
from autotp.sharding.grid import is_full, same_cut
from autotp.sharding.layout import Layout, divided_as
from autotp.sharding.partition import chunk_size
from autotp.sharding.placement import JOINED, Copied, Halo, Partial, Placement, Replicate, Shard

aten = torch.ops.aten

NO_GRADIENT = (aten.detach.default, cross_entropy.peak, custom_vjp.kept)
"""Operators that stop gradients: written a second time, see NOTE [What is proved]."""


def check(
    lowered: fx.Graph,
    graph: fx.Graph,
    layouts: Mapping[str, Layout],
    trainable: Collection[str],
    to: Target,
    local_outputs: Mapping[int, Layout],
    axes: Axes | None = None,
) -> dict[fx.Node, tuple[Typed, ...]]:
    """Returns the types of all tensors in `lowered`: node -> one type for each of its output tensors.

    Args:
        lowered: one rank's graph.
        graph: the model's graph, from which it was made.
        layouts: placeholder name -> layout; a tensor that is not in it is whole on every rank.
        trainable: placeholder names of the parameters and inputs that may require a gradient.
        to: the rank.
        local_outputs: output position -> the layout of an output that stays cut.
        axes: `infer_axes(graph)`, which is the same for all ranks, if the caller has it.

    Raises:
        Error: the types do not fit; names the node, its source line, the rule, the types expected and got.
    """
    proof = _Checking(graph, layouts, trainable, to, local_outputs, axes)
    try:
        separated = separate(lowered)
    except Exception as error:
        where = f"{to.axis} rank {to.rank} of {to.tp}"
        raise Error(
            f"{where}: a group of products cannot be separated: {error!r}",
            fix='without=("overlap",), and a report of it',
        ) from error
    for node in separated.nodes:
        try:
            proof.visit(node)
        except Error:
            raise
        except Exception as error:  # Any failure means that the graph is not proved.
            proof.refuse(node, f"cannot be typed: {error!r}", got=called(node))
    return proof.types


Reads = Sequence[tuple[fx.Node, Typed]]


class _Checking(Proof):
    """Proves node after node."""

    def visit(self, node: fx.Node) -> None:
        source: Any = node.args[0] if node.args else None
        if is_number(node):
            self.numbers[node] = self.number(node)
        elif node.target is together:
            self._together(node, *node.args)
        elif node.target in CONJUGATES and not is_along(node.args[1], self.to.axis):
            self._compute(node)
        elif node.target is collectives.share:
            self._share(node, *node.args)
        elif node.target is collectives.halo:
            self._halo(node, *node.args)
        elif node.target is collectives.all_to_all:
            self._exchange(node, *node.args)
        elif node.target is operator.getitem and source in self.bundles:
            self.give(node, self.bundles[source][node.args[1]], (self.types[source][node.args[1]],))  # type: ignore[index]
        elif node.target in CONJUGATES:
            self._conjugate(node, *node.args)
        elif node.target in LOCAL_MOVES and is_along(node.args[1], self.to.axis):
            self._move(node, node.args[0])
        elif node in self.opened:
            self._close(node, self.opened[node])
        elif (end := closing(node, self.to.axis)) is not None:
            self._open(node, end)
        elif node.target is operator.getitem and source in self.opened.values():
            self.give(node, source, (self.types[source][node.args[1]],))  # type: ignore[index]
        else:
            self._compute(node)

    # ---- nodes that stand for a node of the model's graph

    def _compute(self, node: fx.Node) -> None:
        """Finds the model's node for `node`: the next ordered node, or a pure operator on the same operands."""
        if node.target in BIASED and len(node.args) == 3:
            return self._biased(node, *(node.args[i] for i in BIASED[node.target][1]))  # type: ignore[arg-type]
        if is_ordered(node):
            return self._stands_for(node, self.model.next())
        candidates, errors = self.model.on(family(node), *(self.whole[n] for n in tensor_operands(node))), []
        for model in candidates:
            try:
                self._stands_for(node, model)
                return candidates.remove(model)
            except Error as error:
                errors.append(error)
        raise errors[0] if errors else self._stands_for(node, None)

    def _stands_for(self, node: fx.Node, model: fx.Node | None) -> Any:
        if model is None or node.op != model.op:
            facts = {} if model is None else {"expected": called(model)}
            self.refuse(node, "is not what the model computes", **facts, got=called(node))
        if node.op in ("placeholder", "get_attr"):
            self._stored(node, model)
        elif node.op == "output":
            self._output(node, model)
        elif model in self.axes.bound:
            self._operator(node, model)
        else:
            self._other(node, model)

    def _stored(self, node: fx.Node, model: fx.Node) -> None:
        """Types a parameter, a buffer, an input or a constant."""
        if node.target != model.target:
            self.refuse(node, "is not what the model reads here", expected=model.target)
        layout = self.held.get(node.name)
        read = bool(node.users or model.users)  # Of a tensor that nothing reads, the graph says nothing.
        leaf = self._held(node, model, layout) if layout is not None and read else None
        placement: Placement = Replicate() if leaf is None else stored(leaf, layout)
        if leaf is not None and not any(same_cut(leaf, cut) for cut in self.cuts):
            self.cuts.append(leaf)
        flows = node.name in self.trainable
        types = (self.typed(v, self.axes.of(model), placement, flows) for v in outputs_of(model))
        self.give(node, model, tuple(types))

    def _held(self, node: fx.Node, model: fx.Node, layout: Layout) -> Axis | None:
        """Returns the axis whose cut gives every rank the pieces of a layout; None for a whole tensor."""
        dims, shape = self.axes.of(model), tuple(outputs_of(model)[0].shape)
        if layout.dim is None and layout.shape == shape:
            return None
        if layout.dim is not None and layout.shape == shape:
            leaf = cut_of(self.to, dims[layout.dim], layout.pieces)
            leaf = leaf or divided_as(dims[layout.dim], layout.pieces, self.to.tp)
            if leaf is not None:
                return leaf
        self.refuse(node, "is not held as one of its axes is cut", expected=listed(dims), got=layout)

    def _output(self, node: fx.Node, model: fx.Node) -> None:
        for i, (got, expected) in enumerate(zip(node.args[0], model.args[0], strict=True)):  # type: ignore[arg-type]
            if plain(self.erased(got)) != valued(expected):
                self.refuse(node, f"returns something else at {i}", expected=expected, got=got)
            for typed in self.types.get(got, ()):
                layout, dims = self.local_outputs.get(i), typed.cut_dims(typed.leaf)
                if layout is not None and typed.flows and layout.repeated and type(typed.placement) is Shard:
                    self.refuse(
                        node, f"returns at {i} what several ranks have, its gradient counted by each", got=typed
                    )
                if layout is None and not typed.fits(Replicate()):
                    self.refuse_read(node, got, typed, Replicate())
                if layout is not None and (dims != [layout.dim] or self._cut_at(typed, dims[0]) != layout.pieces):
                    self.refuse(node, f"returns at {i} what is not cut as declared", expected=layout, got=typed)

    def _cut_at(self, typed: Typed, dim: int) -> Any:
        return pieces_by_rank(self.to, typed.dims[dim], typed.leaf) if typed.leaf is not None else None

    def _other(self, node: fx.Node, model: fx.Node) -> None:
        """Types a node without a rule: an item of a tuple, a number read from a tensor, the edge of a region."""
        self._expect_call(node, model.target, arguments_of(model))
        if outputs_of(model):
            source: Any = node.args[0]
            before = source.meta["val"][: node.args[1]]
            types = self.types[source][sum(isinstance(value, torch.Tensor) for value in before)]
            return self.give(node, model, (types,))
        for operand in node.all_input_nodes:
            for typed in self.types.get(operand, ()):
                if isinstance(typed.placement, Partial | Shard):
                    self.refuse_read(node, operand, typed, Replicate())
        self.whole[node], self.numbers[node] = model, model.meta.get("val", model)

    # ---- operators

    def _is_call(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> bool:
        """True if `node` calls `target` on these arguments of the model's graph."""
        return node.target is target and plain(self.erased(arguments_of(node))) == valued(arguments)

    def _expect_call(self, node: fx.Node, target: Any, arguments: dict[str, Any]) -> None:
        if not self._is_call(node, target, arguments):
            expected = f"{target_name(target)}({', '.join(map(listed, arguments.values()))})"
            self.refuse(node, "is not this rank's part", expected=expected, got=called(node))

    def _operator(self, node: fx.Node, model: fx.Node) -> None:
        reads = [(operand, self.types[operand][0]) for operand in tensor_operands(node)]
        cut = self._cut(node, model, reads)
        if cut is None or not is_full(cut.leaf):
            cut = self._new_cut(node, model, cut) or cut
        self._expect_call(node, *local_call(self.to, self.axes, node, model, cut))
        self.give(node, model, self._typing(node, model, reads, cut))

    def _biased(self, node: fx.Node, x: fx.Node, w: fx.Node, bias: fx.Node) -> None:
        """Types a product with a bias (`passes/lower/fuse_bias.py`) as a product, then a sum."""
        read = {n: (n, self.types[n][0]) for n in (x, w, bias)}
        for model in self.model.on(BIASED[node.target][0], self.whole[x], self.whole[w]):  # type: ignore[index]
            for terms in ((model, self.whole[bias]), (self.whole[bias], model)):
                sums = self.model.on(aten.add.Tensor, *terms)
                if sums and arguments_of(sums[0])["alpha"] == 1:
                    factors = [read[x], read[w]]
                    (made,) = self._typing(node, model, factors, self._cut(node, model, factors))
                    reads = [(node, made) if term is model else read[bias] for term in terms]
                    total = sums.pop(0)
                    return self.give(node, total, self._typing(node, total, reads, self._cut(node, total, reads)))
        self._stands_for(node, None)

    def _cut(self, node: fx.Node, model: fx.Node, reads: Reads) -> OperatorCut | None:
        """Returns the cut of an operator that reads cut operands; None if it reads none."""
        cuts = [typed.leaf for _, typed in reads if typed.leaf is not None]
        leaf = (joint_cut(cuts, self.to.tp) or cuts[0]) if cuts else None
        factor = cut_factor(self.axes.bound[model], leaf) if leaf is not None else None
        if leaf is not None and factor is None:
            rule, got = self.axes.bound[model].rule, ", ".join(str(typed) for _, typed in reads)
            self.refuse(node, "cannot be cut along the axis of what it reads", rule=rule, got=got)
        return None if leaf is None or factor is None else OperatorCut(leaf, factor)

    def _new_cut(self, node: fx.Node, model: fx.Node, existing: OperatorCut | None) -> OperatorCut | None:
        """Returns the cut of an operator that makes a dimension, such as zeros and expand, from its local sizes.

        Args:
            existing: a cut along another axis, which uses a factor of the ranks.
        """
        bound = self.axes.bound[model]
        made = [factor.axis for factor in bound.factors if not factor.ins and factor.mark != "^"]
        if existing is not None and self._is_call(node, *local_call(self.to, self.axes, node, model, existing)):
            return existing
        if self._is_call(node, model.target, arguments_of(model)):
            return None
        for leaf in [*self._cuts_of(made, existing), *self._cuts_made(made, existing)]:
            factor = cut_factor(bound, leaf)
            cut = OperatorCut(leaf, factor) if factor is not None else None
            if cut is not None and self._is_call(node, *local_call(self.to, self.axes, node, model, cut)):
                return cut
        return None

    def _cuts_of(self, made: Sequence[Axis], existing: OperatorCut | None) -> list[Axis]:
        """Returns the cuts of parameters and inputs that divide a new axis.

        They are tried first: several cuts of an axis with several leaves give the same local sizes (8 heads as `2 x 4`
        on 4 ranks: the 4, or both by 2), and readers need the cut of their other operands.
        """
        return [leaf for leaf in self.cuts if existing is None and any(touches(axis, leaf) for axis in made)]

    def _cuts_made(self, made: Sequence[Axis], existing: OperatorCut | None) -> Iterator[Axis]:
        """Yields the cuts of one leaf of a new axis, in addition to the existing cut."""
        for new_leaf in [leaf for axis in made for leaf in leaves(axis) if self._has_part(leaf, existing)]:
            leaf = extended(existing.leaf if existing else None, new_leaf, self.to.tp)
            if leaf is not None:
                yield leaf

    def _has_part(self, leaf: Axis, existing: OperatorCut | None) -> bool:
        """True for a length that is a number, or, without another cut, for one whose part the rank has computed."""
        part = (chunk_size, find(leaf).size)
        return not leaf.size.symbols or (existing is None and part in self.to.parts)

    def _typing(self, node: fx.Node, model: fx.Node, reads: Reads, cut: OperatorCut | None) -> tuple[Typed, ...]:
        """Returns the types of an operator's outputs, if its rule allows the types of its operands."""
        bound = self.axes.bound[model]
        wants, gives = placements(bound, [typed for _, typed in reads], cut)
        for i, ((operand, typed), want) in enumerate(zip(reads, wants, strict=True)):
            if isinstance(typed.placement, Halo) and self._reads_halo(model, i, typed.placement, cut):
                continue
            if not typed.fits(want):
                self.refuse_read(node, operand, typed, want, rule=bound.rule)
        flows = model.target not in NO_GRADIENT and any(typed.flows for _, typed in reads)
        values = zip(outputs_of(model), self.axes.dims[model], gives, strict=True)
        types = tuple(self.typed(v, dims, placement, flows) for v, dims, placement in values)
        if model.target is custom_vjp.output:  # Its outputs: a value that has a gradient, and the gradient itself.
            types = replace(types[0], flows=True), replace(types[1], flows=False)
        for typed in types:
            if typed.flows and typed.placement == Partial("max"):
                self.refuse(node, "loses its gradient where it is reduced", rule=bound.rule, got=typed)
        return types

    # ---- conjugates

    def _conjugate(self, node: fx.Node, x: Any, axis: Any, *rest: Any) -> None:
        """Types a conjugate: its operand has the placement of its row, and it moves the dimension that is cut."""
        (typed,), kinds = self.types[x], CONJUGATES[node.target]
        leaf = moved_leaf(typed, *self.erased(rest)) if Shard in kinds else None
        reducers: Any = ([], ["sum"], ["max"], *([name] for name in JOINED))
        allowed = {collectives.copy: ([],), collectives.reduce: reducers}.get(node.target, ())  # type: ignore[arg-type]
        if axis != self.to.axis or node.kwargs or (leaf is None and list(rest) not in allowed):
            self.refuse(node, "does not move along the axis that is cut", got=f"{called(node)} of {typed}")
        make: dict[type[Placement], Any] = {Shard: lambda: Shard(leaf), Partial: lambda: Partial(*rest[: leaf is None])}  # type: ignore[arg-type]
        want, give = (make.get(placement, placement)() for placement in kinds)
        if not typed.fits(want):
            self.refuse_read(node, x, typed, want)
        self.give(node, self.whole[x], (replace(typed, placement=give),))

    def _exchange(
        self, node: fx.Node, x: Any, axis: Any, dim: Any, size: Any, to_dim: Any, to_size: Any, *blocks: Any
    ) -> None:
        """Types an `all_to_all`: it joins the parts of the dimension that is cut, and cuts another one."""
        (typed,), (block, to_block) = self.types[x], blocks or (1, 1)
        sides = (dim, size, block), (to_dim, to_size, to_block)
        leaf, to_leaf = (moved_leaf(typed, at, *self.erased(lengths)) for at, *lengths in sides)
        if axis != self.to.axis or node.kwargs or leaf is None or to_leaf is None or leaf is to_leaf:
            self.refuse(node, "does not exchange the axis that is cut for another", got=f"{called(node)} of {typed}")
        if not typed.fits(Shard(leaf)):
            self.refuse_read(node, x, typed, Shard(leaf))
        self.give(node, self.whole[x], (replace(typed, placement=Shard(to_leaf)),))

    def _halo(self, node: fx.Node, x: Any, axis: Any, dim: Any, size: Any, before: Any, ends: Any, *more: Any) -> None:
        """Types a `halo`, which stands for a `nearby` of the model's graph: its operand is cut along `dim` alone."""
        (typed,), documents = self.types[x], [] if ends is None else [ends]
        leaf = moved_leaf(typed, *self.erased((dim, size)))
        wanted = plain(self.erased([dim, before, *more]))
        models = self.model.on(nearby, self.whole[x], *(self.whole[n] for n in documents))
        model = next((n for n in models if plain(valued([*n.args[1:3], *n.args[4:]])) == wanted), None)
        if axis != self.to.axis or node.kwargs or leaf is None or model is None:
            self.refuse(node, "does not read what the model reads around its part", got=f"{called(node)} of {typed}")
        wants = [(x, Shard(leaf)), *((n, Copied() if self.types[n][0].flows else Replicate()) for n in documents)]
        for operand, want in wants:
            if not self.types[operand][0].fits(want):
                self.refuse_read(node, operand, self.types[operand][0], want)
        models.remove(model)
        self.give(node, model, (replace(typed, dims=self.axes.of(model), placement=Halo(leaf, dim)),))

    def _reads_halo(self, model: fx.Node, position: int, placement: Halo, cut: OperatorCut | None) -> bool:
        """True for keys and values of an attention whose queries read no more than the halo, and are cut as it is."""
        reach, operands, arguments = reach_of(model), self.axes.bound[model].operands, arguments_of(model)
        if cut is None or reach is None or position not in (1, 2) or not same_cut(cut.leaf, placement.axis):
            return False
        _, dim, before, ends, chunk, after = operands[position].args
        wanted = reach.around(call_of(model).arguments)
        known = (plain(valued([before, after])), chunk) == (plain(list(wanted)), reach.chunk)
        known = known and ends in (None, arguments.get(reach.ends))
        return known and find(self.axes.of(operands[0])[dim]) is find(cut.leaf)  # type: ignore[index]

    def _share(self, node: fx.Node, x: Any, axis: Any, dim: Any, ranges: Any) -> None:
        """Types a `share`: a value that several ranks hold, and of whose readers each rank computes a part."""
        (typed,) = self.types[x]
        if node.kwargs or not shares(self.to, typed, axis, dim, ranges):
            self.refuse(node, "does not sum the gradient of what several ranks hold", got=f"{called(node)} of {typed}")
        self.give(node, self.whole[x], (replace(typed, placement=Shard(typed.leaf)),))  # type: ignore[arg-type]

    def _together(self, node: fx.Node, xs: Any, axis: Any, where: Any) -> None:
        """Types a `together`: each operand as `copy` or `share` would type it."""
        if not is_along(axis, self.to.axis):
            return self._copies(node, xs, axis, where)
        types = []
        for x, share_args in zip(xs, where, strict=True):
            (typed,) = self.types[x]
            is_replicated = share_args is None and axis == self.to.axis and typed.fits(Replicate())
            is_shared = share_args is not None and shares(self.to, typed, axis, *share_args)
            if node.kwargs or not (is_replicated or is_shared):
                self.refuse(node, f"does not sum the gradient of `{x}`", got=f"{called(node)} of {typed}")
            types.append(replace(typed, placement=Shard(typed.leaf) if is_shared else Copied()))  # type: ignore[arg-type]
        self.bundles[node], self.types[node] = [self.whole[x] for x in xs], tuple(types)

    def _copies(self, node: fx.Node, xs: Any, axis: Any, where: Any) -> None:
        """Types a `together` over another mesh axis: the copies of the model's graph, each as an operator."""
        models, types = list[fx.Node](), list[Typed]()
        for x, share_args in zip(xs, where, strict=True):
            copies = [model for model in self.model.on(collectives.copy, self.whole[x]) if model.args[1:] == (axis,)]
            if share_args is not None or node.kwargs or not copies:
                self.refuse(node, f"does not copy `{x}` as the model does", got=called(node))
            self.model.on(collectives.copy, self.whole[x]).remove(copies[0])
            reads = [(x, self.types[x][0])]
            models.append(copies[0])
            types += self._typing(node, copies[0], reads, self._cut(node, copies[0], reads))
        self.bundles[node], self.types[node] = models, tuple(types)

    def _move(self, node: fx.Node, x: Any) -> None:
        """Types a move without communication (`replication.py`)."""
        (typed,) = self.types[x]
        row = moved(self.to, node.target, typed, arguments_of(node))
        if row is None or node.kwargs:
            self.refuse(node, "is no move of what this rank has", got=f"{called(node)} of {typed}")
        if not typed.fits(row[0]):
            self.refuse_read(node, x, typed, row[0])
        self.give(node, self.whole[x], (replace(typed, placement=row[1]),))

    def _open(self, node: fx.Node, end: fx.Node) -> None:
        """Types a split of a dimension, so that one part of it can be cut or joined (`passes/lower/exchange.py`)."""
        x: Any
        dim: Any
        x, *rest = node.args
        sizes, dim = rest if node.target is SPLIT else reversed(rest)
        (typed,) = self.types[x]
        for parts in openings(node.target, find(typed.dims[dim])):
            if plain([local_length(self.to, part, typed.leaf) for part in parts]) == plain(self.erased(sizes)):
                break
        else:
            self.refuse(node, "splits a dimension in another way than its axis", expected=typed, got=called(node))
        inner = [[part] for part in parts] if node.target is SPLIT else [parts]
        types = (replace(typed, dims=(*typed.dims[:dim], *axes, *typed.dims[dim + 1 :])) for axes in inner)
        self.opened[end] = node
        self.give(node, node, tuple(types))

    def _close(self, node: fx.Node, opening: fx.Node) -> None:
        """Types the join of a split dimension; all its parts must have moved in the same way."""
        x: Any = opening.args[0]
        (typed,), moved = self.types[x], [self.types[n][0] for n in node.all_input_nodes if n in self.types]
        if any(part.placement != moved[0].placement for part in moved):
            self.refuse(node, "joins parts that were moved differently", got=", ".join(map(str, moved)))
        self.give(node, self.whole[x], (replace(typed, placement=moved[0].placement),))
