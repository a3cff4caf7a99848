"""beside_compute: collectives of replicas that run while a rank computes, and what of them nothing hides.

A rank computes its units (blocks) one after the other. Its collectives with the other replicas share a link, and run on
it one after the other in the order in which they start.

Before: sums of 3 blocks, 2 s each; backward of a block takes 1 s
After:  ready at 1, 2 and 3 s; they end at 3, 5 and 7 s: 4 s are waited for, and 2 s are hidden
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotp.costs.hardware import Hardware
from autotp.costs.links import RankGroup, channels


def slowed(hidden: float, group: RankGroup, device: Hardware) -> float:
    """Returns the seconds by which computation takes longer beside `hidden` seconds of collectives of this group."""
    return hidden * min(0.5, channels(group, device) / device.units)


def link_free(transfers: Iterable[tuple[float, float]], free: float = 0.0) -> float:
    """Returns when the last transfer ends.

    Args:
        transfers: (when it can start, its seconds).
        free: when the link is free.
    """
    for ready, seconds in sorted(transfers):
        free = max(free, ready) + seconds
    return free


@dataclass(frozen=True, kw_only=True)
class PassOverUnits:
    """One pass over the units, forward or backward, beside its collectives.

    Attributes:
        waited: seconds in which computation waits for gathered parameters, or for a buffer.
        ends: when the link is free, after the start of the pass.
        seconds: of the pass, with what is waited for.
    """

    waited: float
    ends: float
    seconds: float

    @property
    def tail(self) -> float:
        """The seconds of collectives behind the computation."""
        return max(0.0, self.ends - self.seconds)


def run_beside(
    work: Sequence[float], gathers: Sequence[float], sums: Sequence[float], *, begin: float = 0.0, ahead: float = 1
) -> PassOverUnits:
    """Returns a pass over units, whose parameters are gathered before, and whose gradients are summed behind.

    A sum starts when its unit has been computed and the sum before has ended, for which computation waits: one
    sum runs at a time.

    Args:
        work: seconds of each unit, in the order in which they run.
        gathers: seconds to gather the parameters of each unit.
        sums: seconds to sum the gradients of each unit.
        begin: seconds after the first gather at which the pass may start.
        ahead: 0: a unit is gathered when the one before has been computed; 1: while the one before is computed;
            inf: all units are gathered from the start.
    """
    now, free, summed = begin, 0.0, 0.0
    arrived = [0.0] * len(work)

    def gather(i: int, ready: float) -> None:
        nonlocal free
        if i < len(work) and gathers[i]:
            free = max(free, ready) + gathers[i]
            arrived[i] = free

    # Nothing is computed before the first unit, so its gather is never hidden.
    for i in range(len(work) if ahead == math.inf else min(1, len(work))):
        gather(i, 0.0)
    for i, seconds in enumerate(work):
        now = max(now, arrived[i])
        if ahead == 1:
            gather(i + 1, now)
        now += seconds
        if sums[i]:
            now = max(now, summed)
            free = summed = max(free, now) + sums[i]
        if ahead == 0:
            gather(i + 1, now)
    return PassOverUnits(waited=now - begin - sum(work), ends=free - begin, seconds=now - begin)
