"""rough: a price of a layout from a few numbers, to find out which layouts are worth a full price.

All stages are taken to be alike, and the bubble is the formula's (Narayanan et al. 2021, section 2.2; of the schedules
in two halves that of Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autotp.estimation.counts.activations import StageMemory, stage_memory
from autotp.estimation.layout import Layout
from autotp.estimation.price import Prices, beside_times, cast_seconds, exchange_seconds, itemsize_of, update_seconds
from autotp.estimation.seconds.schedule import engine_of
from autotp.estimation.seconds.times import Times


@dataclass(frozen=True)
class Rough:
    """The seconds of a step, and the bytes of the fullest device, roughly."""

    seconds: float
    memory: float


@dataclass(frozen=True)
class Rows:
    """A microbatch in all pieces: its times, its memory, and the bytes between pieces."""

    times: Times
    memory: StageMemory
    boundaries: float


class RoughPrices:
    """The rough prices of one number of tensor-parallel ranks.

    Args:
        prices: those without full recomputation, whose costs follow from them.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._rows: dict[int, Rows] = {}
        self._names: dict[int, frozenset[str]] = {}
        self._exchanges: dict[tuple[int, ...], tuple[float, float]] = {}
        self._sums: dict[tuple[int, int], float] = {}
        self._casts: dict[tuple[int, int, int], float] = {}
        self._totals: dict[int, tuple[float, float, float]] = {}

    @cached_property
    def _blocks(self) -> int:
        return len(self._prices.pieces(1).pieces)

    def _of_rows(self, rows: int) -> Rows:
        if rows not in self._rows:
            found, times = self._prices.pieces(rows), self._prices.times(rows)
            sent = [v.bytes for p in found.pieces for v in found.records[p.kind].sent[: p.boundary]]
            total = sum((times[piece.kind] for piece in found.pieces), Times())
            self._rows[rows] = Rows(total, stage_memory(found.pieces, found), float(sum(sent)))
        return self._rows[rows]

    def _parameters(self, count: int) -> frozenset[str]:
        """Returns the names of the parameters of the first pieces, which are the most."""
        if count not in self._names:
            pieces = self._prices.pieces(1).pieces[:count]
            self._names[count] = frozenset(name for piece in pieces for name in piece.parameters)
        return self._names[count]

    def rough(self, layout: Layout) -> Rough:
        """Returns the rough price of a layout."""
        rows, kind = self._of_rows(layout.micro_batch), engine_of(layout.schedule, layout.interleave)
        rounds = kind.rounds if layout.pp > 1 else 1
        count = math.ceil(self._blocks / (layout.pp * rounds)) * rounds
        again = rows.times.forward * (layout.recompute == "full")
        whole = rows.times.forward + rows.times.backward + again
        work = (whole * count / self._blocks + self._beside(layout, count)) * layout.microbatches
        work += self._cast(layout, count)
        filled = rows.times.weights * kind.halves * (2 + kind.folded)  # Weights' gradients are computed meanwhile.
        idle = (layout.pp - 1) / rounds * max(0.0, whole - filled) / layout.pp
        exchange, update = self._once(layout, count)
        exchange = max(0.0, exchange - work) if layout.zero == 3 else exchange
        return Rough(work + idle + exchange + update, self._memory(layout, count, rows))

    def _beside(self, layout: Layout, count: int) -> float:
        """Returns the seconds to add up gradients, for one microbatch."""
        key = count, int(layout.microbatches > 1)
        if key not in self._sums:
            self._sums[key] = beside_times(self._prices, layout, self._parameters(count)).backward
        return self._sums[key]

    def _cast(self, layout: Layout, count: int) -> float:
        """Returns the seconds to cast parameters in a step."""
        key = count, layout.dp if layout.zero else 1, layout.microbatches if layout.zero == 3 else 1
        if key not in self._casts:
            self._casts[key] = cast_seconds(self._prices, layout, self._parameters(count))
        return self._casts[key]

    def _once(self, layout: Layout, count: int) -> tuple[float, float]:
        """Returns the seconds of the sums over replicas and of the optimizer."""
        times = layout.microbatches if layout.zero == 3 else 1
        key = count, layout.dp, layout.zero, times, int(layout.pp > 1)
        if key not in self._exchanges:
            names = self._parameters(count)
            exchange = exchange_seconds(self._prices, layout, names)
            self._exchanges[key] = exchange, update_seconds(self._prices, layout, names)
        return self._exchanges[key]

    def _sizes(self, count: int) -> tuple[float, float, float]:
        """Returns the bytes of the parameters of the first pieces, the elements that learn, and all elements."""
        if count not in self._totals:
            own = [self._prices.model.parameters[name] for name in self._parameters(count)]
            weights = float(sum(p.elements * p.itemsize for p in own))
            learnt = float(sum(p.elements for p in own if p.learns))
            self._totals[count] = weights, learnt, float(sum(p.elements for p in own))
        return self._totals[count]

    def _memory(self, layout: Layout, count: int, rows: Rows) -> float:
        weights, learnt, elements = self._sizes(count)
        itemsize = weights / elements
        divided = layout.dp if layout.zero else 1
        narrow = itemsize_of(layout, int(itemsize))
        copy = elements * narrow if narrow != itemsize else 0.0
        flights = float(min(layout.microbatches, layout.pp)) if layout.pp > 1 else 1.0
        if layout.interleave:
            flights *= 1 + (layout.pp - 1) / layout.pp / layout.interleave
        kept = rows.boundaries if layout.recompute == "full" else rows.memory.kept
        copies = 0.0 if layout.zero == 3 else copy
        state = (weights + 2 * learnt * itemsize) / divided
        gradients = learnt * itemsize / (divided if layout.zero > 1 else 1)
        live = max(rows.memory.forward, rows.memory.backward)
        return state + gradients + copies + kept * count / self._blocks * flights + live
