"""Trainer: one rank of a model under tensor, pipeline and data parallelism, and the step that trains it.

A rank is at one place of a mesh of pipeline, data and tensor ranks. `compiler.py` makes the graph of its tensor rank;
of this graph the trainer runs the stages of its pipeline rank (`passes/pipeline/stages.py`), on the microbatches of its
replica. The loss is a sum over all microbatches and replicas (`passes/pipeline/loss_totals.py`), so gradients are
added without weights.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from threading import Thread, current_thread
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autotp.attached import READ
from autotp.compiler import rank_graph, rank_program, warn_of_whole_sequences
from autotp.diagnostics.report import memory_plan
from autotp.display.sheet import Table
from autotp.distributed.agreement import Fact, agree, tried
from autotp.distributed.cut_tensors.cut_parameter import Cut, CutTensor, as_cut
from autotp.distributed.cut_tensors.rows_of_parts import rows_of_part
from autotp.distributed.device_arguments import to_device
from autotp.distributed.fingerprint import Fingerprint, fingerprint
from autotp.distributed.mesh import Mesh, broadcast_from_first, group_of, make_mesh, new_group
from autotp.distributed.peers.heartbeat import take_note_back
from autotp.distributed.replica_check import expect_collectives_of_replicas
from autotp.errors import Error, calling, within
from autotp.groups.failures import peer_error
from autotp.model_library import library
from autotp.ops.collectives import reduce
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.pytree import signature_of
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.attach_parameters import module_at, place_in, value_at
from autotp.passes.emit.count_load import layers_of_experts
from autotp.passes.emit.memory.budget import budget_on
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.emit.zero.room import Room
from autotp.passes.emit.zero.sharded_unit import ShardedUnit
from autotp.passes.emit.zero.step_gathers import RoomOfSteps, StepGathers, step_gathers
from autotp.passes.pipeline.stages import Division, Stage, staged
from autotp.passes.plan.experts.expert_parallel import exchanges, with_own_experts
from autotp.passes.program.emitted import Seat
from autotp.passes.program.program import Program
from autotp.rules.call import placeholders, returned
from autotp.runtime.calls.call_consistency import SAME_ROWS
from autotp.runtime.calls.executable import CHECKED_CALLS
from autotp.runtime.calls.graph_cache import MOST
from autotp.runtime.calls.graph_digest import digest, draws_alike, order_of, same_cards, same_graph, same_order
from autotp.runtime.fsdp import rows_as_dtensors
from autotp.runtime.holdings import HasHoldings, Holdings, saved_names, uncut
from autotp.runtime.torch_hooks.gradient_hooks import HooksOfStep
from autotp.runtime.torch_hooks.loading import part_in
from autotp.runtime.torch_hooks.optimizer_steps import count_anew, steps_taken
from autotp.sharding.boxes import is_sharded, local_of
from autotp.sharding.layout import Layout
from autotp.tracebacks import shorten_traceback
from autotp.training import process_groups as groups
from autotp.training.compute_dtype import ParameterReader, cast_arguments
from autotp.training.microbatches import (
    Batch,
    batch_tensors,
    expect_values,
    map_rows,
    places_of_rows,
    row_count,
    structure_of,
    totals_of,
)
from autotp.training.model_settings import model_settings
from autotp.training.original_model import OriginalModel, expect_one_mode
from autotp.training.pipeline.documents import Documents, LongestDocuments
from autotp.training.pipeline.expert_load import ExpertLoad, load_of_step
from autotp.training.pipeline.microbatch_graphs import Pipeline, checksums_of, fitting_graphs
from autotp.training.pipeline.microbatch_run import MicrobatchRun
from autotp.training.pipeline.rank_parameters import (
    ReadsParts,
    divide_rows,
    hold_parts_of_rank,
    readers_of,
    tensors_of_stages,
)
from autotp.training.pipeline.replica_gradients import ReplicaGradients
from autotp.training.pipeline.rest_of_loss import RestOfLoss
from autotp.training.pipeline.schedule_actions import actions_of
from autotp.training.pipeline.schedules import (
    StageModule,
    Training,
    analyse_microbatch,
    division,
    engine,
    expect_forward_alone,
    expect_parts_of_experts,
    learning_of,
    parameters_of_stage,
    stages_of,
)
from autotp.training.step_consistency import (
    DRAWS,
    NOW,
    REPLICA,
    Prints,
    agree_on_step,
    equal_replicas,
    frozen_checksums,
    groups_of,
    same_new_graph,
    step_state,
    with_rank_names,
    without_optimizer,
)
from autotp.training.step_facts import LateFacts, StepFacts, finite_tensors, raise_nonfinite
from autotp.training.trainer_module import InGraphs

T = TypeVar("T")
OpensModel = Callable[[Mesh], tuple[nn.Module, ReadsParts]]
"""mesh of all ranks -> a model on meta, and the function that reads its parameters."""
NO_OPTIMIZER = (
    "{} trained parameters and no optimizer stepped them, while other ranks stepped theirs: make an optimizer of "
    "trainer.parameters() on every rank, or freeze what is not trained (requires_grad_(False))"
)

OTHER_LENGTHS = (
    "the replicas have rows of other lengths, and the loss has a mean over all elements ({}): each row "
    "counts the same, however long it is. For a mean over tokens, divide a sum by the count of a mask"
)


def _shapes(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of a tensor, and that of what this rank has of it."""
    return tuple(tensor.shape), tuple(local_of(tensor).shape)


