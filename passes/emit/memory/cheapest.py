"""cheapest: the fates of a block's values with the least seconds, at each price of a byte.

For a price of `p` seconds a byte, each value that backward needs is kept for `p` times its bytes, or computed again for
its seconds; what is computed again needs what it reads: kept, or computed again in turn. The least sum is that of a
minimum cut. As `p` grows, the solutions are the corners of the curve of bytes against seconds: each corner is the
fastest for its bytes.

Source: Picard 1976, "Maximal closure of a graph"; torch's min-cut partitioner (`torch/_functorch/partitioners.py`) cuts
the same graph, for bytes alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from autotp.costs.hardware import Hardware
from autotp.passes.emit.kept_values.fates import Fate, Fates
from autotp.passes.emit.memory.block_table import BlockTable, BlockValue, Kept

COLLECTIVE = 100.0
"""Seconds that a collective counts for in the choice, so that it runs again only where nothing else fits."""
NEVER = 1e5
"""Seconds of what cannot be."""
LEAST = 1e-12
"""Seconds below which nothing more is moved: what is left of sums of numbers with digits."""
POINTS = 24
"""The most corners of a block's curve that are looked for."""
MOST = 1000
"""The most choices that are compared beside the corners."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Fates of a block's values, and what they bring.

    Attributes:
        fates: of the values that do not stay.
        after: what is kept.
        seconds: that backward takes longer, with copies to the host.
    """

    fates: Fates
    after: Kept
    seconds: float

    @cached_property
    def bytes(self) -> int:
        """The bytes that stay on the device, without the block's inputs."""
        return sum(self.after.kept.values())

    @property
    def rank(self) -> float:
        """Seconds, and those that collectives count for."""
        return self.seconds + COLLECTIVE * self.after.collectives


def choice_of(table: BlockTable, fates: Fates, device: Hardware) -> Choice:
    """Returns the fates with what they bring."""
    after = table.after(fates)
    return Choice(fates=fates, after=after, seconds=after.seconds + after.moved / device.host_bandwidth)


def curve(table: BlockTable, device: Hardware, allowed: Collection[Fate]) -> list[Choice]:
    """Returns the corners of the curve of bytes against seconds, from all kept to the fewest bytes.

    Args:
        allowed: the fates that may be chosen beside "keep".
    """
    first = choice_of(table, {}, device)
    # So dear that a thousandth of the bytes is worth more than all seconds.
    everything = table.seconds + COLLECTIVE * sum(value.collectives for value in table.values.values())
    last = cheapest(table, device, 1e3 * everything / max(1, first.bytes), allowed)
    corners = [first]
    if last.bytes < first.bytes:
        corners += [*_between(table, device, allowed, first, last, POINTS), last]
    return corners


def neighbours(table: BlockTable, device: Hardware, corners: Sequence[Choice]) -> list[Choice]:
    """Returns the corners, and what differs from one of them in one value, without what another is better than in both.

    In order, from all kept to the fewest bytes.
    """
    names = [name for name, value in table.values.items() if not value.fixed]
    choices = {frozenset(corner.fates.items()): corner for corner in corners}
    both: tuple[Fate, ...] = ("keep", "recompute")
    for corner, name in itertools.product(corners, names):
        for fate in both:
            changed: dict[str, Fate] = {n: f for n, f in {**corner.fates, name: fate}.items() if f != "keep"}
            key = frozenset(changed.items())
            if key not in choices and len(choices) < MOST:
                choices[key] = choice_of(table, changed, device)
    best: list[Choice] = []
    for choice in sorted(choices.values(), key=lambda choice: (choice.rank, choice.bytes)):
        if not best or choice.bytes < best[-1].bytes:
            best.append(choice)
    return best


