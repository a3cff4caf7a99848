"""What a rank gathers and sums in a step of ZeRO, and the number of blocks that a budget has room for."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotp.display.text_table import bytes_text
from autotp.options import memory_limit
from autotp.passes.emit.memory.budget import MOST, MemoryChoice, budget_of
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.emit.zero.room import FEWEST, Room, gathered, whole_bytes
from autotp.passes.emit.zero.sharded_unit import ShardedUnit


@dataclass(frozen=True, kw_only=True)
class StepGathers:
    """What a rank gathers and sums in a step.

    Attributes:
        zero: the stage of ZeRO.
        blocks: the number of the rank's blocks.
        whole_blocks: how many of them are whole at a time; None where all stay until the step ends.
        gathers: how often a block is gathered, all blocks together.
        gathered_bytes: of the parameters that are gathered, each time.
        outside_bytes: of those outside of blocks, which are gathered once.
        whole_bytes: bytes that are whole at a time, at most.
        summed_bytes: of the gradients that are summed, each time.
        dtypes: in which parameters are sent, and gradients.
    """

    zero: int
    blocks: int
    whole_blocks: int | None
    gathers: int
    gathered_bytes: int
    outside_bytes: int
    whole_bytes: int
    summed_bytes: int
    dtypes: tuple[str, str]

    def lines(self) -> tuple[str, ...]:
        """Returns what a plan says."""
        sent, sums = bytes_text(self.gathered_bytes), bytes_text(self.summed_bytes)
        at_once, outside = bytes_text(self.whole_bytes), bytes_text(self.outside_bytes)
        of_gradients = f"zero        a step sums {sums} of gradients in {self.dtypes[1]}"
        if self.whole_blocks is None:
            once = f"zero        {self.zero}: a step gathers all parameters once, {sent} in {self.dtypes[0]}"
            return f"{once}; they stay until it ends", of_gradients
        blocks_ahead = self.whole_blocks - FEWEST
        ahead = "a block ahead" if blocks_ahead < FEWEST else f"up to {blocks_ahead} blocks ahead"
        return (
            f"zero        {self.zero}: a step gathers {self.blocks} blocks {self.gathers} times, {ahead}: {sent} in "
            f"{self.dtypes[0]}",
            f"zero        {outside} of it are outside of blocks, and gathered once; "
            f"with {min(self.whole_blocks, self.blocks)} blocks, {at_once} are whole at a time",
            of_gradients,
        )


def step_gathers(
    zero: int, stages: Mapping[int, Sequence[ShardedUnit]], passes: Iterable[tuple[int, bool]], sums: int
) -> StepGathers:
    """Returns what a step gathers and sums.

    Args:
        stages: number of a stage of this rank -> its units, which have read their parameters.
        passes: of each pass in order the stage, and whether it is forward.
        sums: how often gradients are summed.
    """
    units = [unit for units_of_stage in stages.values() for unit in units_of_stage]
    whole_blocks = next((unit.room.most for unit in units if unit.room is not None), None)
    starts = [unit for unit in units if unit.room is None]
    outside = sum(unit.nbytes for unit in starts) if whole_blocks is not None else 0
    gathers = len(starts)
    if whole_blocks is not None:
        orders = {i: _orders(units_of_stage) for i, units_of_stage in stages.items()}
        of_blocks = list(itertools.chain(*gathered((orders[i][not forward] for i, forward in passes), whole_blocks)))
        starts, gathers = starts + of_blocks, len(of_blocks)
    sizes = {str(i): unit.nbytes for i, unit in enumerate(units) if unit.room is not None or whole_blocks is None}
    return StepGathers(
        zero=zero, blocks=len(sizes), whole_blocks=whole_blocks, gathers=gathers,
        gathered_bytes=sum(unit.nbytes for unit in starts),
        outside_bytes=outside, whole_bytes=int(whole_bytes({"": outside, **sizes}, whole_blocks)),
        summed_bytes=sums * sum(size for unit in units for size in unit.sums_by_dtype.values()),
        dtypes=(_named(x for unit in units for x in unit.dtypes), _named(x for u in units for x in u.sums_by_dtype)),
    )  # fmt: skip


def _orders(units: Sequence[ShardedUnit]) -> tuple[Sequence[ShardedUnit], Sequence[ShardedUnit]]:
    """Returns a stage's blocks in the orders of forward and of backward."""
    blocks = [unit for unit in units if unit.room is not None]
    first = max(blocks, key=lambda unit: len(unit.following), default=None)
    last = max(blocks, key=lambda unit: len(unit.preceding), default=None)
    return (() if first is None else (first, *first.following)), (() if last is None else (last, *last.preceding))


def _named(dtypes: Iterable[object]) -> str:
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})) or "no dtype"


class RoomOfSteps:
    """The room of a rank in each step: as large as a budget leaves it after the steps before with as large a batch.

    NOTE [The room follows the budget]
    A budget first chooses which values backward keeps, as if the room were the smallest one: to compute a value again
    always takes time, and most gathers are hidden. The bytes that are left are the room's. They are known once a batch
    of this size has run. Replicas whose batches have other sizes may have other numbers: they use the smallest room.

    Attributes:
        room: of the rank; None where all that is gathered stays for a step.
    """

    def __init__(self, room: Room[ShardedUnit] | None) -> None:
        self.room, self._blocks, self._size = room, dict[str, int](), ""

    def begin(self, size: str) -> int:
        """Returns for how many blocks this rank has room. size: the kind of the batch, with its sizes"""
        self._size = size
        return self._blocks.get(size, FEWEST)

    def agree(self, alike: bool) -> None:
        """Sets the room of the step. alike: whether all replicas have room for as many blocks"""
        if self.room is not None:
            self.room.most = self._blocks.get(self._size, FEWEST) if alike else FEWEST

    def note(self, graphs: Collection[RankProgram]) -> None:
        """Notes what a budget has left in a step. graphs: of the rank's stages"""
        if self.room is not None:
            budgets = [budget_of(graph.module) for graph in graphs]
            choices = [None if budget is None else budget.latest for budget in budgets]
            sizes = [unit.nbytes for graph in graphs for unit in graph.units if unit.room is not None]
            self._blocks[self._size] = blocks_with_room(choices, sizes)
            if len(self._blocks) > MOST:
                del self._blocks[next(iter(self._blocks))]


def blocks_with_room(choices: Iterable[MemoryChoice | None], blocks: Sequence[float]) -> int:
    """Returns for how many blocks a rank has room beside what a budget of bytes has chosen.

    Args:
        choices: of each stage of the rank; None where there is no budget.
        blocks: the bytes of each block that is gathered, of all stages.
    """
    rest = 0.0
    for choice in choices:
        if choice is None or memory_limit(choice.allowance.memory) <= 1:
            return FEWEST
        rest += memory_limit(choice.allowance.memory) * choice.allowance.share - choice.needed
    # One place more than there are blocks: one block is there twice when it arrives.
    return max(FEWEST, min(FEWEST + int(rest // max([1, *blocks])), len(blocks) + 1))
