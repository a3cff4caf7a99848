"""sequence_parallel: cuts the values between a block's products along the sequence.

    Before: x = add(x, reduce(o)); n = norm(x, w); linear(copy(n), q)
    After:  x = add(x, reduce_scatter(o)); n = norm(x, copy(w)); linear(all_gather(n), q)       x, n f32[B, T@tp, 768]

The region begins where a product leaves a sum to be reduced, and goes on through all whole operators whose rule passes
the sequence through: residual additions, norms, dropouts. Nothing is moved that was not: an all-reduce is a
reduce-scatter and an all-gather. What ranks keep for backward there is divided among them, and each norms its own
rows, so the parameters' gradients are partial and summed, those of a block in one exchange (`bucket.py`).

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from autotp.passes.plan.choose import Decision, elements
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.match import contracts, readers, root
from autotp.passes.plan.propagate import propagate
from autotp.rules.call import draws
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, find, leaves
from autotp.sharding.placement import Partial, Replicate

aten = torch.ops.aten


def sequence_parallel(
    graph: fx.Graph,
    axes: Axes,
    decision: Decision,
    differentiable: Collection[fx.Node],
    hoisted: Collection[fx.Node],
) -> Decision:
    """The decision, with the operators of such regions cut along their sequence.

    Args:
        differentiable: values a gradient may flow through: only those are kept for backward.
        hoisted: operators that all ranks compute from one copy, cheaper than a copy of what each of them gives.
    """
    have = propagate(graph, axes, decision.cuts, decision.held)
    along = set(_sequences(axes))
    region: dict[fx.Node, Axis] = {}
    sums: dict[fx.Node, Axis] = {}  # Partial -> the sequence along which it may be scattered.
    cut: dict[fx.Node, Axis] = {}  # Both.
    for node in graph.nodes:
        if node not in axes.bound or node not in differentiable or not isinstance(node.meta["val"], torch.Tensor):
            continue
        leaf = next((cut[operand] for operand in axes.bound[node].operands if operand in cut), None)
        if have[node] == (Partial(),):
            if _is_product(node, axes):
                leaf = next((it for it in _leading(axes.of(node)) if it in along), leaf)
            if leaf is not None:
                cut[node] = sums[node] = leaf
            continue
        whole = node not in decision.cuts and have[node] == (Replicate(),) and node not in hoisted
        if whole and leaf is not None and _passes(node, leaf, axes):
            cut[node] = region[node] = leaf
    _grow(graph, axes, decision, differentiable, region)
    _trim(graph, axes, sums | region, region)
    scattered = {node: leaf for node, leaf in sums.items() if any(region.get(user) is leaf for user in node.users)}
    return replace(decision, cuts={**decision.cuts, **region}, scattered=scattered)


def _grow(
    graph: fx.Graph, axes: Axes, decision: Decision, differentiable: Collection[fx.Node], region: dict[fx.Node, Axis]
) -> None:
    """Adds what the region alone reads, where it is cheaper to cut it than to gather its gradient: small tables."""
    for node in reversed(graph.nodes):
        into = {region.get(user) for user in node.users}
        leaf = into.pop() if len(into) == 1 else None
        if leaf is None or node in decision.cuts or node not in axes.bound or node not in differentiable:
            continue
        before = [operand for operand in axes.bound[node].operands if operand in differentiable]
        if _passes(node, leaf, axes) and sum(map(elements, before)) < elements(node):
            region[node] = leaf


def _trim(graph: fx.Graph, axes: Axes, cut: Mapping[fx.Node, Axis], region: dict[fx.Node, Axis]) -> None:
    """Takes out what has to be gathered and is more than what it is made of: a head's logits."""
    for node in reversed(graph.nodes):
        if node in region and any(user not in region for user in readers(node)):
            before = [operand for operand in axes.bound[node].operands if operand in cut]
            if sum(map(elements, before)) < elements(node):
                del region[node]


def _passes(node: fx.Node, leaf: Axis, axes: Axes) -> bool:
    """True if an operator can be cut along the sequence and gives all that it gives cut so."""
    factor = axes.bound[node].cuttable(leaf)
    whole = factor is not None and len(factor.outs) == len(axes.bound[node].rule.outs)
    return whole and (factor.mark == "" or draws(node))  # type: ignore[union-attr]


def _is_product(node: fx.Node, axes: Axes) -> bool:
    """True for a product, or a lookup, whose sum over ranks is an activation."""
    return contracts(axes.bound[node]) or has(node.target, Trait.LOOKUP)


def _leading(dims: tuple[Axis, ...]) -> Iterator[Axis]:
    """The leaves of all dimensions but the features."""
    yield from (find(leaf) for axis in dims[:-1] for leaf in leaves(axis))


def _sequences(axes: Axes) -> Iterator[Axis]:
    """The axes along which attentions sum: those that keys and values share, and queries have too."""
    for node, bound in axes.bound.items():
        attends = has(node.target, Trait.ATTENTION) or contracts(bound)
        if attends and all(root(operand).op != "placeholder" for operand in bound.operands[:2]):
            for factor in bound.factors:
                if len(factor.ins) > 1 and not factor.outs:
                    yield from map(find, leaves(factor.axis))
