"""Trainer: one rank of a model under tensor, pipeline and data parallelism, and the step that trains it.

A rank is at one place of a mesh of pipeline, data and tensor ranks. `compiler.py` makes the graph of its tensor rank;
of this graph the trainer runs the stages of its pipeline rank (`passes/pipeline/stages.py`), on the microbatches of its
replica. The loss is a sum over all microbatches and replicas (`passes/pipeline/loss_totals.py`), so gradients are
added without weights.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from threading import Thread, current_thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autotp.attached import READ
from autotp.compiler import rank_graph, rank_program, warn_of_whole_sequences
from autotp.diagnostics.report import memory_plan
from autotp.display.sheet import Table
from autotp.distributed.agreement import Fact, agree, line_sums, tried
from autotp.distributed.cut_tensors.cut_parameter import Cut, CutTensor, as_cut
from autotp.distributed.cut_tensors.rows_of_parts import rows_of_part
from autotp.distributed.device_arguments import inputs_on_host, to_device
from autotp.distributed.fingerprint import Fingerprint, fingerprint
from autotp.distributed.mesh import Mesh, broadcast_from_first, group_of, make_mesh, new_group
from autotp.distributed.peers.heartbeat import take_note_back
from autotp.distributed.replica_check import expect_collectives_of_replicas
from autotp.errors import Error, calling, within
from autotp.groups.failures import peer_error
from autotp.model_library import library
from autotp.ops.collectives import reduce
from autotp.passes.capture.example_inputs import example_inputs as find_inputs
from autotp.passes.capture.python_state.guard import Guard
from autotp.passes.capture.pytree import signature_of
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.attach_parameters import Owner, module_at, place_in, value_at
from autotp.passes.emit.memory.budget import budget_on
from autotp.passes.emit.rank_program import RankProgram
from autotp.passes.emit.zero.room import FEWEST, Room
from autotp.passes.emit.zero.sharded_unit import ShardedUnit
from autotp.passes.pipeline.stages import Division, Stage, staged
from autotp.passes.plan.experts.expert_parallel import EP, exchanges
from autotp.passes.program.emitted import Seat
from autotp.passes.program.program import Program
from autotp.rules.call import placeholders, returned
from autotp.runtime.call_consistency import SAME_ROWS
from autotp.runtime.executable import CHECKED_CALLS, MOST
from autotp.runtime.fsdp import as_dtensors, rows_as_dtensors
from autotp.runtime.graph_digest import digest, draws_alike, order_of, same_cards, same_graph, same_order
from autotp.runtime.holdings import HasHoldings, Holdings, saved_names, uncut
from autotp.runtime.shard_parameters import leave_behind, shard_parameters
from autotp.runtime.torch_hooks.gradient_hooks import HooksOfStep, move_hooks
from autotp.runtime.torch_hooks.loading import part_in
from autotp.runtime.torch_hooks.optimizer_steps import count_anew, steps_taken
from autotp.sharding.boxes import is_sharded, local_of
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds
from autotp.source_location import block_in, block_of
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
from autotp.training.pipeline.full_masks import are_full, masks_left_out
from autotp.training.pipeline.gradient_buckets import GradientSums, sum_in_buckets
from autotp.training.pipeline.rest_of_loss import RestOfLoss, first_pass
from autotp.training.pipeline.schedules import (
    StageModule,
    Training,
    analyse_microbatch,
    division,
    engine,
    expect_forward_alone,
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
from autotp.training.trainer_module import InGraphs, as_module_of

T = TypeVar("T")
ReadsParts = Callable[[Mapping[str, Layout], Mesh, Collection[str]], Mapping[str, Tensor]]
"""(layouts, tensor-parallel mesh, names of what this rank holds) -> its parts of what files have."""
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


def checksums_of(analysis: Program, lowered: fx.Graph) -> tuple[int, int]:
    """Returns checksums of a graph before sequences are cut, and of a rank's collectives in order."""
    return zlib.crc32(repr(line_sums(digest(analysis))).encode()), order_of(lowered)


