"""price: puts the seconds and bytes of pieces together to those of a training step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from autotp.distributed.gradient_buckets import BUCKET
from autotp.estimation.counts.activations import StageMemory, stage_memory
from autotp.estimation.counts.kernels import fused
from autotp.estimation.counts.pieces import Lowered, Parameter, Recorded, recorded, whole_flops
from autotp.estimation.counts.scale import scaled
from autotp.estimation.layout import Layout, Practice
from autotp.estimation.result import Estimate, RankMemory
from autotp.estimation.seconds.hardware import Hardware
from autotp.estimation.seconds.links import Group, collective_seconds, send_seconds
from autotp.estimation.seconds.schedule import Action, Played, actions_of, engine_of, most_held, play
from autotp.estimation.seconds.times import ELEMENTWISE, Times, added, piece_times
from autotp.passes.pipeline.cost import block_costs
from autotp.passes.pipeline.stages import divided
from autotp.training.pipeline.schedules import Engine, costed

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
        self._scaled, self._row_flops = scaled, flops
        self._recorded: dict[int, Recorded] = {}
        self._times: dict[int, list[Times]] = {}
        self._stages: dict[Any, list[list[int]]] = {}
        self._totals: dict[frozenset[str], tuple[Parameter, ...]] = {}
        self._copied: dict[frozenset[str], int] = {}

    def totals(self, names: frozenset[str]) -> tuple[Parameter, ...]:
        """Returns what parameters are together: one parameter for all that differ in nothing but size."""
        if names not in self._totals:
            sizes = Counter[tuple[int, bool]]()
            for own in (self.model.parameters[name] for name in names):
                sizes[own.itemsize, own.learns] += own.elements
            found = (Parameter(elements=n, itemsize=size, learns=learns) for (size, learns), n in sizes.items())
            self._totals[names] = tuple(found)
        return self._totals[names]

    def copied(self, names: frozenset[str]) -> int:
        """Returns the bytes of the gradients that are copied to be summed over replicas: those that are small."""
        if names not in self._copied:
            sizes = (p.elements * p.itemsize for p in map(self.model.parameters.__getitem__, names) if p.learns)
            self._copied[names] = sum(size for size in sizes if size < BUCKET)
        return self._copied[names]

    def pieces(self, rows: int) -> Recorded:
        """Returns the records of the pieces for a microbatch of `rows` rows."""
        if rows not in self._recorded:
            found = self._from_two_and_three(rows) if self._scaled and rows > 3 else None
            if found is None:
                found = recorded(self.model, rows, self.device.is_gpu, self.practice.early_stop)
                if self.practice.fused:
                    found = Recorded(pieces=found.pieces, records=tuple(map(fused, found.records)))
            self._recorded[rows] = found
        return self._recorded[rows]

    def _from_two_and_three(self, rows: int) -> Recorded | None:
        """Returns the records of `rows` rows, made of those of two rows and of three; None if these are not alike."""
        one, two = self.pieces(2), self.pieces(3)
        if [piece.kind for piece in one.pieces] != [piece.kind for piece in two.pieces]:
            return None
        found = [scaled(a, b, rows) for a, b in zip(one.records, two.records, strict=True)]
        known = tuple(record for record in found if record is not None)
        return Recorded(pieces=one.pieces, records=known) if len(known) == len(found) else None

    def times(self, rows: int) -> list[Times]:
        """Returns the times of each kind of piece."""
        if rows not in self._times:
            tp, cp = self.model.program.tp, self.model.training.cp
            training = self.model.training
            turns = training.overlap == "batch" and training.recompute == "none"
            self._times[rows] = [piece_times(x, self.device, tp, cp, turns) for x in self.pieces(rows).records]
        return self._times[rows]

    def flops(self, rows: int) -> float:
        """Returns the FLOPs of a microbatch on one device that would hold the whole model, without recomputation."""
        if self._row_flops is None:
            self._row_flops = whole_flops(self.model, 1)
        return self._row_flops * rows

    def stages(self, kind: Engine, ranks: int, microbatches: int) -> list[list[int]]:
        """Returns the numbers of the pieces of each stage, divided as `distribute` divides them."""
        model, total = self.model, ranks * kind.rounds if ranks > 1 else 1
        flights = tuple(kind.flight(i, total, microbatches) for i in range(total))
        if (kind, ranks, flights) not in self._stages:
            names = list(model.program.captured.parameters)
            each = block_costs(*costed(model.program), model.captured_blocks, names)
            cost = dict(zip(model.captured_blocks, each, strict=False))
            costs = [cost[captured] for _, captured in model.order] or each
            homes = {i: rank for rank in range(ranks) for i in (kind.stages(rank, ranks) if ranks > 1 else [0])}
            kept = model.training.recompute != "full"
            plan = divided(model.blocks, costs, [homes[i] for i in range(total)], [kept * n for n in flights])
            places = itertools.accumulate((len(run) for run in plan.blocks), initial=0)
            pairs = itertools.pairwise(places)
            self._stages[kind, ranks, flights] = [list(range(a, b)) if b > a else [0] for a, b in pairs]
        return self._stages[kind, ranks, flights]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the step knows of a stage.

    Attributes:
        times: of a microbatch.
        memory: of a microbatch.
        parameters: their names.
        casts: seconds to cast them, once a step, before the first microbatch's forward.
    """

    times: Times
    memory: StageMemory
    parameters: frozenset[str]
    casts: float


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A schedule that was played with the times of a layout.

    Attributes:
        order: the actions of each pipeline rank.
        stages: what the step knows of each stage.
        played: when each action runs.
    """

    order: tuple[tuple[Action, ...], ...]
    stages: list[Stage]
    played: Played

    def seconds(self, action: Action) -> float:
        """Returns the seconds of an action; the first microbatch's forward casts the parameters."""
        stage, times = self.stages[action.stage], self.stages[action.stage].times
        forward = times.forward + stage.casts * (action.microbatch == 0)
        parts = {"F": forward, "B": times.backward, "I": times.backward - times.weights, "W": times.weights}
        return parts[action.half]


