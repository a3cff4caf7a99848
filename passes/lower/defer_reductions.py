"""defer_reductions: adds partial terms before they are reduced, so that a sum is reduced once.

Before: (x + (attention + b1)) + (mlp + b2)      attention, mlp Partial: two reductions
After:  (attention + mlp) + x + b1 + b2          one
Before: view(product + bias) + adapter           product, adapter Partial, as in GPT-2 with LoRA
After:  (view(product) + adapter) + bias
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import reduce as fold
from typing import Any

import torch
from torch import fx

from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.plan.choose import Decision, carry
from autotp.passes.plan.infer_axes import Axes, visit
from autotp.passes.plan.propagate import Have, propagate, waits
from autotp.passes.plan.sums import inside, is_sum, terms, views
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Size

aten = torch.ops.aten


Known = tuple[fx.Graph, Axes, Decision]
How = Callable[[fx.Node, Builder], fx.Node]
"""(old node, builder of the new graph) -> the new node in its place."""


def defer_reductions(graph: fx.Graph, axes: Axes, decision: Decision) -> Known:
    """Returns the graph with such sums regrouped, and its axes and cuts."""
    graph, axes, decision = _biases_behind_views(graph, axes, decision)
    have = propagate(graph, axes, decision.cuts, decision.held)
    trees = {node: list(terms(node)) for node in graph.nodes if is_sum(node) and not inside(node)}
    partial = {n for n in have if waits(n, have)}
    # A sum of two partial terms is a partial sum as it stands: only further terms can be in its way.
    regrouped = {n: tree for n, tree in trees.items() if sum(t in partial for t in tree) > 1 and len(tree) > 2}

    def added(node: fx.Node, builder: Builder) -> fx.Node:
        tree = sorted(regrouped[node], key=lambda t: t not in partial)  # A stable sort: order is kept otherwise.
        return fold(lambda a, b: builder.call(aten.add.Tensor, a, b), [builder.env[t] for t in tree])

    return _rewritten(graph, axes, decision, regrouped, added)


def _biases_behind_views(graph: fx.Graph, axes: Axes, decision: Decision) -> Known:
    """Moves a bias behind a view of the sum of a partial product and the bias."""
    have = propagate(graph, axes, decision.cuts, decision.held)

    def added(node: fx.Node, builder: Builder) -> fx.Node:
        chain = views(node)
        product, bias = [builder.env[arg] for arg in _terms_seen(chain)]
        for view in reversed(chain):
            product = builder.call(view.target, product, *builder.map(view.args[1:]))  # type: ignore[arg-type]
        return builder.call(aten.add.Tensor, product, bias)

    return _rewritten(graph, axes, decision, {n for n in graph.nodes if _hides(n, have)}, added)


def _hides(node: fx.Node, have: Have) -> bool:
    """True for a view of the sum of a partial product and its bias, if another sum reads the view."""
    chain = views(node) if any(map(is_sum, node.users)) else []
    summands = _terms_seen(chain) if chain else []
    if len(summands) != 2 or not waits(summands[0], have):
        return False
    bias, shape = summands[1].meta["val"].shape, node.meta["val"].shape
    # Compared as sizes: `==` would assume something.
    return list(map(Size.of, bias)) == list(map(Size.of, shape[-1:]))


def _terms_seen(chain: list[fx.Node]) -> list[fx.Node]:
    """Returns the two terms of the sum behind these views, if nothing else reads the sum; else an empty list."""
    inner: Any = chain[-1].args[0]
    return list(inner.args) if is_sum(inner) and len(inner.users) == 1 else []


def _rewritten(graph: fx.Graph, axes: Axes, decision: Decision, some: Collection[fx.Node], how: How) -> Known:
    """Returns the graph with `how(node, builder)` in place of some nodes."""
    if not some:
        return graph, axes, decision
    builder, new_axes, new_decision = Builder(fake_mode_of(graph)), Axes(), Decision(chosen=decision.chosen)
    for node in graph.nodes:
        builder.origin = node
        if node not in some:
            carry(builder.copy(node), node, axes, new_axes, decision, new_decision)
            continue
        last = len(builder.graph.nodes)
        builder.env[node] = how(node, builder)
        for made in list(builder.graph.nodes)[last:]:
            visit(made, new_axes)
    return _without_dead(builder.graph), new_axes, new_decision


def _without_dead(graph: fx.Graph) -> fx.Graph:
    """Erases the old inner sums and views, which nothing reads any more."""
    for node in reversed(list(graph.nodes)):
        if (is_sum(node) or has(node.target, Trait.MOVABLE)) and not node.users:
            graph.erase_node(node)
    return graph
