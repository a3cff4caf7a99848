"""sequence_parallel: cuts the values between a block's products along the sequence.

    Before: x = add(x, reduce(o)); n = norm(x, w); linear(copy(n), q)
    After:  x = add(x, reduce_scatter(o)); n = norm(x, copy(w)); linear(all_gather(n), q)       x, n f32[B, T@tp, 768]

The region begins at a product whose result is a partial sum, and extends through all whole operators whose rule keeps
the sequence: residual additions, norms, dropouts. The communication is the same: an all-reduce is a reduce-scatter and
an all-gather. The activations that are kept for backward are divided among ranks. Each rank normalises its own rows, so
the gradients of the norms' parameters are partial sums; those of a block are reduced together (`bucket.py`).

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autotp.ops.collectives import all_gather
from autotp.passes.plan.candidate import contracts, readers, root
from autotp.passes.plan.choose import Decision, elements
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.propagate import propagate
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has
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
    """Returns the decision with the operators of such regions cut along their sequence.

    Args:
        differentiable: values that a gradient may flow through: only these are kept for backward.
        hoisted: operators that all ranks compute from copies (`hoist.py`).
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
                # The sequence of the product's own rows, before one that it has from an operand.
                leaf = next((sequence for sequence in _leading(axes.of(node)) if sequence in along), leaf)
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
    """Adds operators that only the region reads, if that is cheaper than gathering their gradient: small tables."""
    for node in reversed(graph.nodes):
        into = {region.get(user) for user in node.users}
        leaf = into.pop() if len(into) == 1 else None
        if leaf is None or node in decision.cuts or node not in axes.bound or node not in differentiable:
            continue
        before = [operand for operand in axes.bound[node].operands if operand in differentiable]
        if _passes(node, leaf, axes) and sum(map(elements, before)) < elements(node):
            region[node] = leaf


def _trim(graph: fx.Graph, axes: Axes, cut: Mapping[fx.Node, Axis], region: dict[fx.Node, Axis]) -> None:
    """Removes values that are gathered and have more elements than their operands, such as a head's logits."""
    for node in reversed(graph.nodes):
        if node in region and any(user not in region for user in readers(node)):
            before = [operand for operand in axes.bound[node].operands if operand in cut]
            if sum(map(elements, before)) < elements(node):
                del region[node]


def _passes(node: fx.Node, leaf: Axis, axes: Axes) -> bool:
    """True if an operator can be cut along the sequence and all its outputs are then cut along it."""
    factor = axes.bound[node].cuttable(leaf)
    whole = factor is not None and len(factor.outs) == len(axes.bound[node].rule.outs)
    return whole and (factor.mark == "" or draws(node))  # type: ignore[union-attr]


def _is_product(node: fx.Node, axes: Axes) -> bool:
    """True for a product, or a lookup, whose sum over ranks is an activation."""
    return contracts(axes.bound[node]) or has(node.target, Trait.LOOKUP)


def _leading(dims: tuple[Axis, ...]) -> Iterator[Axis]:
    """Yields the leaves of all dimensions but the last, the features."""
    yield from (find(leaf) for axis in dims[:-1] for leaf in leaves(axis))


def _sequences(axes: Axes) -> Iterator[Axis]:
    """Yields the axes over which attentions sum: the sequence of keys and values, also before they are gathered.

    With context parallelism, keys and values are gathered over another mesh axis, from a rank's part of the sequence.
    """
    summed = set(_summed(axes))
    yield from summed
    for node in axes.bound:
        if node.target is all_gather:
            dim: Any = node.args[2]
            if find(axes.of(node)[dim]) in summed:
                yield find(axes.of(node.args[0])[dim])  # type: ignore[arg-type]


def _summed(axes: Axes) -> Iterator[Axis]:
    for node, bound in axes.bound.items():
        attends = has(node.target, Trait.ATTENTION) or contracts(bound)
        if attends and all(root(operand).op != "placeholder" for operand in bound.operands[:2]):
            for factor in bound.factors:
                if len(factor.ins) > 1 and not factor.outs:
                    yield from map(find, leaves(factor.axis))
