"""halos: lets a rank read only the keys that its queries see, where attention says how far they look.

    Before: attention_kernel(q, apart(k), apart(v), before=7)                        all keys and values are gathered
    After:  attention_kernel(q, nearby(k, 1, 7), nearby(v, 1, 7), before=7)          `lower` writes `halo`

A query of a sliding window reads a known number of keys before and after it, and one of packed documents none outside
its document: it is at most as long as the longest. Where tokens have numbers of documents, their ends are computed.
`nearby(x)` is `x`, of which each rank gets its part and these positions around it. Masks that are tensors say nothing
before they are computed: there all keys and values are gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.ops.attention.documents import ends_of_numbers, keys_seen
from autotp.ops.placement_moves import apart, nearby
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.plan.choose import Decision, carry, elements
from autotp.passes.plan.infer_axes import Axes, visit
from autotp.passes.plan.propagate import Have, propagate
from autotp.passes.plan.sequence.separate_keys import viewed, with_operands
from autotp.rules.call import arguments_of, call_of, elements_of, nbytes_of
from autotp.rules.row import Reach
from autotp.rules.traits import reach_of
from autotp.sharding.axis import Axis, Size, find
from autotp.sharding.placement import Shard

KEYS = (1, 2)
"""The places of the keys and of the values among the operands of an attention."""


@dataclass(frozen=True)
class WithHalos:
    """A graph in which some attentions read halos, its axes, and its decision."""

    graph: fx.Graph
    axes: Axes
    decision: Decision


def read_halos(graph: fx.Graph, axes: Axes, decision: Decision) -> WithHalos:
    """Returns the same function with `nearby` where an attention that is cut says how far its queries look.

    Args:
        graph: with `apart` for keys and values.
    """
    have = propagate(graph, axes, decision.cuts, decision.held)
    writing = _Halos(graph, axes, decision)
    for node in graph.nodes:
        writing.visit(node, reads_halo(node, axes, decision.cuts, have))
    return WithHalos(writing.builder.graph, writing.new_axes, writing.new)


def reads_halo(node: fx.Node, axes: Axes, cuts: Mapping[fx.Node, Axis], have: Have) -> Reach | None:
    """Returns how far the queries of an attention look if it can read halos of keys and values; else None."""
    leaf, reach = cuts.get(node), reach_of(node)
    if leaf is None or reach is None:
        return None
    operands = axes.bound[node].operands
    dim = _sequence(node, axes, leaf)
    can = dim is not None and all(_is_cut(operands[i], dim, leaf, axes, have) for i in KEYS)
    return reach if can else None


def _sequence(node: fx.Node, axes: Axes, leaf: Axis) -> int | None:
    """Returns the dimension of the queries that is the sequence; None if it is only a part of a dimension."""
    dims = axes.of(axes.bound[node].operands[0])
    return next((d for d, axis in enumerate(dims) if find(axis) is find(leaf)), None)


def _is_cut(operand: fx.Node, dim: int, leaf: Axis, axes: Axes, have: Have) -> bool:
    """True for keys of which each rank computes its part, and which are read as they are or through views of a part."""
    source: Any
    *views, source = viewed(operand)
    keys = find(axes.of(operand)[dim])
    if source.target is not apart or keys.kind != "leaf" or have[source.args[0]] != (Shard(leaf),):
        return False
    return elements(operand) == elements(source) and all(axes.bound[view].cuttable(keys) for view in views)


def halo_bytes(node: fx.Node, reach: Reach, axes: Axes, cuts: Mapping[fx.Node, Axis], parts: int) -> float:
    """Returns the bytes of keys and values that an average rank reads of other ranks, forward."""
    dim = _sequence(node, axes, cuts[node])
    assert dim is not None
    length = elements_of(axes.bound[node].operands[1].meta["val"].shape[dim : dim + 1])
    reaches = reach.around(call_of(node).arguments)
    before, after = (
        number_at_capture(n, length if side < 0 else side)
        for n, side in zip(reaches, (reach.window, reach.after), strict=True)
    )
    keys = keys_seen(length, parts, before, None, reach.chunk, after)
    sent = sum(stop - first for first, stop in keys) - length
    return sum(nbytes_of(axes.bound[node].operands[i].meta["val"]) for i in KEYS) * sent / max(length, 1) / parts


def number_at_capture(number: Any, most: int) -> int:
    """Returns the number of keys beside its own that a query reads, at capture; `most` if values of tensors decide."""
    hint = number if isinstance(number, int) else number.node.hint
    return most if hint is None else int(hint)


class _Halos:
    """The new graph, its axes and its decision.

    Attributes:
        read: (old operand, reach) -> the operand with a halo: layers may share keys and values.
        ends: numbers of documents, the dimension of tokens, and their number -> where documents end.
    """

    def __init__(self, graph: fx.Graph, axes: Axes, decision: Decision) -> None:
        self.axes, self.decision = axes, decision
        self.builder, self.new_axes = Builder(fake_mode_of(graph)), Axes()
        self.new = Decision(chosen=decision.chosen)
        self.read: dict[Any, fx.Node] = {}
        self.ends: dict[Any, fx.Node] = {}

    def visit(self, node: fx.Node, reach: Reach | None) -> None:
        """Copies a node; an attention with a `reach` reads halos."""
        self.builder.origin = node
        leaf = self.decision.cuts.get(node)
        if reach is None or leaf is None:
            carry(self.builder.copy(node), node, self.axes, self.new_axes, self.decision, self.new)
            return
        dim = _sequence(node, self.axes, leaf)
        (before, after), ends = self._around(node, reach, dim), self._ends(node, reach)
        operands = self.axes.bound[node].operands
        read = {i: self._nearby(operands[i], leaf, (dim, before, ends, reach.chunk, after)) for i in KEYS}
        copy = self.builder.copy(node)
        copy.args, copy.kwargs = with_operands(self.builder, node, operands, read)
        if reach.numbers is not None:
            copy.args, copy.kwargs = tuple((arguments_of(copy) | {reach.ends: ends}).values()), {}
        visit(copy, self.new_axes)
        self.new.cuts[copy] = leaf

    def _ends(self, node: fx.Node, reach: Reach) -> fx.Node | None:
        """Returns where documents end, which the call gets, or numbers of its documents say; None for one document."""
        if reach.numbers is None:
            ends = arguments_of(node).get(reach.ends)
            return ends and self.builder.env[ends]
        operands, (place, dim) = self.axes.bound[node].operands, reach.numbers
        query, numbers = self.builder.env[operands[0]], self.builder.env[operands[place]]
        key = numbers, dim, Size.of(query.meta["val"].shape[reach.sequence])
        if key not in self.ends:
            tokens = self.builder.size(query, reach.sequence)
            self.ends[key] = self.builder.call(ends_of_numbers, numbers, dim, tokens)
            visit(self.ends[key], self.new_axes)
        return self.ends[key]

    def _around(self, node: fx.Node, reach: Reach, dim: int | None) -> Any:
        """Returns the numbers of keys before and after its own that a query reads, or nodes that compute them."""
        longest = self.builder.map(arguments_of(node).get(reach.longest))
        sides = reach.window, reach.after
        if not reach.longest and min(sides) < 0:
            assert dim is not None
            longest = self.builder.size(self.builder.env[self.axes.bound[node].operands[0]], dim)
        if not isinstance(longest, fx.Node):
            return reach.around(call_of(node).arguments)
        last = self.builder.call(operator.sub, longest, 1)
        if not reach.longest:
            return [last if side < 0 else side for side in sides]
        return [last if side < 0 else side and self.builder.call(torch.sym_min, side, last) for side in sides]

    def _nearby(self, operand: fx.Node, leaf: Axis, where: tuple[Any, ...]) -> fx.Node:
        key = (operand, *where)
        if key not in self.read:
            *views, source = viewed(operand)
            whole: Any = source.args[0]
            x = self.builder.env[whole]  # What `apart` reads: its axes are those of the queries.
            for view in reversed(views):
                x = self._called(
                    leaf, view.target, x, *self.builder.map(view.args[1:]), **self.builder.map(view.kwargs)
                )
            self.read[key] = self._called(leaf, nearby, x, *where)
        return self.read[key]

    def _called(self, leaf: Axis, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.builder.call(target, *args, **kwargs)
        visit(node, self.new_axes)
        self.new.cuts[node] = leaf
        return node
