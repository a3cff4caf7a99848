"""tree: in which order news passes from rank to rank, so that no rank hears from many.

A rank's number is written with digits of base 8. Its parent is the rank without the last digit that is not 0::

    0 <- 1 ... 7          the ranks of a machine
    0 <- 8, 16 ... 56     the first ranks of eight machines
    8 <- 9 ... 15

So each aligned block of 8, 64, ... ranks is a subtree below its first rank: ranks that hold one model together are
neighbours, and so they are in the tree. A rank has at most 7 children for each digit of the largest rank: 35 at 8,192.
"""

from __future__ import annotations

RADIX = 8


def parent_of(rank: int) -> int | None:
    """Returns the parent of a rank; None of rank 0."""
    if rank == 0:
        return None
    place = _place(rank)
    return rank - rank // place % RADIX * place


def children_of(rank: int, size: int) -> list[int]:
    """Returns the children of a rank in a tree of `size` ranks."""
    end, place, children = min(size, _end(rank, size)), 1, list[int]()
    while rank + place < end:
        children += range(rank + place, min(rank + RADIX * place, end), place)
        place *= RADIX
    return children


def next_hop(rank: int, target: int) -> int:
    """Returns the neighbour of a rank through which news reaches another rank."""
    hop: int | None = target
    while hop is not None:
        above = parent_of(hop)
        if above == rank:
            return hop
        hop = above
    above = parent_of(rank)
    assert above is not None, "every rank is below rank 0"
    return above


def _place(rank: int) -> int:
    """Returns the value of the last digit's place that is not 0."""
    place = 1
    while rank // place % RADIX == 0:
        place *= RADIX
    return place


def _end(rank: int, size: int) -> int:
    """Returns the first rank behind those below this one."""
    return size if rank == 0 else rank + _place(rank)
