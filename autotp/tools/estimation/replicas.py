"""replicas: what the ranks of a stage exchange with those of other replicas in a step, and when it can start.

With ZeRO the units are each block, and all other parameters of the stage, which are gathered first and summed last.
Without, gradients are summed in buckets, in the order in which backward makes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from autotp.costs.hardware import Hardware
from autotp.costs.links import RankGroup, collective_seconds
from autotp.passes.emit.zero.room import gathered
from autotp.tools.estimation.counts.pieces import ModelPiece, Parameter
from autotp.tools.estimation.layout import Practice, StepLayout
from autotp.tools.estimation.result import RankGathers
from autotp.tools.estimation.seconds.beside_compute import PassOverUnits, run_beside, slowed
from autotp.training.pipeline.gradient_buckets import BUCKET
from autotp.training.pipeline.schedule_actions import Action
from autotp.training.pipeline.schedules import Training

if TYPE_CHECKING:
    from autotp.tools.estimation.price import Prices


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of a stage that is computed, gathered and summed together.

    Attributes:
        forward, backward: seconds of a microbatch.
        gather: seconds to gather its parameters once; 0 without ZeRO.
        sum: seconds to sum its gradients once.
        bytes: of its parameters, as they are gathered.
    """

    forward: float = 0.0
    backward: float = 0.0
    gather: float = 0.0
    sum: float = 0.0
    bytes: float = 0.0


def replicas_of(layout: StepLayout) -> RankGroup:
    """Returns the group of the ranks that hold the same stage of other replicas."""
    return RankGroup(size=layout.dp, stride=layout.model_ranks)


