"""The pipeline stages of one rank, and torch's schedules that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autotp.compiler import Captures
from autotp.errors import Error
from autotp.ops.experts.rows import dispatch
from autotp.options import Options
from autotp.passes.canonicalize.gradient_flow import with_gradient
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.guards.looks import without_padding
from autotp.passes.emit.count_load import values_of_parts
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.pipeline.cost import block_costs
from autotp.passes.pipeline.documents import expect_ends_in_parts
from autotp.passes.pipeline.stages import Division, Stage, blocks_in_order, partition
from autotp.passes.plan.infer_axes import Axes, infer_axes
from autotp.passes.program.program import CallState, Program
from autotp.rules.call import placeholders, returned
from autotp.sharding.layout import Layout
from autotp.source_location import layer_of, line_of
from autotp.training.compute_dtype import cast_arguments, expect_products_of_one_dtype
from autotp.training.microbatches import batch_tensors, map_rows, repeat_rows
from autotp.training.pipeline.documents import Documents
from autotp.training.pipeline.full_masks import analyse_for_masks
from autotp.training.pipeline.gradient_buckets import GradientSums
from autotp.training.pipeline.halved_backward import input_half
from autotp.training.pipeline.rest_of_loss import RestOfLoss

Schedule = Literal["1F1B", "interleaved", "GPipe", "zero-bubble", "zero-bubble-v"]


@dataclass(frozen=True)
class Training(Options):
    """The options of `distribute`, except the sizes of the mesh."""

    microbatches: int = 1
    schedule: Schedule = "1F1B"
    interleave: int | None = None
    zero: int = 0
    compute_dtype: torch.dtype | None = None

    @property
    def engine(self) -> Engine:
        """The properties of the schedule."""
        return engine_of(self.schedule, self.interleave)

    def is_stepped(self, pp: int, dp: int) -> bool:
        """Whether only `distribute` has this layout: its step is more than one call of a model on its ranks."""
        return (pp, dp, self.microbatches, self.ep) != (1, 1, 1, 1)

    def gathers_once(self, pp: int) -> bool:
        """Whether parameters that ZeRO gathers stay until a step ends.

        So they do where backward runs in halves: the second half comes later, and reads parameters, too.
        """
        return self.zero < 3 or (self.engine.halves and pp > 1)

    def optional(self, name: str) -> bool:
        """True unless an optional pass is left out.

        A node that overlaps communication in backward cannot be halved: both halves would run all of it.
        """
        return super().optional(name) and not (name in ("overlap", "late_sums") and self.engine.halves)


@dataclass(frozen=True)
class Engine:
    """The properties of one of torch's schedules.

    Attributes:
        kind: the name of the schedule's class in torch.distributed.pipelining.
        rounds: the number of stages on each rank of the pipeline.
        folded: whether the second round of stages goes from the last rank back to the first.
        halves: whether backward runs in two halves: the gradients of inputs, and the gradients of weights.
        evaluates: whether the schedule can run forward alone.
    """

    kind: str
    rounds: int = 1
    folded: bool = False
    halves: bool = False
    evaluates: bool = True

    def stages(self, rank: int, ranks: int) -> list[int]:
        """Returns the numbers of the stages on a rank of the pipeline."""
        last = ranks * self.rounds - 1
        return [rank, last - rank] if self.folded else list(range(rank, last + 1, ranks))

    def flight(self, stage: int, stages: int, microbatches: int) -> int:
        """Returns the greatest number of microbatches whose activations a stage keeps at a time, in torch's order.

        With one stage a rank, these are the microbatches between the stage's forward and its backward (Narayanan et al.
        2021, section 2.2). A single stage is no pipeline: it runs one microbatch after the other.
        """
        if stages == 1:
            return 1
        ranks, in_flight = stages // self.rounds, stages - stage
        if self.kind == "ScheduleInterleaved1F1B":
            in_flight = _interleaved(stage % ranks, ranks, self.rounds, microbatches)[stage // ranks]
        elif self.kind == "ScheduleInterleavedZeroBubble":
            in_flight = ranks * (self.rounds - stage // ranks)
        return microbatches if self.kind == "ScheduleGPipe" else min(microbatches, in_flight)


def _interleaved(rank: int, ranks: int, rounds: int, microbatches: int) -> list[int]:
    """Returns, for each stage of a rank, the greatest number of microbatches whose activations it keeps at a time.

    A rank runs forward with `ranks` microbatches in its first stage, then in its next stage, and so on. Once it is
    `ahead` steps ahead, it also runs backward, in the same way from its last stage on.
    """
    ahead = min(microbatches * rounds, (rounds - 1) * ranks + 2 * (ranks - 1 - rank))
    in_flight, peak = [0] * rounds, [0] * rounds
    for step in range(microbatches * rounds):
        index = step // ranks % rounds
        in_flight[index] += 1
        peak[index] = max(peak[index], in_flight[index])
        if step >= ahead:
            in_flight[rounds - 1 - (step - ahead) // ranks % rounds] -= 1
    return peak


ENGINES: dict[str, Engine] = {
    "1F1B": Engine("Schedule1F1B"),
    "interleaved": Engine("ScheduleInterleaved1F1B", 2),
    "GPipe": Engine("ScheduleGPipe"),
    "zero-bubble": Engine("ScheduleInterleavedZeroBubble", 2, halves=True),
    "zero-bubble-v": Engine("ScheduleZBVZeroBubble", 2, folded=True, halves=True, evaluates=False),
}


def engine_of(schedule: str, interleave: int | None = None) -> Engine:
    """Returns a schedule. interleave: the number of stages of each rank, under "interleaved"

    Raises:
        Error: there is no such schedule, or its number of stages is fixed.
    """
    if schedule not in ENGINES:
        raise Error(f"schedule={schedule!r} is not one of its values", expected=", ".join(map(repr, ENGINES)))
    chosen = ENGINES[schedule]
    if interleave is None:
        return chosen
    if type(interleave) is not int or interleave < 2:
        raise Error(
            f"interleave={interleave!r} is not a whole number of 2 or more",
            fix="interleave=2",
            alternative='schedule="1F1B", which has one stage on each rank',
        )
    if schedule != "interleaved":
        raise Error(
            f'interleave={interleave} is for schedule="interleaved", and the schedule is "{schedule}"',
            fix=f'schedule="interleaved", interleave={interleave}',
        )
    return replace(chosen, rounds=interleave)


def stages_of(training: Training, rank: int, ranks: int) -> list[int]:
    """Returns the numbers of the stages on a rank of the pipeline."""
    return training.engine.stages(rank, ranks) if ranks > 1 else [0]


def costed(analysis: Program) -> tuple[fx.Graph, Axes]:
    """Returns the graph whose costs divide a model: of whole sequences, as a rank's part may be a position shorter."""
    uncut = analysis.sequences.uncut_graph
    return (analysis.graph, analysis.axes) if uncut is None else (uncut, infer_axes(uncut))