@dataclass(frozen=True)
class Pipeline:
    """The graphs of one mode, for microbatches of one kind.

    Attributes:
        key: the mode, the places of the tensors with rows, and the arguments' structure.
        shapes: the shapes of a microbatch's tensors; an engine can run these only.
        analysis: the program of a microbatch.
        stages: number of a stage of this rank -> its graph.
        engine: torch's schedule that runs the stages; None if this rank has the whole pipeline.
        first: the same for forward alone, before a step whose loss needs sums over the batch; None if there is none.
        guard: sees whether the original model is as it was captured.
        learning: the names of the parameters that have a gradient; None means all that the graphs read.
        checksums: those of the graph before sequences are cut, and of this rank's collectives in order.
    """

    key: Any
    shapes: Sequence[Any]
    analysis: Program
    stages: Mapping[int, RankProgram]
    engine: Any
    first: Any
    guard: Guard
    learning: frozenset[str] | None
    checksums: tuple[int, int]

    @property
    def training(self) -> bool:
        """Whether the graphs are for training."""
        return bool(self.key[0])

    @property
    def functions(self) -> fx.Graph | None:
        """The part of the loss that is computed from sums over the batch."""
        assert self.analysis.totals is not None
        return self.analysis.totals.functions

    @cached_property
    def read(self) -> tuple[list[str], list[str]]:
        """The names of the parameters that the graph reads, and the blocks in order."""
        graph, names = self.analysis.graph, self.analysis.captured.parameters
        read = [names[node.name] for node in graph.find_nodes(op="placeholder") if node.users and node.name in names]
        blocks = dict.fromkeys(block_of(node) for node in graph.nodes if node.op != "placeholder")
        return sorted(read), [block for block in blocks if block]

    @cached_property
    def documents(self) -> Documents:
        """What is known of packed documents in a batch."""
        return Documents(self.analysis)

    def runs(self, shapes: Sequence[Any]) -> bool:
        """True if stages send tensors of the same shapes for these. The number of documents does not matter."""
        places = [i for i, name in enumerate(self.analysis.captured.inputs) if name not in self.documents.beside]
        return self.engine is None or all(self.shapes[i] == shapes[i] for i in places)

    @cached_property
    def masks_left_out(self) -> list[int]:
        """The places, among a batch's tensors, of the masks that must have ones only for these graphs."""
        return masks_left_out(self.analysis.captured)

    @cached_property
    def on_host(self) -> frozenset[str]:
        """The names of the inputs that an operator wants on the CPU."""
        return inputs_on_host(self.analysis.graph, self.analysis.captured.inputs)


