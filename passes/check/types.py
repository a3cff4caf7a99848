"""The types of `check`, and the placements that operators and conjugates read and give.

    linear reads x f32[B, T, 768]{tp}, w f32[3072@tp, 768]
    and gives    y f32[B, T, 3072@tp]

NOTE [No gradient, no difference]
Replicate and Copied values are the same on every rank and differ in their gradients only. So a value without a gradient
has both placements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autotp.ops import collectives
from autotp.passes.plan.infer_axes import Bound, Dims, Factor
from autotp.sharding.axis import Axis, Size, find, holds, touches
from autotp.sharding.grid import grid, slices_of
from autotp.sharding.placement import Copied, Halo, Partial, Placement, Replicate, Shard, StoredShard

CONJUGATES: dict[Any, tuple[type[Placement], type[Placement]]] = {
    collectives.copy: (Replicate, Copied),
    collectives.reduce: (Partial, Replicate),
    collectives.scatter: (Replicate, Shard),
    collectives.gather: (Shard, Replicate),
    collectives.all_gather: (Shard, Copied),
    collectives.reduce_scatter: (Partial, Shard),
    collectives.all_to_all: (Shard, Shard),
    collectives.halo: (Shard, Halo),
    collectives.share: (StoredShard, Shard),
}
"""The placements that each conjugate reads and gives."""


@dataclass(frozen=True)
class Typed:
    """The type of one tensor of a rank's graph.

    Attributes:
        dtype: its dtype.
        dims: the axes of its dimensions.
        placement: its placement.
        flows: whether a gradient may flow through it.
        axis: the mesh axis of its placement.
    """

    dtype: torch.dtype
    dims: Dims
    placement: Placement
    flows: bool
    axis: str = "tp"

    @property
    def leaf(self) -> Axis | None:
        """The axis that is cut, or None."""
        return self.placement.axis if isinstance(self.placement, Shard) else None

    def cut_dims(self, leaf: Axis | None) -> list[int]:
        """Returns the dimensions that contain `leaf`."""
        return [d for d, axis in enumerate(self.dims) if leaf is not None and touches(axis, leaf)]

    def fits(self, want: Placement) -> bool:
        """True if this value can be read as `want`. See NOTE [No gradient, no difference]."""
        replicated = (Replicate(), Copied())
        return self.placement == want or (not self.flows and self.placement in replicated and want in replicated)

    def __str__(self) -> str:
        where = self.placement.text(self.axis)
        sizes = [f"{find(a).size}{where * (d in self.cut_dims(self.leaf))}" for d, a in enumerate(self.dims)]
        dtype = str(self.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        return f"{dtype}[{', '.join(sizes)}]{where * (self.leaf is None)}"


@dataclass(frozen=True)
class OperatorCut:
    """The cut of an operator: the leaf, and the factor that contains it."""

    leaf: Axis
    factor: Factor


def placements(bound: Bound, types: list[Typed], cut: OperatorCut | None) -> tuple[list[Placement], list[Placement]]:
    """Returns the placements of an operator's operands and outputs, cut or whole (`cut` is None)."""
    n_outs = len(bound.rule.outs)
    if cut is not None and find(cut.leaf).kind == "grid":
        return _on_grid(bound, cut)
    if cut is not None:
        shard, lost = Shard(cut.leaf), Partial(bound.rule.reducer)
        wants: list[Placement] = [shard if i in cut.factor.ins else Copied() for i in range(len(types))]
        return wants, [shard if i in cut.factor.outs else lost for i in range(n_outs)]
    partial = frozenset(i for i, typed in enumerate(types) if typed.placement == Partial())
    # Exactly a group: the product of two partial sums, for example, is not the sum of the ranks' products.
    if partial in bound.rule.linear:
        return [Partial() if i in partial else Copied() for i in range(len(types))], [Partial()] * n_outs
    copied = not bound.rule.exact and any(typed.flows and typed.placement == Copied() for typed in types)
    placement: Placement = Copied() if copied else Replicate()
    return [placement] * len(types), [placement] * n_outs


def _on_grid(bound: Bound, cut: OperatorCut) -> tuple[list[Placement], list[Placement]]:
    """Returns the placements under a grid: each value is cut by the leaves that it has; without any it is whole."""
    lost: Placement = Partial(bound.rule.reducer) if cut.factor.summed else Copied()
    sides = zip(bound.dims, (cut.factor.ins, cut.factor.outs), (Copied(), lost), strict=True)
    by_side = [
        [Shard(restricted(cut.leaf, dims)) if i in places else default for i, dims in enumerate(terms)]
        for terms, places, default in sides
    ]
    return by_side[0], by_side[1]


def restricted(leaf: Axis, dims: Dims) -> Axis:
    """Returns the part of a cut that divides a value with these dimensions."""
    if find(leaf).kind != "grid":
        return leaf
    tp = find(leaf).tp
    return grid([entry for entry in slices_of(leaf, tp) if any(touches(axis, entry[0]) for axis in dims)], tp)


def cut_factor(bound: Bound, leaf: Axis) -> Factor | None:
    """Returns the factor along which an operator can be cut; None if a tensor has the leaf in several dimensions."""
    factor = bound.cuttable(leaf)
    if find(leaf).kind == "grid":
        return factor
    for places, terms in zip((factor.ins, factor.outs) if factor else (), bound.dims, strict=False):
        for i, dims in enumerate(terms):
            # A tensor has the leaf in the factor's dimension alone, or not at all.
            has = [d for d, axis in enumerate(dims) if touches(axis, leaf)]
            if has != [places[j] for j in (i,) if j in places] or not all(holds(dims[d], leaf) for d in has):
                return None
    return factor


def moved_leaf(typed: Typed, dim: int, size: Any, block: int = 1) -> Axis | None:
    """Returns the leaf that a conjugate cuts or joins: the outermost of its dimension. None if sizes do not fit."""
    axis = outermost = find(typed.dims[dim])
    # A collective moves contiguous blocks, and those of the outermost factor are contiguous.
    while outermost.kind == "product":
        outermost = find(outermost.parts[0])
    blocks = axis.size == Size.of(size) and axis.size.divided(outermost.size) == Size(block)
    alone = typed.cut_dims(outermost) == [dim % len(typed.dims)]
    return outermost if blocks and alone and holds(axis, outermost) else None
