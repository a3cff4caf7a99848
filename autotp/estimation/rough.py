"""rough: a price of a layout from a few numbers, to find out which layouts are worth a full price.

All stages are taken to be alike, and the bubble is the formula's (Narayanan et al. 2021, section 2.2; of the schedules
in two halves that of Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from autotp.estimation.counts.activations import stage_memory
from autotp.estimation.layout import Layout
from autotp.estimation.price import Prices, beside_times, cast_seconds, update_seconds
from autotp.estimation.replicas import exchanged, itemsize_of
from autotp.estimation.seconds.times import Times
from autotp.training.pipeline.schedules import engine_of


@dataclass(frozen=True)
class Rough:
    """The seconds of a step, and the bytes of the fullest device, roughly."""

    seconds: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A microbatch in all pieces.

    Attributes:
        forward, backward, weights: seconds, as of `Times`.
        kept: bytes that backward reads.
        live: bytes beside them at the fullest moment.
        boundaries: bytes between pieces.
    """

    forward: float
    backward: float
    weights: float
    kept: float
    live: float
    boundaries: float


class RoughPrices:
    """The rough prices of a number of tensor-parallel ranks, and of context-parallel ranks.

    Args:
        prices: those without full recomputation, whose costs follow from them.
        rows: the number of rows of a microbatch -> its numbers; by default those of `prices`.
    """

    def __init__(self, prices: Prices, rows: Callable[[int], Rows] | None = None) -> None:
        self._prices, self._find_rows = prices, self._recorded_rows if rows is None else rows
        self._rows: dict[int, Rows] = {}
        self._names: dict[int, frozenset[str]] = {}
        self._exchanges: dict[tuple[int, ...], tuple[float, float, float]] = {}
        self._sums: dict[tuple[int, int], float] = {}
        self._casts: dict[tuple[int, int, int], float] = {}
        self._totals: dict[int, tuple[float, float, float]] = {}

    def divided(self, cp: int, cut: RoughPrices, ranks: int, whole: RoughPrices) -> RoughPrices:
        """Returns rough prices of these tensor-parallel ranks on each of `cp` ranks, without their graph.

        They are low. The seconds change by the factor by which they change from one rank to `ranks`, and are divided
        evenly from there, as if smaller kernels were as fast; the bytes are divided by `cp`, as if no rank gathered.

        Args:
            cut: those of `ranks` context-parallel ranks, on one tensor-parallel rank.
            whole: those of one rank.
        """

        def rows(count: int) -> Rows:
            local, more, less = self.rows(count), cut.rows(count), whole.rows(count)
            return Rows(
                forward=local.forward * more.forward / less.forward * ranks / cp,
                backward=local.backward * more.backward / less.backward * ranks / cp,
                weights=local.weights, kept=local.kept / cp, live=local.live / cp, boundaries=local.boundaries / cp,
            )  # fmt: skip

        return RoughPrices(self._prices, rows)

    @cached_property
    def _blocks(self) -> int:
        return len(self._prices.pieces(1).pieces)

    def rows(self, count: int) -> Rows:
        """Returns the numbers of a microbatch of `count` rows."""
        if count not in self._rows:
            self._rows[count] = self._find_rows(count)
        return self._rows[count]

    def _recorded_rows(self, count: int) -> Rows:
        recorded, times = self._prices.pieces(count), self._prices.times(count)
        sent = [v.bytes for p in recorded.pieces for v in recorded.records[p.kind].sent[: p.boundary]]
        total = sum((times[piece.kind] for piece in recorded.pieces), Times())
        memory = stage_memory(recorded.pieces, recorded)
        return Rows(
            forward=total.forward, backward=total.backward, weights=total.weights, kept=float(memory.kept),
            live=float(max(memory.forward, memory.backward)), boundaries=float(sum(sent)),
        )  # fmt: skip

    def _parameters(self, count: int) -> frozenset[str]:
        """Returns the names of the parameters of the first pieces, which are the most."""
        if count not in self._names:
            pieces = self._prices.pieces(1).pieces[:count]
            self._names[count] = frozenset(name for piece in pieces for name in piece.parameters)
        return self._names[count]

    def rough(self, layout: Layout) -> Rough:
        """Returns the rough price of a layout."""
        rows, engine = self.rows(layout.micro_batch), engine_of(layout.schedule, layout.interleave)
        rounds = engine.rounds if layout.pp > 1 else 1
        count = math.ceil(self._blocks / (layout.pp * rounds)) * rounds
        again = rows.forward * (layout.recompute == "full")
        whole = rows.forward + rows.backward + again
        work = (whole * count / self._blocks + self._beside(layout, count)) * layout.microbatches
        work += self._cast(layout, count)
        filled = rows.weights * engine.halves * (2 + engine.folded)  # Weights' gradients are computed meanwhile.
        idle = (layout.pp - 1) / rounds * max(0.0, whole - filled) / layout.pp
        gathers, sums, update = self._once(layout, count)
        forward, backward = (part * count / self._blocks for part in (rows.forward, rows.backward + again))
        if layout.zero > 1 and layout.pp == 1:  # Beside each microbatch.
            times = layout.microbatches * (2 if layout.zero == 3 else 1)
            exchange = max(sums / count, gathers + sums * layout.microbatches + gathers * (times - 1) - work)
        else:
            exposed = 0.0 if not engine.halves or layout.pp == 1 else sums
            exchange = max(gathers / count, gathers - forward) + max(exposed, sums / count, sums - backward)
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

    def _once(self, layout: Layout, count: int) -> tuple[float, float, float]:
        """Returns the seconds to gather parameters once, to sum gradients once, and of the optimizer."""
        key = count, layout.dp, int(layout.zero > 0)
        if key not in self._exchanges:
            names = self._parameters(count)
            gathers, sums = exchanged(self._prices, layout, names, count + 1)
            self._exchanges[key] = gathers, sums, update_seconds(self._prices, layout, names)
        return self._exchanges[key]

    def _sizes(self, count: int) -> tuple[float, float, float]:
        """Returns the bytes of the parameters of the first pieces, the elements that learn, and all elements."""
        if count not in self._totals:
            parameters = self._prices.totals(self._parameters(count))
            weights = float(sum(p.elements * p.itemsize for p in parameters))
            learnt = float(sum(p.elements for p in parameters if p.learns))
            self._totals[count] = weights, learnt, float(sum(p.elements for p in parameters))
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
        kept_bytes = rows.boundaries if layout.recompute == "full" else rows.kept
        copies = 0.0 if layout.zero == 3 else copy
        state = (weights + 2 * learnt * itemsize) / divided
        gradients = learnt * itemsize / (divided if layout.zero > 1 else 1)
        return state + gradients + copies + kept_bytes * count / self._blocks * flights + rows.live
