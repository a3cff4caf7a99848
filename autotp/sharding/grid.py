"""Grids: the tp axis as a product of factors, each of which cuts another axis.

Eight ranks and two key/value heads: `8 = 2 x 4`, with `kv_heads` cut on the outer factor and `group` on the inner one.
A tensor with both axes (queries) is cut into eight parts. A tensor with `kv_heads` only (keys, values) is cut into two
parts, each of which is on four ranks.

A grid may stand wherever a leaf does. A grid of a single leaf is a cut that some parts of a concatenation may not have:
`(heads | 1 | 1) x head_dim`, the fused queries, key and value of multi-query attention. Parts that a grid does not cut
are the same on several ranks, their holders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autotp.sharding.axis import ONE, Axis, Size, find, touches
from autotp.sharding.partition import chunk_bounds, chunk_length

Slice = tuple[Axis, int, int]
"""A leaf, the number of its parts, and the number of consecutive ranks that hold the same part."""


def grid(slices: Iterable[Slice], tp: int) -> Axis:
    """Returns the cut of several leaves at once, with the outermost factor of the `tp` ranks first."""
    slices = tuple(slices)
    size = ONE
    for leaf, _, _ in slices:
        size = size * find(leaf).size
    return Axis(
        size, "grid", tuple(leaf for leaf, _, _ in slices), counts=tuple((n, run) for _, n, run in slices), tp=tp
    )


def slices_of(leaf: Axis, tp: int) -> tuple[Slice, ...]:
    """Returns the slices of a cut of `leaf`, which may be a grid, on `tp` ranks."""
    leaf = find(leaf)
    if leaf.kind != "grid":
        return ((leaf, tp, 1),)
    return tuple((find(part), n, run) for part, (n, run) in zip(leaf.parts, leaf.counts, strict=True))


def bounds(cut: Slice, rank: int) -> tuple[int, int]:
    """Returns start and stop of the part of a leaf that `rank` holds."""
    # Of 8 = 2 x 4 ranks, the outer leaf has run 4: ranks 0 to 3 hold its part 0, and 4 to 7 its part 1.
    leaf, parts, run = cut
    return chunk_bounds(find(leaf).size.number, parts, rank // run % parts)


def same_cut(a: Axis, b: Axis) -> bool:
    """True for the same leaf, for grids of the same slices, and for a leaf and its own grid on all ranks."""
    a, b = find(a), find(b)
    if a is b or "grid" not in (a.kind, b.kind):
        return a is b
    # One of them is a grid, and only a grid knows the number of ranks.
    tp = a.tp or b.tp
    return {_key(cut) for cut in slices_of(a, tp)} == {_key(cut) for cut in slices_of(b, tp)}


def cut_key(leaf: Axis) -> int:
    """Returns a hash that is equal for cuts that are the same by `same_cut`."""
    leaf = find(leaf)
    # Without the counts: a leaf, which has none, must have the hash of its own grid.
    return hash(frozenset(id(find(part)) for part in (leaf.parts if leaf.kind == "grid" else (leaf,))))


def is_full(leaf: Axis) -> bool:
    """True if the slices use all ranks."""
    leaf, total = find(leaf), 1
    for parts, _ in leaf.counts:
        total *= parts
    return leaf.kind != "grid" or total == leaf.tp


def positions_of_part(axis: Axis, leaf: Axis, tp: int, rank: int) -> tuple[Size, int]:
    """Returns the number of positions of the cut leaves in `axis`, and the number that this rank holds."""
    whole, local = ONE, 1
    for cut in slices_of(leaf, tp):
        if touches(axis, cut[0]):
            start, stop = bounds(cut, rank)
            whole, local = whole * find(cut[0]).size, local * (stop - start)
    return whole, local


def holders_axis(axis: str, leaf: Axis, tp: int) -> str:
    """Returns the name of the group of ranks that hold the same part if only the grid's outer leaf is cut."""
    run = find(leaf).counts[0][1]
    return axis if run in (1, tp) else f"{axis}/{run}"


def splits(kv: int, group: int, tp: int) -> tuple[int, int]:
    """Returns the factors of `tp`, for key/value heads and for groups, that leave the fullest rank the fewest heads."""
    # From many parts of `kv` to few: `min` returns the first of equals, which leaves a head on the fewest ranks.
    pairs = [(n, tp // n) for n in range(tp, 0, -1) if tp % n == 0]
    return min(pairs, key=lambda pair: chunk_length(kv, pair[0]) * chunk_length(group, pair[1]))


def _key(cut: Slice) -> tuple[int, int, int]:
    return id(find(cut[0])), cut[1], cut[2]


def all_grids(leaves: Iterable[Axis], tp: int) -> Iterator[Axis]:
    """Yields every grid of one or two of these leaves on `tp` ranks."""
    leaves = tuple(dict.fromkeys(find(leaf) for leaf in leaves))
    for outer in (n for n in range(1, tp + 1) if tp % n == 0):
        inner = tp // outer
        for a in leaves:
            # A factor of 1 would not cut its leaf.
            if outer > 1:
                yield grid([(a, outer, inner)], tp)
            for b in leaves:
                if a is not b and outer > 1 and inner > 1:
                    yield grid([(a, outer, inner), (b, inner, 1)], tp)