def division(training: Training, ranks: int, analysis: Program, lowered: fx.Graph) -> Division:
    """Returns how a model's blocks are divided among the stages of `ranks` ranks: alike on all ranks.

    Raises:
        Error: as `expect_forward_alone`.
    """
    expect_forward_alone(training, ranks, analysis)
    homes = {i: rank for rank in range(ranks) for i in stages_of(training, rank, ranks)}
    names, schedule = list(analysis.captured.parameters), training.engine
    blocks = blocks_in_order(lowered, names)
    keeps_activations = training.recompute != "full"  # With "full" a block keeps its inputs only.
    flights = [keeps_activations * schedule.flight(i, len(homes), training.microbatches) for i in range(len(homes))]
    costs = block_costs(*costed(analysis), blocks, names)
    return partition(blocks, costs, [homes[i] for i in range(len(homes))], flights)


def expect_forward_alone(training: Training, ranks: int, analysis: Program) -> None:
    """Raises Error if forward has to run before a step of a pipeline, and its schedule always runs backward."""
    functions = None if analysis.totals is None else analysis.totals.functions
    if functions is not None and ranks > 1 and not training.engine.evaluates:
        raise Error(
            "the loss needs sums over the whole batch before backward, as a balancing loss does, and torch's schedule "
            f'"{training.schedule}" has no forward alone',
            fix='schedule="zero-bubble"',
            alternative='balance="microbatch"',
        )


class ContiguousGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient: process groups send contiguous tensors only."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Saves nothing for backward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class StageModule(nn.Module):
    """A module that runs one stage of a pipeline, with the modules that hold its parameters.

    Attributes:
        graph: the graph that it runs now: training and evaluation have different ones.
        totals: the totals of the whole batch, by placeholder.
        rest: in the last stage, the part of the loss that is computed from sums over the batch; None if there is none.
        at_once: whether a step has one part only, which no other stage has a part of.
        sums: the sums of gradients over the replicas that begin under the last backward of a step.
    """

    graph: RankProgram
    totals: Mapping[str, Tensor]
    rest: RestOfLoss | None = None
    sums: GradientSums

    def __init__(self, holders: Sequence[nn.Module], at_once: bool = False) -> None:
        super().__init__()
        self.holders, self.at_once = nn.ModuleList(holders), at_once

    def use(self, graph: RankProgram, totals: Mapping[str, Tensor], rest: RestOfLoss | None = None) -> None:
        """Sets the graph, the totals and the rest of the loss that the next calls of `forward` use."""
        self.graph, self.totals, self.rest = graph, totals, rest

    def last_backward(self) -> AbstractContextManager[None]:
        """Returns a region for the last backward of a step."""
        return self.sums.under_backward(self.parameters())

    def forward(self, *received: Tensor, **inputs: Tensor) -> Any:
        """Returns the tensors that the stage sends, or the loss in shape [1]: the engine concatenates the losses."""
        arrived = [ContiguousGradient.apply(x) for x in received]
        given = {**self.totals, **inputs, **dict(zip(self.graph.received, arrived, strict=True))}
        # Inside, the tensors are local parts, in the layouts of the plan.
        with torch._C.DisableTorchFunctionSubclass():
            results = self.graph(given)
            if self.rest is not None:
                results = (self.rest.add(results[0], results[1:], self.at_once),)
        results = tuple(torch.stack([value]) if value.dim() == 0 else value.contiguous() for value in results)
        return results[0] if len(results) == 1 else results


def engine(
    training: Training,
    works: Mapping[int, nn.Module],
    analysis: Program,
    device: torch.device,
    group: Any,
    loss: Callable[[Tensor, Any], Tensor],
) -> Any:
    """Returns torch's schedule for the stages of this rank.

    Args:
        works: number of a stage -> its module.
        analysis: says which inputs have rows.
        group: the process group of the pipeline's ranks.
        loss: returns the tensor that backward starts from, from a microbatch's loss and an unused target.

    Raises:
        Error: the schedule cannot run this number of microbatches.
    """
    from torch.distributed import pipelining  # It takes a second, and most models have no pipeline.
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    schedule, inputs = training.engine, analysis.captured.inputs
    divided = {*analysis.rows, *Documents(analysis).tokens}
    stages = _torch_stages(schedule, works, device, group)
    try:
        return getattr(pipelining, schedule.kind)(
            # torch's schedules of one stage a rank take the stage itself.
            stages if schedule.rounds > 1 else stages[0],
            training.microbatches,
            loss_fn=loss,
            # What has no rows goes whole to each microbatch.
            kwargs_chunk_spec={x: TensorChunkSpec(0) if x in divided else _Replicate() for x in inputs},
            # A loss is divided by the count of the whole batch already, so gradients are sums over microbatches.
            scale_grads=False,
        )
    except ValueError as error:
        ranks, microbatches = group.size(), training.microbatches
        raise Error(
            f'schedule="{training.schedule}" on {ranks} ranks cannot run {microbatches} microbatches: {error}',
            fix=f"microbatches={-(-microbatches // ranks) * ranks}",
        ) from error


