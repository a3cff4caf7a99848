"""mesh_proof: proves a layout of tensor, pipeline and data ranks, in one process, also for a model on `meta`.

NOTE [What is proved of a mesh]
Each tensor-parallel rank's graph is typed, gradients included (passes/check). The stages of each pipeline compute that
graph (passes/check/stage_composition.py). A parameter that several pipeline ranks read has its gradient summed over
exactly these. The schedule runs each microbatch once forward and once backward in each stage, and no rank waits for
ever. Rows are independent and the loss is a sum over them (passes/pipeline), so microbatches and replicas add up to the
whole batch. All replicas run the same graphs, so one stands for all.

With ZeRO, each parameter of a rank is either divided over the replicas or whole on each; the whole ones are those that
several stages of the rank read, that have no dimension, or no element on the rank. The nodes that gather and sum the
divided ones are typed (passes/check/gathers.py), and run where a step is compared.

With `ep`, each graph whose rows travel computes the graph before (passes/check/expert_rows.py).

Trusted are what the check trusts, torch's pipelining, and the collectives. `NOT_PROVED` says what of ZeRO is trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from autotp.compiler import flat_graphs, rank_program
from autotp.display.progress import progress
from autotp.display.sheet import Table
from autotp.errors import REPORT, Error
from autotp.passes.canonicalize.custom_vjp import fuse
from autotp.passes.capture.example_inputs import Inputs
from autotp.passes.capture.pytree import signature_of
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.check.stage_composition import Composition, compose
from autotp.passes.emit.zero.room import Room
from autotp.passes.emit.zero.sharded_unit import ShardedUnit
from autotp.passes.pipeline.stages import Division, Stage, staged
from autotp.passes.plan.experts.expert_parallel import exchanges
from autotp.passes.program.program import Program
from autotp.rules.call import nbytes_of
from autotp.training.compute_dtype import cast_arguments
from autotp.training.microbatches import batch_tensors, places_of_rows
from autotp.training.pipeline.schedule_actions import Action, actions_of, play
from autotp.training.pipeline.schedules import (
    Training,
    analyse_microbatch,
    division,
    expect_parts_of_experts,
    learning_of,
    stages_of,
)
from autotp.training.process_groups import holders, read_by_several_stages

NOT_PROVED = "that replicas divide a parameter alike, and the two collectives of each unit (a block, or all else)"


@dataclass(frozen=True)
class MeshProof:
    """The facts that were proved about a layout.

    Attributes:
        tp, pp, dp: the sizes of the mesh.
        schedule, interleave, microbatches, zero: as for `distribute`.
        operators: the number of operators in the graph of each tensor-parallel rank.
        division: the blocks of each stage.
        sent: for each boundary between stages, the number of tensors and of bytes that a microbatch of the example's
            size sends across it, from one tensor-parallel rank.
        parameters: the number of parameters.
        tied: name of a parameter that several pipeline ranks hold -> these ranks.
        actions: the number of forwards and backwards in a step of one replica.
        cp: the number of ranks that sequences are cut over.
        not_computed: why no step was compared with one device; "" if one was.
        whole: with ZeRO, the parameters that each replica holds whole. The others are divided over the replicas; a rank
            that has no element of one has nothing to divide.
        ep: the number of ranks that experts are cut over.
        of_experts: the parameters of which each of these ranks stores its own experts.
        without_gradient: in a pipeline, the parameters that get no gradient, for the loss has none on one device.
    """

    DATA = (
        "ranks", "tp", "cp", "pp", "dp", "schedule", "interleave", "microbatches", "zero", "operators", "division",
        "sent", "parameters", "tied", "actions", "not_computed", "whole", "without_gradient", "ep", "of_experts",
    )  # fmt: skip

    tp: int
    pp: int
    dp: int
    schedule: str
    microbatches: int
    zero: int
    operators: tuple[int, ...]
    division: Division
    sent: tuple[tuple[int, int], ...]
    parameters: int
    tied: dict[str, tuple[int, ...]]
    actions: int
    cp: int = 1
    not_computed: str = ""
    whole: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    interleave: int | None = None
    ep: int = 1
    of_experts: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.tp * self.cp * self.pp * self.dp

    def table(self) -> Table:
        """Returns a row for each fact."""
        return Table(("proved", "of"), tuple(self._rows()), ("good", ""))

    def not_proved(self) -> Table | None:
        """Returns a row for what is not proved of this layout alone; None if there is nothing."""
        if not self.divides:
            return None
        return Table(("not proved", "of"), (("ZeRO", NOT_PROVED),), ("whole", "note"))

    @property
    def divides(self) -> bool:
        """True if replicas divide tensors among them."""
        return self.zero > 0 and self.dp > 1

    def _rows(self) -> Iterator[tuple[str, str]]:
        size = _number(self.operators[0])
        ranks_text = f"{self.tp} of {self.tp} tensor-parallel ranks"
        ranks_text += f" x {self.cp} of {self.cp} context-parallel ranks" * (self.cp > 1)
        yield "types", f"{ranks_text}, {size} operators each, gradients included"
        stages = len(self.division.blocks)
        if stages > 1:
            tensors, peak = max(n for n, _ in self.sent), max(size for _, size in self.sent)
            crossing = (
                f"at most {tensors} tensor{'s' * (tensors > 1)} and {peak / 2**20:.3g} MiB a microbatch cross one"
            )
            yield "stages", f"{stages} on {self.pp} pipeline ranks compute these graphs; {crossing}"
        text = f"{_number(self.parameters)} parameters, each on one pipeline rank"
        for name, ranks in list(self.tied.items())[:4]:
            text += f"; `{name}` on {', '.join(map(str, ranks))}, its gradient summed over them"
        text += f"; and {len(self.tied) - 4} more on several" if len(self.tied) > 4 else ""
        text += f"; {_number(len(self.without_gradient))} without a gradient" if self.without_gradient else ""
        yield "parameters", text
        yield "schedule", f"{self.schedule}: {_number(self.actions)} forwards and backwards a replica, none twice"
        parts = (
            f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)} x {self.dp} replica{'s' * (self.dp > 1)}"
        )
        yield "loss", f"a sum over independent rows, so that {parts} add up to the whole batch"
        if self.of_experts:
            text = f"{_number(len(self.of_experts))} parameters, each of {self.ep} ranks stores its own"
            yield "experts", f"{text}; rows travel to the ranks of their experts, and back to their places"
        if self.divides:
            divided = _number(self.parameters - len(self.whole) - len(self.of_experts))
            split = f"{divided} parameters are divided over {self.dp} replicas"
            rest = f", {len(self.whole) or 'none'} {'are' if len(self.whole) > 1 else 'is'} whole on each"
            yield "ZeRO", f"stage {self.zero}: {split}{rest}; the gradient of each is summed over the replicas once"
            yield "gathers", "each block finds its parameters gathered, in forward and in backward"


def _number(count: int) -> str:
    return f"{count:,}"


def prove(
    model: nn.Module,
    inputs: Inputs,
    sizes: tuple[int, int, int],
    training: Training,
    stages_of_ranks: list[list[Stage]] | None = None,
) -> tuple[Program, fx.Graph, MeshProof]:
    """Returns a model's program for a microbatch, the first rank's graph, and what is proved of the layout.

    `distribute` makes program and graphs in the same way.

    Args:
        inputs: the arguments of a microbatch.
        sizes: tp, pp and dp.
        stages_of_ranks: takes the stages of each tensor-parallel rank, those of the first context-parallel rank first.

    Raises:
        Error: as `distribute`; or something cannot be proved.
    """
    tp, pp, dp = sizes
    # Before the capture, as this is fast and needs no model.
    order = actions_of(training.engine, pp, training.microbatches)
    expect_complete(order, [stages_of(training, rank, pp) for rank in range(pp)], training.microbatches)
    skeleton = skeleton_of(model).train()
    args, kwargs = cast_arguments(signature_of(model).by_name(*inputs), training.compute_dtype)
    rows = places_of_rows(batch_tensors(args, kwargs), [])
    programs = [
        analyse_microbatch(skeleton, args, kwargs, tp, training, None, rows, cp_rank) for cp_rank in range(training.cp)
    ]
    for of_cp_rank in programs:
        expect_parts_of_experts(of_cp_rank, training.ep, dp)
    program = programs[0]
    counts, divisions, first_graph = list[int](), list[tuple[Division, Composition]](), fx.Graph()
    first_stages = list[Stage]()
    flats = (flat for of_cp_rank in programs for flat in flat_graphs(of_cp_rank, training.randomness))
    with progress(f"proof of {tp * training.cp * pp * dp} ranks") as line:
        for rank, flat in enumerate(flats):
            line.begin(f"tp rank {rank % tp}")
            graph, first_graph = fuse(flat), flat if rank == 0 else first_graph
            counts.append(sum(node.op == "call_function" for node in flat.nodes))
            # Each context-parallel rank has a program of its own, for its part of the sequences.
            of_rank = programs[rank // tp]
            divided, stages = _divided(of_rank, graph, pp, training)
            divisions.append((divided, _composed(of_rank, graph, stages, divided, pp, training)))
            first_stages = first_stages or stages
            if stages_of_ranks is not None:
                stages_of_ranks.append(stages)
    first, composed = divisions[0]
    for rank, (rank_division, rank_composed) in enumerate(divisions[1:], 1):
        # Ranks of one stage must send the same tensors at the same boundaries.
        if rank_division != first or list(map(len, rank_composed.sent)) != list(map(len, composed.sent)):
            raise Error(f"tp rank {rank % tp} would divide its graph in another way than tp rank 0", fix=REPORT)
    names = program.captured.parameters
    tied = _homes(composed, names, first.ranks)
    of_experts = dict.fromkeys(name for some in exchanges(program.graph, names) for name in some)
    undivided = {name for name, layout in program.layouts.items() if not layout.shape or 0 in layout.shape}
    undivided_names = tuple(sorted(_read_twice(composed, names, first.ranks) | undivided))
    if training.zero and dp > 1:
        gathered = {*names.values()} - {*undivided_names} - of_experts.keys()
        for stage in first_stages:
            room = None if training.gathers_once(pp) else Room[ShardedUnit]()
            plain = replace(training, memory=None)  # What a budget keeps moves no gather.
            rank_program(stage.graph, program, plain, torch.device("cpu"), {}).gathering(gathered, None, room)
    sent = tuple((len(values), sum(nbytes_of(value.meta["val"]) for value in values)) for values in composed.sent)
    learning = learning_of(program) if pp > 1 else None
    still = () if learning is None else tuple(name for name in names.values() if name not in learning)
    proof = MeshProof(
        tp, pp, dp, training.schedule, training.microbatches, training.zero, tuple(counts), first, sent,
        len(names), tied, sum(map(len, order)), training.cp, whole=undivided_names if training.zero else (),
        without_gradient=still, interleave=training.interleave, ep=training.ep, of_experts=tuple(of_experts),
    )  # fmt: skip
    return program, first_graph, proof


def _divided(program: Program, graph: fx.Graph, pp: int, training: Training) -> tuple[Division, list[Stage]]:
    divided = division(training, pp, program, graph)
    return divided, staged(graph, divided.blocks, list(program.captured.parameters))


def _composed(
    program: Program, graph: fx.Graph, stages: Sequence[Stage], divided: Division, pp: int, training: Training
) -> Composition:
    """Returns what the stages of one rank's graph exchange.

    Raises:
        Error: they do not compute the graph, or gradients would not be summed over all readers of a parameter.
    """
    names = program.captured.parameters
    composed = compose(graph, [(stage.graph, stage.received) for stage in stages])
    summed = holders(stages, names, pp, lambda rank: stages_of(training, rank, pp))
    if summed != (read := _homes(composed, names, divided.ranks)):
        raise Error("the gradient of a parameter is not summed over its readers", expected=str(read), got=str(summed))
    read_by_several = read_by_several_stages(stages, names, pp, lambda rank: stages_of(training, rank, pp))
    if training.zero and read_by_several != (read_twice := _read_twice(composed, names, divided.ranks)):
        raise Error("a parameter would be in two units of ZeRO", expected=str(read_twice), got=str(read_by_several))
    return composed


def _read_twice(composed: Composition, names: Mapping[str, str], ranks: Sequence[int]) -> set[str]:
    """Returns the parameters that several stages of one pipeline rank read."""
    homes = {names[place]: [ranks[i] for i in some] for place, some in composed.readers.items() if place in names}
    return {name for name, where in homes.items() if len(set(where)) < len(where)}


def _homes(composed: Composition, names: Mapping[str, str], ranks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns parameter -> the pipeline ranks that read it, where several do."""
    homes: dict[str, set[int]] = {}
    for place, stages in composed.readers.items():
        if place in names:
            homes.setdefault(names[place], set()).update(ranks[i] for i in stages)
    return {name: tuple(sorted(some)) for name, some in homes.items() if len(some) > 1}


