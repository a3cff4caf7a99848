"""Room: the blocks whose parameters are whole at a time, and which of them go when another one comes.

    Before: forward and backward over blocks 0 1 2 3, of which two are whole at a time; then the same again
    After:  forward gathers 0 1 2 3, backward 2 1 0 (3 is there still), the next forward 1 2 3 (0 is there still)

What is in the room depends on the order of passes alone, which is the same on all replicas: so is what they gather.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)
FEWEST = 2
"""The blocks that are whole at a time, at least: one that computes, and the next one, which is on its way."""


class Room(Generic[M]):
    """The blocks that are gathered, of all stages of a rank.

    Args:
        most: the greatest number of blocks whose parameters are whole at a time; more are only while a block needs it.

    Attributes:
        members: the blocks in the room; the one that was used longest ago is first.
    """

    def __init__(self, most: int) -> None:
        self.most, self.members = most, list[M]()

    @property
    def ahead(self) -> int:
        """For how many blocks parameters are gathered while one computes."""
        return self.most - 1

    def let_in(self, block: M, beside: Sequence[M]) -> list[M]:
        """Lets a block in as the latest one; returns those that leave for it: used longest ago, and not in `beside`."""
        if block in self.members:
            self.members.remove(block)
        self.members.append(block)
        return self._leaving(self.most, [block, *beside])

    def arrive(self, block: M, beside: Sequence[M]) -> list[M]:
        """Returns the blocks that leave while one arrives: what was sent is copied then, and is there twice."""
        return self._leaving(self.most - 1, [block, *beside])

    def end(self, block: M) -> bool:
        """Returns whether a block leaves when its forward or its backward ends: the next start would drop it."""
        leaves = len(self.members) >= self.most and block in self.members
        if leaves:
            self.members.remove(block)
        return leaves

    def _leaving(self, most: int, staying: Sequence[M]) -> list[M]:
        leaving = [block for block in self.members if block not in staying][: max(0, len(self.members) - most)]
        self.members = [block for block in self.members if block not in leaving]
        return leaving


def gathered(passes: Iterable[Sequence[M]], most: int) -> Iterator[list[M]]:
    """Yields the blocks that each pass over blocks gathers, as the nodes of `gather_ahead` do it.

    Args:
        passes: the blocks of each forward or backward, in the order in which it runs them, each once.
        most: as for `Room`.
    """
    room, on_the_way = Room[M](most), set[M]()
    for order in passes:
        starts = list[M]()
        for i, block in enumerate(order):
            for j in range(i, min(i + most, len(order))):
                if order[j] not in room.members:
                    starts.append(order[j])
                    on_the_way.add(order[j])
                room.let_in(order[j], order[i:j])
                if block in on_the_way:
                    on_the_way.remove(block)
                    room.arrive(block, order[i + 1 : i + most])
            room.end(block)
        yield starts
