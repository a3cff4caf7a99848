"""The pipeline stages of one rank, and torch's schedules that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autotp.compiler import CallState, Program, analyse
from autotp.errors import Error
from autotp.options import Options
from autotp.passes.capture.captured import Captured
from autotp.passes.emit.attach_parameters import ParameterPlace, ReadParameter, value_at
from autotp.passes.pipeline.cost import block_costs
from autotp.passes.pipeline.row_independence import batched
from autotp.passes.pipeline.stages import Division, Stage, blocks_in_order, divided
from autotp.passes.plan.match import contracts
from autotp.rules.call import placeholders
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.runtime.fsdp import expect_whole
from autotp.sharding.layout import Layout
from autotp.source_location import line_of
from autotp.training.microbatches import of_rows, tensors_of, twice

Schedule = Literal["1F1B", "interleaved", "GPipe", "zero-bubble", "zero-bubble-v"]


@dataclass(frozen=True)
class Training(Options):
    """What `distribute` was asked for beyond the sizes."""

    microbatches: int = 1
    schedule: Schedule = "1F1B"
    zero: int = 0
    compute_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Engine:
    """A schedule of torch's.

    Attributes:
        kind: the name of its class in torch.distributed.pipelining.
        rounds: how many stages each rank of the pipeline has.
        folded: whether the second round runs back, from the last rank to the first.
        halves: whether backward runs in two halves, for the gradients of inputs and of weights.
        evaluates: whether the schedule can run forward alone.
    """

    kind: str
    rounds: int = 1
    folded: bool = False
    halves: bool = False
    evaluates: bool = True

    def stages(self, rank: int, ranks: int) -> list[int]:
        """Which stages a rank of the pipeline has."""
        last = ranks * self.rounds - 1
        return [rank, last - rank] if self.folded else list(range(rank, last + 1, ranks))

    def flight(self, stage: int, stages: int, microbatches: int) -> int:
        """Of how many microbatches a stage has activations at a time, at most, as torch orders them.

        With one stage a rank these are those on their way behind it (Narayanan et al. 2021, section 2.2).
        """
        ranks, behind = stages // self.rounds, stages - stage
        if self.kind == "ScheduleInterleaved1F1B":
            behind = _interleaved(stage % ranks, ranks, self.rounds, microbatches)[stage // ranks]
        elif self.kind == "ScheduleInterleavedZeroBubble":
            behind = ranks * (self.rounds - stage // ranks)
        return microbatches if self.kind == "ScheduleGPipe" else min(microbatches, behind)


def _interleaved(rank: int, ranks: int, rounds: int, microbatches: int) -> list[int]:
    """Of how many microbatches each of a rank's stages has activations, at most.

    A rank goes forward with as many microbatches as there are ranks in each of its stages in turn, and backward
    likewise from the last stage on, once it is some steps ahead.
    """
    ahead = min(microbatches * rounds, (rounds - 1) * ranks + 2 * (ranks - 1 - rank))
    held, most = [0] * rounds, [0] * rounds
    for step in range(microbatches * rounds):
        at = step // ranks % rounds
        held[at] += 1
        most[at] = max(most[at], held[at])
        if step >= ahead:
            held[rounds - 1 - (step - ahead) // ranks % rounds] -= 1
    return most


ENGINES: dict[str, Engine] = {
    "1F1B": Engine("Schedule1F1B"),
    "interleaved": Engine("ScheduleInterleaved1F1B", 2),
    "GPipe": Engine("ScheduleGPipe"),
    "zero-bubble": Engine("ScheduleInterleavedZeroBubble", 2, halves=True),
    "zero-bubble-v": Engine("ScheduleZBVZeroBubble", 2, folded=True, halves=True, evaluates=False),
}


def stages_of(training: Training, rank: int, ranks: int) -> list[int]:
    """Which stages a rank of the pipeline has."""
    return ENGINES[training.schedule].stages(rank, ranks) if ranks > 1 else [0]


def division(training: Training, ranks: int, analysis: Program, lowered: fx.Graph) -> Division:
    """The blocks of a model, divided among the stages of so many ranks."""
    homes = {i: rank for rank in range(ranks) for i in stages_of(training, rank, ranks)}
    names, kind = list(analysis.captured.parameters), ENGINES[training.schedule]
    blocks = blocks_in_order(lowered, names)
    kept = training.recompute != "full"  # Or a block keeps what it is given, no more.
    flights = [kept * kind.flight(i, len(homes), training.microbatches) for i in range(len(homes))]
    costs = block_costs(analysis.graph, analysis.axes, blocks, names)
    return divided(blocks, costs, [homes[i] for i in range(len(homes))], flights)


@dataclass(frozen=True)
class StageGraph:
    """What a stage computes in one mode, for microbatches of one kind.

    Attributes:
        module: the graph, whose blocks read their parameters themselves.
        received: names of the placeholders of what is received.
        places: placeholder -> the name of its parameter or buffer, and where that lies.
        constants: placeholder -> its value.
    """

    module: fx.GraphModule
    received: tuple[str, ...]
    places: Mapping[str, tuple[str, ParameterPlace]]
    constants: Mapping[str, Tensor]


class Dense(torch.autograd.Function):
    """The identity, whose gradient is contiguous: torch sends it as it lies in memory, and a group sends no other."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class Work(nn.Module):
    """One stage of a pipeline, on the modules that hold its parameters.

    Attributes:
        graph: what it computes now: in training and in evaluation another.
        totals: what the whole batch counts.
    """

    graph: StageGraph
    totals: Mapping[str, Tensor]

    def __init__(self, holders: Sequence[nn.Module], read: ReadParameter) -> None:
        super().__init__()
        self.holders = nn.ModuleList(holders)
        self.read = read

    def use(self, graph: StageGraph, totals: Mapping[str, Tensor]) -> None:
        """Has the stage compute this from now on."""
        self.graph, self.totals = graph, totals

    def forward(self, *received: Tensor, **given: Tensor) -> Any:
        """What the stage sends, or the loss as a tensor of one element: the engine joins those of the microbatches."""
        arrived = [Dense.apply(x) for x in received]
        known = {
            **self.graph.constants,
            **self.totals,
            **given,
            **dict(zip(self.graph.received, arrived, strict=True)),
        }
        with torch._C.DisableTorchFunctionSubclass():  # Inside, parts are as planned.
            for at, (name, place) in self.graph.places.items():
                known[at] = expect_whole(name, self.read(place))
            found = self.graph.module(*(known[name] for name in placeholders(self.graph.module.graph)))
        found = tuple(torch.stack([value]) if value.dim() == 0 else value.contiguous() for value in found)
        return found[0] if len(found) == 1 else found


