"""Room: the blocks whose parameters are whole at a time, and which of them go when another one comes.

    Before: forward and backward over blocks 0 1 2 3, of which two are whole at a time; then the same again
    After:  forward gathers 0 1 2 3, backward 2 1 0 (3 is there still), the next forward 1 2 3 (0 is there still)

What is in the room depends on the order of passes and on its size alone, which are the same on all replicas: so is what
they gather.

NOTE [How far ahead blocks are gathered]
The next block is on its way while one computes. A room for more blocks has two uses. Blocks that have ended stay for
the next pass: each saves a gather. And blocks further ahead are on their way, so that a large one can come beside
several small ones. The second use costs no gather: of blocks that have ended, the last ones of a pass are the first of
the next one, and only others make place. So both share the room, without a choice. One place is left for the block that
arrives: what was sent is copied then, and is there twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)
FEWEST = 2
"""The blocks that are whole at a time, at least: one that computes, and the next one, which is on its way."""


class Room(Generic[M]):
    """The blocks that are gathered, of all stages of a rank.

    Args:
        most: the greatest number of blocks whose parameters are whole at a time; more are only while a block needs it.
            Replicas change it together, between steps.

    Attributes:
        members: the blocks in the room; the one that was used longest ago is first.
    """

    def __init__(self, most: int = FEWEST) -> None:
        self.most, self.members = most, list[M]()

    def let_in(self, block: M, beside: Sequence[M], following: Sequence[M] = ()) -> list[M]:
        """Lets a block in as the latest one; returns those that leave for it.

        Args:
            beside: blocks that stay.
            following: the next blocks of this pass. Others leave before them, and of them the last ones first.
        """
        if block in self.members:
            self.members.remove(block)
        self.members.append(block)
        return self._leaving(self.most, {block, *beside}, following)

    def arrive(self, block: M, beside: Sequence[M], following: Sequence[M] = ()) -> list[M]:
        """Returns the blocks that leave while one arrives: what was sent is copied then, and is there twice."""
        return self._leaving(self.most - 1, {block, *beside}, following)

    def next_ahead(self, block: M, beside: Sequence[M], following: Sequence[M]) -> M | None:
        """Returns the block to gather next while one computes; None if there is no place, or nothing to gather."""
        nearer = {block, *beside}
        for later in following:
            if later not in self.members:
                return later if len(nearer.intersection(self.members)) < max(self.most - 1, FEWEST) else None
            nearer.add(later)
        return None

    def _leaving(self, most: int, staying: set[M], following: Sequence[M]) -> list[M]:
        count = len(self.members) - most
        if count <= 0:
            return []
        later = [block for block in reversed(following) if block in self.members]
        read_no_more = [block for block in self.members if block not in later]
        leaving = [block for block in (*read_no_more, *later) if block not in staying][:count]
        self.members = [block for block in self.members if block not in leaving]
        return leaving


def whole_bytes(sizes: Mapping[str, float], most: int | None) -> float:
    """Returns the bytes of gathered parameters that a rank has at its fullest moment.

    Args:
        sizes: block -> the bytes of its parameters; "" -> those outside of blocks, which stay for a step.
        most: as for `Room`; None where all stay for a step.
    """
    blocks = sorted((size for block, size in sizes.items() if block), reverse=True)
    return sizes.get("", 0) + sum(blocks[:most])


def gathered(passes: Iterable[Sequence[M]], most: int) -> Iterator[list[M]]:
    """Yields the blocks that each pass over blocks gathers, as the nodes of `gather_ahead` do it.

    Args:
        passes: the blocks of each forward or backward, in the order in which it runs them, each once.
        most: as for `Room`.
    """
    room, on_the_way = Room[M](most), set[M]()
    for order in passes:
        starts = list[M]()

        def start(block: M, beside: Sequence[M], following: Sequence[M], starts: list[M] = starts) -> None:
            if block not in room.members:
                starts.append(block)
                on_the_way.add(block)
            room.let_in(block, beside, following)

        for i, block in enumerate(order):
            following = order[i + 1 :]
            start(block, (), following)
            if block in on_the_way:
                on_the_way.remove(block)
                room.arrive(block, following[:1], following)
            while (later := room.next_ahead(block, (), following)) is not None:
                start(later, [block], following)
            if following:
                start(following[0], [block], following[1:])
        yield starts
