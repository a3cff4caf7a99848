"""price: puts the seconds and bytes of pieces together to those of a training step."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from autotp.costs.hardware import Hardware
from autotp.costs.links import RankGroup, collective_seconds, send_seconds
from autotp.costs.room import axis_groups, buffer_bytes
from autotp.diagnostics.report import plan_of_choice
from autotp.passes.emit.zero.room import whole_bytes
from autotp.passes.emit.zero.step_gathers import blocks_with_room
from autotp.passes.pipeline.cost import block_costs
from autotp.passes.pipeline.stages import partition
from autotp.passes.program.emitted import bytes_of_states
from autotp.tools.estimation.counts.activations import StageMemory, stage_memory
from autotp.tools.estimation.counts.budget import Budgets, StageChoice, stage_choices
from autotp.tools.estimation.counts.kernels import fused, narrowed
from autotp.tools.estimation.counts.pieces import Lowered, Parameter, Recorded, recorded, whole_flops
from autotp.tools.estimation.counts.scale import scaled, scaled_reads
from autotp.tools.estimation.layout import AUTOTP, FOREACH, Practice, StepLayout
from autotp.tools.estimation.replicas import (
    ReplicaWaits,
    Unit,
    copies_of,
    gathers_once,
    itemsize_of,
    replicas_of,
    sums_of_buckets,
    sums_of_units,
    units_of,
    zero_ranks,
)
from autotp.tools.estimation.result import Estimate, RankMemory, TimeSaving
from autotp.tools.estimation.seconds.beside_compute import link_free, slowed
from autotp.tools.estimation.seconds.times import ELEMENTWISE, Times, piece_times, summed_by_row
from autotp.training.pipeline.gradient_buckets import BUCKET
from autotp.training.pipeline.schedule_actions import Action, Played, actions_of, most_held, play
from autotp.training.pipeline.schedules import Engine, costed, engine_of

AGAIN = "computed again"
"""The row of the table for what a budget of memory has backward do beside: it runs operators again, or moves values."""
NOTHING_PLAYED = Played(seconds=0.0, busy=(), starts=())


class Prices:
    """The prices of layouts of one captured model: what two layouts share is computed once.

    Args:
        scaled: whether records of more than three rows are made of those of two and of three.
        flops: FLOPs of a row on one device, if they are known.
    """

    def __init__(
        self, model: Lowered, device: Hardware, practice: Practice, scaled: bool = False, flops: float | None = None
    ) -> None:
        self.model, self.device, self.practice = model, device, practice
        self._recorded_model = model
        self._scaled, self._row_flops = scaled, flops
        self._recorded: dict[tuple[int, bool], Recorded] = {}
        self._times: dict[int, list[Times]] = {}
        self._stages: dict[Any, list[list[int]]] = {}
        self._totals: dict[frozenset[str], tuple[Parameter, ...]] = {}
        self._copied: dict[frozenset[str], int] = {}
        self.budgets = Budgets(model, device)

    def totals(self, names: frozenset[str]) -> tuple[Parameter, ...]:
        """Returns what parameters are together: one parameter for all that differ in nothing but size."""
        if names not in self._totals:
            sizes = Counter[tuple[int, bool, bool]]()
            for parameter in (self.model.parameters[name] for name in names):
                sizes[parameter.itemsize, parameter.learns, parameter.of_experts] += parameter.elements
            self._totals[names] = tuple(
                Parameter(elements=n, itemsize=size, learns=learns, of_experts=of_experts)
                for (size, learns, of_experts), n in sizes.items()
            )
        return self._totals[names]

    def copied(self, names: frozenset[str]) -> int:
        """Returns the bytes of the gradients that are copied to be summed over replicas: those that are small."""
        if names not in self._copied:
            sizes = (p.bytes for p in map(self.model.parameters.__getitem__, names) if p.learns)
            self._copied[names] = sum(size for size in sizes if size < BUCKET)
        return self._copied[names]

    def under(self, practice: Practice) -> Prices:
        """Returns the prices under another practice that records as this one does; what both have is computed once."""
        prices = copy.copy(self)
        # Records, stages and sizes are the same under both practices; times are not.
        prices.practice, prices._times = practice, {}
        return prices

    def of(self, model: Lowered) -> Prices:
        """Returns the prices of a model that has the same records, which stay those of the graph of this one."""
        prices = copy.copy(self)
        prices.model, prices._times, prices._totals, prices._copied = model, {}, {}, {}
        return prices

    def pieces(self, rows: int) -> Recorded:
        """Returns the records of the pieces for a microbatch of `rows` rows."""
        if (rows, self.practice.fused) not in self._recorded:
            plain = self._recorded.get((rows, False)) or self._plain(rows)
            self._recorded[rows, False] = plain
            if self.practice.fused:
                records = tuple(map(fused, plain.records))
                self._recorded[rows, True] = replace(plain, records=records, peaks={})
        return self._recorded[rows, self.practice.fused]

    def _plain(self, rows: int) -> Recorded:
        """Returns the records without kernels that are joined."""
        # One row is another case (scale.py), and two and three are what others are made of.
        scaled_records = self._from_two_and_three(rows) if self._scaled and rows > 3 else None
        return scaled_records or recorded(self._recorded_model, rows, self.device.is_gpu, self.practice.early_stop)

    def _from_two_and_three(self, rows: int) -> Recorded | None:
        """Returns the records of `rows` rows, made of those of two rows and of three; None if these are not alike."""
        plain = self.under(replace(self.practice, fused=False))
        of_two, of_three = plain.pieces(2), plain.pieces(3)
        if [piece.kind for piece in of_two.pieces] != [piece.kind for piece in of_three.pieces]:
            return None
        candidates = [scaled(a, b, rows) for a, b in zip(of_two.records, of_three.records, strict=True)]
        records = tuple(record for record in candidates if record is not None)
        reads = tuple(scaled_reads(a, b, rows) for a, b in zip(of_two.reads, of_three.reads, strict=True))
        return replace(of_two, records=records, reads=reads, peaks={}) if len(records) == len(candidates) else None

    def times(self, rows: int) -> list[Times]:
        """Returns the times of each kind of piece."""
        if rows not in self._times:
            training = self.model.training
            tp, cp, ep = self.model.program.tp, training.cp, training.ep
            turns = training.overlap != "none" and training.recompute == "none"
            practice, beside = self.practice, self.practice.beside_products
            records = [narrowed(x, practice.products, practice.exchange) for x in self.pieces(rows).records]
            self._times[rows] = [piece_times(x, self.device, tp, cp, turns, beside, ep) for x in records]
        return self._times[rows]

    def flops(self, rows: int) -> float:
        """Returns the FLOPs of a microbatch on one device that would hold the whole model, without recomputation."""
        if self._row_flops is None:
            self._row_flops = whole_flops(self._recorded_model, 1)
        return self._row_flops * rows

    def stages(self, engine: Engine, ranks: int, microbatches: int) -> list[list[int]]:
        """Returns the numbers of the pieces of each stage, divided as `distribute` divides them."""
        model, total = self.model, ranks * engine.rounds if ranks > 1 else 1
        flights = tuple(engine.flight(i, total, microbatches) for i in range(total))
        if (engine, ranks, flights) not in self._stages:
            names = list(model.program.captured.parameters)
            captured_costs = block_costs(*costed(model.program), model.captured_blocks, names)
            cost = dict(zip(model.captured_blocks, captured_costs, strict=False))
            costs = [cost[captured] for _, captured in model.order] or captured_costs
            homes = {i: rank for rank in range(ranks) for i in (engine.stages(rank, ranks) if ranks > 1 else [0])}
            keeps_activations = model.training.recompute != "full"
            plan = partition(
                model.blocks, costs, [homes[i] for i in range(total)], [keeps_activations * n for n in flights]
            )
            places = itertools.accumulate((len(run) for run in plan.blocks), initial=0)
            pairs = itertools.pairwise(places)
            # A model without numbered blocks is one piece, in one stage.
            self._stages[engine, ranks, flights] = [list(range(a, b)) if b > a else [0] for a, b in pairs]
        return self._stages[engine, ranks, flights]


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What the step knows of a stage.

    Attributes:
        times: of a microbatch.
        memory: of a microbatch.
        parameters: their names.
        casts: seconds to cast them, once a step, before the first microbatch's forward.
        units: what is computed, gathered and summed together, in the order of forward.
        sums: (seconds after the start of the last backward, seconds) of each sum over replicas, once a step.
        budget: what a budget of memory does; None without one.
    """

    times: Times
    memory: StageMemory
    parameters: frozenset[str]
    casts: float
    units: tuple[Unit, ...] = ()
    sums: tuple[tuple[float, float], ...] = ()
    budget: StageChoice | None = None


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A schedule that was played with the times of a layout.

    Attributes:
        order: the actions of each pipeline rank.
        stages: what the step knows of each stage.
        waits: what actions wait for, on other replicas.
        played: when each action runs.
    """

    order: tuple[tuple[Action, ...], ...]
    stages: list[StageCost]
    waits: ReplicaWaits
    played: Played = NOTHING_PLAYED

    @cached_property
    def names(self) -> list[frozenset[str]]:
        """The names of the parameters of each pipeline rank."""
        return [_together([self.stages[i].parameters for i in {a.stage for a in row}]) for row in self.order]

    def seconds(self, action: Action) -> float:
        """Returns the seconds of an action; the first microbatch's forward casts the parameters."""
        stage, times = self.stages[action.stage], self.stages[action.stage].times
        forward = times.forward + stage.casts * (action.microbatch == 0)
        parts = {"F": forward, "B": times.backward, "I": times.backward - times.weights, "W": times.weights}
        return parts[action.half]


