"""Trainer: one rank of a model that is cut three ways, and the step that trains it.

A rank is at one place of a mesh of pipeline, data and tensor ranks. Its graph is that of its tensor rank
(`compiler.py`), of which it runs the stages of its pipeline rank (`passes/pipeline/stages.py`), on the microbatches of
its replica; the loss is a sum over all of them (`passes/pipeline/loss_totals.py`), so gradients add up and nothing is
weighted by hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autotp.compiler import Program, emitted, rank_graph
from autotp.distributed.consistency import agree, agree_on_graph, tried
from autotp.distributed.cut_parameter import Cut, Warned, as_cut
from autotp.distributed.heartbeat import leave_note, take_note_back
from autotp.distributed.mesh import Mesh, broadcast_from_first, make_mesh, new_group
from autotp.errors import Error, within
from autotp.ops.collectives import peer_error, reduce
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.pytree import signature_of
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.attach_parameters import Owner, attach_parameters, module_at, place_of, value_at
from autotp.passes.pipeline.row_independence import batched
from autotp.passes.pipeline.stages import Division, Stage, staged
from autotp.rules.call import placeholders, returned
from autotp.runtime.executable import CHECKED_CALLS
from autotp.runtime.fsdp import pace, shard
from autotp.runtime.graph_digest import digest
from autotp.runtime.holdings import HasHoldings, Holdings, saved_names, uncut
from autotp.runtime.shard_parameters import shard_parameters
from autotp.sharding.boxes import local_of
from autotp.sharding.layout import Layout
from autotp.source_location import block_in
from autotp.training import process_groups as groups
from autotp.training.hyperparameters import hyperparameters
from autotp.training.microbatches import Batch, expect_values, key_of, of_rows, rows_of, tensors_of, totals_of
from autotp.training.nonfinite import refuse
from autotp.training.pipeline_schedules import (
    ENGINES,
    StageGraph,
    Training,
    Work,
    analysed,
    cast,
    division,
    engine,
    expect_splits,
    read_by,
    reader,
    stages_of,
)
from autotp.training.step_consistency import agree_on_step, equal_replicas, frozen_of, over, said
from autotp.training.trainer_module import as_module_of

T = TypeVar("T")
SAME_ROWS = (
    "all {} replicas were given the same rows, and each learns from them: give each its part, as `autotp.Sampler` does"
)


@dataclass(frozen=True)
class Pipeline:
    """The graphs of one mode, for microbatches of one kind.

    Attributes:
        key: the mode, and all about a call's arguments but sizes and values.
        shapes: of a microbatch's tensors; an engine is for these alone.
        stages: number of the stage -> what it computes, of this rank's.
        engine: what runs them; None where this rank has the whole pipeline.
    """

    key: Any
    shapes: Sequence[Any]
    analysis: Program
    stages: Mapping[int, StageGraph]
    engine: Any

    @property
    def training(self) -> bool:
        """Whether it is for training."""
        return bool(self.key[0])


class Trainer(HasHoldings):
    """One rank's part of a model on a mesh of pipeline, data and tensor ranks, made by `autotp.distribute`.

    Parameters have the names of the original model: `trainer.parameters()` is for the optimizer.

    Attributes:
        mesh: the DeviceMesh of all processes, with the dimensions "pp", "dp" and "tp".
        layouts: first name of any parameter of the model -> how its tensor-parallel ranks hold it.
        steps: the number of steps done, also those before the checkpoint that was loaded.
        plan: which blocks each stage of the pipeline has, and what each stage costs (multiplications) and keeps
            (numbers).
        place: this rank among its tensor-parallel ranks.
        everyone: this rank among all ranks.
        replicas: this rank among the ranks that hold the same stage of another replica.
        shared: name of a parameter that other pipeline ranks hold too -> the numbers of these ranks, and their group.
        tied: name of such a parameter -> this rank among them.
        skeleton: the model on `meta`.
        hyperparameters: the attributes of the model's modules and configurations.
        files: the process group that agrees on checkpoints, also while another thread trains.
        saving: the checkpoint that is being written; None where there is none.

    Raises:
        Error: the model cannot be divided so.

    Example:
        `Regression` is a linear layer whose `forward(x, y)` returns the mean squared error.

        >>> trainer = autotp.distribute(Regression(), example_inputs=(torch.ones(2, 4), torch.ones(2, 1)))
        >>> loss = trainer.step(torch.ones(8, 4), torch.zeros(8, 1))
        >>> trainer.steps, sorted(name for name, p in trainer.named_parameters() if p.grad is not None)
        (1, ['head.bias', 'head.weight'])
    """

    mesh: DeviceMesh
    layouts: dict[str, Layout]
    steps: int
    plan: Division
    place: Mesh
    everyone: Mesh
    replicas: Mesh
    shared: dict[str, tuple[list[int], Any]]
    tied: dict[str, Mesh]
    skeleton: nn.Module
    hyperparameters: dict[str, Any]
    files: Any
    saving: Future[None] | None

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, training: Training, given: Any, scaler: Any, timeout: timedelta
    ) -> None:
        super().__init__()
        self.mesh, self.steps, self._calls, self._training, self._scaler = mesh, 0, 0, training, scaler
        self.place = make_mesh(None, mesh["tp"])
        self.everyone = groups.world(self.place, timeout)
        self.files, self.saving = new_group(None, timeout, backend="gloo"), None
        self._ranks = over(self.everyone, mesh)
        self.replicas = groups.along(self.place, mesh.get_group("dp"), "dp")
        self._signature = signature_of(model)
        self.hyperparameters = hyperparameters(model)  # Before forward has run, and changed attributes.
        self.__dict__["skeleton"] = skeleton_of(model)  # No part of it: it is on meta.
        for tensor in self.skeleton.parameters() if training.compute_dtype else ():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(training.compute_dtype)
        args, kwargs = cast(self._signature.by_name(*find_inputs(model, given)), training.compute_dtype)
        if mesh["pp"].size() > 1:
            expect_splits(training, mesh["tp"].size(), all(parameter.requires_grad for parameter in model.parameters()))
        analysis = agree_on_graph(
            self.everyone, lambda: self._analysed(True, args, kwargs), lambda it: f"{digest(it)} {training}"
        )
        self.layouts = dict(analysis.layouts)
        lowered = rank_graph(analysis, self.place.rank, training.randomness)
        self.plan = self._divided(analysis, lowered)
        stages = self._cut(analysis, lowered)
        self._engine(analysis, {i: nn.Identity() for i in self._mine})  # What cannot be is known before we take over.
        self._hold(model, analysis, stages)
        self._holders = groups.holders(stages, analysis.captured.parameters, mesh["pp"].size(), self._mine_of)
        self.__dict__["shared"] = groups.shared(self._holders, mesh, timeout)
        self.__dict__["tied"] = self._tied()
        readers, read = self._readers(stages, analysis), reader(training.compute_dtype)
        self._works = {i: Work([m for m, some in readers.items() if i in some], read) for i in self._mine}
        shapes = [x.shape for x in tensors_of(args, kwargs)]
        self._pipelines = [self._pipeline(key_of(True, args, kwargs), shapes, analysis, stages)]
        if training.zero and mesh["dp"].size() > 1:
            self._shard(stages, analysis.captured.parameters)
        warned = Warned()
        for name, parameter in self.named_parameters():
            as_cut(parameter, Cut(name, self.layouts[name], self.place, warned))
        self._seed()

    # ---- what this rank holds

    def holdings(self) -> Holdings:
        """Returns what this rank holds of the model: its tensors, their layouts and the ranks that share them."""
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        rank, ranks = self.mesh["pp"].get_local_rank(), self.mesh["pp"].size()
        later = {name for name, (holders, _) in self.shared.items() if holders[0] != rank}
        group = self.mesh.get_group("pp").group_name if ranks > 1 else None
        replica = self.mesh["dp"].get_local_rank()
        alike = [(self.place, uncut(held, self.layouts)), (self.replicas, frozenset(held))]
        for mesh in dict.fromkeys(self.tied.values()):
            alike.append((mesh, frozenset(name for name, its in self.tied.items() if its is mesh)))
        saved, shapes, beside, left_out = saved_names(self.skeleton)
        return Holdings(
            held, frozenset(held) - later, saved, shapes, self.layouts, self.place, self.everyone,
            group, replica, alike=tuple(alike), beside=beside, left_out=left_out,
        )  # fmt: skip

    @property
    def _mine(self) -> list[int]:
        return self._mine_of(self.mesh["pp"].get_local_rank())

    def _mine_of(self, rank: int) -> list[int]:
        """The stages of a rank of the pipeline."""
        return stages_of(self._training, rank, self.mesh["pp"].size())

    def _analysed(self, training: bool, args: Any, kwargs: Any) -> Program:
        """The model's graph in one mode, cut as its parameters are held."""
        self.skeleton.train(training)
        return analysed(self.skeleton, args, kwargs, self.place.size, self._training, getattr(self, "layouts", None))

    def _divided(self, analysis: Program, lowered: fx.Graph) -> Division:
        return division(self._training, self.mesh["pp"].size(), analysis, lowered)

    def _cut(self, analysis: Program, lowered: fx.Graph) -> list[Stage]:
        return staged(lowered, self.plan.blocks, list(analysis.captured.parameters))

    def _hold(self, model: nn.Module, analysis: Program, every: Sequence[Stage]) -> None:
        """Registers this rank's part of what its stages read; blocks are modules that run."""
        names, stages = analysis.captured.parameters | analysis.captured.buffers, [every[i] for i in self._mine]
        read = {name for stage in stages for name in placeholders(stage.graph)}
        read |= set(placeholders(analysis.counts)) if analysis.counts is not None else set()
        unread = set(names) - {name for stage in every for name in placeholders(stage.graph)}
        wanted = list(dict.fromkeys(name for at, name in names.items() if at in read | unread))
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        parameters = {name for name, _ in model.named_parameters()}
        for name in (name for stage in stages for name in stage.blocks):
            module_at(self, name, Owner)
        for name, tensor in shard_parameters(
            model, self.layouts, self.place.rank, self.everyone, wanted=wanted
        ).items():
            path, _, key = name.rpartition(".")
            module = module_at(self, path)
            if name in parameters:
                held = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, name not in frozen)
                module._parameters[key] = held
            else:
                module._buffers[key] = tensor
        originals = dict(self.skeleton.named_modules(remove_duplicate=False))
        for path, module in [(path, module) for path, module in self.named_modules() if path]:
            as_module_of(module, originals[path])

    def _tied(self) -> dict[str, Mesh]:
        """For each parameter that other pipeline ranks hold, too, this rank among these."""
        every = dict.fromkeys(group for _, group in self.shared.values())
        of = {group: groups.along(self.place, group, "pp") for group in every}
        return {name: of[group] for name, (_, group) in self.shared.items()}

    def _readers(self, stages: Sequence[Stage], analysis: Program) -> dict[nn.Module, set[int]]:
        """The modules that hold what this rank's stages read, a block or what is in none, each with its stages."""
        names = analysis.captured.parameters | analysis.captured.buffers
        readers: dict[nn.Module, set[int]] = {}
        for i in self._mine:
            for name in (names[x] for x in placeholders(stages[i].graph) if x in names):
                block = block_in(name) if block_in(name) in stages[i].blocks else name.rpartition(".")[0]
                readers.setdefault(module_at(self, block), set()).add(i)
        return readers

    def _shard(self, stages: Sequence[Stage], names: Mapping[str, str]) -> None:
        """Shards parameters over the replicas: each block's by themselves, and what else a stage reads.

        What several stages of one rank read stays whole, everywhere: it would be in two units.
        """
        (pipeline,), every = self._pipelines, set(self.parameters())
        outside = {lies[0] for stage in pipeline.stages.values() for _, lies in stage.places.values()}
        homes = [(name, self.plan.ranks[i]) for i, stage in enumerate(stages) for name in read_by(stage, names)]
        several = {name for name, rank in homes if homes.count((name, rank)) > 1}
        for i, work in self._works.items():
            mine = {value_at(place_of(self, name)) for name in read_by(stages[i], names) - several}
            mine = {parameter for parameter in mine if parameter.dim()}
            blocks = [m for m in work.holders if isinstance(m, Owner) and not outside & set(m.modules())]
            blocks = [block for block in blocks if mine.issuperset(block.parameters())]
            shard(work, blocks, self.mesh["dp"], self._training.zero, self._training.compute_dtype, every - mine)

    def _pipeline(self, key: Any, shapes: Sequence[Any], analysis: Program, stages: Sequence[Stage]) -> Pipeline:
        """What this rank runs in one mode."""
        graphs = {i: self._graph(stages[i], analysis) for i in self._mine}
        return Pipeline(key, shapes, analysis, graphs, self._engine(analysis, self._works))

    def _engine(self, analysis: Program, works: Mapping[int, nn.Module]) -> Any:
        """What runs this rank's stages; None for the whole pipeline."""
        group = self.mesh.get_group("pp")
        if group.size() == 1:
            return None
        return engine(
            self._training, works, analysis.captured, self.place.device, group, lambda x, _: self._scaled(x.sum())
        )

    def _graph(self, stage: Stage, analysis: Program) -> StageGraph:
        """A stage's graph, whose blocks read their parameters here."""
        captured, place = analysis.captured, self.place
        names = captured.parameters | captured.buffers
        places = {name: place_of(self, name) for name in (names[x] for x in placeholders(stage.graph) if x in names)}
        owners = {name: module_at(self, name) for name in stage.blocks}
        bound = emitted(stage.graph, analysis, self._training, place.device, place.groups)
        module = attach_parameters(bound, captured.parameters, places, owners.get, reader(self._training.compute_dtype))
        left = placeholders(module.graph)
        return StageGraph(
            module,
            stage.received,
            {x: (names[x], places[names[x]]) for x in left if x in names},
            {x: captured.constants[x].to(place.device) for x in left if x in captured.constants},
        )

    def _seed(self) -> None:
        """Gives each replica and each pipeline rank random numbers of its own, all from the first rank's."""
        if self.mesh["pp"].size() * self.mesh["dp"].size() > 1:
            seed = torch.randint(2**62, (), device=self.everyone.device)
            broadcast_from_first(seed, self.everyone)
            torch.manual_seed(int(seed) + self.everyone.rank // self.place.size)

    # ---- a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises Error: a trainer is not called, but told to step or to evaluate.

        Args:
            args, kwargs: ignored.

        Raises:
            Error: always.
        """
        raise Error("a trainer cannot be called", fix="trainer.step(...), or trainer.evaluate(...)")

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs forward and backward, adds to each `.grad`, and returns the loss of the whole batch (shape []).

        The whole batch is that of all replicas, and every rank gets its loss. Ranks of one replica give the same rows.

        Args:
            args, kwargs: what the model's `forward` takes; tensors are this replica's rows, [batch/dp ...].

        Raises:
            Error: on every rank. The batch does not divide into the microbatches; ranks of one replica were given
                different batches; a rank was lost; or the loss is infinite or undefined (the error names the first
                parameter or gradient that is).
        """
        pipeline, given = self._begin(True, args, kwargs)
        before = {parameter: parameter.grad for parameter in self.parameters()}
        self.zero_grad(set_to_none=True)  # What was there has been summed over the ranks already.
        self._scaled(torch.zeros((), device=self.place.device))  # The scaler begins on ranks that have no loss, too.
        losses = self._together("Trainer.step", lambda: self._run(pipeline, given))
        self._together("Trainer.step", self._add_up)
        for parameter, grad in before.items():
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        self.steps += 1
        loss = self._together("Trainer.step", lambda: self._sum(pipeline, losses))
        if self._scaler is None and not torch.isfinite(loss):
            within("Trainer.step", lambda: refuse(float(loss), self.steps, self, self.everyone))
        return loss

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the loss of a whole batch (shape []) in evaluation mode, without gradients.

        Args:
            args, kwargs: as for `step`.

        Raises:
            Error: as `step`; or the schedule always runs backward, as "zero-bubble-v" does.
        """
        schedule = self._training.schedule
        if not ENGINES[schedule].evaluates and self.mesh["pp"].size() > 1:
            problem = f'Trainer.evaluate: torch\'s schedule "{schedule}" always runs backward'
            raise Error(problem, fix='schedule="zero-bubble"')
        pipeline, given = self._begin(False, args, kwargs)
        losses = self._together("Trainer.evaluate", lambda: self._run(pipeline, given))
        for module in (module for work in self._works.values() for module in work.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()
        return self._together("Trainer.evaluate", lambda: self._sum(pipeline, losses))

    def _together(self, what: str, run: Callable[[], T]) -> T:
        """What `run` returns; where a rank is lost meanwhile, an Error that says so."""
        try:
            return run()
        except Error:
            raise
        except Exception as error:
            group, lost = str(self._ranks.group), None
            if isinstance(error, RuntimeError):
                lost = peer_error(what, group, error, self._ranks)
            if lost is None:
                leave_note(error)
            raise lost or error from error

    def _begin(self, training: bool, args: Any, kwargs: Any) -> tuple[Pipeline, dict[str, Tensor]]:
        """The graphs for a batch, ready to run, and its tensors by name."""
        call = f"Trainer.{'step' if training else 'evaluate'}"
        return within(call, lambda: self._together(call, lambda: self._ready(training, args, kwargs)))

    def _ready(self, training: bool, args: Any, kwargs: Any) -> tuple[Pipeline, dict[str, Tensor]]:
        pipeline, tensors = self._fitting(training, args, kwargs)
        given = dict(zip(pipeline.analysis.captured.inputs, tensors, strict=True))
        totals = totals_of(pipeline.analysis, given, self, self.mesh.get_group("dp"))
        for i, work in self._works.items():
            work.use(pipeline.stages[i], totals)
        return pipeline, given

    def _fitting(self, training: bool, args: Any, kwargs: Any) -> tuple[Pipeline, list[Tensor]]:
        """The graphs for a batch, captured now if there are none, and its tensors, once all ranks have both.

        Raises:
            Error: on every rank, where one cannot take its batch, or has another than its replica, or no graph.
        """
        taken, problem = tried(lambda: self._taken(training, args, kwargs))
        self._calls += 1
        values = self._calls <= CHECKED_CALLS
        frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]
        mine = said(training, frozen, taken[0].arguments if taken else None, self.place, values)
        found = self._fitted(taken[0]) if taken else None
        mine = mine._replace(captures=found is None)
        rows = agree_on_step(self._ranks, self.mesh, mine, frozen_of(frozen, self._holders), problem)
        take_note_back()
        if values and equal_replicas(rows, self.mesh):
            warnings.warn(SAME_ROWS.format(self.mesh["dp"].size()), stacklevel=5)
        (batch,) = taken
        if any(row.captures for row in rows):
            found = agree(self._ranks, lambda: found or self._captured(training, batch))
        assert found is not None  # Captured above otherwise.
        return found, batch.tensors

    def _taken(self, training: bool, args: Any, kwargs: Any) -> Batch:
        """A batch as the graphs take it. Raises Error if it does not divide."""
        args, kwargs = cast(self._signature.by_name(args, kwargs), self._training.compute_dtype)
        expect_values(tensors_of(args, kwargs))
        tensors, parts, key = tensors_of(args, kwargs), self._training.microbatches, key_of(training, args, kwargs)
        known = [pipeline.analysis.captured for pipeline in self._pipelines if pipeline.key == key]
        size = rows_of(tensors, parts, known)
        micro = pytree.tree_map(lambda x: of_rows(x, size, lambda rows: rows[: size // parts]), (args, kwargs))
        return Batch((args, kwargs), micro, tensors, key, [x.shape for x in tensors_of(*micro)])

    def _fitted(self, batch: Batch, of_size: bool = True) -> Pipeline | None:
        """The graphs for a batch, if there are some; with `of_size` their engine is for microbatches as large."""
        for it in self._pipelines:
            same = it.engine is None or list(it.shapes) == batch.shapes or not of_size
            if it.key == batch.key and same and it.analysis.captured.fits(batch.shapes):
                return it
        return None

    def _captured(self, training: bool, batch: Batch) -> Pipeline:
        """The graphs for microbatches that none fits, or an engine for those of another size."""
        fit = self._fitted(batch, of_size=False)
        if fit is not None:
            new = replace(fit, shapes=batch.shapes, engine=self._engine(fit.analysis, self._works))
        else:
            analysis = self._analysed(training, *batch.micro)
            lowered = rank_graph(analysis, self.place.rank, self._training.randomness)
            new = self._pipeline(batch.key, batch.shapes, analysis, self._cut(analysis, lowered))
        self._pipelines.append(new)
        return new

    def _run(self, pipeline: Pipeline, given: Mapping[str, Tensor]) -> list[Tensor]:
        """The microbatches' losses, on the ranks that have the last stage; in training backward has been run."""
        losses: list[Tensor] = []
        if pipeline.engine is not None:
            last = len(self.plan.blocks) - 1 in self._mine
            run = pipeline.engine.step if pipeline.training else pipeline.engine.eval
            run(**given, target=torch.zeros(self._training.microbatches) if last else None, losses=losses)
            return losses
        (work,), captured, parts = self._works.values(), pipeline.analysis.captured, self._training.microbatches
        rows = batched(captured.inputs, captured.example)
        divided = {name: value.chunk(parts) if name in rows else [value] * parts for name, value in given.items()}
        for i in range(parts):
            pace(work, self._training.zero, i == parts - 1)
            loss = self._scaled(work(**{name: values[i] for name, values in divided.items()}).sum())
            if pipeline.training:
                loss.backward()
            losses.append(loss.detach())
        return losses

    def _scaled(self, loss: Tensor) -> Tensor:
        found: Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        return found

    def _sum(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> Tensor:
        """The whole batch's loss, on every rank."""
        dtype = returned(pipeline.analysis.graph)[0].meta["val"].dtype
        loss = sum((loss.detach() for loss in losses), torch.zeros((), dtype=dtype, device=self.place.device))
        if self.place.rank:  # Its loss is the first one's; where it alone is not finite, all ranks are told.
            loss = torch.where(torch.isfinite(loss), 0.0, loss)
        loss = reduce(loss, self._ranks.group)
        return loss if self._scaler is None else loss / self._scaler.get_scale()

    def _add_up(self) -> None:
        """Gradients of what several stages hold, and of all replicas where these are not sharded."""
        for name, (_, group) in self.shared.items():
            parameter = value_at(place_of(self, name))
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(local_of(parameter.grad), group=group)
        whole = [p.grad for p in self.parameters() if p.grad is not None and not isinstance(p.grad, DTensor)]
        for dtype in dict.fromkeys(grad.dtype for grad in whole):
            some = [grad for grad in whole if grad.dtype == dtype]
            flat = torch.cat([grad.flatten() for grad in some])
            dist.all_reduce(flat, group=self.mesh.get_group("dp"))
            for grad, summed in zip(some, flat.split([grad.numel() for grad in some]), strict=True):
                grad.copy_(summed.view_as(grad))