def copies_of(layout: StepLayout) -> RankGroup:
    """Returns the group of the ranks that hold the same experts of the same stage."""
    return RankGroup(size=layout.dp // layout.ep, stride=layout.model_ranks * layout.ep)


def zero_ranks(layout: StepLayout, parameter: Parameter) -> int:
    """Returns the number of replicas that ZeRO divides a parameter over: of an expert, those that have it."""
    return layout.dp // (layout.ep if parameter.of_experts else 1) if layout.zero else 1


def gathers_once(layout: StepLayout) -> bool:
    """Returns whether parameters are gathered once a step, as `Training.gathers_once` says."""
    return Training(schedule=layout.schedule, zero=layout.zero).gathers_once(layout.pp)  # type: ignore[arg-type]


def gradient_bytes(prices: Prices, parameters: Sequence[Parameter]) -> float:
    """Returns the bytes of the gradients of parameters, as they are summed over replicas."""
    return sum(p.elements * (prices.practice.gradient or p.itemsize) for p in parameters if p.learns)


def itemsize_of(layout: StepLayout, parameter_itemsize: int) -> int:
    """Returns the bytes of an element of a parameter in computation."""
    return parameter_itemsize if layout.dtype is None else layout.dtype.itemsize


def gathered_bytes(layout: StepLayout, parameters: Iterable[Parameter]) -> float:
    """Returns the bytes of parameters as they are gathered: those that are frozen, too."""
    return sum(p.elements * itemsize_of(layout, p.itemsize) for p in parameters if zero_ranks(layout, p) > 1)


def exchanged(prices: Prices, layout: StepLayout, names: frozenset[str], count: int = 1) -> tuple[float, float]:
    """Returns the seconds to gather parameters once, and to sum their gradients once.

    Args:
        count: the number of units that the names are in.
    """
    device, units = prices.device, len(names) if prices.practice.units == "parameter" else count
    every, gather, sums = prices.totals(names), 0.0, 0.0

    def seconds(name: str, size: float, group: RankGroup) -> float:
        # A kernel for each replica, which together read and write all.
        copies = group.size * device.launch + 2 * size / (device.memory_bandwidth * device.memory_sustained)
        return units * (collective_seconds(name, size, group, device) + copies * prices.practice.listed)

    for of_experts, group in ((False, replicas_of(layout)), (True, copies_of(layout))):
        parameters = [parameter for parameter in every if parameter.of_experts == of_experts]
        gradients, size = gradient_bytes(prices, parameters), gathered_bytes(layout, parameters)
        if not layout.zero:
            sums += collective_seconds("all-reduce", gradients, group, device)
        elif size:
            gather += seconds("all-gather", size / max(1, units), group)
            sums += seconds("reduce-scatter", gradients / max(1, units), group)
    return gather, sums


def units_of(
    prices: Prices, layout: StepLayout, pieces: Sequence[ModelPiece], work: Sequence[tuple[float, float]]
) -> tuple[Unit, ...]:
    """Returns the units of a stage in the order of forward: first what is outside of its blocks.

    Args:
        work: of each piece, the seconds of forward and of backward.
    """
    units, outside = list[Unit](), set[str]()
    for piece, (forward, backward) in zip(pieces, work, strict=True):
        names = frozenset(name for name in piece.parameters if piece.name and name.startswith(f"{piece.name}."))
        outside |= {*piece.parameters} - names
        gather, sums = exchanged(prices, layout, names)
        size = gathered_bytes(layout, prices.totals(names))
        units.append(Unit(forward=forward, backward=backward, gather=gather, sum=sums, bytes=size))
    rest = frozenset(outside)
    gather, sums = exchanged(prices, layout, rest)
    return (Unit(gather=gather, sum=sums, bytes=gathered_bytes(layout, prices.totals(rest))), *units)


def sums_of_units(units: Sequence[Unit]) -> list[tuple[float, float]]:
    """Returns when the gradients of each unit are known after the start of backward, and the seconds to sum them."""
    sums, now = list[tuple[float, float]](), 0.0
    for unit in reversed(units):  # The unit outside of blocks comes last: its gradients grow until the end.
        now += unit.backward
        sums.append((now, unit.sum))
    return sums


def sums_of_buckets(
    prices: Prices, layout: StepLayout, pieces: Sequence[ModelPiece], backward: Sequence[float]
) -> list[tuple[float, float]]:
    """Returns when each bucket of gradients is full after the start of backward, and the seconds to sum it.

    The gradients of a piece come in the reverse order of its parameters, each after a part of the piece's backward
    that is its part of the piece's elements. A gradient of more than a bucket is summed alone.

    Args:
        backward: of each piece, the seconds of its backward.
    """
    itemsize, groups = prices.practice.gradient, {False: replicas_of(layout), True: copies_of(layout)}
    # Without both, all gradients are summed at once, behind backward.
    limit = BUCKET if prices.practice.buckets or prices.practice.overlapped else math.inf
    sums, now, filled = list[tuple[float, float]](), 0.0, {False: 0.0, True: 0.0}
    # The gradient of a weight that several pieces read is complete when backward reaches the first of them.
    first = {name: i for i in reversed(range(len(pieces))) for name in pieces[i].parameters}

    def close(of_experts: bool) -> None:
        if filled[of_experts]:
            seconds = collective_seconds("all-reduce", filled[of_experts], groups[of_experts], prices.device)
            # The trainer sums those of experts that are cut over replicas behind backward.
            is_full_at = sum(backward) if of_experts else now
            sums.append((is_full_at, seconds))
        filled[of_experts] = 0.0

    start = 0.0
    for i in reversed(range(len(pieces))):
        parameters = [prices.model.parameters[name] for name in reversed(pieces[i].parameters) if first[name] == i]
        learnt = [p for p in parameters if p.learns]
        elements = sum(p.elements for p in learnt)
        for parameter in learnt:
            size = parameter.elements * (itemsize or parameter.itemsize)
            if filled[parameter.of_experts] + size > limit:
                close(parameter.of_experts)
            now += backward[i] * parameter.elements / elements
            filled[parameter.of_experts] += size
        # A piece without parameters that learn takes its time, too.
        start += backward[i]
        now = start
    close(of_experts=False)
    close(of_experts=True)
    return sums


@dataclass(frozen=True, kw_only=True)
class ReplicaWaits:
    """What the actions of a schedule wait for on other replicas: gathered parameters, and with ZeRO 2 and 3 sums.

    Attributes:
        units: of each stage, in the order of forward.
        order: the actions of each pipeline rank.
        rooms: the number of blocks that each pipeline rank has whole at a time, where they do not stay for a step.
    """

    layout: StepLayout
    practice: Practice
    device: Hardware
    units: Sequence[tuple[Unit, ...]]
    order: tuple[tuple[Action, ...], ...]
    rooms: tuple[int, ...]

    @cached_property
    def _stages_of_ranks(self) -> list[list[int]]:
        """The stages of each pipeline rank, in the order in which they first run."""
        return [list(dict.fromkeys(action.stage for action in row)) for row in self.order]

    @cached_property
    def gathered(self) -> dict[Action, frozenset[int]]:
        """The places of the units that each action gathers: by the count that the nodes of the graphs follow."""
        once, counts = self._once, dict[Action, frozenset[int]]()
        for row, room in zip(self.order, self.rooms, strict=True):
            begun, passes = set[int](), list[list[tuple[int, int]]]()
            for action in row:
                units = self.units[action.stage]
                blocks = [(action.stage, i) for i in range(1, len(units)) if units[i].gather]
                passes.append([] if once else blocks if action.half == "F" else blocks[::-1])
            for action, starts in zip(row, gathered(passes, room), strict=True):
                places = {i for _, i in starts}
                if action.stage not in begun:
                    places |= set(range(len(self.units[action.stage]))) if once else {0}
                begun.add(action.stage)
                counts[action] = frozenset(places)
        return counts

    @property
    def _once(self) -> bool:
        """Whether parameters are gathered once a step."""
        return gathers_once(self.layout)

    def of_rank(self, rank: int) -> RankGathers:
        """Returns what a pipeline rank gathers in a step."""
        units = [self.units[action.stage][i] for action in self.order[rank] for i in self.gathered[action]]
        room = None if self._once else self.rooms[rank]
        return RankGathers(times=sum(unit.gather > 0 for unit in units), bytes=sum(u.bytes for u in units), room=room)

    def _places(self, action: Action) -> frozenset[int]:
        return self.gathered.get(action, frozenset())  # A closed form plays some actions of many.

    def _gathers(self, action: Action) -> list[float]:
        """Returns the seconds in which an action gathers each unit."""
        places = self._places(action)
        return [unit.gather * (i in places) for i, unit in enumerate(self.units[action.stage])]

    @cached_property
    def _backward_waits(self) -> dict[tuple[int, frozenset[int]], tuple[float, float]]:
        """The seconds for which a backward of a stage, which gathers some units, waits for parameters, and for sums."""
        return {}

    @property
    def sums_each_backward(self) -> bool:
        """Whether gradients are summed in the backward of each microbatch: in a pipeline once a step."""
        return self.layout.zero > 1 and self.layout.pp == 1 < self.layout.dp

    @property
    def tail(self) -> float:
        """The seconds of the last sums behind the last backward, where each backward sums gradients."""
        return self._backward(self.order[0][-1]).tail if self.practice.overlapped else 0.0

    def seconds(self, action: Action, begin: float) -> float:
        """Returns the seconds for which an action that begins at `begin` waits."""
        return sum(self.parts(action, begin))

    def parts(self, action: Action, begin: float) -> tuple[float, float]:
        """Returns the seconds for which an action waits for parameters, and for sums."""
        zero, units = self.layout.zero, self.units[action.stage]
        # The gradient of a weight is a product of activations and gradients: it needs no gathered weight.
        if self.layout.dp == 1 or not zero or action.half == "W":
            return 0.0, 0.0
        if action.half != "F":
            key = action.stage, self._places(action)
            if key not in self._backward_waits:
                self._backward_waits[key] = self._in_backward(action)
            return self._backward_waits[key]
        if not self.practice.ahead:
            # They stay gathered until the step ends, unless ZeRO 3 drops them.
            return sum(unit.gather for unit in units) * (zero == 3 or not action.microbatch), 0.0
        gathers = self._gathers(action)
        waited = self._all_ahead(action, begin) if self._once else self._forward(units, gathers).waited
        return waited + self._slowed(sum(gathers) - waited), 0.0

    def _all_ahead(self, action: Action, begin: float) -> float:
        """Returns the seconds for which a first forward waits: all is gathered from the start of the step."""
        if not self._places(action):
            return 0.0
        stages_of_rank = next(stages for stages in self._stages_of_ranks if action.stage in stages)
        before = sum(u.gather for i in stages_of_rank[: stages_of_rank.index(action.stage)] for u in self.units[i])
        units = self.units[action.stage]
        if len(stages_of_rank) > 1:  # torch's schedule waits for all units of a stage.
            return max(0.0, before + sum(unit.gather for unit in units) - begin)
        work, gathers = [unit.forward for unit in units], [unit.gather for unit in units]
        return run_beside(work, gathers, [0.0] * len(units), begin=begin, ahead=math.inf).waited

    def _forward(self, units: Sequence[Unit], gathers: Sequence[float]) -> PassOverUnits:
        return run_beside([unit.forward for unit in units], gathers, [0.0] * len(units))

    def _backward(self, action: Action) -> PassOverUnits:
        """Returns the backward of a microbatch beside its collectives."""
        order, practice = self.units[action.stage][::-1], self.practice
        summed = self.sums_each_backward and practice.overlapped
        gathers = self._gathers(action)[::-1] if practice.ahead else [0.0] * len(order)
        return run_beside([unit.backward for unit in order], gathers, [unit.sum * summed for unit in order])

    def _in_backward(self, action: Action) -> tuple[float, float]:
        """Returns the seconds for which a backward waits for parameters, and for sums."""
        units, practice = self.units[action.stage], self.practice
        sums = sum(unit.sum for unit in units) if self.sums_each_backward else 0.0
        beside = self._backward(action)
        ahead = sum(self._gathers(action)) if practice.ahead else 0.0
        under = sums if practice.overlapped else 0.0
        waited = beside.waited + self._slowed(max(0.0, ahead + under - beside.waited - beside.tail))
        again = sum(unit.gather for unit in units) * (self.layout.zero == 3 and not practice.ahead)
        alone = (practice.gathers - 1) * again, sums - under
        return (alone[0] + waited, alone[1]) if ahead else (alone[0], alone[1] + waited)

    def _slowed(self, hidden: float) -> float:
        return slowed(hidden, replicas_of(self.layout), self.device)
