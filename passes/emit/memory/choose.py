"""choose: the fates of all blocks of a graph with the least seconds under which it fits a budget.

The steps along the curves of all blocks (`cheapest.py`) are taken in the order of their seconds a byte, until the graph
fits: of blocks that are alike the first ones take a step before the others, so that a budget is used up to a step of
one block. Then the last step is refined, value by value, in one block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from autotp.costs.hardware import Hardware
from autotp.passes.emit.kept_values.fates import Fate
from autotp.passes.emit.memory.cheapest import Choice, curve, neighbours
from autotp.passes.emit.memory.graph_table import GraphTable

Choices = list[Choice]
ROUNDS = 4
"""How often the choices of all calls are refined."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What was chosen.

    Attributes:
        choices: of each call of a block.
        fits: whether the graph fits then.
        least: the fewest bytes that are possible, by the measure of the budget.
    """

    choices: Choices
    fits: bool
    least: int

    @property
    def seconds(self) -> float:
        """Seconds that backward takes longer."""
        return sum(choice.seconds for choice in self.choices)


def choose_fates(
    table: GraphTable, measure: Callable[[Choices], float], limit: float, device: Hardware, allowed: Collection[Fate]
) -> Chosen:
    """Returns the fastest choice with `measure(choices) <= limit`; if nothing fits, the one with the fewest bytes.

    Args:
        measure: returns the bytes of a choice, such as `table.kept`.
        allowed: the fates that may be chosen beside "keep".
    """
    curves = [curve(block, device, allowed) for block in table.tables]
    steps = [
        ((after.rank - before.rank) / (before.bytes - after.bytes), i, place)
        for i, call in enumerate(table.calls)
        for place, (before, after) in enumerate(zip(curves[call.kind], curves[call.kind][1:], strict=False))
    ]
    steps.sort()

    def after(count: int) -> Choices:
        places = [0] * len(table.calls)
        for _, i, place in steps[:count]:
            places[i] = max(places[i], place + 1)
        return [curves[call.kind][place] for call, place in zip(table.calls, places, strict=True)]

    low, high = 0, len(steps)
    least = measure(after(high))
    if least > limit:
        return Chosen(choices=after(high), fits=False, least=int(least))
    while low < high:  # The measure falls with each step.
        middle = (low + high) // 2
        low, high = (low, middle) if measure(after(middle)) <= limit else (middle + 1, high)
    if not low:
        return Chosen(choices=after(0), fits=True, least=int(least))
    ways = [neighbours(block, device, corners) for block, corners in zip(table.tables, curves, strict=True)]
    starts = [after(low), after(low - 1), *(after(count) for count in range(low + 1, min(low + 3, len(steps)) + 1))]
    refined = [_refined(table, start, ways, measure, limit) for start in starts]
    fitting = [choices for choices in refined if measure(choices) <= limit]
    return Chosen(choices=min(fitting, key=_rank), fits=True, least=int(least))


def _rank(choices: Choices) -> float:
    return sum(choice.rank for choice in choices)


def _refined(
    table: GraphTable, choices: Choices, ways: Sequence[Choices], measure: Callable[[Choices], float], limit: float
) -> Choices:
    """Returns the choices with those of single calls replaced by the fastest that fits, as long as that helps."""
    now = choices
    for _ in range(ROUNDS):
        needed, before = measure(now), _rank(now) if measure(now) <= limit else float("inf")
        tried = set[tuple[int, frozenset[tuple[str, str]]]]()
        for i, call in enumerate(table.calls):
            key = call.kind, frozenset(now[i].fates.items())
            if key in tried:  # A call that is like an earlier one, with the same fates.
                continue
            tried.add(key)
            room = now[i].bytes + limit - needed
            for way in ways[call.kind]:  # The fastest first.
                candidate = [*now[:i], way, *now[i + 1 :]]
                if way.bytes <= room and measure(candidate) <= limit:
                    if _rank(candidate) < before:
                        now, needed, before = candidate, measure(candidate), _rank(candidate)
                    break
        if before == float("inf") or now is choices:
            break
        choices = now
    return now
