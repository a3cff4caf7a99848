"""hoist: moves a copy up through operators that all ranks compute, to where its gradient is smallest.

    Before: n = norm(x, w); m = norm(x, v); linear(copy(n), q); linear(copy(m), u)
    After:  c = copy(x); n = norm(c, copy(w)); m = norm(c, copy(v)); linear(n, q); linear(m, u)

An operator that all ranks compute whole may read Copied values. Its result is then Copied, too. Its gradient is linear
in the gradient of the result, so it is a partial sum. So a copy can stand before or after the operator. Before it, the
parameters need copies, too; they are small beside activations. A value that is copied for other readers costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import fx

from autotp.passes.plan.choose import elements
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.propagate import Have
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has
from autotp.sharding.axis import Axis
from autotp.sharding.placement import Copied, Replicate

aten = torch.ops.aten
Cuts = Mapping[fx.Node, Axis]


def hoist(graph: fx.Graph, axes: Axes, cuts: Cuts, have: Have, differentiable: Collection[fx.Node]) -> set[fx.Node]:
    """Returns the operators that read copies, so that their result need not be copied.

    Args:
        have: the placements of all values.
        differentiable: values that a gradient may flow through: the others need no copy.
    """
    hoisted = set(_wanted(graph, axes, cuts, have, differentiable))
    while True:  # Operators that share a copy share its price: if one drops out, the others pay more.
        cheap = _cheap(graph, hoisted, axes, cuts, have, differentiable)
        if cheap == hoisted:
            return hoisted
        hoisted = cheap


def _wanted(
    graph: fx.Graph, axes: Axes, cuts: Cuts, have: Have, differentiable: Collection[fx.Node]
) -> Iterator[fx.Node]:
    """Yields the whole operators whose result is read Copied only: by cut operators, by each other, or as an output."""
    copied, last = set(), _returned(graph, axes, cuts)
    for node in reversed(graph.nodes):
        eligible = node in differentiable and node in axes.bound and have[node] == (Replicate(),) and node not in cuts
        # Such a mark reads gradients, too: NOTE [Why these marks are Replicate or Shard]
        eligible = eligible and not axes.bound[node].rule.exact
        if eligible and isinstance(node.meta.get("val"), torch.Tensor) and not draws(node):
            users = [user for user in node.users if user not in last and user.target is not aten.sym_size.int]
            # Readers come before, so it is known which of them read copies.
            if users and all(user in copied or _in_copy(node, user, axes, cuts) for user in users):
                copied.add(node)
                yield node


def _returned(graph: fx.Graph, axes: Axes, cuts: Cuts) -> set[fx.Node]:
    """Returns the output, and views of values that are only returned, as in a cache: they take either placement."""
    only_returned = {graph.output_node()}
    for node in reversed(graph.nodes):
        bound = axes.bound.get(node)
        part = (
            bound is not None and node not in cuts and len(bound.operands) == 1 and frozenset({0}) in bound.rule.linear
        )
        if part and node.users and all(user in only_returned for user in node.users):
            only_returned.add(node)
    return only_returned


def _cheap(
    graph: fx.Graph,
    hoisted: Collection[fx.Node],
    axes: Axes,
    cuts: Cuts,
    have: Have,
    differentiable: Collection[fx.Node],
) -> set[fx.Node]:
    """Returns the operators in `hoisted` for which copies of their operands cost less than a copy of their result.

    An operator that reads another one in `hoisted` counts only if its readers are returned, too.
    """
    price: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if node in hoisted:
            before = [o for o in dict.fromkeys(axes.bound[node].operands) if o in differentiable]
            price[node] = sum(_price(o, price, hoisted, axes, cuts, have) for o in before)
    cheap: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in hoisted and all(user in cheap or user not in hoisted for user in node.users):
            result_size, plain = elements(node), all(o.op == "placeholder" for o in axes.bound[node].operands)
            if price[node] < result_size or ((plain or has(node.target, Trait.MOVABLE)) and price[node] == result_size):
                cheap.add(node)
    return cheap


def _in_copy(node: fx.Node, reader: fx.Node, axes: Axes, cuts: Cuts) -> bool:
    """True if a cut operator reads a value Copied."""
    bound, leaf = axes.bound.get(reader), cuts.get(reader)
    factor = bound.cuttable(leaf) if bound is not None and leaf is not None else None
    return bound is not None and factor is not None and not any(bound.operands[i] is node for i in factor.ins)


def _price(
    node: fx.Node, price: Mapping[fx.Node, float], hoisted: Collection[fx.Node], axes: Axes, cuts: Cuts, have: Have
) -> float:
    """Returns the price of a copy of an operand for each reader that shares it; 0 if there is a copy anyway."""
    if have.get(node) == (Copied(),) or _copied_anyway(node, hoisted, axes, cuts):
        return 0
    # The operand is copied itself, or, if it is hoisted, too, what it is made of.
    sharing = len([reader for reader in node.users if reader in hoisted])
    return min(elements(node), price.get(node, float("inf"))) / max(sharing, 1)


def _copied_anyway(node: fx.Node, hoisted: Collection[fx.Node], axes: Axes, cuts: Cuts) -> bool:
    """True if a cut operator reads a copy of a value or of its view (a view of the same copy)."""
    return any(
        _in_copy(node, reader, axes, cuts)
        or (reader in hoisted and has(reader.target, Trait.MOVABLE) and _copied_anyway(reader, hoisted, axes, cuts))
        for reader in node.users
    )