def simulated(prices: Prices, layout: Layout) -> Simulated:
    """Returns the schedule of a layout with its times.

    Raises:
        Error: the schedule cannot run the microbatches, or there are more stages than blocks.
    """
    device, practice = prices.device, prices.practice
    kind = engine_of(layout.schedule, layout.interleave)
    order = actions_of(kind, layout.pp, layout.microbatches)
    stages = [_stage(prices, layout, run) for run in prices.stages(kind, layout.pp, layout.microbatches)]
    distance = layout.model_ranks * layout.dp

    def sends(start: int, stop: int) -> float:
        sent = stages[min(start, stop)].memory.sent
        if practice.scattered and not layout.sequence_parallel:
            whole = collective_seconds("all-gather", sent, Group(size=layout.tp, stride=1), device)
            return send_seconds(sent / layout.tp, distance, device) + whole
        return send_seconds(sent, distance, device)

    unplayed = Simulated(order=order, stages=stages, played=NOTHING_PLAYED)
    return replace(unplayed, played=play(order, unplayed.seconds, cache(sends)))


def price(prices: Prices, layout: Layout) -> Estimate:
    """Returns the estimate of a layout, whose tp, recompute and sequence parallelism are those of the captured model.

    Raises:
        Error: the schedule cannot run the microbatches, or there are more stages than blocks.
    """
    device, practice, model = prices.device, prices.practice, prices.model
    kind = engine_of(layout.schedule, layout.interleave)
    step = simulated(prices, layout)
    order, stages, played = step.order, step.stages, step.played
    held = [frozenset().union(*(stages[i].parameters for i in {a.stage for a in row})) for row in order]
    slowest = max(range(layout.pp), key=played.busy.__getitem__)
    spent = added(*(stages[action.stage].times.spent for action in order[slowest] if action.half == "F"))
    casts = sum(stages[i].casts for i in {action.stage for action in order[slowest]})
    spent[ELEMENTWISE] = spent.get(ELEMENTWISE, 0.0) + casts
    spent["pipeline"] = played.seconds - played.busy[slowest]
    exchanges = [exchange_seconds(prices, layout, names) for names in held]
    updates = [update_seconds(prices, layout, names) for names in held]
    exchange = max(exchanges)
    if practice.overlapped or (layout.zero == 3 and practice.units == "block"):
        beside = played.busy[slowest] if layout.zero == 3 else max(stage.times.backward for stage in stages)
        exchange = max(exchange - beside, 0.0)
    spent["gradients dp"], spent["optimizer"] = exchange, max(updates)
    spent["tied weights pp"] = 0.0
    if tied := _tied(model, held):
        ends = Group(size=2, stride=layout.model_ranks * layout.dp * max(1, layout.pp - 1))
        spent["tied weights pp"] = collective_seconds("all-reduce", tied, ends, device)
    seconds = played.seconds + exchange + max(updates) + spent["tied weights pp"]
    rows = [_rank_memory(prices, layout, stages, row, names, practice) for row, names in zip(order, held, strict=True)]
    flops = prices.flops(layout.micro_batch) * layout.microbatches * layout.dp
    again = sum(stage.times.again for stage in stages) * layout.model_ranks * layout.microbatches * layout.dp
    names = [piece.name for piece in prices.pieces(layout.micro_batch).pieces]
    runs = prices.stages(kind, layout.pp, layout.microbatches)
    home = {action.stage: rank for rank, row in enumerate(order) for action in row}
    return Estimate(
        layout=layout, device=device, seconds=seconds, flops=flops, flops_again=again,
        spent={name: s for name, s in spent.items() if s > 0}, memory=tuple(rows),
        stages=tuple(tuple(names[i] for i in run) for run in runs), homes=tuple(home[i] for i in range(len(runs))),
        row=model.row, source=prices,
    )  # fmt: skip