def timed_schedule(prices: Prices, layout: StepLayout) -> Simulated:
    """Returns the schedule of a layout with its times.

    Raises:
        Error: the schedule cannot run the microbatches, or there are more stages than blocks.
    """
    device, practice = prices.device, prices.practice
    engine = engine_of(layout.schedule, layout.interleave)
    order = actions_of(engine, layout.pp, layout.microbatches)
    runs = prices.stages(engine, layout.pp, layout.microbatches)
    choices: list[StageChoice | None] = [None] * len(runs)
    if layout.memory is not None:
        home = _homes(order)
        recorded_pieces = prices.pieces(layout.micro_batch)
        choices = [*stage_choices(prices.budgets, recorded_pieces, layout, runs, home, engine)]
    stages = [_stage(prices, layout, run, choice) for run, choice in zip(runs, choices, strict=True)]
    # Stages are the outermost axis of the mesh: neighbours are all ranks of a stage apart.
    distance = layout.model_ranks * layout.dp

    def sends(start: int, stop: int) -> float:
        # On the way back goes the gradient of what was sent, which is as large.
        sent = stages[min(start, stop)].memory.sent
        # With sequence parallelism each rank has only its part of it anyway.
        if practice.scattered and not layout.sequence_parallel:
            whole = collective_seconds("all-gather", sent, RankGroup(size=layout.tp, stride=1), device)
            return send_seconds(sent / layout.tp, distance, device) + whole
        return send_seconds(sent, distance, device)

    rooms = tuple(_room(stages, row) for row in order)
    units = [stage.units for stage in stages]
    waits = ReplicaWaits(layout=layout, practice=practice, device=device, units=units, order=order, rooms=rooms)
    unplayed = Simulated(order=order, stages=stages, waits=waits)
    return replace(unplayed, played=play(order, unplayed.seconds, cache(sends), waits.seconds))


