"""head_grids: cuts attention heads where there are fewer key/value heads than ranks (grouped-query attention).

Before: 2 key/value heads with 3 query heads each, on 4 ranks
After:  a grid of 2 x 2 ranks: two ranks hold a copy of one key/value head, and each has a part of its query heads

A grid cuts two axes at once (`autotp/sharding/grid.py`). A grid of one axis also cuts the heads of a fused weight that
has a part without heads, such as one key for all queries: that part is whole on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from autotp.passes.plan.candidate import Candidate, counts_attentions
from autotp.passes.plan.infer_axes import Axes
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, find, holds, leaves, touches
from autotp.sharding.grid import grid, splits
from autotp.sharding.layout import layout_of


def head_grids(candidates: Iterable[Candidate], axes: Axes, tp: int) -> Iterator[Axis]:
    """Yields grids: for fewer key/value heads than ranks, and for heads in a fused weight with a part without heads.

    Args:
        candidates: the axes of parameters, one by one; only those that count attentions are looked at.
    """
    for candidate in candidates:
        if not any(counts_attentions(node, factor, axes) for node, factor in candidate.nodes):
            continue
        pair = _pair(candidate, axes)
        if pair is not None:
            parts = splits(pair[0].size.number, pair[1].size.number, tp)
            cuts = [(leaf, n, run) for leaf, n, run in zip(pair, parts, (parts[1], 1), strict=True) if n > 1]
            # With one part for the groups, the cut is one by key/value heads alone, which needs no grid.
            if parts[1] > 1:
                yield grid(cuts, tp)
        fused = (axis for node in candidate.parameters for axis in axes.of(node) if touches(axis, candidate.leaf))
        if not candidate.core and any(not holds(axis, candidate.leaf) for axis in fused):
            yield grid([(candidate.leaf, tp, 1)], tp)


def _pair(candidate: Candidate, axes: Axes) -> tuple[Axis, Axis] | None:
    """Returns key/value heads and the group of query heads of each, if `candidate` is the key/value heads."""
    for node, factor in candidate.nodes:
        heads = factor.axis
        if has(node.target, Trait.ATTENTION) and 0 in factor.ins:  # With grouped heads the factor is of the keys alone.
            heads = axes.of(axes.bound[node].operands[0])[factor.ins[0]]
        inside = list(leaves(heads))
        if (
            counts_attentions(node, factor, axes)
            and find(heads).kind == "product"
            and len(inside) == 2
            and inside[0] is find(candidate.leaf)
        ):
            # The groups of query heads must be an axis that can be cut.
            return None if inside[1].size.symbols or inside[1].tangled else (inside[0], inside[1])
    return None


def on_grid(
    leaf: Axis,
    touching: Mapping[Axis, list[fx.Node]],
    axes: Axes,
    candidates: Mapping[Axis, Candidate],
    order: Mapping[fx.Node, int],
) -> Candidate:
    """Returns a grid's candidate: the operators with one of its leaves that it can cut, in graph order."""
    nodes = dict.fromkeys(node for part in leaf.parts for node in touching.get(find(part), []))
    cut = [(node, axes.bound[node].cuttable(leaf)) for node in sorted(nodes, key=order.__getitem__)]
    parameters = dict.fromkeys(
        p for part in leaf.parts if find(part) in candidates for p in candidates[find(part)].parameters
    )
    return Candidate(leaf, [(node, factor) for node, factor in cut if factor is not None], list(parameters))


def shared_evenly(candidate: Candidate, axes: Axes, tp: int) -> bool:
    """True if every shard that several ranks hold is held by one whole group of ranks."""
    run = find(candidate.leaf).counts[0][1]
    for node in candidate.parameters:
        layout = layout_of(tuple(node.meta["val"].shape), axes.of(node), candidate.leaf, tp, "")
        if layout.dim is None or not layout.holders() <= {1, tp if run == 1 else run}:
            return False
    return True