class Trainer(InGraphs, HasHoldings):
    """One rank's part of a model on a mesh of pipeline, data and tensor ranks, made by `autotp.distribute`.

    Parameters have the names of the original model: `trainer.parameters()` is for the optimizer.

    Attributes:
        mesh: the DeviceMesh of all processes, with the dimensions "pp", "dp", with `cp` "cp", and "tp".
        layouts: first name of a parameter or buffer of the model -> its layout on the tensor-parallel ranks.
        steps: the number of steps done, with those before the loaded checkpoint.
        plan: the blocks of each stage of the pipeline, its cost (multiplications) and the numbers that it keeps for
            backward; with `zero`, what this rank gathers and sums in a step; with `memory=`, what the budget did with
            the values of this rank's stages.
        place: this rank among its tensor-parallel ranks.
        everyone: this rank among all ranks.
        replicas: this rank among the ranks that hold the same stage of another replica.
        shared: name of a parameter that other pipeline ranks also hold -> the numbers of its ranks, and their group.
        tied: name of such a parameter -> this rank among the ranks that hold it.
        skeleton: the model on `meta`.
        model_settings: the attributes of the model's modules and configurations.
        files: the process group for checkpoints: one may be written in a thread while another thread trains.
        saving: the checkpoint that is being written, or None.
        thread: the thread that trains, loads or saves; None before the first of these.
        late: what is not yet known of the last steps on a GPU.

    Raises:
        Error: the model cannot be divided among the ranks.

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
    _division: Division
    place: Mesh
    everyone: Mesh
    replicas: Mesh
    shared: dict[str, tuple[list[int], Any]]
    tied: dict[str, Mesh]
    skeleton: nn.Module
    model_settings: dict[str, Any]
    files: Any
    saving: Future[None] | None
    thread: Thread | None

    def __init__(
        self,
        model: nn.Module | OpensModel,
        mesh: DeviceMesh,
        training: Training,
        example_inputs: Any,
        scaler: Any,
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self._watchers: list[Callable[[], bool]] = []
        self._failed, self._idle = "", False
        self.late, self._facts = LateFacts(), StepFacts(0, Fingerprint())
        self.mesh, self.steps, self._calls, self._scaler = mesh, 0, 0, scaler
        self.place = groups.with_sequences(make_mesh(None, mesh["tp"]), mesh)
        self._pp = mesh.get_group("pp")  # `mesh["pp"]` makes a mesh each time.
        axes = self.place.size, self.place.cp, mesh["dp"].size(), mesh["pp"].size()
        training = replace(training, memory=budget_on(training.memory, self.place.device, axes))
        self._training = training
        self.everyone = groups.world_mesh(self.place, mesh, timeout)
        self.files, self.saving, self.thread = new_group(None, timeout, "files", "gloo"), None, None
        # For errors, which name ranks by their places: `everyone` has numbers only.
        self._ranks = with_rank_names(self.everyone, mesh)
        self.replicas = groups.mesh_along(self.place, mesh.get_group("dp"), "dp")
        model, read_folder = (model, None) if isinstance(model, nn.Module) else model(self.everyone)
        self._signature = signature_of(model)
        self.model_settings = model_settings(model)  # Before forward runs: it may set attributes.
        self.__dict__["skeleton"] = skeleton_of(
            model
        )  # In `__dict__`, so that `nn.Module` does not register the model on meta.
        # The graph is captured in the dtype in which it computes. Buffers keep their own.
        for tensor in self.skeleton.parameters() if training.compute_dtype else ():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(training.compute_dtype)
        args, kwargs = self._arguments(*find_inputs(model, example_inputs), training.compute_dtype)
        tensors = batch_tensors(args, kwargs)
        rows = places_of_rows(tensors, [])
        self._longest = LongestDocuments()
        analysis = agree(
            self.everyone,
            lambda: self._first_analysis(args, kwargs, rows),
            lambda program: [same_graph(f"{digest(program)} {training}", self.everyone)],
        )
        self.layouts = dict(analysis.layouts)
        if training.ep > 1:  # Only now all ranks are known to have the same `ep`.
            self._ep, self._copies, self._cp_copies = groups.expert_meshes(self.place, mesh, training.ep, timeout)
        groups_of_ranks = groups_of(self._ranks.rank, mesh)

        def facts(lowered: fx.Graph) -> list[Fact]:
            cards = same_cards(self.place, draws_alike(lowered), groups_of_ranks[DRAWS])
            return [same_order(order_of(lowered), groups_of_ranks[REPLICA]), *cards]

        lowered = agree(self._ranks, lambda: rank_graph(analysis, self.place.rank, training.randomness), facts)
        self._division = replace(
            division(training, mesh["pp"].size(), analysis, lowered), experts=analysis.notes.get("experts", "")
        )
        stages = self._cut(analysis, lowered)
        # What cannot be is known before we take over.
        self._engine(analysis, {i: nn.Identity() for i in self._my_stages})
        self._exchanges = exchanges(analysis.graph, analysis.captured.parameters)
        self._expert_numbers = {
            name: number for (name, _), (*_, number) in layers_of_experts(lowered, analysis.captured.parameters)
        }
        self._load: ExpertLoad | None = None
        of_experts = dict.fromkeys(name for some in self._exchanges for name in some)
        needed = tensors_of_stages(analysis, stages, self._my_stages)
        layouts = self._with_own_experts(self.layouts)
        blocks = [block for i in self._my_stages for block in stages[i].blocks]
        hold_parts_of_rank(self, model, self.skeleton, blocks, needed, layouts, read_folder, self.place, self.everyone)
        whole = dict(self.named_parameters())
        # In the order of the model, which is the same on all ranks.
        self._experts = dict.fromkeys(
            rows_as_dtensors(self, [name for name in whole if name in of_experts], self._mesh_of_experts)
        )
        self._original = OriginalModel(model)
        self._holders = groups.holders(stages, analysis.captured.parameters, mesh["pp"].size(), self._stages_of)
        self._groups = groups_of(self._ranks.rank, mesh, self._holders.values())
        # In `__dict__`: a model may have a module named "shared" or "tied", whose attribute this would be.
        self.__dict__["shared"] = groups.shared(self._holders, mesh, timeout)
        self.__dict__["tied"] = self._tied()
        readers = readers_of(self, analysis, {i: stages[i] for i in self._my_stages})
        self._read = ParameterReader(training.compute_dtype, self._experts)
        at_once = mesh["pp"].size() == training.microbatches == 1
        self._works = {
            i: StageModule([m for m, some in readers.items() if i in some], at_once) for i in self._my_stages
        }
        self._several = groups.read_by_several_stages(
            stages, analysis.captured.parameters, mesh["pp"].size(), self._stages_of
        )
        gathers_once = training.gathers_once(mesh["pp"].size())
        self._room = None if gathers_once else Room[ShardedUnit]()
        self._room_of_steps = RoomOfSteps(self._room)
        if self._experts or self._gathers:
            names = analysis.captured.parameters
            read = {name for i in self._my_stages for name in parameters_of_stage(stages[i], names)}
            # Each of several stages would gather a parameter that they read.
            divide_rows(self, read - self._several if self._gathers else (), self._mesh_of_rows, whole)
        self._longest.note((args, kwargs), analysis)
        key, shapes = (True, rows, structure_of(args, kwargs)), [x.shape for x in tensors]
        self._pipelines = [self._pipeline(key, shapes, analysis, stages, checksums_of(analysis, lowered))]
        self._gradients = ReplicaGradients(
            self, self.shared, self._several, mesh.get_group("dp"), alone=mesh["pp"].size() == 1,
            under_backward=mesh["dp"].size() > 1 and not training.zero,  # Graphs that gather sum by themselves.
            experts=self._experts, copies=group_of(self._copies) if self._sums_copies else None,
        )  # fmt: skip
        self._hooks = HooksOfStep({}, {})
        for name, parameter in self.named_parameters():
            as_cut(parameter, Cut(name, self.layouts[name], self.place))
        self._seed()

    @property
    def plan(self) -> Division:
        """The division into stages; with `memory=`, what the budget did in the last step: see the class."""
        load = () if self._load is None else (self._load.table(),)
        gathers = (self._step_gathers().lines(),) if self._gathers else ()
        return replace(self._division, budgets=(*load, *gathers, *self._budgets()))

    def _step_gathers(self) -> StepGathers:
        """Returns what this rank gathers and sums in a step."""
        training, ranks = self._training, self._pp.size()
        actions = actions_of(training.engine, ranks, training.microbatches)[self._pp.rank()]
        stages = {i: graph.units_with_rows() for i, graph in self._pipelines[0].stages.items()}
        sums = training.microbatches if training.zero > 1 and ranks == 1 else 1
        passes = [(action.stage, action.half == "F") for action in actions]
        if self._pipelines[0].functions is not None and ranks * training.microbatches > 1:
            passes = [(stage, True) for stage, is_forward in passes if is_forward] + passes  # A pass for the sums.
        return step_gathers(training.zero, stages, passes, sums)

    @property
    def load(self) -> ExpertLoad:
        """How many rows chose each expert in the last step, in all layers, on all ranks together.

        Raises:
            Error: there was no step yet, or the model has no experts.
        """
        if self._load is None:
            raise Error(
                "Trainer.load: no step has counted rows of experts",
                fix="trainer.step(...) first, with a model whose layers read stacks of experts' weights",
            )
        return self._load

    def _budgets(self) -> Iterator[Table | tuple[str, ...]]:
        """Yields the table and the lines about the budget of each stage of this rank that has run."""
        for number in self._my_stages:
            graphs = (pipeline.stages[number].module for pipeline in reversed(self._pipelines) if pipeline.training)
            memory = next((memory for graph in graphs if (memory := memory_plan(graph)) is not None), None)
            if memory is not None:
                yield memory.table()
                yield (*[f"stage       {number}"] * (len(self._division.blocks) > 1), *memory.lines())

    def _in_graphs(self) -> Mapping[str, Any]:
        """Returns the settings of the original model that have no name of the trainer's own."""
        settings = vars(self.__dict__.get("skeleton", nn.Module()))
        declared = Trainer.__annotations__
        return {name: value for name, value in settings.items() if name not in declared and not name.startswith("_")}

    def _every_tensor(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named_parameters(remove_duplicate=False)
        yield from self.named_buffers(remove_duplicate=False)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads what `state_dict()` returned on this rank, or whole tensors.

        All ranks call it.

        Args:
            state_dict: as `state_dict()` returned it, or with whole tensors.
            args, kwargs: as for a module.

        Raises:
            Error: on every rank, if it has other names or shapes on one. Nothing is changed.
        """
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}

        parts = {name: self._own_part(name, tensor, tensors.get(name)) for name, tensor in state_dict.items()}

        def expect_own_parts() -> None:
            for name, tensor in parts.items():
                if name not in tensors or _shapes(tensor) != _shapes(tensors[name]):
                    raise Error(
                        f"Trainer.load_state_dict: `{name}` is not this rank's part, as trainer.state_dict() has it",
                        fix="autotp.load_full_state_dict(trainer, state), for the state dict of the whole model",
                    )

        agree(self._ranks, expect_own_parts)
        return super().load_state_dict(parts, *args, **kwargs)

    def _own_part(self, name: str, tensor: Any, local: Tensor | None) -> Any:
        """Returns what this rank has of a whole tensor; other values as they are."""
        layout = self.layouts.get(name)
        if layout is None or not isinstance(local, CutTensor) or isinstance(tensor, DTensor):
            return tensor
        if tuple(tensor.shape) != layout.shape:
            return tensor
        part = tensor if layout.dim is None else part_in(tensor, layout, self.place.rank)
        return rows_of_part(part, local) if isinstance(local, DTensor) else part

    # ---- the tensors of this rank

    def holdings(self) -> Holdings:
        """Returns this rank's tensors, their layouts, and the ranks that share them."""
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        rank, ranks = self._pp.rank(), self._pp.size()
        # The first rank that holds a shared parameter counts it.
        later = {name for name, (holders, _) in self.shared.items() if holders[0] != rank}
        group = self.mesh.get_group("pp").group_name if ranks > 1 else None
        place = self.place
        replica = self.replicas.rank * place.cp + place.cp_rank
        of_experts = frozenset(name for name, tensor in tensors.items() if tensor in self._experts)
        replicated = [(place, uncut(tensors, self.layouts)), (self.replicas, frozenset(tensors) - of_experts)]
        replicated += [(self._copies, of_experts)] if of_experts else []
        replicated += [] if place.sequence is None else [(place.sequence, frozenset(tensors) - of_experts)]
        replicated += [(self._cp_copies, of_experts)] if of_experts else []
        for mesh in dict.fromkeys(self.tied.values()):
            replicated.append((mesh, frozenset(name for name, tied_mesh in self.tied.items() if tied_mesh is mesh)))
        # The skeleton has the tensors of all stages, and this rank only those of its own.
        saved, shapes, beside, left_out = saved_names(self.skeleton)
        return Holdings(
            tensors, frozenset(tensors) - later, saved, shapes, self.layouts, place, self.everyone,
            group, replica, alike=tuple(replicated), beside=beside, left_out=left_out,
        )  # fmt: skip

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that forward and backward compute in; None: that of the parameters."""
        return self._training.compute_dtype

    @property
    def _my_stages(self) -> list[int]:
        return self._stages_of(self._pp.rank())

    def _stages_of(self, rank: int) -> list[int]:
        """Returns the numbers of the stages on a rank of the pipeline."""
        return stages_of(self._training, rank, self._pp.size())

    def _analyse(
        self, training: bool, args: Any, kwargs: Any, rows: frozenset[int], padded: bool | None = None
    ) -> Program:
        """Returns the model's program in one mode; once this rank holds parameters, in their layouts."""
        self.skeleton.train(training)
        layouts = getattr(self, "layouts", None)
        place, device_type = self.place, self.place.device.type
        program = analyse_microbatch(
            self.skeleton, args, kwargs, place.size, self._training, layouts, rows, place.cp_rank,
            device_type=device_type, padded=padded,
        )  # fmt: skip
        expect_parts_of_experts(program, self._training.ep, self.replicas.size)
        return program

    def _arguments(self, args: Any, kwargs: Any, dtype: torch.dtype | None) -> tuple[Any, Any]:
        """Returns the arguments of a step by name, in the dtype in which it computes."""
        args, kwargs = self._signature.by_name(args, kwargs)
        arguments: tuple[Any, Any] = cast_arguments((args, library().with_documents(self.skeleton, kwargs)), dtype)
        return arguments

    def _first_analysis(self, args: Any, kwargs: Any, rows: frozenset[int]) -> Program:
        # A copy, as `train()` changes the modes of the skeleton.
        original = copy.deepcopy(self.skeleton)
        expect_one_mode(original, self.skeleton.train())
        return self._analyse(True, args, kwargs, rows)

    def _cut(self, analysis: Program, lowered: fx.Graph) -> list[Stage]:
        return staged(lowered, self._division.blocks, list(analysis.captured.parameters))

    def _tied(self) -> dict[str, Mesh]:
        """Returns, for each parameter in `shared`, the mesh of the ranks that hold it."""
        every = dict.fromkeys(group for _, group in self.shared.values())
        meshes = {group: groups.mesh_along(self.place, group, "pp") for group in every}
        return {name: meshes[group] for name, (_, group) in self.shared.items()}

    @cached_property
    def _mesh_of_experts(self) -> DeviceMesh:
        """The replicas that have some rows of a stack of experts each: with ZeRO also those with the same experts."""
        if self._training.ep in (1, self.replicas.size):
            return self.mesh["dp"]
        return groups.mesh_of_rows(self._ep, *[self._copies] * self._gathers)

    @property
    def _mesh_of_rows(self) -> DeviceMesh:
        """The replicas that have some rows of another parameter each, or all of it."""
        return self.mesh["dp"] if self._gathers else self._mesh_of_experts

    def _with_own_experts(self, layouts: dict[str, Layout]) -> dict[str, Layout]:
        """Returns layouts with the rows of this rank's experts."""
        return with_own_experts(layouts, self._exchanges, self._ep.size, self._ep.rank) if self._exchanges else layouts

    @property
    def _gathers(self) -> bool:
        """Whether replicas keep rows of parameters, and the graphs gather them: ZeRO."""
        return self._training.zero > 0 and self.replicas.size > 1

    @property
    def _sums_copies(self) -> bool:
        """Whether gradients of experts are summed over the ranks with the same ones, where no graph sums them."""
        return bool(self._experts) and self._copies.size > 1 and not self._gathers

    def _divides(self, parameter: Tensor) -> bool:
        """Whether ZeRO divides a parameter's rows over replicas, of experts over those with the same ones."""
        return self._gathers and (parameter not in self._experts or self._copies.size > 1)

    def _pipeline(
        self, key: Any, shapes: Sequence[Any], analysis: Program, stages: Sequence[Stage], checksums: tuple[int, int]
    ) -> Pipeline:
        """Returns the graphs of this rank's stages in one mode."""
        graphs = {i: self._graph(stages[i], analysis, self._seat(i)) for i in self._my_stages}
        guard = self._original.guard(analysis.captured)
        # Only between stages do zeros come back where one device has no gradient.
        learning = learning_of(analysis) if self._pp.size() > 1 else None
        engines = self._engines(analysis, training=bool(key[0]))
        return Pipeline(key, shapes, analysis, graphs, *engines, guard, learning, checksums)

    def _read_by_replicas(self, pipeline: Pipeline) -> int:
        """Returns a checksum of the layers whose replicas communicate, in order; 0 if they do not.

        These are parameters that they gather, or sum gradients of, and experts whose rows they exchange. What they send
        has no name: other layers of the same sizes would be added without an error.
        """
        if self.replicas.size == 1 or not (pipeline.training or self._gathers or pipeline.exchanges):
            return 0
        parameters, (names, blocks) = dict(self.named_parameters()), pipeline.read
        trained = [name for name in names if name in parameters and parameters[name].requires_grad]
        layers = (names, blocks) if self._gathers else trained
        return zlib.crc32(repr((layers, pipeline.exchanges)).encode())

    def _engines(self, analysis: Program, training: bool) -> tuple[Any, Any]:
        """Returns the schedule that runs this rank's stages, and the one that runs forward before it, or None.

        Raises:
            Error: forward has to run before it, and the schedule always runs backward.
        """
        engine = self._engine(analysis, self._works)
        if engine is None or not training or analysis.totals is None or analysis.totals.functions is None:
            return engine, None
        expect_forward_alone(self._training, self._pp.size(), analysis)
        return engine, self._engine(analysis, self._works)

    def _engine(self, analysis: Program, works: Mapping[int, nn.Module]) -> Any:
        """Returns the schedule that runs this rank's stages; None if the pipeline has one rank."""
        group = self.mesh.get_group("pp")
        if group.size() == 1:
            return None
        # x: [1], the loss of a microbatch.
        return engine(self._training, works, analysis, self.place.device, group, lambda x, _: self._scale(x.sum()))

    def _seat(self, stage: int) -> Seat:
        """Returns what a budget of memory needs to know of a stage's place."""
        mine, count = self._my_stages, len(self._division.blocks)
        return Seat(
            rank=self.place.rank, kept_calls=self._training.engine.flight(stage, count, self._training.microbatches),
            replicas=self.replicas.size, share=1 / len(mine), microbatches=self._training.microbatches,
            gathers_once=self._room is None,
        )  # fmt: skip

    def _graph(self, stage: Stage, analysis: Program, seat: Seat) -> RankProgram:
        """Returns a stage's graph for this rank; its blocks read their parameters from the trainer's modules."""
        captured, place = analysis.captured, self.place
        expect_collectives_of_replicas(captured.graph, place)
        names = captured.parameters | captured.buffers
        places = {name: place_in(self, name) for name in (names[x] for x in placeholders(stage.graph) if x in names)}
        if lacking := [name for name in places if name not in dict(self._every_tensor())]:
            raise Error(
                f"a batch of another kind needs `{lacking[0]}` in a stage whose rank does not have it",
                fix="example_inputs, or a first step, in which forward runs all blocks",
            )
        owners = {name: module_at(self, name) for name in stage.blocks}
        axes = place.groups | (self._ep.groups | self._cp_copies.groups if self._exchanges else {})
        program = replace(analysis, layouts=self._with_own_experts(analysis.layouts))
        ready = rank_program(stage.graph, program, self._training, place.device, axes, seat)
        if self._gathers:
            values = {name: value_at(at) for name, at in places.items()}
            rows = {name for name, value in values.items() if is_sharded(value) and self._divides(value)}
            ready = ready.gathering(rows, self._training.compute_dtype, self._room)
        return replace(ready.attached(places, owners.get, self._read), received=stage.received)

    def _seed(self) -> None:
        """Seeds each replica and each pipeline rank differently, by a random number of the first rank."""
        if self._pp.size() * self.replicas.size > 1:
            seed = torch.randint(2**62, (), device=self.everyone.device)
            broadcast_from_first(seed, self.everyone)
            # The number of the stage and the replica: ranks along tp and cp draw alike.
            torch.manual_seed(int(seed) + self.everyone.rank // (self.place.size * self.place.cp))

    # ---- a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises Error: a trainer has `step` and `evaluate` in place of a call.

        Args:
            args, kwargs: ignored.

        Raises:
            Error: always.
        """
        raise Error("a trainer cannot be called", fix="trainer.step(...), or trainer.evaluate(...)")

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises Error: a parallel model generates, with the parameters of a trainer.

        Args:
            args, kwargs: ignored.

        Raises:
            Error: always.
        """
        raise Error(
            "a trainer does not generate: its ranks have stages, other rows, or other experts",
            fix="model = autotp.parallelize(MODEL, tp), then autotp.load_full_state_dict(model, "
            "autotp.full_state_dict(trainer)) and model.generate(...), on every rank",
            alternative="autotp.save_pretrained(trainer, path), and autotp.from_pretrained(path, tp)",
        )

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs forward and backward, adds to each `.grad`, and returns the loss of the whole batch (shape []).

        The whole batch is the batch of all replicas, and every rank gets its loss. The ranks of one replica pass the
        same rows.

        Args:
            args, kwargs: what the model's `forward` takes; tensors are this replica's rows, [batch/dp ...], on the
                rank's device or on the CPU.

        Raises:
            Error: on every rank. The batch does not divide into the microbatches; the ranks of one replica have
                different batches; a rank was lost; or the loss is infinite or undefined (the error names the first
                parameter or gradient that is). On a GPU it is raised in one of the next calls, for the step that it
                names: NOTE [No rank waits for its device].
        """
        self._watchers = [watcher for watcher in self._watchers if watcher()]
        pipeline, inputs = self._begin(True, args, kwargs)
        before = {parameter: parameter.grad for parameter in self.parameters()}  # Summed over the ranks already.
        self._hooks = hooks = HooksOfStep(before, {p: name for name, p in self.named_parameters()})
        try:
            with hooks.put_off():
                self.zero_grad(set_to_none=True)
                self._scale(torch.zeros((), device=self.place.device))  # Initialises the scaler also without a loss.
                sums = self._gradients.begin(hooks)
                for work in self._works.values():
                    work.sums = sums
                losses = self._named_if_lost("Trainer.step", lambda: self._run(pipeline, inputs))
                self._named_if_lost("Trainer.step", lambda: self._gradients.finish(sums, hooks.stepped))
                self._drop_zeros(pipeline.learning)
        except BaseException:  # The step adds nothing, and what was there stays.
            for parameter, grad in before.items():
                parameter.grad = grad
            raise
        within("Trainer.step", lambda: self._named_if_lost("Trainer.step", hooks.run))
        self.steps += 1
        self._room_of_steps.note(pipeline.stages.values())
        loss = self._named_if_lost("Trainer.step", lambda: self._sum_losses(pipeline, losses))
        if self._expert_numbers:
            loads = [load for graph in pipeline.stages.values() for load in graph.loads]
            # The ranks along `tp` have the same rows, and those along `cp` of some layers.
            counted = [] if self.place.rank else [*self._expert_numbers]
            counted = [name for name in counted if not self.place.cp_rank or name not in pipeline.experts_of_all]
            how = loads, self._training.microbatches, counted, self._ranks
            self._load = self._named_if_lost("Trainer.step", lambda: load_of_step(self._expert_numbers, *how))
        if self._scaler is None:
            within("Trainer.step", lambda: self._expect_finite(loss))
        return loss

    def _expect_finite(self, loss: Tensor) -> None:
        """Raises Error if a loss is not finite: now, or on a GPU once it has come from there."""
        if loss.is_cuda:
            self._facts.note_loss(loss, self)
        elif not torch.isfinite(loss):
            raise_nonfinite(float(loss), self.steps, *finite_tensors(self), partial(agree, self.everyone))

    def watch(self, watcher: Callable[[], bool]) -> None:
        """Calls a function before each following step, until it returns False; `Estimate.watch` uses it.

        Args:
            watcher: must not communicate, or it does so on every rank.
        """
        self._watchers.append(watcher)

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the loss of a whole batch (shape []) in evaluation mode, without gradients.

        Args:
            args, kwargs: as for `step`.

        Raises:
            Error: as `step`; or the schedule always runs backward, as "zero-bubble-v" does.
        """
        schedule = self._training.schedule
        if not self._training.engine.evaluates and self._pp.size() > 1:
            problem = f'Trainer.evaluate: torch\'s schedule "{schedule}" always runs backward'
            raise Error(problem, fix='schedule="zero-bubble"')
        pipeline, inputs = self._begin(False, args, kwargs)
        losses = self._named_if_lost("Trainer.evaluate", lambda: self._run(pipeline, inputs))
        return self._named_if_lost("Trainer.evaluate", lambda: self._sum_losses(pipeline, losses))

    def _named_if_lost(self, method: str, run: Callable[[], T]) -> T:
        """Returns what `run` returns; raises Error if a rank is lost meanwhile."""
        with calling(method):  # An exception that is no Error is noted for the other ranks.
            try:
                return run()
            except Exception as error:
                shorten_traceback(error, isinstance(error, Error), shows_itself=False)
                if isinstance(error, Error) or not isinstance(error, RuntimeError):
                    raise
                lost = peer_error(method, str(self._ranks.group), error, self._ranks)
                if lost is None:
                    raise  # `raise error from error` would make it its own cause.
                raise lost from error

    def _begin(self, training: bool, args: Any, kwargs: Any) -> tuple[Pipeline, dict[str, Tensor]]:
        """Returns the graphs for a batch, ready to run, and the batch's tensors by name."""
        call = f"Trainer.{'step' if training else 'evaluate'}"
        self.thread = current_thread()
        return within(call, lambda: self._named_if_lost(call, lambda: self._ready(training, args, kwargs)))

    def _ready(self, training: bool, args: Any, kwargs: Any) -> tuple[Pipeline, dict[str, Tensor]]:
        pipeline, tensors = self._graphs_for(training, args, kwargs)
        names = pipeline.analysis.captured.inputs
        stay = [name in pipeline.on_host for name in names]
        moved = to_device(tensors, self.place.device, stay)
        for name, x, y in zip(names, tensors, moved, strict=True):
            if name in pipeline.documents.tokens:
                READ.copied(x, y)
        inputs = dict(zip(names, moved, strict=True))
        totals = totals_of(pipeline.analysis, inputs, self, self.mesh.get_group("dp"))
        inputs = pipeline.documents.divided(inputs, self._training.microbatches)
        rest, last = None, len(self._division.blocks) - 1
        if pipeline.functions is not None and last in self._works:
            replicas, parts = self.mesh.get_group("dp"), self._training.microbatches
            rest = RestOfLoss(pipeline.functions, self.place.device, replicas, parts)
        for i, work in self._works.items():
            work.use(pipeline.stages[i], totals, rest if i == last else None)
        return pipeline, inputs

    def _graphs_for(self, training: bool, args: Any, kwargs: Any) -> tuple[Pipeline, list[Tensor]]:
        """Returns the graphs for a batch and the batch's tensors; where a rank has no graphs, all ranks capture.

        Raises:
            Error: on every rank. A rank cannot take its batch or has another than its replica, or the capture failed.
        """
        attempt, problem = tried(lambda: self._as_batch(training, args, kwargs))
        self._calls += 1
        values = self._calls <= CHECKED_CALLS
        frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]
        arguments = attempt[0].arguments if attempt else None
        # With a capacity, each replica has as many slots as it has rows: rows travel between equal numbers of slots.
        equal_slots = self._training.capacity is not None and bool(self._exchanges)
        state = step_state(training, frozen, arguments, self.place, values, steps_taken(self), equal_slots)
        pipeline = fitting_graphs(self._pipelines, attempt[0]) if attempt else None
        room = self._room_of_steps.begin(repr((attempt[0].key, attempt[0].shapes)) if attempt else "")
        read = self._read_by_replicas(pipeline) if pipeline else 0
        state = state._replace(captures=pipeline is None, read=read, room=room)
        now = fingerprint(attempt[0].arguments) if attempt else Fingerprint()
        prints: Prints = {**self.late.prints(), NOW: now.as_ints() if now.arrived is None else None}
        tied = frozen_checksums(frozen, self._holders)
        agreed = agree_on_step(
            self._ranks, self._groups, state, tied, problem, prints, self.late.count(), values, not self._idle
        )
        if equal_slots and not agreed.lengths:
            raise Error(
                f"ep={self._training.ep} beside capacity={self._training.capacity}: "
                "replicas have batches of other shapes",
                fix="batches of one shape, or capacity=None",
            )
        self._room_of_steps.agree(agreed.room)
        self.late.take(agreed.arrived, self.everyone)
        self._facts = StepFacts(self.steps + training, Fingerprint() if now.arrived is None else now)
        if self.place.device.type == "cuda":
            self.late.add(self._facts)
        # All ranks are here, and agree.
        count_anew(self)
        take_note_back()
        # Only in these calls all states were gathered.
        if values and equal_replicas(agreed.rows, self._groups):
            warnings.warn(SAME_ROWS.format(self.replicas.size), stacklevel=5)
        if agreed.idle and not self._idle:
            self._idle = True
            warnings.warn(NO_OPTIMIZER.format(without_optimizer(agreed.rows, self._ranks)), stacklevel=5)
        (batch,) = attempt
        if agreed.captures:
            # A rank that has graphs takes part, too: all ranks call `agree`.
            known = pipeline
            pipeline = agree(
                self._ranks,
                lambda: self._renewed(known) if known else self._capture(training, batch),
                lambda made: same_new_graph(self._groups, *made.checksums, self._read_by_replicas(made)),
            )
            self._keep(pipeline, known)
        assert pipeline is not None  # Captured above otherwise.
        totals = pipeline.analysis.totals
        if totals is not None and totals.by_rows and not agreed.lengths:
            warnings.warn(OTHER_LENGTHS.format(totals.by_rows[0]), stacklevel=5)
        return pipeline, batch.tensors

    def _as_batch(self, training: bool, args: Any, kwargs: Any) -> Batch:
        """Returns the arguments as a batch.

        Raises:
            Error: its rows do not divide into the microbatches, or an earlier call failed in the middle.
        """
        if self._failed:
            raise Error(
                f"an earlier call failed in the middle, and stages or shards are left there: {self._failed}",
                fix="mend the batch that failed, and start again from a checkpoint",
            )
        for pipeline in self._pipelines:
            self._original.expect_unchanged(pipeline.guard)
        args, kwargs = self._arguments(args, kwargs, self._training.compute_dtype)
        expect_values(batch_tensors(args, kwargs))
        args, kwargs = self._longest.as_inputs((args, kwargs), self.place.device)
        tensors, structure = batch_tensors(args, kwargs), structure_of(args, kwargs)
        pipelines = [pipeline for pipeline in self._pipelines if pipeline.key[-1] == structure]
        places = places_of_rows(tensors, [pipeline.analysis for pipeline in pipelines])
        size = row_count(tensors, self._training.microbatches, places) // self._training.microbatches
        micro, key = map_rows((args, kwargs), places, lambda x: x[:size]), (training, places, structure)
        batch = Batch((args, kwargs), micro, tensors, places, key, [x.shape for x in batch_tensors(*micro)])
        fitting = fitting_graphs(self._pipelines, batch, of_size=False)
        if fitting is not None:  # Else a capture looks.
            fitting.documents.expect_whole(tensors, self._training.microbatches)
        return batch

    def _capture(self, training: bool, batch: Batch) -> Pipeline:
        """Returns new graphs for a batch; if only the size differs from known graphs, these with a new engine."""
        fit = fitting_graphs(self._pipelines, batch, of_size=False)
        if fit is not None:
            engine, first = self._engines(fit.analysis, training)
            pipeline = replace(fit, shapes=batch.shapes, engine=engine, first=first)
        else:
            args, kwargs = batch.micro
            analysis = self._analyse(training, args, kwargs, batch.rows, batch.padded)
            Documents(analysis).expect_whole(batch.tensors, self._training.microbatches)
            self._longest.note(batch.arguments, analysis)
            lowered = rank_graph(analysis, self.place.rank, self._training.randomness)
            stages = self._cut(analysis, lowered)
            pipeline = self._pipeline(batch.key, batch.shapes, analysis, stages, checksums_of(analysis, lowered))
        return pipeline

    def _renewed(self, pipeline: Pipeline) -> Pipeline:
        """Returns graphs that this rank has, for a step in which another replica makes some.

        NOTE [Trials together]
        A new engine of torch's first runs the stages on zeros, to learn the shapes that they send. There parameters
        are gathered, with all replicas. So where one replica has a new engine, each of them makes a new one.
        """
        if pipeline.engine is None or not self._training.zero:
            return pipeline
        engine, first = self._engines(pipeline.analysis, pipeline.training)
        return replace(pipeline, engine=engine, first=first)

    def _keep(self, pipeline: Pipeline, known: Pipeline | None) -> None:
        """Keeps new graphs for later calls, or in the place of `known` ones. Warns where no sequence is cut over cp."""
        if known is not None:
            self._pipelines = [pipeline if existing is known else existing for existing in self._pipelines]
            return
        if all(pipeline.analysis is not existing.analysis for existing in self._pipelines):
            warn_of_whole_sequences(pipeline.analysis, f"Trainer.{'step' if pipeline.training else 'evaluate'}")
        self._pipelines.append(pipeline)
        if len(self._pipelines) > MOST:
            del self._pipelines[1]  # The first stays: it is that of an ordinary step. Of the others the oldest goes.

    def _run(self, pipeline: Pipeline, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Runs forward, and in training backward; returns the microbatches' losses on ranks with the last stage."""
        try:
            with self._read.one_step():
                return MicrobatchRun(
                    pipeline, self._works, inputs, self._training,
                    has_last=len(self._division.blocks) - 1 in self._my_stages,
                    adds_rest=self.replicas.rank == 0, scale=self._scale, device=self.place.device,
                    hooks=self._hooks, completes=not self._exchanges, replicas=self.replicas.size,
                ).losses()  # fmt: skip
        except BaseException as error:  # Other ranks wait for a stage, or a part of the gradients is held.
            divided = self._pp.size() > 1 or (self._training.zero and self.replicas.size > 1)
            divided = divided or bool(self._exchanges)
            self._failed = f"{type(error).__name__}: {error}".splitlines()[0] if divided else ""
            raise
        finally:
            for graph in pipeline.stages.values():
                graph.end_step()

    def _scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        return scaled

    def _sum_losses(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> Tensor:
        """Returns the loss of the whole batch, on every rank."""
        dtype = returned(pipeline.analysis.graph)[0].meta["val"].dtype
        # A rank without the last stage has no losses, and adds 0.
        loss = sum((loss.detach() for loss in losses), torch.zeros((), dtype=dtype, device=self.place.device))
        if self.place.rank or self.place.cp_rank:  # The first rank's loss counts; of others, show what is not finite.
            loss = torch.where(torch.isfinite(loss), 0.0, loss)
        loss = reduce(loss, self._ranks.group)
        scale = self._scale(torch.ones_like(loss))  # `get_scale()` would wait for the device.
        return (loss / scale).to(loss.dtype) if self._scaler is not None else loss

    def _drop_zeros(self, learning: Collection[str] | None) -> None:
        """Leaves no gradient where one device has none: a stage gets zeros back for what the next one detaches."""
        for name, parameter in self.named_parameters():
            if learning is not None and name not in learning:
                parameter.grad = None