def _room(stages: Sequence[StageCost], row: Sequence[Action]) -> int:
    """Returns the number of blocks that a pipeline rank has whole at a time. row: its actions"""
    of_rank = [stages[i] for i in sorted({action.stage for action in row})]
    budgets = [None if stage.budget is None else stage.budget.choice for stage in of_rank]
    return blocks_with_room(budgets, [unit.bytes for stage in of_rank for unit in stage.units[1:]])


def price(prices: Prices, layout: StepLayout) -> Estimate:
    """Returns the estimate of a layout, whose tp, recompute and sequence parallelism are those of the captured model.

    Raises:
        Error: the schedule cannot run the microbatches, or there are more stages than blocks.
    """
    device, model = prices.device, prices.model
    engine = engine_of(layout.schedule, layout.interleave)
    step = timed_schedule(prices, layout)
    order, stages = step.order, step.stages
    spent = _spent(prices, layout, step)
    flops = prices.flops(layout.micro_batch) * layout.microbatches * layout.dp
    again = sum(stage.times.again for stage in stages) * layout.model_ranks * layout.microbatches * layout.dp
    names = [piece.name for piece in prices.pieces(layout.micro_batch).pieces]
    runs = prices.stages(engine, layout.pp, layout.microbatches)
    return Estimate(
        layout=layout, device=device, seconds=sum(spent.values()), flops=flops, flops_again=again,
        spent={name: s for name, s in spent.items() if s > 0}, memory=tuple(memory_of_ranks(prices, layout, step)),
        stages=tuple(tuple(names[i] for i in run) for run in runs), homes=tuple(_homes(order)),
        budgets=tuple(plan_of_choice(stage.budget.choice) for stage in stages if stage.budget is not None),
        gathers=tuple(step.waits.of_rank(rank) for rank in range(layout.pp)) if layout.zero and layout.dp > 1 else (),
        row=model.row, tokens=model.row_tokens * layout.batch, source=prices,
    )  # fmt: skip


