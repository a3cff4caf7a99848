"""Values that several ranks hold, for `check`: grids derived from layouts, and the moves of such values.

share        StoredShard -> Shard     take     Copied -> Shard
first        Shard -> StoredShard     place    Shard -> Partial
first        Copied -> Replicate
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autotp.ops import placement_moves
from autotp.passes.check.local_calls import pieces_by_rank
from autotp.passes.check.types import Typed
from autotp.passes.lower.local_sizes import Target
from autotp.sharding.axis import Axis, find, holds, leaves
from autotp.sharding.grid import all_grids, grid, same_cut, slices_of
from autotp.sharding.layout import Layout, Range
from autotp.sharding.placement import Copied, Partial, Placement, Replicate, Shard, StoredShard

LOCAL_MOVES = (placement_moves.take, placement_moves.place, placement_moves.first)
"""Functions that change a placement without communication."""
Pieces = tuple[tuple[Range, ...], ...]


def cut_of(to: Target, axis: Axis, pieces: Pieces) -> Axis | None:
    """Returns the leaf, or the grid, whose cut gives every rank these pieces of an axis; None if there is none."""
    # Leaves before grids: a grid of one leaf on all ranks is the same cut.
    for leaf in leaves(axis):
        if holds(axis, leaf) and pieces_by_rank(to, axis, leaf) == pieces:
            return leaf
    for cut in all_grids((leaf for leaf in leaves(axis) if not leaf.size.symbols), to.tp):
        if holds(axis, cut) and pieces_by_rank(to, axis, cut) == pieces:
            return cut
    return None


def stored(leaf: Axis, layout: Layout) -> Placement:
    """Returns the placement of a parameter with this layout."""
    return StoredShard(leaf) if layout.repeated else Shard(leaf)


def joint_cut(cuts: Iterable[Axis], tp: int) -> Axis | None:
    """Returns the cut that contains all of these cuts; None if two of them cut a leaf differently."""
    cuts = list(cuts)
    if not any(find(leaf).kind == "grid" for leaf in cuts):
        return cuts[0] if cuts and all(same_cut(cuts[0], leaf) for leaf in cuts) else None
    slices_by_leaf: dict[int, tuple[Axis, int, int]] = {}
    for leaf, parts, run in (entry for cut in cuts for entry in slices_of(cut, tp)):
        if slices_by_leaf.setdefault(id(find(leaf)), (leaf, parts, run))[1:] != (parts, run):
            return None
    # The outermost factor of the ranks has the longest runs.
    slices = sorted(slices_by_leaf.values(), key=lambda entry: -entry[2])
    outer_run = tp
    for _, parts, run in slices:  # Each slice uses a separate factor of the ranks.
        if parts * run > outer_run:
            return None
        outer_run = run
    return grid(slices, tp)


def extended(leaf: Axis | None, made: Axis, tp: int) -> Axis | None:
    """Returns the cut of `leaf` and `made`, on the ranks' factor that `leaf` does not use; None if none is left."""
    if leaf is None:
        return made
    slices = slices_of(leaf, tp)
    if len(slices) != 1 or slices[0][1] == tp:
        return None
    _, parts, run = slices[0]
    # If the existing cut is on the outer factor of the ranks, the inner one is left; else the outer one.
    added = (made, run, 1) if run > 1 else (made, tp // parts, parts)
    return grid(sorted([*slices, added], key=lambda entry: -entry[2]), tp)


def moved(to: Target, target: Any, typed: Typed, arguments: Mapping[str, Any]) -> tuple[Placement, Placement] | None:
    """Returns the placements that a move reads and gives; None if its arguments are not this rank's."""
    dim = arguments["dim"]
    if target is placement_moves.take:
        leaf = cut_of(to, typed.dims[dim], arguments["pieces"])
        return (Copied(), Shard(leaf)) if leaf is not None and arguments["rank"] == to.rank else None
    if typed.leaf is None:
        expected = None if to.rank == 0 else ()
        return (Copied(), Replicate()) if target is placement_moves.first and arguments["ranges"] == expected else None
    layout = _layout(to, typed, dim)
    if layout is None or arguments["ranges"] != (first := tuple(layout.first(to.rank))):
        return None
    if target is placement_moves.first:
        return Shard(typed.leaf), StoredShard(typed.leaf)
    placed = (
        arguments["places"] == tuple(layout.places(to.rank, list(first))) and arguments["size"] == layout.shape[dim]
    )
    return (Shard(typed.leaf), Partial()) if placed else None


def shares(to: Target, typed: Typed, axis: str, dim: int, ranges: tuple[Range, ...]) -> bool:
    """True if a `share` sums the parts that several ranks hold, over exactly the ranks that hold them."""
    layout = _layout(to, typed, dim) if type(typed.placement) is StoredShard else None
    if layout is None or ranges != tuple(layout.shared(to.rank)):
        return False
    name, _, run = axis.partition("/")
    # `tp/4` is a group of 4 consecutive ranks, and `tp` one of all.
    count = int(run or to.tp)
    group = range(to.rank // count * count, to.rank // count * count + count)
    places = [layout.places(rank, layout.shared(rank)) for rank in group]
    alone = [rank for rank in range(to.tp) if rank not in group]
    # A rank outside of the group that holds such a position would miss the sum, and its part would be missing in it.
    outside = any(_meet(places[0], list(layout.pieces[rank])) for rank in alone)
    return name == to.axis and all(place == places[0] for place in places) and not outside


def _meet(a: list[Range], b: list[Range]) -> bool:
    return any(max(x[0], y[0]) < min(x[1], y[1]) for x in a for y in b)


def _layout(to: Target, typed: Typed, dim: int) -> Layout | None:
    """Returns the layout of a value that is cut in the dimension `dim`, of known length; else None."""
    assert typed.leaf is not None
    if typed.cut_dims(typed.leaf) != [dim] or (pieces := pieces_by_rank(to, typed.dims[dim], typed.leaf)) is None:
        return None
    sizes = tuple(find(axis).size.number if not find(axis).size.symbols else -1 for axis in typed.dims)
    return Layout(sizes, dim, pieces)