def _torch_stages(schedule: Engine, works: Mapping[int, nn.Module], device: torch.device, group: Any) -> list[Any]:
    """Returns torch's object of each stage of this rank.

    NOTE [Sums under the last backward]
    In the last backward of a stage, each block's gradients are summed over the replicas while the blocks before it run
    theirs, and a rank waits for the last sums when all its stages have ended. Schedules that halve backward have the
    gradients of weights later: they are summed behind.
    """
    from torch.distributed.pipelining import PipelineStage

    class TrialStage(PipelineStage):
        """A stage whose trial run has valid indices, and whose sums over replicas run beside backward.

        To learn the shapes that stages send, torch runs them once on uninitialized memory, where integers may be out of
        range for an embedding. Here they are zeros.
        """

        # Not public: torch 2.13 allocates that memory in `_to_tensor`. If a later torch does so elsewhere, an index may
        # be out of range.
        def _to_tensor(self, arg: Any) -> Tensor:
            made: Tensor = super()._to_tensor(arg)
            return made if isinstance(arg, Tensor) or made.is_floating_point() else made.zero_()

        def backward_maybe_with_nosync(self, half: str, values: dict[str, Any], last_backward: bool = False) -> Any:
            """Runs backward ("full"), or one of our halves ("input", "weight")."""
            work: Any = self.submod
            work.graph.sum_now(last_backward and half == "full")
            with work.last_backward() if last_backward else nullcontext():
                if half == "full":
                    return super().backward_maybe_with_nosync(half, values, last_backward)
                if half == "input":
                    return input_half(values["stage_output"], values["output_grads"], values["input_values"])
                return values["param_groups"].run(), None

    count = group.size() * schedule.rounds
    return [TrialStage(work, i, count, device, group=group) for i, work in works.items()]


def analyse_microbatch(
    skeleton: nn.Module,
    args: Any,
    kwargs: Any,
    tp: int,
    training: Training,
    layouts: Mapping[str, Layout] | None,
    rows: frozenset[int],
    cp_rank: int = 0,
    captures: Captures | None = None,
    device_type: str = "cpu",
    padded: bool | None = None,
) -> Program:
    """Returns the program of a microbatch; its parameters are cut as `layouts` says, if there are layouts.

    Args:
        rows: as `places_of_rows` returns them.
        cp_rank, captures: as for `analyse`.
        device_type: the type of the device on which it will run.
        padded: whether some microbatch has padding; None: whether this one has.

    Raises:
        Error: as `expect_products_of_one_dtype` and `expect_ends_in_parts`.
    """
    args, kwargs = cast_arguments((args, kwargs), training.compute_dtype)
    call = CallState(autocast=Autocast(device_type), layouts=layouts, rows=rows)
    padded = not without_padding(kwargs) if padded is None else padded
    if len(batch_tensors(args, kwargs)[0]) == 1:  # One row does not show whether rows depend on each other.
        two = map_rows((args, kwargs), rows, repeat_rows)
        # Sequences are whole: documents that lie in one row only can be cut over cp.
        whole = replace(training, cp=1)
        of_two = analyse_for_masks(padded, skeleton, two[0], two[1], tp, whole, call, last="row_independence")
        assert of_two.totals is not None
        call = replace(call, sums=of_two.totals.names)
    options = {"cp_rank": cp_rank, "captures": captures}
    analysis = analyse_for_masks(padded, skeleton, args, kwargs, tp, training, call, **options)
    if training.microbatches > 1:
        expect_ends_in_parts(analysis.sequences.uncut_graph or analysis.graph)
    if training.compute_dtype:
        expect_products_of_one_dtype(analysis)
    return analysis


def expect_parts_of_experts(program: Program, ep: int, dp: int) -> None:
    """Raises Error if experts are cut over ranks along `cp`, and each of these has the rows of whole sequences."""
    if dp % ep == 0:
        return
    parts = values_of_parts(program.graph, "cp")
    for choice in program.graph.find_nodes(op="call_function", target=dispatch):
        if choice not in parts:
            problem = f"ep={ep} is over parts of sequences, and `{layer_of(choice)}` has rows of whole ones"
            raise Error(f"{problem} on every cp rank", at=line_of(choice), fix="ep that divides dp, or cp=1")


def learning_of(analysis: Program) -> frozenset[str] | None:
    """Returns the names of the parameters that the loss has a gradient for; None if nothing is detached."""
    graph, names = analysis.graph, analysis.captured.parameters
    if not any(node.target is torch.ops.aten.detach.default for node in graph.nodes):
        return None
    # Only a detach keeps the gradient from a parameter that is read.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    learning = {x for result in returned(graph) for x in with_gradient(result, mode)}
    return frozenset(names[x] for x in learning if x in names)


def parameters_of_stage(stage: Stage, names: Mapping[str, str]) -> list[str]:
    """Returns the names of the parameters that a stage reads, in the order of its graph: the same on every rank.

    Args:
        names: the names by placeholder.
    """
    return list(dict.fromkeys(names[x] for x in placeholders(stage.graph) if x in names))
