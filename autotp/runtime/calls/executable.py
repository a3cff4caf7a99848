"""Runs a call of a module by a graph that fits the call; captures the graph if there is none yet.

A module has one graph for each kind of call. A call passes the parameters and the tensors among its arguments to the
graph, and rebuilds the model's result from the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autotp.attached import READ
from autotp.compiler import analyse, warn_of_whole_sequences
from autotp.distributed.agreement import agree
from autotp.distributed.cut_tensors.cut_parameter import STAND_FOR_WHOLES, whole_operand
from autotp.distributed.cut_tensors.sharded_tensor import Sharded, local_part
from autotp.distributed.device_arguments import to_device
from autotp.distributed.mesh import Mesh, follow_first_numpy_state
from autotp.distributed.peers.in_step import begin_call, end_call
from autotp.distributed.replica_check import expect_own_ranks
from autotp.errors import Error, within
from autotp.groups.one_thread import one_thread
from autotp.groups.process_group import backend_of
from autotp.model_library import BeginAgain, library
from autotp.ops.eager_mode import alone, unseen
from autotp.ops.random_state import random_state_of, set_random_state
from autotp.options import CheckInputs, Options
from autotp.passes.capture.autocast_regions import ambient
from autotp.passes.capture.captured import contradicted
from autotp.passes.capture.guards.sizes import Shapes
from autotp.passes.capture.guards.values import NO_VALUES, KnownValues, Outcome, other_reads
from autotp.passes.capture.python_state.walk import Path, everything, put_at
from autotp.passes.capture.pytree import flatten_call, states
from autotp.passes.capture.replacements.number_arguments import as_length, is_countable
from autotp.passes.capture.unsupported.lost_gradients import expect_no_global_hooks
from autotp.passes.emit.async_tensor_parallel import FusedPairs, enable_symmetric_memory, expect_async_tp
from autotp.passes.emit.attach_parameters import BlockCall, in_places, value_at, works
from autotp.passes.emit.compiled import compile_blocks
from autotp.passes.program.program import CallState
from autotp.runtime.calls.call_consistency import (
    agree_on_call,
    agree_on_documents,
    agree_on_values,
    checksum_of_parts,
    warn_of_equal_rows,
)
from autotp.runtime.calls.graph_cache import FlatCall, GraphCache, Key
from autotp.runtime.calls.graph_digest import digest
from autotp.runtime.calls.graph_entry import GraphEntry, Ran, guard_of, prepare, run_until_right
from autotp.runtime.calls.structure import Structure
from autotp.runtime.calls.write_back import copy_what_is_written, result_of
from autotp.runtime.func_gradients import expect_tied, own_parts
from autotp.runtime.torch_hooks.interrupted import interrupted
from autotp.runtime.tree import Tree, original_of, state_of
from autotp.sharding.layout import Layout

CHECKED_CALLS = 2
"""The number of calls of each graph that `check_inputs="first"` compares."""

CAPTURES = (
    "autotp captures a graph in the first call of each kind (arguments, mode, dtypes, settings), outside of "
    "torch.compile. With fullgraph=True: make one such call of the parallel model before the compiled one"
)
"""What Dynamo says where a compiled call is the first one of its kind."""


class _OtherNumbers(BeginAgain):
    """Other numbers among the arguments have become inputs of graphs, or no longer are."""


_Ran = Ran[tuple[Mapping[int, Tensor], Shapes]]
"""Beside the outputs: the caller's tensors that the model writes into, by the position of the output with their
values, and the shapes of the inputs."""


class Executable:
    """One module of a parallel model, and its calls.

    Attributes:
        structure: its present parameters, buffers and modules.
        graphs: those that its calls run.
        uncompiled: calls a function that Dynamo does not trace: `uncompiled(function, *args)`.
        seen_loaded: how often parts had been loaded when the ranks last compared them.
        guesses: what the reads gave in the last run that assumed a wrong outcome.
    """

    def __init__(self, module: nn.Module, tree: Tree) -> None:
        self.structure = Structure(module, tree)
        self.graphs = GraphCache(self.structure)
        self.guesses: tuple[Outcome, ...] = ()
        self.seen_loaded = 0
        # Here, as a model is captured before it has an `Executable`: Dynamo, which takes a second, is imported already.
        self.uncompiled = torch._dynamo.disable(_call, reason=CAPTURES)

    @property
    def name(self) -> str:
        """The class of the module."""
        return self.structure.name

    @property
    def tree(self) -> Tree:
        """The state that all modules of the model share."""
        return self.structure.tree

    @property
    def mesh(self) -> Mesh:
        """The tensor-parallel axis and this rank's place on it."""
        return self.tree.mesh

    # ---- a call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module on these arguments, which must be the same on all ranks of the axis."""
        group = self.mesh.everyone.group
        if group is None or torch.compiler.is_compiling():
            # A single rank waits for nobody, and Dynamo would trace what is noted for the others.
            return self._result_of(args, kwargs)
        with one_thread(f"{self.name}.forward", group):
            before = begin_call(self.mesh)
            try:
                return self._result_of(args, kwargs)
            except RuntimeError as error:
                interrupted(error)
                self._expect_on_device(error)
                raise
            except BaseException as error:
                interrupted(error)
                raise
            finally:
                end_call(self.mesh, before, (args, kwargs) if self.tree.settings.check_inputs != "never" else ())

    def _expect_on_device(self, error: RuntimeError) -> None:
        """Raises Error if a call failed and the model is not on the kind of device for which its graphs were made."""
        kinds = {tensor.device.type for tensor in self.structure.tensors().values()} - {self.mesh.device.type}
        if kinds and not isinstance(error, Error):
            now, device = ", ".join(sorted(kinds)), self.mesh.device
            raise Error(
                f"{self.name}.forward: parameters are on {now}, and the model was made parallel on {device}",
                fix=f'model.to("{device.type}"), or autotp.parallelize behind the last move to another device',
            ) from error

    def _result_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self.structure.signature.by_name(args, kwargs)
        # A compiled call learns no numbers, so it never begins again.
        if torch.compiler.is_compiling():
            return self._result_of_flat(args, kwargs, *flatten_call(args, kwargs))
        numbers = self.graphs.numbers
        while True:
            try:
                return self._result_of_flat(args, kwargs, *flatten_call(args, kwargs))
            except _OtherNumbers:
                continue
            except Error:  # Perhaps only this rank has learned them, from a batch that the others did not get.
                self.graphs.numbers = numbers
                raise

    def _result_of_flat(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], spec: Any) -> Any:
        leaves = [whole_operand(leaf) if isinstance(leaf, STAND_FOR_WHOLES) else leaf for leaf in leaves]
        for i in self.graphs.numbers_in(spec) or ():
            leaves[i] = as_length(leaves[i], self.mesh.device) if is_countable(leaves[i]) else leaves[i]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        looks = not (torch.compiler.is_compiling() or self._is_recorded())
        called = FlatCall(leaves, spec, tensors, ambient(self.mesh.device), looks)
        model_tensors: Mapping[str, Tensor] = self.structure.tensors()
        parts: AbstractContextManager[None] = nullcontext()
        if not torch.compiler.is_compiling():
            expect_tied(self.structure.ties, model_tensors)
            if func_parts := own_parts(model_tensors, self.structure.layouts, self.mesh):
                model_tensors, parts = (
                    {**model_tensors, **func_parts},
                    in_places({self.structure.places[name]: x for name, x in func_parts.items()}),
                )
        key = self.graphs.key(leaves, spec, called.autocast, model_tensors)
        compiled = self._find_compiled(key, called, model_tensors) if torch.compiler.is_compiling() else None
        if compiled is None and torch.compiler.is_compiling():
            # Nothing of a first call is compiled: it may look at masks, and learn numbers.
            return self.uncompiled(self._result_of, args, kwargs)
        with parts:
            entry, (outputs, (written, shapes)) = self._run_until_right(key, called, model_tensors, compiled)
            return result_of(self.structure, entry, outputs, states((args, kwargs)), written, shapes)

    def _run_until_right(
        self, key: Key, called: FlatCall, model_tensors: Mapping[str, Tensor], compiled: GraphEntry | None
    ) -> tuple[GraphEntry, _Ran]:
        """Returns the graph that is right for a call, and what it computed.

        Args:
            compiled: the graph of a compiled call, as far as nothing has run.
        """
        device = self.mesh.device
        state: list[Tensor] = []

        def prepare(known: KnownValues) -> GraphEntry:
            if known.guesses:
                self.guesses = known.guesses
            first = compiled if known is NO_VALUES else None
            entry = first or self._entry(key, called, model_tensors, known.outcomes)
            draw_again()
            if entry.assumes and entry.random and not state:
                state.append(random_state_of(device))
            return entry

        def draw_again() -> None:
            """Has the next run of the call draw the numbers of the first one, however far that came."""
            if state:
                set_random_state(device, state[0])

        def read(entry: GraphEntry, first: int) -> KnownValues | None:
            draw_again()
            assert entry.other_assumed is not None
            tensors, _ = self.structure.graph_inputs(entry.analysis.captured, called.tensors)
            with unseen(), called.autocast.off(), torch._C.DisableTorchFunctionSubclass():
                operands = self._operands(entry, tensors)
                return entry.other_assumed(
                    lambda name: operands[name] if name in operands else entry.ready.value(name), first
                )

        compare = partial(self.uncompiled, contradicted) if torch.compiler.is_compiling() else contradicted
        return run_until_right(prepare, lambda entry: self._run(entry, called), read, compare)

    def _is_recorded(self) -> bool:
        """True while a CUDA graph is recorded."""
        return self.mesh.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _entry(
        self, key: Key, called: FlatCall, model_tensors: Mapping[str, Tensor], outcomes: tuple[Outcome, ...] = ()
    ) -> GraphEntry:
        """Returns the graph for a call in which the first reads of values have these outcomes."""
        if not torch.compiler.is_compiling():
            match = self.graphs.find(key, called, model_tensors, outcomes)
            if match is None and self.graphs.learns_numbers(key):
                raise _OtherNumbers
            return self._agreed(match, called, key, model_tensors, outcomes)
        entry = self._find_compiled(key, called, model_tensors, outcomes)
        return entry or self.uncompiled(self._agreed, entry, called, key, model_tensors, outcomes)

    def _find_compiled(
        self, key: Key, called: FlatCall, model_tensors: Mapping[str, Tensor], outcomes: tuple[Outcome, ...] = ()
    ) -> GraphEntry | None:
        """Returns the graph for a compiled call, as `GraphCache.find`. Dynamo has no values, which Python may read."""
        find = partial(self.uncompiled, self.graphs.find) if self.graphs.read_places else self.graphs.find
        match: GraphEntry | None = find(key, called, model_tensors, outcomes)
        return match

    def _run(self, entry: GraphEntry, called: FlatCall) -> _Ran:
        """Runs a graph on a call's tensors and the model's."""
        if entry.numpy_random:
            follow = self.uncompiled if torch.compiler.is_compiling() else _call
            follow(follow_first_numpy_state, self.mesh)
        tensors, shapes = self.structure.graph_inputs(entry.analysis.captured, called.tensors)
        check_apart = self.uncompiled if torch.compiler.is_compiling() else _call
        written = copy_what_is_written(self.structure, entry.analysis.captured, tensors, check_apart)
        with called.autocast.off(), torch._C.DisableTorchFunctionSubclass():  # No warnings about parts inside.
            # After the line above: a caller's tensor on the CPU is written into there, and not in its copy.
            results = entry.ready(self._operands(entry, tensors))
        return results, (written, shapes)

    def _operands(self, entry: GraphEntry, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns this rank's part of each input of a graph, on its device, by placeholder."""
        moved = to_device(tensors, self.mesh.device, entry.on_host)
        if not torch.compiler.is_compiling() and entry.documents:
            for x, copy in zip(tensors, moved, strict=True):
                READ.copied(x, copy)
        operands = dict(zip(entry.analysis.captured.inputs, map(local_part, moved), strict=True))
        return operands | {name: self._part_of_cache(entry, name) for name in entry.analysis.caches}

    def _part_of_cache(self, entry: GraphEntry, placeholder: str) -> Tensor:
        """Returns this rank's part of a buffer that a graph has cut."""
        buffer = value_at(self.structure.places[entry.analysis.captured.buffers[placeholder]])
        if isinstance(buffer, Sharded):
            part: Tensor = local_part(buffer)
            return part
        return entry.analysis.caches[placeholder].take(buffer, self.mesh.rank)  # `functional_call` puts wholes there.

    def _agreed(
        self,
        entry: GraphEntry | None,
        called: FlatCall,
        key: Key,
        model_tensors: Mapping[str, Tensor],
        outcomes: tuple[Outcome, ...],
    ) -> GraphEntry:
        """Returns the graph for a call, after the ranks agree on it; captures it if there is none.

        Args:
            key: the call's key.
            model_tensors: the present parameters and buffers.
            outcomes: what the first reads of values in this call gave.

        Raises:
            Error: the ranks were called differently, or the model cannot be captured; on every rank.
        """
        expect_untraced(self.name)
        if entry is None and self._is_recorded():
            raise Error(
                f"{self.name}.forward: a CUDA graph is recorded of a call of a kind that was not made before",
                fix="one such call before; with an attention_mask, a call in which it masks a token, as the recorded "
                "graph keeps its masks",
                alternative="no attention_mask, where no token is padding",
            )
        with unseen():  # NOTE [What is no operator of the model]
            expect_no_global_hooks()
            expect_own_ranks(self.structure.module, self.mesh, model_tensors)
            check = self.tree.settings.check_inputs
            if self.seen_loaded != self.tree.loaded:  # What was loaded is compared in the next calls.
                self.seen_loaded = self.tree.loaded
                for _, graph in self.graphs.entries:
                    graph.calls = 0
            # Each rank read values by itself. Where they differ it would run another graph, with other collectives.
            if self.graphs.read_places:
                index = next((i for i, (_, graph) in enumerate(self.graphs.entries) if graph is entry), -1)
                within(f"{self.name}.forward", lambda: agree_on_values(self.mesh, index))
            if entry is None or (check != "never" and self._is_compared(entry)):
                entry = within(f"{self.name}.forward", lambda: self._checked(entry, called, key[3:], check, outcomes))
            within(f"{self.name}.forward", lambda: self._read_documents(entry, called, key[3:], check))
            entry.warned = entry.warned or warn_of_whole_sequences(entry.analysis, f"{self.name}.forward")
            return entry

    def _read_documents(self, entry: GraphEntry, called: FlatCall, mode: Key, check: CheckInputs) -> None:
        """Reads the ends of packed documents for a GPU, where they say how much ranks send over cp."""
        if not entry.documents or self.mesh.cp == 1 or self.mesh.device.type != "cuda" or self._is_recorded():
            return
        tensors, _ = self.structure.graph_inputs(entry.analysis.captured, called.tensors)
        ends = [x for x, name in zip(tensors, entry.analysis.captured.inputs, strict=True) if name in entry.documents]
        agree_on_documents(self.mesh, ends, called.leaves, mode, check != "never")

    def _is_compared(self, entry: GraphEntry) -> bool:
        """True if ranks compare the inputs of this call of a graph.

        On a CPU the ends of packed documents are read, and say how much ranks send over cp: so they do in each call. On
        a GPU they compare these alone.
        """
        read = entry.reads_documents and self.mesh.device.type == "cpu"
        return read or self.tree.settings.check_inputs != "first" or entry.calls < CHECKED_CALLS

    def _checked(
        self,
        entry: GraphEntry | None,
        called: FlatCall,
        mode: Key,
        check: CheckInputs,
        outcomes: tuple[Outcome, ...],
    ) -> GraphEntry:
        structure, has_loaded = self.structure, self.tree.loaded and check != "never"
        parts = checksum_of_parts(structure.tensors(), structure.layouts) if has_loaded else 0
        if entry is None:
            # Here, too: the capture would find only that graphs differ. Whether the graph will draw is not known yet.
            if check != "never":
                agree_on_call(self.mesh, called.leaves, mode, False)
            try:
                entry = self._captured(called, outcomes)
            except Error:  # On every rank. Where inputs differ, others may have a graph, and do not begin again.
                if not self.graphs.numbers_in(called.spec):
                    raise
                self.graphs.set_numbers(called.spec, frozenset())  # Perhaps the graph has no operator for a number.
                raise _OtherNumbers from None
        if check != "never":
            agree_on_call(self.mesh, called.leaves, mode, entry.random, parts)
            if self.structure.module.training and torch.is_grad_enabled():
                warn_of_equal_rows(self.mesh, called.leaves)
        entry.calls += 1
        return entry

    def _captured(self, called: FlatCall, outcomes: tuple[Outcome, ...]) -> GraphEntry:
        """Captures a graph. Captures again where the values of inputs, which the graph says, were not known before."""
        while True:
            entry = self._capture(called, outcomes)
            operands, _ = self.structure.graph_inputs(entry.analysis.captured, called.tensors)
            other_outcomes = entry.other_reads(operands, looks=called.looks)
            if other_outcomes is None:
                return entry
            # The capture knew this read already, and made another one: a further capture would end here again.
            if len(other_outcomes) <= len(outcomes):
                raise other_reads(other_outcomes[-1].place)
            outcomes = other_outcomes

    def _capture(self, called: FlatCall, outcomes: tuple[Outcome, ...]) -> GraphEntry:
        """Captures a further graph for a new kind of call, with the present layouts of parameters."""
        library().watch_calls()  # Here, as libraries may be imported after the model was made parallel.
        self.graphs.open_what_changes(called)
        mesh, settings = self.mesh, self.tree.settings
        layouts: dict[int | Path, Layout] = {i: t.held for i, t in enumerate(called.tensors) if isinstance(t, Sharded)}
        layouts |= {place: x.held for place, x in everything(self.structure.module) if isinstance(x, Sharded)}
        cut_buffers = {name: x for name, x in self.structure.tensors().items() if isinstance(x, Sharded)}
        call = CallState(
            autocast=called.autocast,
            layouts=self.structure.layouts,
            cut_inputs=layouts,
            cut_caches={name: replace(x.held, shape=tuple(x.shape)) for name, x in cut_buffers.items()},
            opened=self.graphs.opened,
            wanted=self.structure.gradients_wanted(called.tensors, self.structure.tensors()),
            values=KnownValues(self.graphs.read_places, outcomes, guesses=self.guesses),
            looks=called.looks,
        )

        def make() -> GraphEntry:
            args, kwargs = pytree.tree_unflatten(called.leaves, called.spec)
            skeleton = original_of(self.structure.module, self.structure.whole_tensors())
            program = analyse(skeleton, args, kwargs, mesh.size, settings, call, cp_rank=mesh.cp_rank)
            return prepare(program, mesh, settings)

        # The graph serves calls under other modes, too, so those of this call must not be in it.
        with alone():
            entry = agree(mesh, make, lambda made: made.facts(digest(made.analysis), mesh))
            self._cut_caches(entry)
        return self.keep(self.graphs.key(called.leaves, called.spec, called.autocast, self.structure.tensors()), entry)

    def first(self, entry: GraphEntry) -> None:
        """Keeps the graph that was captured when the model became parallel."""
        captured = entry.analysis.captured
        leaves, spec = flatten_call(*pytree.tree_unflatten(captured.leaves, captured.spec))
        self._cut_caches(entry)
        self.keep(self.graphs.key(leaves, spec, captured.autocast, self.structure.tensors()), entry)

    def _cut_caches(self, entry: GraphEntry) -> None:
        """Keeps this rank's part of each buffer that a graph has cut, in all places of the buffer."""
        names = entry.analysis.layouts_of_caches
        wholes = {name: x for name in names if not isinstance(x := value_at(self.structure.places[name]), Sharded)}
        for name, buffer in wholes.items():
            cache = Sharded(names[name].take(buffer, self.mesh.rank), names[name], self.mesh)
            for module in self.structure.modules.values():
                module._buffers.update({key: cache for key, x in module._buffers.items() if x is buffer})
            for place in [place for place, x in everything(self.structure.module) if x is buffer]:
                put_at(self.structure.modules, place, cache)
        if wholes:
            self.tree.version += 1
            self.structure.look_again()

    def keep(self, key: Key, made: GraphEntry) -> GraphEntry:
        """Keeps a graph for later calls; its blocks read their parameters from this model."""
        parts = dict(self.structure.module.named_modules(remove_duplicate=False))
        attached = made.ready.attached(self.structure.places, lambda block: parts.get(block) if block else None)
        entry = replace(made, ready=attached)
        captured = entry.analysis.captured
        # `Part.__setattr__` counts assignments to these names only.
        self.tree.read |= {name for _, name in captured.reads}
        entry.guard = guard_of(captured, self.structure.module, self.structure.modules, self.tree.version)
        for part in entry.ready.module.children():
            # `fully_shard` may register its hooks on the modules that a graph really calls.
            if isinstance(part, BlockCall) and (state := state_of(part.owner[0])) is not None:
                state.is_block = True
        if self.tree.compiles is not None:
            compile_blocks(entry.ready.module, self.tree.compiles, self.tree.fused)
        return self.graphs.keep(key, entry)

    # ---- attributes for users

    @property
    def code(self) -> str:
        """The Python code of this rank's latest graph, with each block once."""
        module = self.graphs.latest.ready.module
        parts = [
            (f"{name}.{path}".rstrip("."), part)
            for name, work in works(module).items()
            for path, part in work.named_modules()
        ]
        graphs = [("", module), *((name, part) for name, part in parts if isinstance(part, fx.GraphModule))]
        return "\n".join(f"# {name}\n{part.code}" for name, part in graphs)

    def compile_blocks(self, *, async_tp: bool = False, **options: Any) -> FusedPairs | None:
        """Compiles the blocks of all present and later graphs, once for all blocks that compute alike.

        The time of `torch.compile(model)` grows with the depth of the model; the time of this does not.

        Args:
            async_tp: has torch fuse products with the all-gathers before and the reduce-scatters behind them. The
                model needs `sequence_parallel=True`, and NVIDIA GPUs under NCCL.
            options: as for `torch.compile`.

        Returns:
            What is fused, with `async_tp`; it counts on as torch compiles. Else None.

        Raises:
            Error: with `async_tp`, torch could fuse nothing. Where torch has fused nothing in a block, the first call
                raises it.
        """
        if not self.tree.settings.optional("outline"):
            raise Error("compile_blocks: without=('outline',) left no blocks", fix="torch.compile(model)")
        fused = None
        if async_tp:
            _prepare_async_tp(self.mesh, self.tree.settings, options)
            fused = FusedPairs()
        if self.tree.settings.sequence_parallel or self.mesh.cp > 1:
            options = {"fullgraph": True, **options}  # NOTE [Compiled on all ranks or on none] in compiled.py
        for _, entry in self.graphs.entries:
            compile_blocks(entry.ready.module, options, fused)
        self.tree.compiles, self.tree.fused = options, fused
        return fused


def expect_untraced(name: str) -> None:
    """Raises Error if torch traces the call into a graph of its own, in which a parallel model has no place."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise Error(
            f"{name}.forward: torch traces this call (torch.func.linearize, make_fx)",
            fix="torch.func.jvp or vjp in place of linearize, or torch.compile",
        )


def _prepare_async_tp(mesh: Mesh, settings: Options, options: Mapping[str, Any]) -> None:
    """Gives the ranks symmetric memory; raises Error where torch could fuse no collective. All ranks call this."""
    backend = "" if mesh.group is None else backend_of(mesh.group, mesh.device.type)
    expect_async_tp(mesh.size, settings.sequence_parallel, mesh.device, backend, options.get("backend", "inductor"))
    enable_symmetric_memory(str(mesh.group))


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
