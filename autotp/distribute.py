"""distribute: one captured graph, cut for three kinds of parallelism, and the engines of torch that run the pieces.

A rank is at one place of a mesh of pipeline, data and tensor ranks. Its graph is that of its tensor rank
(`transform.py`), of which it runs the stages of its pipeline rank (`passes/stages.py`), on the microbatches of its
replica; the loss is a sum over all of them (`passes/totals.py`), so gradients add up and nothing is weighted by hand.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from autotp.call import returned
from autotp.errors import Error, within
from autotp.inputs import example_inputs as find_inputs
from autotp.layout import Layout
from autotp.mesh import Mesh, make_mesh
from autotp.passes.bind import bind
from autotp.passes.capture import skeleton_of
from autotp.passes.cost import block_costs
from autotp.passes.recompute import Recompute, outline
from autotp.passes.rows import batched
from autotp.passes.stages import Stage, balanced, blocks_in_order, staged
from autotp.passes.totals import TOTAL
from autotp.settings import Settings, expect_choices
from autotp.structure import flatten, signature_of
from autotp.transform import Analysis, analyse, rank_graph

Schedule = Literal["1F1B", "interleaved", "GPipe"]
ROUNDS = {"1F1B": 1, "interleaved": 2, "GPipe": 1}
"""How many stages each rank of the pipeline has."""
ENGINES: dict[str, Any] = {"1F1B": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "GPipe": ScheduleGPipe}


def distribute(
    model: nn.Module,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    microbatches: int = 1,
    schedule: Schedule = "1F1B",
    example_inputs: Any = None,
    randomness: Literal["fast", "exact"] = "fast",
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> Trainer:
    """This rank's part of `model`, and the steps that train it on `tp * pp * dp` processes.

    Args:
        model: an ordinary single-device model that returns its loss; the first rank's values are taken.
        tp: ranks that share each operator, as in `parallelize`.
        pp: ranks that the blocks are divided among.
        dp: replicas of all that, each on a batch of its own.
        microbatches: parts that a replica's batch is computed in.
        schedule: in which order the parts go through the pipeline; "interleaved" gives each rank two stages.
        example_inputs: as for `parallelize`; a microbatch.
        randomness, sequence_parallel, recompute: as for `parallelize`.

    Raises:
        Error: bad input of any kind.
    """
    settings = Settings(
        outputs="local", sequence_parallel=sequence_parallel, randomness=randomness, recompute=recompute, summed=True
    )

    def run() -> Trainer:
        expect_choices(settings)
        if schedule not in ENGINES:
            raise Error(f"schedule={schedule!r}", expected=", ".join(map(repr, ENGINES)))
        return Trainer(model, _mesh(tp, pp, dp), settings, example_inputs, microbatches, schedule)

    return within(f"distribute({type(model).__name__}, tp={tp}, pp={pp}, dp={dp})", run)


def _mesh(tp: int, pp: int, dp: int) -> DeviceMesh:
    for name, size in (("tp", tp), ("pp", pp), ("dp", dp)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise Error(f"{name}={size!r} is not a whole number of 1 or more", **{"try": f"{name}=2"})
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if tp * pp * dp != world:
        raise Error(
            f"tp * pp * dp is {tp * pp * dp}, and the world has {world}",
            **{"try": f"torchrun --nproc-per-node {tp * pp * dp}"},
        )
    nccl = not dist.is_initialized() or dist.get_backend() == "nccl"
    kind = "cuda" if torch.cuda.is_available() and nccl else "cpu"
    return init_device_mesh(kind, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


class Work(nn.Module):
    """One stage: a graph, on tensors that the trainer holds."""

    def __init__(self, stage: Stage, module: fx.GraphModule, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.module, self.received = module, stage.received
        self.places = [node.name for node in stage.graph.nodes if node.op == "placeholder"]
        self.tensors = dict(tensors)
        self.totals: dict[str, Tensor] = {}

    def forward(self, *received: Tensor, **given: Tensor) -> Any:
        """What the stage sends, or the loss as a tensor of one element: the engine joins those of the microbatches."""
        known = self.tensors | self.totals | given | dict(zip(self.received, received, strict=True))
        found = self.module(*(known[name] for name in self.places))
        found = tuple(value.view(1) if value.dim() == 0 else value for value in found)
        return found[0] if len(found) == 1 else found


class Trainer(nn.Module):
    """One rank's part of a model. Made by `autotp.distribute`; parameters have the names of the original model.

    Attributes:
        mesh: the processes, by "pp", "dp" and "tp".
        layouts: first name of a parameter that is held here -> how it is cut.
    """

    mesh: DeviceMesh
    layouts: dict[str, Layout]
    _analysis: Analysis
    _stages: list[PipelineStage]
    _engine: Any
    _microbatches: int
    _shared: list[tuple[str, Any]]
    _signature: Any

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, settings: Settings, given: Any, microbatches: int, schedule: str
    ) -> None:
        super().__init__()
        place, count = make_mesh(None, mesh["tp"]), mesh["pp"].size()
        self.mesh, self.layouts, self._microbatches = mesh, {}, microbatches
        self._signature = signature_of(model)
        args, kwargs = self._signature.by_name(*find_inputs(model, given))
        self._analysis = analyse(skeleton_of(model), args, kwargs, place.size, settings)
        captured = self._analysis.captured
        lowered = rank_graph(self._analysis, place.rank, settings.randomness)
        stages = _stages(lowered, self._analysis, count * ROUNDS[schedule] if count > 1 else 1)
        mine = range(mesh["pp"].get_local_rank(), len(stages), count)
        names = captured.parameters | captured.buffers
        read = {node.name for i in mine for node in stages[i].graph.nodes if node.op == "placeholder"}
        self._hold(model, {name for at, name in names.items() if at in read}, place)
        tensors = {at: self._tensor(name) for at, name in names.items() if at in read}
        tensors |= {name: constant.to(place.device) for name, constant in captured.constants.items()}
        self._stages = []
        for i in mine:
            module = outline(bind(stages[i].graph, place.device, place.groups), settings.recompute)
            work = Work(stages[i], module, tensors)
            self._stages.append(PipelineStage(work, i, len(stages), place.device, group=mesh.get_group("pp")))
        kind: Any = ENGINES[schedule if count > 1 else "1F1B"]
        self._engine = kind(
            self._stages if len(self._stages) > 1 else self._stages[0],
            microbatches,
            loss_fn=lambda loss, _: loss.sum(),
            kwargs_chunk_spec=self._divided(),
            scale_grads=False,
        )
        self._shared = _shared(stages, captured.parameters, mesh)

    def _hold(self, model: nn.Module, wanted: Collection[str], place: Mesh) -> None:
        """Registers this rank's part of what its stages read, of the model that the first rank has."""
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            full = tensor.detach().to(place.device, copy=True).contiguous()
            dist.broadcast(full, 0)
            if name in wanted:
                layout = self._analysis.layouts.get(name, Layout(tuple(tensor.shape)))
                part = layout.take(full, place.rank)
                if isinstance(tensor, nn.Parameter):
                    part, self.layouts[name] = nn.Parameter(part, tensor.requires_grad), layout
                _register(self, name, part)

    def _tensor(self, name: str) -> Tensor:
        path, _, key = name.rpartition(".")
        found: Tensor = getattr(self.get_submodule(path), key)
        return found

    def _divided(self) -> dict[str, Any]:
        """How the engine divides each input: along the batch, or not at all."""
        captured = self._analysis.captured
        rows = batched(captured.inputs, captured.example)
        return {name: TensorChunkSpec(0) if name in rows else _Replicate() for name in captured.inputs}

    # ---- a step

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of this step's whole batch, of which this replica is given a part; gradients are added to `.grad`.

        Raises:
            Error: the batch does not divide into the microbatches, or these are of other sizes than the graph is for.
        """
        args, kwargs = self._signature.by_name(args, kwargs)
        leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        given = dict(zip(self._analysis.captured.inputs, leaves, strict=True))
        within("Trainer.step", lambda: self._expect_fitting(given))
        totals = self._totals(given)
        for stage in self._stages:
            vars(stage.submod)["totals"] = totals
        losses: list[Tensor] = []
        last = any(stage.is_last for stage in self._stages)
        device = leaves[0].device
        before = {parameter: parameter.grad for parameter in self.parameters()}
        self.zero_grad(set_to_none=True)  # What was there has been summed over the ranks already.
        self._engine.step(**given, target=torch.zeros(self._microbatches) if last else None, losses=losses)
        self._add_up()
        for parameter, grad in before.items():
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        dtype = returned(self._analysis.graph)[0].meta["val"].dtype
        loss = torch.stack(losses).sum().detach() if last else torch.zeros((), dtype=dtype, device=device)
        for axis in ("pp", "dp"):
            dist.all_reduce(loss, group=self.mesh.get_group(axis))
        return loss

    def _expect_fitting(self, given: Mapping[str, Tensor]) -> None:
        captured, parts = self._analysis.captured, self._microbatches
        rows = batched(captured.inputs, captured.example)
        sizes = sorted({given[name].shape[0] for name in rows}, reverse=True)
        if len(sizes) > 1:
            raise Error(f"inputs of {' and '.join(map(str, sizes))} rows, and a batch has as many of all")
        (size,) = sizes
        if size % parts:
            raise Error(f"a batch of {size} does not divide into {parts} microbatches", **{"try": "drop_last=True"})
        shapes = [(size // parts, *x.shape[1:]) if name in rows else tuple(x.shape) for name, x in given.items()]
        if not captured.fits(shapes):
            raise Error(
                f"microbatches of {shapes}, and the graph was captured for {list(captured.example)}",
                **{"try": "example_inputs=..., as a microbatch is"},
            )

    def _totals(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the whole batch counts: each replica its own part, and the sum over them."""
        graph = self._analysis.counts
        assert graph is not None
        device = next(iter(given.values())).device
        values = [given[node.name] for node in graph.nodes if node.op == "placeholder"]
        counts = fx.GraphModule(nn.Module(), bind(graph, device, {}))(*values)
        if not counts:
            return {}
        summed = torch.stack([count.to(torch.float64) for count in counts])
        dist.all_reduce(summed, group=self.mesh.get_group("dp"))
        places = [n for n in self._analysis.graph.nodes if n.op == "placeholder" and n.name.startswith(TOTAL)]
        return {n.name: total.to(n.meta["val"].dtype) for n, total in zip(places, summed.unbind(), strict=True)}

    def _add_up(self) -> None:
        """Gradients of what several stages hold, and of all replicas."""
        for name, group in self._shared:
            dist.all_reduce(self._tensor(name).grad, group=group)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            some = [grad for grad in grads if grad.dtype == dtype]
            flat = torch.cat([grad.flatten() for grad in some])
            dist.all_reduce(flat, group=self.mesh.get_group("dp"))
            for grad, summed in zip(some, flat.split([grad.numel() for grad in some]), strict=True):
                grad.copy_(summed.view_as(grad))


