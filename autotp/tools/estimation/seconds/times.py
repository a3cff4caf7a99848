"""times: the seconds of a piece, forward and backward, and what they are spent on.

A device computes one kernel after the other; collectives run beside kernels between their start and their wait.

Where the halves of a batch take turns, the last sum of a piece runs beside the first turn of the next one: of the other
half, in forward of the next piece, in backward of the piece before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotp.costs.hardware import Hardware
from autotp.costs.links import CHANNELS, RankGroup, collective_seconds
from autotp.costs.operators import Op
from autotp.costs.roofline import op_seconds
from autotp.tools.estimation.counts.record import Record

PRODUCTS, ELEMENTWISE = "products", "elementwise"
WORK = {"product": PRODUCTS, "attention": PRODUCTS}
"""Kind of an operator -> the row of the table that it counts for."""
EXPERTS, GROUPED = "experts", "_grouped_mm"
"""The row of the table for products of experts with their rows, and the operator that counts for it."""
SUMS = "all-reduce tp"
"""The row of the table for what waits for the sums of halves of a batch."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What halves of a batch do at the ends of a piece, in forward or in backward.

    Attributes:
        first: seconds of computation before the first sum starts.
        last: seconds of waiting for the last sum.
    """

    first: float = 0.0
    last: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """The time of one microbatch in a piece or a stage.

    Attributes:
        forward: seconds.
        backward: seconds, with what is computed again.
        weights: the part of `backward` that computes gradients of parameters, which zero-bubble schedules defer.
        spent: row of the table -> seconds of both, without what is hidden behind computation.
        again: FLOPs of products that are computed again.
        turns: of forward and of backward, if the halves of a batch take turns.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)
    again: float = 0.0
    turns: tuple[Turns, Turns] = (Turns(), Turns())

    def __add__(self, other: Times) -> Times:
        """Returns the times of both, one after the other: `other` comes after in forward, and before in backward."""
        (ahead, back), (next_ahead, next_back) = self.turns, other.turns
        forward, backward = min(ahead.last, next_ahead.first), min(next_back.last, back.first)
        spent = summed_by_row(self.spent, other.spent)
        if forward + backward:
            spent[SUMS] -= forward + backward
        return Times(
            forward=self.forward + other.forward - forward, backward=self.backward + other.backward - backward,
            weights=self.weights + other.weights, spent=spent, again=self.again + other.again,
            turns=(
                Turns(first=ahead.first, last=next_ahead.last), Turns(first=next_back.first, last=back.last),
            ),
        )  # fmt: skip


def summed_by_row(*parts: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of the seconds of each row."""
    total = defaultdict[str, float](float)
    for name, seconds in (item for part in parts for item in part.items()):
        total[name] += seconds
    return dict(total)


def beside(seconds: float, collective: float, device: Hardware) -> float:
    """Returns the seconds of a kernel beside a collective that runs for `collective` seconds more, with fewer units."""
    speed = 1 - min(0.5, CHANNELS / device.units)
    shared = min(max(collective, 0.0), seconds / speed)
    return seconds + shared * (1 - speed)


def piece_times(
    record: Record, device: Hardware, tp: int, cp: int = 1, in_turns: bool = False, beside_kernels: bool = True,
    ep: int = 1,
) -> Times:  # fmt: skip
    """Returns the times of a piece, on `tp` tensor-parallel ranks, which are neighbours, for each of `cp` parts.

    Args:
        ep: the number of replicas that experts are cut over.
        in_turns: whether the halves of a batch take turns.
        beside_kernels: whether collectives run beside kernels; else each is waited for where it starts.
    """
    last = {touch.memory: i for i, op in enumerate(record.ops) for touch in op.reads}
    now, free, weights = 0.0, 0.0, 0.0
    ends = dict[int, float]()
    across = {"cp": RankGroup(size=cp, stride=tp), "ep": RankGroup(size=ep, stride=tp * cp)}
    spent, phases = defaultdict[str, float](float), defaultdict[bool, float](float)
    turns = _EndsOfPhase(), _EndsOfPhase()
    for i, op in enumerate(record.ops):
        before = now
        if op.kind == "collective":
            # `tp/4` is a group of four neighbours along the axis `tp`.
            group = across.get(op.axis) or RankGroup(size=int(op.axis.partition("/")[2] or tp), stride=1)
            free = max(free, now) + collective_seconds(op.name, op.size, group, device)
            ends[i] = free
            if not beside_kernels:
                now = free
                spent[f"{op.name} {op.axis.partition('/')[0]}"] += now - before
        elif op.kind == "wait":
            now = max(now, ends.get(op.waits, now))
            waited = record.ops[op.waits]
            spent[f"{waited.name} {waited.axis.partition('/')[0]}"] += now - before
        else:
            now += beside(op_seconds(op, device), free - now, device)
            spent[EXPERTS if op.name == GROUPED else WORK.get(op.kind, ELEMENTWISE)] += now - before
            # Backward reads the gradients of activations further on; what it does not read again is a parameter's
            # gradient.
            leaves = op.phase == "backward" and all(last.get(t.memory, -1) <= i for t in op.writes)
            weights += (now - before) * (leaves and op.kind == "product")
        phases[op.phase == "forward"] += now - before
        turns[op.phase != "forward"].add(op, record, now - before)
    return Times(
        forward=phases[True], backward=phases[False], weights=weights, spent=spent,
        again=sum(op.flops for op in record.ops if op.phase == "again"),
        turns=(turns[0].turns, turns[1].turns) if in_turns and beside_kernels else (Turns(), Turns()),
    )  # fmt: skip


class _EndsOfPhase:
    """Finds the turns at the ends of a phase, from its operators in order."""

    def __init__(self) -> None:
        self.first, self.last, self.sums = 0.0, 0.0, False

    def add(self, op: Op, record: Record, seconds: float) -> None:
        """Notes an operator and the seconds that it takes."""
        if op.kind == "collective" and op.axis == "tp":
            self.sums = True
        elif op.kind == "wait" and record.ops[op.waits].axis == "tp":
            self.last = seconds
        elif op.kind in WORK:
            self.last = 0.0  # Products follow the sum.
        self.first += seconds * (not self.sums)

    @property
    def turns(self) -> Turns:
        """The turns; none in a phase without sums."""
        return Turns(first=self.first, last=self.last) if self.sums else Turns()