def _homes(order: Sequence[Sequence[Action]]) -> list[int]:
    """Returns the pipeline rank of each stage."""
    home = {action.stage: rank for rank, row in enumerate(order) for action in row}
    return [home[i] for i in range(len(home))]


SAVINGS = (
    ("sums of gradients under backward", "overlapped", True, False),
    ("parameters gathered ahead", "ahead", True, False),
    ("collectives beside products", "beside_products", True, False),
    ("pointwise operators fused", "fused", True, False),
    ("optimizer fused", "optimizer", AUTOTP.optimizer, FOREACH),
)
"""What makes a step shorter: its name, the field of `Practice`, and the field's value with it and without."""


def savings(prices: Prices, estimate: Estimate) -> tuple[TimeSaving, ...]:
    """Returns what each way to hide or fuse work brings in the layout of an estimate: the step with it and without."""
    layout, rows = estimate.layout, []
    for name, field, with_it, without in SAVINGS:
        seconds = {
            value: estimate.seconds
            if getattr(prices.practice, field) == value
            else _seconds(prices.under(replace(prices.practice, **{field: value})), layout)  # type: ignore[arg-type]
            for value in (with_it, without)
        }
        used = getattr(prices.practice, field) == with_it
        saving = TimeSaving(name=name, used=used, seconds=seconds[with_it], without=seconds[without])
        rows += [saving] * (saving.without > 1.0005 * saving.seconds)  # It is shown in tenths of a percent.
    return tuple(rows)


def _seconds(prices: Prices, layout: StepLayout) -> float:
    return step_seconds(prices, layout, timed_schedule(prices, layout))


def step_seconds(prices: Prices, layout: StepLayout, step: Simulated) -> float:
    """Returns the seconds of a step with this schedule."""
    return step.played.seconds + sum(behind_pipeline(prices, layout, step).values())


def memory_of_ranks(prices: Prices, layout: StepLayout, step: Simulated) -> list[RankMemory]:
    """Returns the memory of each pipeline rank at its fullest moment."""
    return [
        _rank_memory(prices, layout, step.stages, row, names, room)
        for row, names, room in zip(step.order, step.names, step.waits.rooms, strict=True)
    ]