def _stage(prices: Prices, layout: Layout, run: Sequence[int]) -> Stage:
    found, times = prices.pieces(layout.micro_batch), prices.times(layout.micro_batch)
    pieces = [found.pieces[i] for i in run]
    names = frozenset(name for piece in pieces for name in piece.parameters)
    total = sum((times[piece.kind] for piece in pieces), beside_times(prices, layout, names))
    return Stage(
        times=total, memory=stage_memory(pieces, found), parameters=names, casts=cast_seconds(prices, layout, names)
    )


def cast_seconds(prices: Prices, layout: Layout, names: frozenset[str]) -> float:
    """Returns the seconds in which a step casts a stage's parameters; under ZeRO each replica casts its part."""
    device, practice = prices.device, prices.practice
    if not practice.casts:
        return 0.0
    found = 0.0
    for parameter in prices.totals(names):
        wide, narrow = parameter.itemsize, itemsize_of(layout, parameter.itemsize)
        found += parameter.elements * (wide + narrow) * (narrow != wide)
    times = practice.gathers * layout.microbatches if layout.zero == 3 else 1
    return found * times / (layout.dp if layout.zero else 1) / (device.memory_bandwidth * device.memory_sustained)


def beside_times(prices: Prices, layout: Layout, names: frozenset[str]) -> Times:
    """Returns the time to add up the gradients of a stage's parameters, for one microbatch."""
    device, practice = prices.device, prices.practice
    moved = 0.0
    for parameter in _learnt(prices, names):
        wide, narrow = parameter.itemsize, itemsize_of(layout, parameter.itemsize)
        own = (narrow + wide if narrow != wide else 0) + 3 * wide * (layout.microbatches > 1)
        moved += parameter.elements * (own if practice.accumulation is None else practice.accumulation)
    seconds = moved / (device.memory_bandwidth * device.memory_sustained)
    return Times(backward=seconds, weights=seconds, spent={ELEMENTWISE: seconds})