def _between(
    table: BlockTable, device: Hardware, allowed: Collection[Fate], left: Choice, right: Choice, most: int
) -> list[Choice]:
    """Returns the corners between two of them."""
    price = (right.rank - left.rank) / (left.bytes - right.bytes)
    middle = cheapest(table, device, price, allowed)
    cost = [choice.rank + price * choice.bytes for choice in (left, middle, right)]
    if most < 1 or not right.bytes < middle.bytes < left.bytes or cost[1] >= min(cost[0], cost[2]) * (1 - 1e-9):
        return []
    before = _between(table, device, allowed, left, middle, most // 2)
    return [*before, middle, *_between(table, device, allowed, middle, right, most // 2)]


def cheapest(table: BlockTable, device: Hardware, price: float, allowed: Collection[Fate]) -> Choice:
    """Returns the fates with the least seconds, where a byte that stays costs `price` seconds."""
    values = list(table.values.values())
    place = {value.name: i for i, value in enumerate(values)}
    staying = [_staying(value, device, price, allowed) for value in values]
    count = len(values)
    # The output of value i is there (place i): it stays, or it is computed again (place count + i), which needs what it
    # reads. What autograd keeps is there in any case, and costs nothing more.
    gains, needs = [0.0] * (2 * count), list[tuple[int, int]]()
    for i, value in enumerate(values):
        seconds = value.seconds + COLLECTIVE * value.collectives
        output = price * value.made if value.inside else 0.0
        gains[i] = -output
        gains[count + i] = output + staying[i][0] - (NEVER if value.fixed or "recompute" not in allowed else seconds)
        needs += [(count + i, i), *((count + i, place[name]) for name in value.reads if name in place)]
    closed = closure(gains, needs)
    fates: dict[str, Fate] = {}
    for i, value in enumerate(values):
        if i in closed or count + i in closed or value.kept:
            fate: Fate = "recompute" if count + i in closed else staying[i][1]
            fates |= {value.name: fate} if fate != "keep" else {}
    return choice_of(table, fates, device)


def _staying(value: BlockValue, device: Hardware, price: float, allowed: Collection[Fate]) -> tuple[float, Fate]:
    """Returns the least seconds for which what autograd keeps of a value stays, and how."""
    ways: list[tuple[float, Fate]] = [(price * value.kept, "keep")]
    if value.kept and "host" in allowed:
        ways.append((value.kept / device.host_bandwidth, "host"))
    if value.smaller < value.kept and "bits" in allowed:
        # Two passes over the values: one writes the bits, one reads them.
        moved = 2 * (value.kept + value.smaller) / (device.memory_bandwidth * device.memory_sustained)
        ways.append((price * value.smaller + moved + value.seeds * value.seconds, "bits"))
    return min(ways, key=lambda way: way[0])


def closure(gains: Sequence[float], needs: Sequence[tuple[int, int]]) -> set[int]:
    """Returns the set of places with the greatest sum of gains that has, with each place, all places that it needs."""
    source, sink = len(gains), len(gains) + 1
    room: list[dict[int, float]] = [{} for _ in range(len(gains) + 2)]
    for i, gain in enumerate(gains):
        start, stop = (source, i) if gain > 0 else (i, sink)
        room[start][stop], room[stop][start] = abs(gain), 0.0
    for i, j in needs:
        room[i][j] = float("inf")
        room[j].setdefault(i, 0.0)
    while (depth := _depths(room, source))[sink] >= 0:
        while _push(room, depth, source, sink):
            pass
    return {i for i in range(len(gains)) if depth[i] >= 0}


def _depths(room: Sequence[dict[int, float]], source: int) -> list[int]:
    """Returns how far each place is from the source; -1 for places that are not reached (Dinic 1970)."""
    depth, queue = [-1] * len(room), deque([source])
    depth[source] = 0
    while queue:
        i = queue.popleft()
        for j, free in room[i].items():
            if free > LEAST and depth[j] < 0:
                depth[j] = depth[i] + 1
                queue.append(j)
    return depth


def _push(room: Sequence[dict[int, float]], depth: list[int], source: int, sink: int) -> bool:
    """Sends as much as fits along one shortest path; returns False if there is none."""
    path, tried = [source], set[int]()
    while path[-1] != sink:
        i = path[-1]
        nearer = (j for j, free in room[i].items() if free > LEAST and depth[j] == depth[i] + 1)
        step = next((j for j in nearer if j not in tried), -1)
        if step >= 0:
            path.append(step)
            continue
        tried.add(path.pop())
        if not path:
            return False
    flow = min(room[i][j] for i, j in itertools.pairwise(path))
    for i, j in itertools.pairwise(path):
        room[i][j] -= flow
        room[j][i] += flow
    return True