class Trainer(InGraphs, HasHoldings):
    """One rank's part of a model on a mesh of pipeline, data and tensor ranks, made by `autotp.distribute`.

    Parameters have the names of the original model: `trainer.parameters()` is for the optimizer.

    Attributes:
        mesh: the DeviceMesh of all processes, with the dimensions "pp", "dp", with `cp` "cp", and "tp".
        layouts: first name of a parameter or buffer of the model -> its layout on the tensor-parallel ranks.
        steps: the number of steps done, with those before the loaded checkpoint.
        plan: the blocks of each stage of the pipeline, its cost (multiplications) and the numbers that it keeps for
            backward; with `memory=`, what the budget did with the values of this rank's stages.
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
        training = replace(training, memory=budget_on(training.memory, self.place.device))
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
            self._ep, self._copies = groups.expert_meshes(self.place, mesh, training.ep, timeout)
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
        of_experts = dict.fromkeys(name for some in self._exchanges for name in some)
        self._hold(model, analysis, stages, read_folder, of_experts)
        whole = dict(self.named_parameters())
        # In the order of the model, which is the same on all ranks.
        self._experts = dict.fromkeys(
            rows_as_dtensors(self, [name for name in whole if name in of_experts], self._mesh_of_rows)
        )
        self._original = OriginalModel(model)
        self._holders = groups.holders(stages, analysis.captured.parameters, mesh["pp"].size(), self._stages_of)
        self._groups = groups_of(self._ranks.rank, mesh, self._holders.values())
        # In `__dict__`: a model may have a module named "shared" or "tied", whose attribute this would be.
        self.__dict__["shared"] = groups.shared(self._holders, mesh, timeout)
        self.__dict__["tied"] = self._tied()
        readers, self._read = self._readers(stages, analysis), ParameterReader(training.compute_dtype, self._experts)
        at_once = mesh["pp"].size() == training.microbatches == 1
        self._works = {
            i: StageModule([m for m, some in readers.items() if i in some], at_once) for i in self._my_stages
        }
        self._several = groups.read_by_several_stages(
            stages, analysis.captured.parameters, mesh["pp"].size(), self._stages_of
        )
        gathers_once = training.gathers_once(mesh["pp"].size())
        self._room = None if gathers_once else Room[ShardedUnit](FEWEST)
        if self._experts or self._gathers:
            self._as_dtensors(stages, analysis.captured.parameters, whole)
        self._longest.note((args, kwargs), analysis)
        key, shapes = (True, rows, structure_of(args, kwargs)), [x.shape for x in tensors]
        self._pipelines = [self._pipeline(key, shapes, analysis, stages, checksums_of(analysis, lowered))]
        self._learning: dict[Any, list[nn.Parameter]] = {}
        self._hooks = HooksOfStep({}, {})
        for name, parameter in self.named_parameters():
            as_cut(parameter, Cut(name, self.layouts[name], self.place))
        self._seed()

    @property
    def plan(self) -> Division:
        """The division into stages; with `memory=`, what the budget did in the last step: see the class."""
        return replace(self._division, budgets=tuple(self._budgets()))

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

    def _holds(self, path: str) -> bool:
        """True if this rank has a module of this name."""
        return path in dict(self.named_modules())

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
        rank, ranks = self.mesh["pp"].get_local_rank(), self.mesh["pp"].size()
        # The first rank that holds a shared parameter counts it.
        later = {name for name, (holders, _) in self.shared.items() if holders[0] != rank}
        group = self.mesh.get_group("pp").group_name if ranks > 1 else None
        place = self.place
        replica = self.mesh["dp"].get_local_rank() * place.cp + place.cp_rank
        of_experts = frozenset(name for name, tensor in tensors.items() if tensor in self._experts)
        replicated = [(place, uncut(tensors, self.layouts)), (self.replicas, frozenset(tensors) - of_experts)]
        replicated += [(self._copies, of_experts)] if of_experts else []
        replicated += [] if place.sequence is None else [(place.sequence, frozenset(tensors))]
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
        return self._stages_of(self.mesh["pp"].get_local_rank())

    def _stages_of(self, rank: int) -> list[int]:
        """Returns the numbers of the stages on a rank of the pipeline."""
        return stages_of(self._training, rank, self.mesh["pp"].size())

    def _analyse(
        self, training: bool, args: Any, kwargs: Any, rows: frozenset[int], padded: bool | None = None
    ) -> Program:
        """Returns the model's program in one mode; once this rank holds parameters, in their layouts."""
        self.skeleton.train(training)
        layouts = getattr(self, "layouts", None)
        place, device_type = self.place, self.place.device.type
        return analyse_microbatch(
            self.skeleton, args, kwargs, place.size, self._training, layouts, rows, place.cp_rank,
            device_type=device_type, padded=padded,
        )  # fmt: skip

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

    def _hold(
        self,
        model: nn.Module,
        analysis: Program,
        every: Sequence[Stage],
        read_folder: ReadsParts | None,
        of_experts: Collection[str],
    ) -> None:
        """Registers this rank's parts of the tensors that its stages read; a block becomes an `Owner`.

        Args:
            of_experts: the parameters of which it holds the rows of its own experts.
        """
        names, stages = analysis.captured.parameters | analysis.captured.buffers, [every[i] for i in self._my_stages]
        read = {name for stage in stages for name in placeholders(stage.graph)}
        read |= set(placeholders(analysis.totals.counts)) if analysis.totals is not None else set()
        unread = set(names) - {name for stage in every for name in placeholders(stage.graph)}
        needed = list(dict.fromkeys(name for placeholder, name in names.items() if placeholder in read | unread))
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        parameters = {name for name, _ in model.named_parameters()}
        for name in (name for stage in stages for name in stage.blocks):
            module_at(self, name, Owner)
        layouts = self.layouts | {name: self._of_own_experts(self.layouts[name]) for name in of_experts}
        of_files = read_folder(layouts, self.place, needed) if read_folder is not None else {}
        parts = shard_parameters(model, layouts, self.place.rank, self.everyone, of_files, needed)
        for name, tensor in parts.items():
            path, _, key = name.rpartition(".")
            module = module_at(self, path)
            if name in parameters:
                # Of a model on `meta` a part is a plain tensor.
                parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, name not in frozen)
                module._parameters[key] = parameter
            else:
                module._buffers[key] = tensor
        originals = dict(self.skeleton.named_modules(remove_duplicate=False))
        for path, original in originals.items():  # Parts without tensors, such as a dropout in a block held here.
            if not [*original.parameters(), *original.buffers()] and self._holds(path.rpartition(".")[0]):
                module_at(self, path)
        for path, module in [(path, module) for path, module in self.named_modules() if path]:
            as_module_of(module, originals[path])
        for path, module in self.named_modules():  # Parameters come in the model's order, as for its optimizers.
            for table in ("_modules", "_parameters", "_buffers"):
                entries, order = vars(module)[table], vars(originals[path])[table]
                for key in (key for key in order if key in entries):
                    entries[key] = entries.pop(key)

    def _tied(self) -> dict[str, Mesh]:
        """Returns, for each parameter in `shared`, the mesh of the ranks that hold it."""
        every = dict.fromkeys(group for _, group in self.shared.values())
        meshes = {group: groups.mesh_along(self.place, group, "pp") for group in every}
        return {name: meshes[group] for name, (_, group) in self.shared.items()}

    def _readers(self, stages: Sequence[Stage], analysis: Program) -> dict[nn.Module, set[int]]:
        """Returns module -> the stages that read its tensors: for a tensor in a block, the module is the block."""
        names = analysis.captured.parameters | analysis.captured.buffers
        readers: dict[nn.Module, set[int]] = {}
        for i in self._my_stages:
            for name in (names[x] for x in placeholders(stages[i].graph) if x in names):
                block = block_in(name) if block_in(name) in stages[i].blocks else name.rpartition(".")[0]
                readers.setdefault(module_at(self, block), set()).add(i)
        return readers

    @cached_property
    def _mesh_of_rows(self) -> DeviceMesh:
        """The replicas that have some rows of a parameter each: all, or those that experts are cut over."""
        if self._training.ep in (1, self.replicas.size):
            return self.mesh["dp"]
        return DeviceMesh.from_group(group_of(self._ep), self.place.device.type, mesh_dim_names=(EP,))

    def _of_own_experts(self, layout: Layout) -> Layout:
        """Returns the layout of a stack of experts, with the rows of this rank's experts."""
        return replace(layout, rows=chunk_bounds(layout.shape[0], self._ep.size, self._ep.rank))

    @property
    def _gathers(self) -> bool:
        """Whether replicas keep rows of parameters, and the graphs gather them: ZeRO."""
        return self._training.zero > 0 and self.mesh["dp"].size() > 1

    def _as_dtensors(
        self, stages: Sequence[Stage], names: Mapping[str, str], whole: Mapping[str, nn.Parameter]
    ) -> None:
        """Makes parameters DTensors, in place of the ones that this rank had first (`whole`).

        With ZeRO it leaves this replica's rows of the parameters that the graphs read.

        A parameter that several stages of one rank read stays whole on all ranks: each would gather it. So does one
        without dimensions, or without elements on this rank: nothing of it can be divided.
        """
        gathered = {name for i in self._my_stages if self._gathers for name in parameters_of_stage(stages[i], names)}
        own = dict(self.named_parameters())
        divided = {p for name, p in own.items() if name in gathered - self._several and p.dim() and p.numel()}
        as_dtensors(self, self._mesh_of_rows, divided)
        now = dict(self.named_parameters())
        # New parameters are in the place of the old ones, which the user's hooks are on.
        for name, parameter in whole.items():
            move_hooks(parameter, now[name])
        leave_behind(parameter for name, parameter in whole.items() if now[name] is not parameter)

    def _pipeline(
        self, key: Any, shapes: Sequence[Any], analysis: Program, stages: Sequence[Stage], checksums: tuple[int, int]
    ) -> Pipeline:
        """Returns the graphs of this rank's stages in one mode."""
        graphs = {i: self._graph(stages[i], analysis, self._seat(i)) for i in self._my_stages}
        guard = self._original.guard(analysis.captured)
        # Only between stages do zeros come back where one device has no gradient.
        learning = learning_of(analysis) if self.mesh["pp"].size() > 1 else None
        engines = self._engines(analysis, training=bool(key[0]))
        return Pipeline(key, shapes, analysis, graphs, *engines, guard, learning, checksums)

    def _read_by_replicas(self, pipeline: Pipeline) -> int:
        """Returns a checksum of the parameters that replicas gather, in order, or sum gradients of; 0 if of none.

        Sums and gathers have no names: other layers of the same sizes would be added without an error.
        """
        if self.mesh["dp"].size() == 1 or not (pipeline.training or self._gathers):
            return 0
        own, read = dict(self.named_parameters()), pipeline.read
        if self._gathers:
            return zlib.crc32(repr(read).encode())
        return zlib.crc32(repr(sorted(name for name in read[0] if name in own and own[name].requires_grad)).encode())

    def _engines(self, analysis: Program, training: bool) -> tuple[Any, Any]:
        """Returns the schedule that runs this rank's stages, and the one that runs forward before it, or None.

        Raises:
            Error: forward has to run before it, and the schedule always runs backward.
        """
        engine = self._engine(analysis, self._works)
        if engine is None or not training or analysis.totals is None or analysis.totals.functions is None:
            return engine, None
        expect_forward_alone(self._training, self.mesh["pp"].size(), analysis)
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
            replicas=self.replicas.size, share=1 / len(mine),
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
        if (other := exchanges(analysis.graph, captured.parameters)) != self._exchanges:
            raise Error(
                f"a batch of another kind runs {len(other)} layers of experts in place of {len(self._exchanges)}, "
                "or others: replicas send each other rows for the same layers",
                fix="ep=1, or batches of one kind",
            )
        axes = place.groups | (self._ep.groups if other else {})
        ready = rank_program(stage.graph, analysis, self._training, place.device, axes, seat)
        if self._gathers:
            values = {name: value_at(at) for name, at in places.items()}
            rows = {name for name, value in values.items() if is_sharded(value) and value not in self._experts}
            ready = ready.gathering(rows, self._training.compute_dtype, self._room)
        return replace(ready.attached(places, owners.get, self._read), received=stage.received)

    def _seed(self) -> None:
        """Seeds each replica and each pipeline rank differently, by a random number of the first rank."""
        if self.mesh["pp"].size() * self.mesh["dp"].size() > 1:
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
                sums = self._gradient_sums()
                losses = self._named_if_lost("Trainer.step", lambda: self._run(pipeline, inputs))
                self._named_if_lost("Trainer.step", lambda: self._sum_gradients(sums))
                self._note_learning()
                self._drop_zeros(pipeline.learning)
        except BaseException:  # The step adds nothing, and what was there stays.
            for parameter, grad in before.items():
                parameter.grad = grad
            raise
        within("Trainer.step", lambda: self._named_if_lost("Trainer.step", hooks.run))
        self.steps += 1
        loss = self._named_if_lost("Trainer.step", lambda: self._sum_losses(pipeline, losses))
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
        if not self._training.engine.evaluates and self.mesh["pp"].size() > 1:
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
        state = step_state(training, frozen, arguments, self.place, values, steps_taken(self))
        pipeline = self._fitting_graphs(attempt[0]) if attempt else None
        state = state._replace(captures=pipeline is None, read=self._read_by_replicas(pipeline) if pipeline else 0)
        now = fingerprint(attempt[0].arguments) if attempt else Fingerprint()
        prints: Prints = {**self.late.prints(), NOW: now.as_ints() if now.arrived is None else None}
        tied = frozen_checksums(frozen, self._holders)
        agreed = agree_on_step(
            self._ranks, self._groups, state, tied, problem, prints, self.late.count(), values, not self._idle
        )
        self.late.take(agreed.arrived, self.everyone)
        self._facts = StepFacts(self.steps + training, Fingerprint() if now.arrived is None else now)
        if self.place.device.type == "cuda":
            self.late.add(self._facts)
        # All ranks are here, and agree.
        count_anew(self)
        take_note_back()
        # Only in these calls all states were gathered.
        if values and equal_replicas(agreed.rows, self._groups):
            warnings.warn(SAME_ROWS.format(self.mesh["dp"].size()), stacklevel=5)
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
        fitting = self._fitting_graphs(batch, of_size=False)
        if fitting is not None:  # Else a capture looks.
            fitting.documents.expect_whole(tensors, self._training.microbatches)
        return batch

    def _fitting_graphs(self, batch: Batch, of_size: bool = True) -> Pipeline | None:
        """Returns the graphs for a batch, or None; with `of_size`, only graphs whose engine fits the batch's size."""
        fitting = []
        for pipeline in self._pipelines:
            if pipeline.key != batch.key or (of_size and not pipeline.runs(batch.shapes)):
                continue
            if pipeline.analysis.captured.fits(batch.shapes):
                fitting.append(pipeline)
        # Graphs without masks come first where they are right: they can run kernels that take no mask.
        without_masks = [pipeline for pipeline in fitting if pipeline.masks_left_out]
        full = [pipeline for pipeline in without_masks if are_full(batch.tensors, pipeline.masks_left_out)]
        with_masks = (pipeline for pipeline in fitting if not pipeline.masks_left_out)
        rest = (pipeline for pipeline in with_masks if without_masks or pipeline.analysis.call.looks or batch.padded)
        return next(itertools.chain(full, rest), None)

    def _capture(self, training: bool, batch: Batch) -> Pipeline:
        """Returns new graphs for a batch; if only the size differs from known graphs, these with a new engine."""
        fit = self._fitting_graphs(batch, of_size=False)
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
                return self._run_microbatches(pipeline, inputs)
        except BaseException as error:  # Other ranks wait for a stage, or a part of the gradients is held.
            divided = self.mesh["pp"].size() > 1 or (self._training.zero and self.mesh["dp"].size() > 1)
            divided = divided or bool(self._exchanges)
            self._failed = f"{type(error).__name__}: {error}".splitlines()[0] if divided else ""
            raise
        finally:
            for graph in pipeline.stages.values():
                graph.end_step()

    def _run_microbatches(self, pipeline: Pipeline, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        for graph in pipeline.stages.values():
            graph.begin_step()
        rest = next((work.rest for work in self._works.values() if work.rest is not None), None)
        at_once = all(work.at_once for work in self._works.values())
        if pipeline.functions is not None and pipeline.training and not at_once:  # NOTE [A pass for the sums]
            with first_pass(self.place.device):
                self._run_forward(pipeline, inputs)
            if rest is not None:
                rest.sum_up()
        losses = self._run_parts(pipeline, inputs)
        if rest is not None:
            value = rest.sum_up() if rest.value is None else rest.value
            # One replica adds it.
            losses += [self._scale(value)] * (self.mesh["dp"].get_local_rank() == 0)
        return losses

    def _run_forward(self, pipeline: Pipeline, inputs: Mapping[str, Tensor]) -> None:
        """Runs forward of all microbatches."""
        if pipeline.first is not None:
            pipeline.first.eval(**inputs, target=self._target(), losses=[])
            return
        (work,) = self._works.values()
        for part in self._parts_of(pipeline, inputs):
            work(**part)

    def _target(self) -> Tensor | None:
        """Returns what torch's schedule divides among the microbatches as a target. Our loss does not read it."""
        last = len(self._division.blocks) - 1 in self._my_stages
        return torch.zeros(self._training.microbatches) if last else None

    def _parts_of(self, pipeline: Pipeline, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Returns the inputs of each microbatch."""
        rows, parts = {*pipeline.analysis.rows, *pipeline.documents.tokens}, self._training.microbatches
        divided = {name: value.chunk(parts) if name in rows else [value] * parts for name, value in inputs.items()}
        return [{name: values[i] for name, values in divided.items()} for i in range(parts)]

    def _run_parts(self, pipeline: Pipeline, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        losses: list[Tensor] = []
        if pipeline.engine is not None:
            run = pipeline.engine.step if pipeline.training else pipeline.engine.eval
            run(**inputs, target=self._target(), losses=losses)
            for graph in pipeline.stages.values():
                graph.sum_the_rest()
            return losses
        (work,), parts = self._works.values(), self._parts_of(pipeline, inputs)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            # ZeRO 1 keeps whole gradients until the last microbatch; 2 and 3 keep rows, so each microbatch is summed.
            complete = self._hooks.complete if last and pipeline.training and not self._exchanges else None
            work.graph.sum_now(self._training.zero > 1 or last, complete)
            loss = self._scale(work(**part).sum())
            if pipeline.training:
                with self._last_backward(work) if last else nullcontext():
                    loss.backward()
            losses.append(loss.detach())
        work.graph.sum_the_rest()
        return losses

    def _last_backward(self, work: StageModule) -> AbstractContextManager[None]:
        """Returns a region for the last backward of a step; on one replica it completes gradients."""
        if self.mesh["dp"].size() == 1:
            return self._hooks.as_gradients_arrive(self.parameters())
        return work.last_backward()

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

    def _gradient_sums(self) -> GradientSums:
        """Returns the sums over the replicas that run under backward; each stage's module starts its own.

        These are sums of the parameters that had gradients in the last step that trained the same ones, but for those
        that several stages read, or that ZeRO divides.
        """
        learning = self._learning.get(self._trained(), []) if self._sums_under_backward else []
        excluded = {*self.shared, *self._several}
        names = {parameter: name for name, parameter in self.named_parameters()} if learning else {}
        complete = self._hooks.complete if self.mesh["pp"].size() == 1 and self._hooks.steps else None
        parameters = [p for p in learning if names[p] not in excluded]
        sums = GradientSums(parameters, self.mesh.get_group("dp"), complete=complete)
        for work in self._works.values():
            work.sums = sums
        return sums

    @property
    def _sums_under_backward(self) -> bool:
        # Graphs that gather sum by themselves, and a bucket takes plain tensors.
        return self.mesh["dp"].size() > 1 and not self._training.zero and not self._exchanges

    def _trained(self) -> tuple[bool, ...]:
        """Returns which parameters are trained: it is the same on all replicas, whatever graphs their batches have."""
        return tuple(parameter.requires_grad for parameter in self.parameters())

    def _note_learning(self) -> None:
        """Notes which parameters got a gradient: the same ones do in the next step in which as many are trained."""
        if self._sums_under_backward:
            stepped = self._hooks.stepped
            self._learning[self._trained()] = [p for p in self.parameters() if p.grad is not None or p in stepped]

    def _sum_gradients(self, sums: GradientSums) -> None:
        """Sums gradients: of shared parameters over their stages, and of unsharded parameters over the replicas."""
        for name, (_, group) in self.shared.items():
            parameter = value_at(place_in(self, name))
            if parameter.requires_grad:
                # All holders take part in the sum, also one whose stage has no gradient for it.
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(local_of(parameter.grad), group=group)
        if self.mesh["dp"].size() == 1:
            return
        sums.finish()
        grads = [p.grad for p in self.parameters() if p.grad is not None and p not in sums]
        sum_in_buckets([local_of(grad) for grad in grads if not is_sharded(grad)], self.mesh.get_group("dp"))
        # All rows of the replicas along `ep` have come to a rank's experts: the rest of the sum is over their copies.
        if self._experts and self._copies.size > 1:
            sum_in_buckets([local_of(p.grad) for p in self._experts if p.grad is not None], group_of(self._copies))