def _stages(lowered: fx.Graph, analysis: Analysis, count: int) -> list[Stage]:
    """The graph in `count` stages, the dearest of which costs as little as it can."""
    weights = list(analysis.captured.parameters)
    blocks = blocks_in_order(lowered, weights)
    if len(blocks) < count:
        raise Error(f"{count} stages, and the model has {len(blocks)} blocks", **{"try": "fewer pipeline ranks"})
    runs = balanced(block_costs(analysis.graph, analysis.axes, blocks), count) if blocks else [range(0)]
    return staged(lowered, [[blocks[i] for i in run] for run in runs], weights)


def _register(root: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, key = name.rpartition(".")
    module = root
    for part in path.split(".") if path else []:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(key, tensor)
    else:
        module.register_buffer(key, tensor)


def _shared(stages: Sequence[Stage], names: Mapping[str, str], mesh: DeviceMesh) -> list[tuple[str, Any]]:
    """The parameters of this rank that other pipeline ranks hold, too, each with the group of its holders.

    Every rank makes every group: that is how torch makes them.
    """
    holders: dict[str, set[int]] = {}
    for i, stage in enumerate(stages):
        for node in stage.graph.nodes:
            if node.op == "placeholder" and node.name in names:
                holders.setdefault(names[node.name], set()).add(i % mesh["pp"].size())
    groups: dict[tuple[int, ...], Any] = {}
    for some in dict.fromkeys(tuple(sorted(ranks)) for ranks in holders.values() if len(ranks) > 1):
        for column in mesh.mesh[list(some)].flatten(1).unbind(1):
            group = dist.new_group(column.tolist())
            if dist.get_rank() in column.tolist():
                groups[some] = group
    found = ((name, groups.get(tuple(sorted(ranks)))) for name, ranks in holders.items())
    return [(name, group) for name, group in found if group is not None]
