"""defer: sums in which several terms are partial add those first, so that they are reduced once.

Before: (x + (attention + b1)) + (mlp + b2)      attention, mlp Partial: two reductions
After:  (attention + mlp) + x + b1 + b2          one
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce as fold
from typing import Any

import torch
from torch import fx

from autotp.builder import Builder, fake_mode_of
from autotp.passes.axes import Axes, visit
from autotp.passes.expand import carry
from autotp.passes.flow import flow
from autotp.passes.plan import Decision
from autotp.placement import Partial

aten = torch.ops.aten


def defer(graph: fx.Graph, axes: Axes, decision: Decision) -> tuple[fx.Graph, Axes, Decision]:
    """The graph with such sums regrouped, and the axes and cuts of the new one."""
    have = flow(graph, axes, decision.cuts, decision.held)
    trees = {node: list(_terms(node)) for node in graph.nodes if _is_sum(node) and not _inside(node)}
    partial = {n for n, placements in have.items() if placements == (Partial(),)}
    regrouped = {n: terms for n, terms in trees.items() if sum(t in partial for t in terms) > 1 and len(terms) > 2}
    if not regrouped:
        return graph, axes, decision
    builder, new_axes, new = Builder(fake_mode_of(graph)), Axes(), Decision(chosen=decision.chosen)
    for node in graph.nodes:
        builder.origin = node
        if node not in regrouped:
            carry(builder.copy(node), node, axes, new_axes, decision, new)
            continue
        terms = sorted(regrouped[node], key=lambda t: t not in partial)  # A stable sort: order is kept otherwise.
        last = len(builder.graph.nodes)
        builder.env[node] = fold(lambda a, b: builder.call(aten.add.Tensor, a, b), [builder.env[t] for t in terms])
        for made in list(builder.graph.nodes)[last:]:
            visit(made, new_axes)
    return _without_dead_sums(builder.graph), new_axes, new


def _is_sum(node: fx.Node) -> bool:
    """A plain sum of two tensors."""
    both = all(isinstance(arg, fx.Node) for arg in node.args)
    return node.target is aten.add.Tensor and not node.kwargs and both and len(node.args) == 2


def _inside(node: fx.Node) -> bool:
    """True for a sum whose only reader is a sum of the same shape, of which it is a part."""
    reader = next(iter(node.users), None)
    return len(node.users) == 1 and reader is not None and _is_sum(reader) and _alike(node, reader)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.dtype == y.dtype and [str(n) for n in x.shape] == [str(n) for n in y.shape]


def _terms(node: fx.Node) -> Iterator[fx.Node]:
    """What a tree of sums adds up, left to right."""
    both: Any = node.args
    for arg in both:
        if _is_sum(arg) and _inside(arg):
            yield from _terms(arg)
        else:
            yield arg


def _without_dead_sums(graph: fx.Graph) -> fx.Graph:
    """Drops the old inner sums, which nothing reads any more."""
    for node in reversed(list(graph.nodes)):
        if _is_sum(node) and not node.users:
            graph.erase_node(node)
    return graph
