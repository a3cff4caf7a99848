"""closed_form: the schedule of a layout by formulas, where `price.timed_schedule` plays it action by action.

It tells which layouts are worth a full price, and is priced by the same functions. All blocks are taken to be alike,
and all stages; the bubble is the formula's (Narayanan et al. 2021, section 2.2; of the schedules in two halves that of
Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from autotp.passes.emit.zero.room import FEWEST
from autotp.tools.estimation.counts.activations import StageMemory, stage_memory
from autotp.tools.estimation.layout import StepLayout
from autotp.tools.estimation.price import Prices, Simulated, StageCost, beside_times, cast_seconds
from autotp.tools.estimation.replicas import ReplicaWaits, Unit, exchanged, gathered_bytes, sums_of_units
from autotp.tools.estimation.seconds.times import Times
from autotp.training.pipeline.schedule_actions import Action, Half, Played
from autotp.training.pipeline.schedules import Engine, engine_of


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


class ClosedForms:
    """The schedules of layouts with a number of tensor-parallel ranks, and of context-parallel ranks.

    Args:
        prices: those without full recomputation, whose costs follow from them.
        rows: the number of rows of a microbatch -> its numbers; by default those of `prices`.
    """

    def __init__(self, prices: Prices, rows: Callable[[int], Rows] | None = None) -> None:
        self.prices, self.rows = prices, cache(rows or self._recorded_rows)
        self._names, self._stage = cache(self._of_first_pieces), cache(self._of_alike)

    def divided(self, cp: int, cut: ClosedForms, ranks: int, whole: ClosedForms) -> ClosedForms:
        """Returns those of these tensor-parallel ranks on each of `cp` ranks, without their graph.

        Their prices are low. The seconds change by the factor by which they change from one rank to `ranks`, and are
        divided evenly from there, as if smaller kernels were as fast; the bytes are divided by `cp`, as if no rank
        gathered.

        Args:
            cut: those of `ranks` context-parallel ranks, on one tensor-parallel rank.
            whole: those of one rank.
        """

        def rows(count: int) -> Rows:
            local, more, less = self.rows(count), cut.rows(count), whole.rows(count)
            return Rows(
                forward=local.forward * more.forward / less.forward * ranks / cp,
                backward=local.backward * more.backward / less.backward * ranks / cp,
                weights=local.weights * (more.weights / less.weights if less.weights else 0.0) * ranks / cp,
                kept=local.kept / cp, live=local.live / cp, boundaries=local.boundaries / cp,
            )  # fmt: skip

        return ClosedForms(self.prices, rows)

    @cached_property
    def _blocks(self) -> int:
        return len(self.prices.pieces(1).pieces)

    def _recorded_rows(self, count: int) -> Rows:
        """Returns the numbers of a microbatch of `count` rows."""
        recorded, times = self.prices.pieces(count), self.prices.times(count)
        sent = [v.bytes for p in recorded.pieces for v in recorded.records[p.kind].sent[: p.boundary]]
        total = sum((times[piece.kind] for piece in recorded.pieces), Times())
        memory = stage_memory(recorded.pieces, recorded)
        return Rows(
            forward=total.forward, backward=total.backward, weights=total.weights, kept=float(memory.kept),
            live=float(max(memory.forward, memory.backward)), boundaries=float(sum(sent)),
        )  # fmt: skip

    def _of_first_pieces(self, count: int) -> frozenset[str]:
        """Returns the names of the parameters of the first pieces, which are the most."""
        return frozenset(name for piece in self.prices.pieces(1).pieces[:count] for name in piece.parameters)

    def simulated(self, layout: StepLayout) -> Simulated:
        """Returns the schedule of one pipeline rank, whose stages are one; its row has the first and the last action.

        The stage keeps for backward what all microbatches in flight keep.
        """
        engine, microbatches = engine_of(layout.schedule, layout.interleave), layout.microbatches
        rounds = engine.rounds if layout.pp > 1 else 1
        count = math.ceil(self._blocks / (layout.pp * rounds)) * rounds
        # A stage depends on the number of its pieces, and not on the schedule: layouts that differ in it share a stage.
        stage = self._stage(replace(layout, schedule="1F1B", interleave=None), count)
        half: Half = "W" if engine.halves and layout.pp > 1 else "B"
        first, last = row = Action(0, "F", 0), Action(0, half, microbatches - 1)
        times, (forward, backward) = stage.times, (Action(0, "F", 1), Action(0, "B", microbatches - 1))
        between = (Action(0, "B", 0), forward) if microbatches > 1 else ()
        waits = ReplicaWaits(
            layout=layout, practice=self.prices.practice, device=self.prices.device, units=[stage.units],
            order=((first, *between, backward),), rooms=(FEWEST,),
        )  # fmt: skip
        busy = stage.casts + microbatches * (times.forward + times.backward)
        # The first forward counts by itself: under ZeRO 1 and 2 only it waits for gathered parameters.
        waited = waits.seconds(first, 0.0) + (microbatches - 1) * waits.seconds(forward, 0.0)
        waited += microbatches * waits.seconds(backward, 0.0)
        seconds = busy + waited + _idle(engine, layout, times) * self._blocks / count / rounds
        memory = replace(stage.memory, kept=round(stage.memory.kept * _flights(layout)))
        step = Simulated(order=(row,), stages=[replace(stage, memory=memory)], waits=waits)
        begin = seconds - step.seconds(last) - waits.seconds(last, 0.0)
        return replace(step, played=Played(seconds=seconds, busy=(busy,), starts=(((0.0, first), (begin, last)),)))

    def _of_alike(self, layout: StepLayout, count: int) -> StageCost:
        """Returns a stage of `count` pieces, which are alike, for one microbatch of any schedule."""
        rows, names, full = self.rows(layout.micro_batch), self._names(count), layout.recompute == "full"
        part, added = count / self._blocks, beside_times(self.prices, layout, names)
        times = Times(
            forward=rows.forward * part, weights=rows.weights * part,
            backward=(rows.backward + rows.forward * full) * part + added.backward,
        )  # fmt: skip
        live, kept_bytes = round(rows.live), round((rows.boundaries if full else rows.kept) * part)
        # One unit more than pieces: that of the parameters outside of blocks, which takes no time of its own.
        gathers, sums = (s / (count + 1) for s in exchanged(self.prices, layout, names, count + 1))
        rest = Unit(gather=gathers, sum=sums, bytes=gathered_bytes(layout, self.prices.totals(names)) / (count + 1))
        units = (rest, *[replace(rest, forward=times.forward / count, backward=times.backward / count)] * count)
        return StageCost(
            times=times, memory=StageMemory(kept=kept_bytes, logits=0, sent=0, forward=live, backward=live),
            parameters=names, casts=cast_seconds(self.prices, layout, names), units=units,
            sums=tuple(sums_of_units(units)),
        )  # fmt: skip


def _idle(engine: Engine, layout: StepLayout, times: Times) -> float:
    """Returns the seconds of the bubble, as if a rank's stages were the whole model, and as if it had one stage."""
    filled = times.weights * engine.halves * (2 + engine.folded)  # Weights' gradients are computed meanwhile.
    return max(0.0, times.forward + times.backward - filled) * (layout.pp - 1) / layout.pp


def _flights(layout: StepLayout) -> float:
    """Returns the number of microbatches of which the first rank keeps activations at a time."""
    more = (layout.pp - 1) / layout.pp / layout.interleave if layout.interleave else 0.0
    return min(layout.microbatches, layout.pp) * (1 + more)
