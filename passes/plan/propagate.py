"""propagate: derives the placement of every value from the cuts of operators.

Before: linear cut along `heads`       After: operands Copied and Shard(heads), result Shard(heads)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autotp.ops.custom_vjp import is_gradient, output
from autotp.ops.placement_moves import nearby
from autotp.passes.plan.infer_axes import Axes, Bound, is_getitem
from autotp.passes.plan.sums import is_sum, outermost, terms
from autotp.rules.call import outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import ONE, Axis, Size, find, holds, touches
from autotp.sharding.placement import Copied, Partial, Placement, Replicate, Shard, StoredShard

Cuts = Mapping[fx.Node, Axis]
"""Node -> the leaf along which it is cut; every rank computes the other nodes whole."""


@dataclass(frozen=True)
class Needs:
    """The placements in which an operator reads its operands, and of its outputs."""

    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


Have = Mapping[fx.Node, tuple[Placement, ...]]
"""Node -> the placements of its outputs, for all earlier nodes of the graph."""


def needs(node: fx.Node, axes: Axes, leaf: Axis | None, have: Have, hoisted: Collection[fx.Node] = ()) -> Needs:
    """Returns the placements of a node's operands and outputs if it is cut along `leaf`, or computed whole (None).

    Args:
        have: the placements of earlier nodes.
        hoisted: whole operators that read copies (`passes/plan/hoist.py`).
    """
    bound = axes.bound[node]
    n_outs = len(bound.rule.outs)
    if leaf is not None:
        factor = bound.cuttable(leaf)
        assert factor is not None
        ins: tuple[Placement, ...] = tuple(
            Shard(leaf) if i in factor.ins else Copied() for i in range(len(bound.operands))
        )
        if node.target is nearby:  # Its form is the conjugate `halo`. Each rank does a part of the work that reads it.
            return Needs(ins, (Copied(),))
        lost: Placement = Partial(bound.rule.reducer)
        # Its output is another part of `q | k | v`, which every rank computes whole.
        if not factor.summed:
            lost = Copied()
        return Needs(ins, tuple(Shard(leaf) if o in factor.outs else lost for o in range(n_outs)))
    group = _deferred(node, axes, have)
    if group is not None:
        ins = tuple(Partial() if i in group else Copied() for i in range(len(bound.operands)))
        return Needs(ins, (Partial(),) * n_outs)
    copied = not bound.rule.exact and (
        node in hoisted or any(have[n] == (Copied(),) for n in bound.operands)
    )  # Replicate here would need an all-reduce of the gradient.
    placement: Placement = Copied() if copied else Replicate()
    return Needs((placement,) * len(bound.operands), (placement,) * n_outs)


def _deferred(node: fx.Node, axes: Axes, have: Have) -> frozenset[int] | None:
    """Returns the operands that can stay partial sums, or None: linear operands with this reader only."""
    for group, operands in _linear_in(axes.bound[node]):
        # A second reader of a partial sum would need it reduced all the same.
        if all(waits(n, have) for n in operands):
            return group if _grows_not(node, operands) or _joins(node, axes, have) else None
    return None


def _linear_in(bound: Bound) -> Iterator[tuple[frozenset[int], list[fx.Node]]]:
    """Yields the operands of each group in which it is linear: a product is in each factor, `x * x` in none."""
    for group in bound.rule.linear:
        operands = [bound.operands[i] for i in group]
        others = [n for i, n in enumerate(bound.operands) if i not in group]
        if operands and not any(n in operands for n in others):
            yield group, operands


def waits(node: fx.Node, have: Have) -> bool:
    """True for a partial sum with a single reader: its reduction can wait until after the reader."""
    return have.get(node) == (Partial(),) and len(node.users) == 1


def _joins(node: fx.Node, axes: Axes, have: Have) -> bool:
    """True if the result becomes, through linear operators only, a term of a sum that is reduced later anyway.

    So the LoRA adapter of a row-parallel layer, `B(A(x)) * scaling`, is reduced together with the layer.
    """
    while len(node.users) == 1:
        reader = next(iter(node.users))
        if is_sum(reader):
            return any(waits(term, have) for term in terms(outermost(reader)) if term is not node)
        if reader not in axes.bound or not _is_linear(axes.bound[reader], node):
            return False
        node = reader
    return False


def _is_linear(bound: Bound, operand: fx.Node) -> bool:
    return any(operands == [operand] for _, operands in _linear_in(bound))


def _grows_not(node: fx.Node, operands: list[fx.Node]) -> bool:
    """True if the result has no more elements than the operands: reducing it later costs no more.

    It is so for all parts of a dimension, or for none: ranks with parts of 4 and 2 of 10 positions reduce alike.
    """
    counts = list(map(_count, outputs_of(node)))
    return all(_is_at_most(count, _count(n.meta["val"])) for n in operands for count in counts)


def _is_at_most(count: Size, limit: Size) -> bool:
    """True if a count is at most another one, whatever its symbols are."""
    return count.number <= limit.number and not Counter(count.symbols) - Counter(limit.symbols)


def _count(value: torch.Tensor) -> Size:
    total = ONE
    for n in value.shape:
        total = total * Size.of(n)
    return total


def propagate(graph: fx.Graph, axes: Axes, cuts: Cuts, stored: Cuts) -> dict[fx.Node, tuple[Placement, ...]]:
    """Returns the placements of every node's outputs, before any conversion.

    Args:
        cuts: node -> leaf it is cut along.
        stored: placeholder -> leaf along which it is stored cut.
    """
    have: dict[fx.Node, tuple[Placement, ...]] = {}
    for node in graph.nodes:
        if is_getitem(node) and node.args[0] in have:
            have[node] = (have[node.args[0]][node.args[1]],)
        elif node in axes.bound:
            have[node] = needs(node, axes, cuts.get(node), have).outputs
        elif axes.dims.get(node):
            have[node] = (stored_placement(axes.of(node), stored[node]) if node in stored else Replicate(),)
    return have


def stored_placement(dims: tuple[Axis, ...], leaf: Axis) -> Placement:
    """Returns the placement of a parameter that is stored cut along `leaf`."""
    return StoredShard(leaf) if find(leaf).kind == "grid" and overlaps(dims, leaf) else Shard(leaf)


def overlaps(dims: tuple[Axis, ...], leaf: Axis) -> bool:
    """True if a grid puts some positions of a value on several ranks."""
    cut = [axis for axis in dims if touches(axis, leaf)]
    # A value without one of the leaves has the same positions on all ranks of that leaf's factor.
    leaves_there = {id(find(part)) for part in find(leaf).parts if any(touches(axis, part) for axis in cut)}
    mixed = any(not _every(axis, part) for part in find(leaf).parts for axis in cut if touches(axis, part))
    return mixed or len(leaves_there) < len(find(leaf).parts)


def _every(axis: Axis, leaf: Axis) -> bool:
    """True if a leaf is in all parts of an axis."""
    return find(leaf).tangled or holds(axis, leaf)


def needs_grad(graph: fx.Graph, trainable: frozenset[fx.Node]) -> set[fx.Node]:
    """Returns the values that a gradient can flow through: floating, and computed from `trainable` without a detach."""
    differentiable: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, list | tuple) else [value]
        floating = any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)
        stops = has(node.target, Trait.NO_GRADIENT) or is_gradient(node)
        flows = node.target is output or any(n in differentiable for n in node.all_input_nodes)
        if floating and (node in trainable or (flows and not stops)):
            differentiable.add(node)
    return differentiable