def _together(names: Sequence[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*names)


def _spent(prices: Prices, layout: StepLayout, step: Simulated) -> dict[str, float]:
    """Returns what the seconds of a step are spent on: on the busiest rank, then behind the pipeline."""
    order, stages, played = step.order, step.stages, step.played
    slowest = max(range(layout.pp), key=played.busy.__getitem__)
    # `spent` is of forward and backward together, so each microbatch of a stage counts once.
    spent = summed_by_row(*(stages[action.stage].times.spent for action in order[slowest] if action.half == "F"))
    casts = sum(stages[i].casts for i in {action.stage for action in order[slowest]})
    spent[ELEMENTWISE] = spent.get(ELEMENTWISE, 0.0) + casts
    waited = [step.waits.parts(action, start) for start, action in played.starts[slowest]]
    gathers, sums = (sum(part) for part in zip(*waited, strict=True))
    spent["pipeline"] = played.seconds - played.busy[slowest] - gathers - sums
    spent["parameters dp"] = gathers
    after_pipeline = behind_pipeline(prices, layout, step)
    return {**spent, **after_pipeline, "gradients dp": sums + after_pipeline["gradients dp"]}


def behind_pipeline(prices: Prices, layout: StepLayout, step: Simulated) -> dict[str, float]:
    """Returns the seconds of what follows the pipeline, in order: of the sums over replicas what nothing hides."""
    seconds, device = {"tied weights pp": 0.0}, prices.device
    if tied := _tied(prices.model, step.names):
        # The usual tied weights are the embedding on the first pipeline rank and the head on the last.
        group = RankGroup(size=2, stride=layout.model_ranks * layout.dp * max(1, layout.pp - 1))
        seconds["tied weights pp"] = collective_seconds("all-reduce", tied, group, device)
    ends = [_exchange_ends(prices, layout, step, rank, names) for rank, names in enumerate(step.names)]
    seconds["gradients dp"] = max(0.0, max(ends) - step.played.seconds)
    seconds["optimizer"] = max(update_seconds(prices, layout, names) for names in step.names)
    return seconds


def _exchange_ends(prices: Prices, layout: StepLayout, step: Simulated, rank: int, names: frozenset[str]) -> float:
    """Returns when the sums over replicas of a pipeline rank have ended.

    They begin under the last backward of each stage. Schedules in halves have the gradients when this has ended; with
    ZeRO they then wait for the sums.
    """
    device, practice, starts = prices.device, prices.practice, step.played.starts[rank]
    ends = {a.stage: start + step.seconds(a) + step.waits.seconds(a, start) for start, a in starts}
    done = max(ends.values())
    if layout.dp == 1:
        return done
    if step.waits.sums_each_backward:
        return done + step.waits.tail
    last = {action.stage: (start, action.half) for start, action in starts if action.half != "F"}
    sums = {stage: step.stages[stage].sums for stage in last}
    total = sum(seconds for timed in sums.values() for _, seconds in timed)
    halves = any(half != "B" for _, half in last.values())
    # Small gradients are copied to a bucket; behind backward they are copied back, under it they stay there.
    overlapped = practice.overlapped
    # Beside experts of a rank's own gradients are DTensors, which are copied back under backward, too.
    stay = overlapped and layout.ep == 1
    copied = (2 if stay else 4) * prices.copied(names) if practice.buckets and not layout.zero else 0
    done += copied / (device.memory_bandwidth * device.memory_sustained)
    if not overlapped or (halves and layout.zero):
        return done + total
    begins = {stage: ends[stage] if halves else start for stage, (start, _) in last.items()}
    free = link_free(
        (begins[i] + ready * (not halves), seconds) for i, timed in sums.items() for ready, seconds in timed
    )
    hidden = max(0.0, total - max(0.0, free - done))
    return max(free, done + slowed(hidden, replicas_of(layout), device))


def _stage(prices: Prices, layout: StepLayout, run: Sequence[int], budget: StageChoice | None) -> StageCost:
    recorded_pieces, times = prices.pieces(layout.micro_batch), prices.times(layout.micro_batch)
    pieces = [recorded_pieces.pieces[i] for i in run]
    names = frozenset(name for piece in pieces for name in piece.parameters)
    total = sum((times[piece.kind] for piece in pieces), beside_times(prices, layout, names))
    if budget is not None:
        seconds = budget.choice.chosen.seconds
        total += Times(backward=seconds, again=budget.flops, spent={AGAIN: seconds})
    stage = StageCost(
        times=total,
        memory=stage_memory(pieces, recorded_pieces) if budget is None else budget.memory,
        budget=budget,
        parameters=names,
        casts=cast_seconds(prices, layout, names),
    )
    if layout.dp == 1:
        return stage
    # `total` also has the time to add up gradients, which the pieces share.
    forward, backward = (_shares([getattr(times[p.kind], half) for p in pieces], getattr(total, half)) for half in
                         ("forward", "backward"))  # fmt: skip
    if not layout.zero:
        return replace(stage, sums=tuple(sums_of_buckets(prices, layout, pieces, backward)))
    units = units_of(prices, layout, pieces, list(zip(forward, backward, strict=True)))
    return replace(stage, units=units, sums=tuple(sums_of_units(units)))


def _shares(parts: Sequence[float], total: float) -> list[float]:
    """Returns the parts, longer or shorter by one factor, so that they are `total` together."""
    return [part * total / sum(parts) for part in parts]


def cast_seconds(prices: Prices, layout: StepLayout, names: frozenset[str]) -> float:
    """Returns the seconds in which a step casts a stage's parameters; under ZeRO each replica casts its part."""
    device, practice = prices.device, prices.practice
    if not practice.casts:
        return 0.0
    moved = 0.0
    for parameter in prices.totals(names):
        wide, narrow = parameter.itemsize, itemsize_of(layout, parameter.itemsize)
        divided = zero_ranks(layout, parameter)
        copied = 2 if divided > 1 else 0  # What is gathered is copied to the parameters.
        moved += parameter.elements * ((wide + narrow) * (narrow != wide) / divided + copied * narrow)
    times = practice.gathers * layout.microbatches if layout.zero == 3 else 1
    return moved * times / (device.memory_bandwidth * device.memory_sustained)


def beside_times(prices: Prices, layout: StepLayout, names: frozenset[str]) -> Times:
    """Returns the time to add up the gradients of a stage's parameters, for one microbatch."""
    device, practice = prices.device, prices.practice
    moved = 0.0
    for parameter in _learnt(prices, names):
        added_bytes = _added_bytes(layout, parameter.itemsize, itemsize_of(layout, parameter.itemsize))
        moved += parameter.elements * (added_bytes if practice.accumulation is None else practice.accumulation)
    seconds = moved / (device.memory_bandwidth * device.memory_sustained)
    return Times(backward=seconds, weights=seconds, spent={ELEMENTWISE: seconds})


def _added_bytes(layout: StepLayout, wide: int, narrow: int) -> float:
    """Returns the bytes that are moved for an element of a gradient and a microbatch, beside the product.

    ZeRO copies gradients into a buffer that is summed; what microbatches add up is in the parameter's dtype.
    """
    cast, count = (narrow + wide if narrow != wide else 0), layout.microbatches
    if not layout.zero or layout.dp == 1:
        # A sum reads two tensors and writes one.
        return cast + 3 * wide * (count > 1)
    if count == 1 or (layout.zero > 1 and layout.pp == 1):
        return narrow + wide
    # The first gradient is cast, the others are added to it, and the sum is copied to the buffer once.
    return (cast + (count - 1) * (2 * wide + narrow) + 2 * wide) / count


def update_seconds(prices: Prices, layout: StepLayout, names: frozenset[str]) -> float:
    """Returns the seconds of the optimizer's step of a rank: it moves memory."""
    device, practice = prices.device, prices.practice
    elements = sum(parameter.elements / zero_ranks(layout, parameter) for parameter in _learnt(prices, names))
    moved = elements * practice.optimizer
    return moved / (device.memory_bandwidth * device.memory_sustained) + device.launch


def _learnt(prices: Prices, names: frozenset[str]) -> list[Parameter]:
    return [parameter for parameter in prices.totals(names) if parameter.learns]


def _tied(model: Lowered, names_by_rank: Sequence[frozenset[str]]) -> int:
    """Returns the bytes of the gradients that several pipeline ranks sum: those of tied weights."""
    counts = Counter(name for names in names_by_rank for name in names)
    shared = [model.parameters[name] for name, n in counts.items() if n > 1 and model.parameters[name].learns]
    return sum(p.bytes for p in shared)


def _rank_memory(
    prices: Prices,
    layout: StepLayout,
    stages: Sequence[StageCost],
    row: Sequence[Action],
    names: frozenset[str],
    room: int,
) -> RankMemory:
    """Returns the memory of a pipeline rank at its fullest moment."""
    practice = prices.practice
    weights = sum(p.bytes / zero_ranks(layout, p) for p in prices.totals(names))
    learnt = _learnt(prices, names)
    # From ZeRO 2 on each replica keeps only its part of the gradients.
    gradients = sum(
        p.elements * (practice.gradient or p.itemsize) / (zero_ranks(layout, p) if layout.zero > 1 else 1)
        for p in learnt
    )
    state = sum(
        bytes_of_states(p.elements, p.bytes, practice.state if layout.state_bytes is None else layout.state_bytes)
        / zero_ranks(layout, p)
        for p in learnt
    )
    stages_of_rank = sorted({action.stage for action in row})
    uncut = [p for i in stages_of_rank for p in prices.totals(stages[i].parameters) if zero_ranks(layout, p) == 1]
    units = {f"{i} {k}" if k else "": unit.bytes for i in stages_of_rank for k, unit in enumerate(stages[i].units)}
    units[""] = sum(stages[i].units[0].bytes for i in stages_of_rank if stages[i].units)
    gathered = whole_bytes(units, None if gathers_once(layout) else room) * bool(layout.zero)
    copies = sum(_copy(p, layout) for p in uncut) + gathered
    activations = most_held(row, lambda i: stages[i].memory.kept - stages[i].memory.logits, lambda a: 0.0)
    logits = most_held(row, lambda i: stages[i].memory.logits, lambda a: 0.0)

    def extra(action: Action) -> float:
        memory = stages[action.stage].memory
        return float(memory.forward if action.half == "F" else memory.backward)

    together = most_held(row, lambda i: float(stages[i].memory.kept), extra)
    if practice.buckets and layout.dp > 1 and not layout.zero:  # Copied when backward has ended and keeps nothing.
        together = max(together, float(min(BUCKET, prices.copied(names))))
    transients = max(0.0, together - activations - logits)
    return RankMemory(
        buffers=buffer_bytes([*axis_groups(layout.axes), *_groups_of_experts(layout)], prices.device),
        weights=weights,
        copies=copies,
        gradients=gradients,
        optimizer=state,
        activations=activations,
        logits=logits,
        transients=transients,
        is_gpu=prices.device.is_gpu,
    )


def _groups_of_experts(layout: StepLayout) -> list[RankGroup]:
    """Returns the groups that a rank communicates in for experts that are cut over some of its replicas."""
    if not 1 < layout.ep < layout.dp:
        return []
    return [RankGroup(size=layout.ep, stride=layout.model_ranks), copies_of(layout)]


def _copy(parameter: Parameter, layout: StepLayout) -> int:
    """Returns the bytes of a parameter's copy in the dtype of computation; 0 where that is its own."""
    narrow = itemsize_of(layout, parameter.itemsize)
    return parameter.elements * narrow if narrow != parameter.itemsize else 0
