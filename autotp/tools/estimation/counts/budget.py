"""budget: what `memory=` chooses in each stage of a layout, by the functions with which `distribute` chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotp.costs.hardware import Hardware
from autotp.passes.emit.memory.budget import Allowance, MemoryChoice, budget_within, choice_under, too_small
from autotp.passes.emit.memory.graph_table import GraphTable
from autotp.passes.emit.zero.room import FEWEST, whole_bytes
from autotp.passes.program.emitted import bytes_beside, bytes_of_states, parameter_bytes
from autotp.tools.estimation.counts.activations import StageMemory, stage_memory
from autotp.tools.estimation.counts.kept import piece_table, stage_table
from autotp.tools.estimation.counts.pieces import Lowered, Recorded
from autotp.tools.estimation.layout import StepLayout
from autotp.tools.estimation.replicas import gathers_once, itemsize_of, zero_ranks
from autotp.training.pipeline.schedules import Engine


@dataclass(frozen=True, kw_only=True)
class StageChoice:
    """What a budget does in a stage.

    Attributes:
        choice: with the values of its blocks.
        unbudgeted: the memory of the stage without a budget.
    """

    choice: MemoryChoice
    unbudgeted: StageMemory

    @property
    def memory(self) -> StageMemory:
        """The memory of the stage, as the budget counts it."""
        kept_bytes = self.choice.kept
        beside = self.choice.table.peak(self.choice.chosen.choices) - kept_bytes
        return replace(self.unbudgeted, kept=kept_bytes, forward=beside, backward=beside)

    @property
    def flops(self) -> float:
        """The floating-point operations of products that run again, of a microbatch."""
        return sum(choice.after.flops for choice in self.choice.chosen.choices)


class Budgets:
    """The choices of budgets for layouts of one captured model; what two layouts share is computed once."""

    def __init__(self, model: Lowered, device: Hardware) -> None:
        self.model, self.device = model, device
        self._tables: dict[tuple[int, int], GraphTable] = {}
        self._stages: dict[Any, GraphTable] = {}
        self._choices: dict[Any, StageChoice] = {}

    def table(self, recorded: Recorded, rows: int, run: Sequence[int]) -> GraphTable:
        """Returns what a stage keeps. run: the numbers of its pieces"""
        key = (rows, *run)
        if key not in self._stages:
            pieces = [recorded.pieces[i] for i in run]
            for kind in {piece.kind for piece in pieces}:
                if (rows, kind) not in self._tables:
                    self._tables[rows, kind] = piece_table(self.model, recorded, kind, self.device)
            tables = {kind: self._tables[rows, kind] for kind in {piece.kind for piece in pieces}}
            self._stages[key] = stage_table(pieces, tables)
        return self._stages[key]

    def choice(self, recorded: Recorded, layout: StepLayout, run: Sequence[int], allowance: Allowance) -> StageChoice:
        """Returns what a budget does in a stage; it may be that nothing fits."""
        key = layout.micro_batch, tuple(run), allowance
        if key not in self._choices:
            choice = choice_under(allowance, self.table(recorded, layout.micro_batch, run), self.device)
            unbudgeted = stage_memory([recorded.pieces[i] for i in run], recorded)
            self._choices[key] = StageChoice(choice=choice, unbudgeted=unbudgeted)
        return self._choices[key]

    def fixed(self, recorded: Recorded, layout: StepLayout, run: Sequence[int]) -> int:
        """Returns the bytes of a stage's parameters, gradients, optimizer states and buffers."""
        pieces = [recorded.pieces[i] for i in run]
        total, beside = 0.0, Counter[str]()
        homes = {n: piece.name if n.startswith(f"{piece.name}.") else "" for piece in pieces for n in piece.parameters}
        for name, block in homes.items():
            parameter, replicas = self.model.parameters[name], zero_ranks(layout, self.model.parameters[name])
            computed = parameter.elements * itemsize_of(layout, parameter.itemsize)
            states = bytes_of_states(parameter.elements, parameter.bytes, layout.state_bytes)
            always, if_learning = parameter_bytes(parameter.bytes, states, layout.zero, replicas)
            total += always + if_learning * parameter.learns
            beside[block] += bytes_beside(parameter.bytes, computed, layout.zero, replicas)
        few = layout.dp > 1 and not gathers_once(layout)
        total += whole_bytes(beside, FEWEST if few else None)
        buffers = {
            name: value.bytes
            for piece in pieces
            for name, (value, reads) in zip(piece.reads, recorded.reads[piece.kind][1], strict=True)
            if reads == "held"
        }
        return int(total) + sum(buffers.values())


def stage_choices(
    budgets: Budgets, recorded: Recorded, layout: StepLayout, runs: Sequence[Sequence[int]], homes: Sequence[int],
    engine: Engine,
) -> list[StageChoice]:  # fmt: skip
    """Returns what a budget does in each stage.

    Args:
        runs: of each stage the numbers of its pieces.
        homes: the pipeline rank of each stage.
        engine: the schedule.

    Raises:
        Error: a rank's stages do not fit; names the smallest budget under which all do.
    """
    device = budgets.device
    memory = budget_within(layout.memory, device, layout.axes)
    assert memory is not None
    choices = []
    for i, run in enumerate(runs):
        allowance = Allowance(
            memory=memory, fixed=budgets.fixed(recorded, layout, run), share=1 / homes.count(homes[i]),
            calls=engine.flight(i, len(runs), layout.microbatches),
        )  # fmt: skip
        choices.append(budgets.choice(recorded, layout, run, allowance))
    fullest = max((stage.choice for stage in choices), key=lambda choice: choice.smallest)
    if fullest.smallest:
        raise too_small(fullest.allowance, fullest.smallest, device, layout.devices, layout.batch)
    return choices