def expect_splits(training: Training, tp: int, all_learn: bool) -> None:
    """Raises an Error if the schedule halves backward, into inputs' and weights', where torch cannot do so."""
    if not ENGINES[training.schedule].halves:
        return
    if not all_learn:
        problem = "loses gradients where parameters are frozen"
    elif training.sequence_parallel and tp > 1:
        problem = "cannot halve the backward of a residual stream that is cut along the sequence"
    else:
        return
    raise Error(f'schedule="{training.schedule}" {problem}', fix='schedule="interleaved"')


def engine(
    training: Training,
    works: Mapping[int, nn.Module],
    captured: Captured,
    device: torch.device,
    group: Any,
    loss: Callable[[Tensor, Any], Tensor],
) -> Any:
    """torch's schedule for the stages of this rank.

    Args:
        works: by number of the stage.
        captured: what the inputs are.
        group: the ranks of the pipeline.
        loss: what is made of a microbatch's loss and of nothing, for backward.

    Raises:
        Error: the schedule cannot be for so many microbatches.
    """
    from torch.distributed import pipelining  # It takes a second, and most models have no pipeline.
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    kind, microbatches, rows = (
        ENGINES[training.schedule],
        training.microbatches,
        batched(captured.inputs, captured.example),
    )
    count = group.size() * kind.rounds

    class Stage(pipelining.PipelineStage):
        """To learn what stages send, the engine runs them once on memory as it comes: indices in it must be some."""

        # Not public: torch 2.13 makes that memory here. Where it does so elsewhere, an index in it may be out of range.
        def _to_tensor(self, arg: Any) -> Tensor:
            made: Tensor = super()._to_tensor(arg)
            return made if isinstance(arg, Tensor) or made.is_floating_point() else made.zero_()

    stages = [Stage(work, i, count, device, group=group) for i, work in works.items()]
    try:
        return getattr(pipelining, kind.kind)(
            stages if kind.rounds > 1 else stages[0],
            microbatches,
            loss_fn=loss,
            kwargs_chunk_spec={x: TensorChunkSpec(0) if x in rows else _Replicate() for x in captured.inputs},
            scale_grads=False,
        )
    except ValueError as error:
        raise Error(
            f'schedule="{training.schedule}" on {group.size()} ranks cannot run {microbatches} microbatches: {error}',
            fix=f"microbatches={-(-microbatches // group.size()) * group.size()}",
        ) from error


def cast(arguments: Any, dtype: torch.dtype | None) -> Any:
    """Arguments, the floating tensors among them in the dtype that is computed in."""

    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if dtype and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(one, arguments)


def analysed(
    skeleton: nn.Module, args: Any, kwargs: Any, tp: int, training: Training, layouts: Mapping[str, Layout] | None
) -> Program:
    """The graph of a microbatch, cut as its parameters are held, if they are.

    Raises:
        Error: an operator that wants one dtype is given several: a buffer's is its own.
    """
    args, kwargs = cast((args, kwargs), training.compute_dtype)
    call = CallState(layouts=layouts)
    if len(tensors_of(args, kwargs)[0]) == 1:  # Of one row nothing shows whether rows depend on each other.
        two = [pytree.tree_map(lambda x: of_rows(x, 1, twice), given) for given in (args, kwargs)]
        analyse(skeleton, two[0], two[1], tp, training, call)
    analysis = analyse(skeleton, args, kwargs, tp, training, call)
    for node in analysis.graph.nodes if training.compute_dtype else ():
        if contracts(analysis.axes.bound.get(node)) or has(node.target, Trait.ATTENTION):
            values = [x for x in (n.meta.get("val") for n in node.all_input_nodes) if isinstance(x, Tensor)]
            found = sorted({str(x.dtype).removeprefix("torch.") for x in values if x.is_floating_point()})
            if len(found) > 1:
                problem = f"compute_dtype: a product of {' and '.join(found)}"
                raise Error(problem, at=line_of(node), fix="`buffer.to(x.dtype)` there: buffers are not cast")
    return analysis


def reader(dtype: torch.dtype | None) -> ReadParameter:
    """What reads a parameter in the dtype that is computed in; its gradient comes back in its own."""

    def read(place: ParameterPlace) -> Tensor:
        value = value_at(place)
        return value.to(dtype) if dtype and isinstance(value, nn.Parameter) and value.is_floating_point() else value

    return read


def read_by(stage: Stage, names: Mapping[str, str]) -> set[str]:
    """The parameters that a stage reads, of these by placeholder."""
    return {names[x] for x in placeholders(stage.graph) if x in names}