def itemsize_of(layout: Layout, own: int) -> int:
    """Returns the bytes of an element of a parameter in computation."""
    return own if layout.dtype is None else layout.dtype.itemsize


def exchange_seconds(prices: Prices, layout: Layout, names: frozenset[str]) -> float:
    """Returns the seconds in which replicas sum the gradients of a rank, and gather its parameters under ZeRO."""
    model, device, practice = prices.model, prices.device, prices.practice
    group = Group(size=layout.dp, stride=layout.model_ranks)
    learnt = _learnt(prices, names)
    if not layout.zero:
        gradients = sum(p.elements * (practice.gradient or p.itemsize) for p in learnt)
        copied = prices.copied(names) if practice.buckets and layout.dp > 1 else 0
        copies = 4 * copied  # Read and written, there and back.
        moving = copies / (device.memory_bandwidth * device.memory_sustained)
        return collective_seconds("all-reduce", gradients, group, device) + moving
    narrow = sum(p.elements * itemsize_of(layout, p.itemsize) for p in learnt)
    per_block = max(1, len(names) // max(1, len(model.blocks)))
    units = len(names) if practice.units == "parameter" else max(1, len(names) // per_block)
    gathers = 1 if layout.zero < 3 else practice.gathers * layout.microbatches
    sums = 1 if layout.zero < 2 or layout.pp > 1 else layout.microbatches
    gathered = collective_seconds("all-gather", narrow / units, group, device)
    return units * (gathers * gathered + sums * collective_seconds("reduce-scatter", narrow / units, group, device))


def update_seconds(prices: Prices, layout: Layout, names: frozenset[str]) -> float:
    """Returns the seconds of the optimizer's step of a rank: it moves memory."""
    device, practice = prices.device, prices.practice
    elements = sum(own.elements for own in _learnt(prices, names))
    moved = elements * practice.optimizer / (layout.dp if layout.zero else 1)
    return moved / (device.memory_bandwidth * device.memory_sustained) + device.launch


def _learnt(prices: Prices, names: frozenset[str]) -> list[Parameter]:
    return [own for own in prices.totals(names) if own.learns]


def _tied(model: Lowered, held: Sequence[frozenset[str]]) -> int:
    """Returns the bytes of the gradients that several pipeline ranks sum: those of tied weights."""
    counts = Counter(name for names in held for name in names)
    shared = [model.parameters[name] for name, n in counts.items() if n > 1 and model.parameters[name].learns]
    return sum(p.elements * p.itemsize for p in shared)


def _rank_memory(
    prices: Prices, layout: Layout, stages: Sequence[Stage], row: Sequence[Action], names: frozenset[str],
    practice: Practice,
) -> RankMemory:  # fmt: skip
    """Returns the memory of a pipeline rank at its fullest moment."""
    weights = sum(p.elements * p.itemsize for p in prices.totals(names))
    copy = {i: sum(_copy(p, layout) for p in prices.totals(stage.parameters)) for i, stage in enumerate(stages)}
    learnt = _learnt(prices, names)
    gradients = sum(p.elements * (practice.gradient or p.itemsize) for p in learnt)
    state = sum(p.elements * (2 * p.itemsize if practice.state is None else practice.state) for p in learnt)
    share = layout.dp if layout.zero else 1
    here = sorted({action.stage for action in row})
    copies = float(sum(copy[i] for i in here))
    if layout.zero == 3:
        copies = max((copy[i] / max(1, len(stages[i].parameters)) for i in here), default=0.0)
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
        weights=weights / share,
        copies=copies,
        gradients=gradients / (share if layout.zero > 1 else 1),
        optimizer=state / share,
        activations=activations,
        logits=logits,
        transients=transients,
    )


def _copy(parameter: Parameter, layout: Layout) -> int:
    """Returns the bytes of a parameter's copy in the dtype of computation; 0 where that is its own."""
    narrow = itemsize_of(layout, parameter.itemsize)
    return parameter.elements * narrow if narrow != parameter.itemsize else 0