def expect_complete(order: Sequence[Sequence[Action]], stages: Sequence[Sequence[int]], microbatches: int) -> None:
    """Raises Error unless a schedule runs each microbatch once forward and once backward in each stage, and ends.

    Args:
        order: the actions of each pipeline rank.
        stages: the stages of each pipeline rank.
    """
    for rank, row in enumerate(order):
        done = Counter((a.stage, half, a.microbatch) for a in row for half in _halves(a))
        # F: forward; I and W: backward for the inputs, and for the weights.
        expected = Counter((i, half, j) for i in stages[rank] for half in "FIW" for j in range(microbatches))
        if done != expected:
            # A Counter keeps no negative counts: this is what is there too often, then what is missing.
            (stage, half, j), _ = next(iter(((done - expected) + (expected - done)).items()))
            problem = f"pp rank {rank} runs {half} of stage {stage} {done[stage, half, j]} times for microbatch {j}"
            raise Error(problem, fix=REPORT)
    try:
        # `play` asserts that no schedule waits for itself.
        play(order, lambda action: 1.0, lambda sender, receiver: 0.0)
    except AssertionError as error:
        raise Error(f"the schedule does not end: {error}", fix=REPORT) from error


def _halves(action: Action) -> str:
    """Returns the halves of an action: a backward has the gradients of inputs, and those of weights."""
    return "IW" if action.half == "B" else action.half
