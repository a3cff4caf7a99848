"""Executable: runs a call of a module by a graph that fits the call; captures the graph if there is none yet.

A module has one graph for each kind of call. A call passes the parameters and the tensors among its arguments to the
graph, and rebuilds the model's result from the outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autotp.attached import READ
from autotp.compiler import analyse, warn_of_whole_sequences
from autotp.distributed.agreement import agree
from autotp.distributed.cut_tensors.cut_parameter import STAND_FOR_WHOLES, whole_operand
from autotp.distributed.cut_tensors.sharded_tensor import CutOutput, Sharded, local_part, whole
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
from autotp.passes.capture.autocast_regions import Autocast, ambient
from autotp.passes.capture.captured import NOTHING_OPENED, Captured, InputSize, Opened, OutputAt, contradicted
from autotp.passes.capture.guards.gradient_queries import NOT_ASKED, GradientsWanted, wanted_now
from autotp.passes.capture.guards.sizes import Shapes
from autotp.passes.capture.guards.values import (
    NO_VALUES,
    KnownValues,
    Outcome,
    Place,
    ValueRead,
    other_reads,
    place_text,
)
from autotp.passes.capture.python_state.attribute_writes import AnyChange, Change, Write, make_changes, write_into
from autotp.passes.capture.python_state.code_names import CodeName
from autotp.passes.capture.python_state.freeze import freeze_argument
from autotp.passes.capture.python_state.walk import Path, everything, found_at, put_at
from autotp.passes.capture.pytree import computes_by_itself, flatten_call, leaf_names, signature_of, states
from autotp.passes.capture.replacements.number_arguments import NumberArgument, as_length, is_countable
from autotp.passes.capture.skeleton import storage_of
from autotp.passes.capture.unsupported.lost_gradients import expect_no_global_hooks
from autotp.passes.emit.async_tensor_parallel import FusedPairs, enable_symmetric_memory, expect_async_tp
from autotp.passes.emit.attach_parameters import BlockCall, in_places, places, ties, value_at, values_at, works
from autotp.passes.emit.compiled import compile_blocks
from autotp.passes.program.program import CallState
from autotp.runtime.call_consistency import (
    agree_on_call,
    agree_on_documents,
    agree_on_values,
    checksum_of_parts,
    warn_of_equal_rows,
)
from autotp.runtime.fsdp import dtypes
from autotp.runtime.func_gradients import expect_tied, own_parts
from autotp.runtime.graph_digest import digest
from autotp.runtime.graph_entry import GraphEntry, Ran, guard_of, prepare, run_until_right
from autotp.runtime.torch_hooks.interrupted import interrupted
from autotp.runtime.tree import Tree, held_in, original_class, original_of, state_of, table_of
from autotp.sharding.layout import Layout

CHECKED_CALLS = 2
"""The number of calls of each graph that `check_inputs="first"` compares."""

CAPTURES = (
    "autotp captures a graph in the first call of each kind (arguments, mode, dtypes, settings), outside of "
    "torch.compile. With fullgraph=True: make one such call of the parallel model before the compiled one"
)
"""What Dynamo says where a compiled call is the first one of its kind."""

FEW, MOST = 8, 64
"""The number of captures for one kind of call that causes a warning, or an Error where activations select the graphs,
and the number of graphs that are kept."""
GRAPHS_OF_NUMBERS = 4
"""The number of graphs with numbers as inputs after which each number has a graph of its own."""
Key = tuple[Any, ...]


class FlatCall(NamedTuple):
    """One call: its flattened arguments, the tensors among them, and what is around it.

    Attributes:
        autocast: the settings of autocast.
        looks: whether the host may look at masks: no compiled code, and no CUDA graph that is recorded.
    """

    leaves: list[Any]
    spec: Any
    tensors: list[Tensor]
    autocast: Autocast
    looks: bool


class _OtherNumbers(BeginAgain):
    """Other numbers among the arguments have become inputs of graphs, or no longer are."""


_Ran = Ran[tuple[Mapping[int, Tensor], Shapes]]
"""Beside the outputs: the caller's tensors that the model writes into, by the position of the output with their
values, and the shapes of the inputs."""


class Executable:
    """The graphs of one module of a parallel model, and its calls.

    Attributes:
        module: the module.
        tree: the state that all modules of the model share.
        entries: each graph with the key of its calls.
        uncompiled: calls a function that Dynamo does not trace: `uncompiled(function, *args)`.
        seen_loaded: how often parts had been loaded when the ranks last compared them.
        opened: the attributes that are known to change from call to call; graphs have them as inputs.
        numbers: structure of the arguments, and positions of the numbers among them that change, which are inputs, too;
            none where each number needs a graph of its own.
        read_places: the places at which Python needs values of tensors.
        count: how often a graph was found for a call, or made.
        guesses: what the reads gave in the last run that assumed a wrong outcome.
        seen: the tree's version when the following attributes were computed.
        signature: the signature of the module's forward.
        first_names, places: first names and places of its parameters and buffers.
        ties: further names of tied parameters, with the place and the first name of each.
        modules: the modules by path.
        layouts: first parameter name -> layout.
        whole: parameters and buffers with the original's shapes, on meta.
        structure: the modules, and the layouts of parameters; a graph is right for one structure.
    """

    def __init__(self, module: nn.Module, tree: Tree) -> None:
        self.module, self.tree = module, tree
        self.entries: list[tuple[Key, GraphEntry]] = []
        self.opened = NOTHING_OPENED
        self.numbers: list[tuple[Any, frozenset[int]]] = []
        self.read_places = frozenset[Place]()
        self.guesses: tuple[Outcome, ...] = ()
        self.seen_loaded = self.count = 0
        # Here, as a model is captured before it has an `Executable`: Dynamo, which takes a second, is imported already.
        self.uncompiled = torch._dynamo.disable(_call, reason=CAPTURES)
        self.look_again()

    def look_again(self) -> None:
        """Reads the module's present structure."""
        self.seen = self.tree.version
        self.signature = signature_of(self.module)
        self.first_names, self.places = places(self.module)
        self.ties = ties(self.module, self.first_names, self.places)
        self.modules = dict(self.module.named_modules())
        self.look_at_modes()
        layouts = {name: held_in(module).get(key) for name, (module, key) in self.places.items()}
        self.layouts = {name: layout for name, layout in layouts.items() if layout is not None}
        self.whole = {name: self._on_meta(name, tensor) for name, tensor in self.tensors().items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.whole.items()}
        modules = self.module.named_modules(remove_duplicate=False)
        every = [(path, id(module), original_class(type(module))) for path, module in modules]
        caches = {name: x.held for name, x in self.tensors().items() if isinstance(x, Sharded)}
        now = every, self.first_names, shapes, self.layouts, caches
        if now != getattr(self, "structure", None):  # Otherwise keeps the old object: comparing it is fast.
            self.structure = now

    def look_at_modes(self) -> None:
        """Reads which modules are in training."""
        self.seen_modes = self.tree.modes
        self.modes = tuple(module.training for module in self.modules.values())

    @property
    def name(self) -> str:
        """The class of the module."""
        return type(self.module).__name__

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
        kinds = {tensor.device.type for tensor in self.tensors().values()} - {self.mesh.device.type}
        if kinds and not isinstance(error, Error):
            now, device = ", ".join(sorted(kinds)), self.mesh.device
            raise Error(
                f"{self.name}.forward: parameters are on {now}, and the model was made parallel on {device}",
                fix=f'model.to("{device.type}"), or autotp.parallelize behind the last move to another device',
            ) from error

    def _result_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self.signature.by_name(args, kwargs)
        # A compiled call learns no numbers, so it never begins again.
        if torch.compiler.is_compiling():
            return self._result_of_flat(args, kwargs, *flatten_call(args, kwargs))
        numbers = self.numbers
        while True:
            try:
                return self._result_of_flat(args, kwargs, *flatten_call(args, kwargs))
            except _OtherNumbers:
                continue
            except Error:  # Perhaps only this rank has learned them, from a batch that the others did not get.
                self.numbers = numbers
                raise

    def _result_of_flat(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], spec: Any) -> Any:
        leaves = [whole_operand(leaf) if isinstance(leaf, STAND_FOR_WHOLES) else leaf for leaf in leaves]
        for i in self._numbers_in(spec) or ():
            leaves[i] = as_length(leaves[i], self.mesh.device) if is_countable(leaves[i]) else leaves[i]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        looks = not (torch.compiler.is_compiling() or self._is_recorded())
        called = FlatCall(leaves, spec, tensors, ambient(self.mesh.device), looks)
        model_tensors: Mapping[str, Tensor] = self.tensors()
        parts: AbstractContextManager[None] = nullcontext()
        if not torch.compiler.is_compiling():
            expect_tied(self.ties, model_tensors)
            if func_parts := own_parts(model_tensors, self.layouts, self.mesh):
                model_tensors, parts = (
                    {**model_tensors, **func_parts},
                    in_places({self.places[name]: x for name, x in func_parts.items()}),
                )
        key = self._key(leaves, spec, called.autocast, model_tensors)
        compiled = self._find_compiled(key, called, model_tensors) if torch.compiler.is_compiling() else None
        if compiled is None and torch.compiler.is_compiling():
            # Nothing of a first call is compiled: it may look at masks, and learn numbers.
            return self.uncompiled(self._result_of, args, kwargs)
        with parts:
            entry, (outputs, (written, shapes)) = self._run_until_right(key, called, model_tensors, compiled)
            return self._returned(entry, outputs, states((args, kwargs)), written, shapes)

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
            tensors, _ = self._graph_inputs(entry.analysis.captured, called.tensors)
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
            match = self._find(key, called, model_tensors, outcomes)
            if match is None and self._learns_numbers(key):
                raise _OtherNumbers
            return self._agreed(match, called, key, model_tensors, outcomes)
        entry = self._find_compiled(key, called, model_tensors, outcomes)
        return entry or self.uncompiled(self._agreed, entry, called, key, model_tensors, outcomes)

    def _find_compiled(
        self, key: Key, called: FlatCall, model_tensors: Mapping[str, Tensor], outcomes: tuple[Outcome, ...] = ()
    ) -> GraphEntry | None:
        """Returns the graph for a compiled call, as `_find`. Dynamo has no values, which Python may read."""
        find = partial(self.uncompiled, self._find) if self.read_places else self._find
        match: GraphEntry | None = find(key, called, model_tensors, outcomes)
        return match

    def _run(self, entry: GraphEntry, called: FlatCall) -> _Ran:
        """Runs a graph on a call's tensors and the model's."""
        if entry.numpy_random:
            follow = self.uncompiled if torch.compiler.is_compiling() else _call
            follow(follow_first_numpy_state, self.mesh)
        tensors, shapes = self._graph_inputs(entry.analysis.captured, called.tensors)
        written = self._written_into(entry.analysis.captured, tensors)
        with called.autocast.off(), torch._C.DisableTorchFunctionSubclass():  # No warnings about parts inside.
            # After the line above: a caller's tensor on the CPU is written into there, and not in its copy.
            results = entry.ready(self._operands(entry, tensors))
        return results, (written, shapes)

    def _operands(self, entry: GraphEntry, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns this rank's part of each input of a graph, on its device, by placeholder."""
        moved = to_device(tensors, self.mesh.device, entry.on_host)
        if entry.documents and not torch.compiler.is_compiling():
            for x, copy in zip(tensors, moved, strict=True):
                READ.copied(x, copy)
        operands = dict(zip(entry.analysis.captured.inputs, map(local_part, moved), strict=True))
        return operands | {name: self._part_of_cache(entry, name) for name in entry.analysis.caches}

    def _part_of_cache(self, entry: GraphEntry, placeholder: str) -> Tensor:
        """Returns this rank's part of a buffer that a graph has cut."""
        buffer = value_at(self.places[entry.analysis.captured.buffers[placeholder]])
        if isinstance(buffer, Sharded):
            part: Tensor = local_part(buffer)
            return part
        return entry.analysis.caches[placeholder].take(buffer, self.mesh.rank)  # `functional_call` puts wholes there.

    def _graph_inputs(self, captured: Captured, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Sequence[int]]]:
        """Returns a graph's input tensors (those of arguments, then those of attributes), and all shapes."""
        opened = [found_at(self.modules, path) for path in captured.opened]
        every = [*tensors, *opened]
        with torch._C.DisableTorchFunctionSubclass():  # A part would look for the user's code.
            shapes: list[Sequence[int]] = [x.shape if isinstance(x, Tensor) else (x,) for x in every]
        return [x for x in every if isinstance(x, Tensor)], shapes

    def _written_into(self, captured: Captured, tensors: list[Tensor]) -> dict[int, Tensor]:
        """Returns the caller's tensors that the model writes into, by the position of the output with their new values.

        It replaces them in `tensors` by copies, so that tensors saved for backward do not change.
        """
        written = {index: tensors[i] for i, index in captured.outputs.into}
        # torch refuses to write into such a tensor on one device, too.
        if torch.is_grad_enabled() and any(x.requires_grad and x.is_leaf for x in written.values()):
            raise Error(
                f"{self.name}.forward writes into an argument that requires a gradient",
                fix="give it a clone()",
            )
        if written:
            check_apart = self.uncompiled if torch.compiler.is_compiling() else _call
            places = [i for i, _ in captured.outputs.into]
            check_apart(_expect_apart, self.name, places, [*tensors, *self.tensors().values()])
        for i, _ in captured.outputs.into:
            tensors[i] = tensors[i].clone()
        return written

    def _returned(
        self,
        entry: GraphEntry,
        results: Sequence[Any],
        changed: Sequence[Any],
        written: Mapping[int, Tensor],
        shapes: Shapes,
    ) -> Any:
        """Rebuilds the model's result from the outputs, and notes the layout of each tensor on it.

        Updates buffers, attributes, and the arguments that the model changes; cut values in these become `Sharded`.
        """
        with torch.no_grad():
            # In reverse: a buffer that was written to and then replaced comes twice, with its final value first.
            updated, first = entry.updated, len(results) - len(entry.updated)
            for i, name in reversed(list(enumerate(updated, first))):
                self._update(value_at(self.places[name]), results[i], entry.cut.get(i))
        results = list(results)
        for index, output in entry.cut.items():
            results[index] = output.of(results[index])
        captured = entry.analysis.captured
        for index, tensor in written.items():
            write_into(tensor, results[index])
            # The caller gets its own tensor back, not the graph's copy of it.
            results[index] = tensor
        if captured.changes:
            self._change(captured.changes, results, shapes)
        return captured.outputs(results, changed)

    def _update(self, buffer: Tensor, value: Tensor, cut: CutOutput | None) -> None:
        """Writes the new value of a buffer. cut: makes a cut tensor of this rank's part of it; None if it is whole"""
        if isinstance(buffer, Sharded) and cut is not None:
            buffer.part.copy_(value)
        elif isinstance(buffer, Sharded):
            buffer.write(value)
        else:
            buffer.copy_(value if cut is None else whole(cut.of(value)))

    def _change(self, changes: Sequence[AnyChange], results: Sequence[Any], shapes: Shapes) -> None:
        """Makes the changes that the original forward makes."""

        def leaf(x: Any) -> Any:
            if isinstance(x, OutputAt):
                return results[x.at]
            return x.kind(x.expression(shapes)) if isinstance(x, InputSize) else x

        for change in changes:
            if isinstance(change, Write):
                self._write(change, results[change.at])
        make_changes(changes, self.modules, leaf, table_of)
        if any(isinstance(change, Change) and change.path[1:] == ("_buffers",) for change in changes):
            self.tree.version += 1  # A buffer has another shape now.

    def _write(self, change: Write, value: Tensor) -> None:
        """Writes into a tensor of an attribute; a value that becomes cut, or whole, replaces the tensor."""
        before = found_at(self.modules, change.path)
        if isinstance(value, Sharded) and isinstance(before, Sharded):
            write_into(before.part, value.part)
        elif isinstance(value, Sharded) or isinstance(before, Sharded):
            put_at(self.modules, change.path, value)
        else:
            write_into(before, value)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the present parameters and buffers by first name."""
        return dict(zip(self.places, values_at(self.places.values()), strict=True))

    def _key(self, leaves: Sequence[Any], spec: Any, autocast: Autocast, model_tensors: Mapping[str, Tensor]) -> Key:
        """Returns all facts of a call that select a graph, except sizes and values of tensors."""
        settings = self.tree.settings
        with torch._C.DisableTorchFunctionSubclass():  # A part would look for the user's code.
            kinds = tuple([_kind(leaf) if isinstance(leaf, Tensor) else freeze_argument(leaf) for leaf in leaves])
            used = dtypes(self.module, model_tensors)
        requested = autocast.dtype, torch.get_default_dtype(), settings.outputs, settings.recompute
        return spec, kinds, self.structure, self.modes, used, *requested

    def _find(
        self, key: Key, called: FlatCall, model_tensors: Mapping[str, Tensor], outcomes: tuple[Outcome, ...] = ()
    ) -> GraphEntry | None:
        """Returns the graph for a call; of those that assume outcomes of activations the one that was used last.

        What one graph has read of the call's inputs, the next does not read again: each look at a mask is one wait of
        the host for the device.
        """
        best: GraphEntry | None = None
        input_outcomes = outcomes  # Of the graphs that read inputs only.
        for entry_key, entry in self.entries:
            if entry_key != key or (called.looks and not entry.analysis.call.looks):
                continue
            if not called.looks and not entry.keeps_masks:
                continue
            first = outcomes if entry.assumes or not called.looks else input_outcomes
            operands = self._operands_if_right(entry, called.tensors, model_tensors, first)
            if operands is None:
                continue
            try:
                other_outcomes = entry.other_reads(operands, 0 if entry.assumes else len(first), called.looks)
            except Exception:  # After another outcome, later reads may be of nothing, as int() of infinity.
                continue
            if not entry.assumes and other_outcomes is None:
                return self._used(entry)
            if not entry.assumes and other_outcomes is not None:
                input_outcomes = other_outcomes
            elif other_outcomes is None and (best is None or entry.last > best.last):
                best = entry
        return None if best is None else self._used(best)

    def _used(self, entry: GraphEntry) -> GraphEntry:
        """Notes that a graph is used now."""
        if not torch.compiler.is_compiling():  # A counter would have torch compile each call anew.
            self.count += 1
            entry.last = self.count
        return entry

    def _operands_if_right(
        self,
        entry: GraphEntry,
        tensors: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        outcomes: tuple[Outcome, ...],
    ) -> list[Tensor] | None:
        """Returns the inputs of a graph whose key is the call's; None if it is not right for the call.

        The guard takes longest, so it comes last; but first where it says whether attributes that are inputs are there.
        """
        captured, guard, version = entry.analysis.captured, entry.guard, self.tree.version
        if guard is None or (captured.opened and not guard.holds(version)):
            return None
        operands, shapes = self._graph_inputs(captured, tensors)
        if not captured.fits(shapes) or not _begins_with(captured, outcomes):
            return None
        if captured.wanted != NOT_ASKED and not captured.wanted.covers(self._wanted(tensors, parameters)):
            return None
        return operands if captured.opened or guard.holds(version) else None

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
            expect_own_ranks(self.module, self.mesh, model_tensors)
            check = self.tree.settings.check_inputs
            if self.seen_loaded != self.tree.loaded:  # What was loaded is compared in the next calls.
                self.seen_loaded = self.tree.loaded
                for _, graph in self.entries:
                    graph.calls = 0
            # Each rank read values by itself. Where they differ it would run another graph, with other collectives.
            if self.read_places:
                index = next((i for i, (_, graph) in enumerate(self.entries) if graph is entry), -1)
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
        tensors, _ = self._graph_inputs(entry.analysis.captured, called.tensors)
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
        parts = checksum_of_parts(self.tensors(), self.layouts) if self.tree.loaded and check != "never" else 0
        if entry is None:
            # Here, too: the capture would find only that graphs differ. Whether the graph will draw is not known yet.
            if check != "never":
                agree_on_call(self.mesh, called.leaves, mode, False)
            try:
                entry = self._captured(called, outcomes)
            except Error:  # On every rank. Where inputs differ, others may have a graph, and do not begin again.
                if not self._numbers_in(called.spec):
                    raise
                self._set_numbers(called.spec, frozenset())  # Perhaps the graph has no operator for a number.
                raise _OtherNumbers from None
        if check != "never":
            agree_on_call(self.mesh, called.leaves, mode, entry.random, parts)
            if self.module.training and torch.is_grad_enabled():
                warn_of_equal_rows(self.mesh, called.leaves)
        entry.calls += 1
        return entry

    def _captured(self, called: FlatCall, outcomes: tuple[Outcome, ...]) -> GraphEntry:
        """Captures a graph. Captures again where the values of inputs, which the graph says, were not known before."""
        while True:
            entry = self._capture(called, outcomes)
            operands, _ = self._graph_inputs(entry.analysis.captured, called.tensors)
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
        self._open_what_changes(called)
        mesh, settings = self.mesh, self.tree.settings
        layouts: dict[int | Path, Layout] = {i: t.held for i, t in enumerate(called.tensors) if isinstance(t, Sharded)}
        layouts |= {place: x.held for place, x in everything(self.module) if isinstance(x, Sharded)}
        cut_buffers = {name: x for name, x in self.tensors().items() if isinstance(x, Sharded)}
        call = CallState(
            autocast=called.autocast,
            layouts=self.layouts,
            cut_inputs=layouts,
            cut_caches={name: replace(x.held, shape=tuple(x.shape)) for name, x in cut_buffers.items()},
            opened=self.opened,
            wanted=self._wanted(called.tensors, self.tensors()),
            values=KnownValues(self.read_places, outcomes, guesses=self.guesses),
            looks=called.looks,
        )

        def make() -> GraphEntry:
            args, kwargs = pytree.tree_unflatten(called.leaves, called.spec)
            skeleton = original_of(self.module, self._whole())
            program = analyse(skeleton, args, kwargs, mesh.size, settings, call, cp_rank=mesh.cp_rank)
            return prepare(program, mesh, settings)

        # The graph serves calls under other modes, too, so those of this call must not be in it.
        with alone():
            entry = agree(mesh, make, lambda made: made.facts(digest(made.analysis), mesh))
            self._cut_caches(entry)
        return self.keep(self._key(called.leaves, called.spec, called.autocast, self.tensors()), entry)

    def _learns_numbers(self, key: Key) -> bool:
        """Notes the whole numbers among the arguments that change from call to call; True if there are new ones.

        They are inputs of later graphs (`number_arguments.py`), unless the model asks so much of them that there is a
        graph for each all the same.
        """
        spec, kinds, *_ = key
        before = self._numbers_in(spec)
        if before and sum(entry_key == key for entry_key, _ in self.entries) >= GRAPHS_OF_NUMBERS:
            self._set_numbers(spec, frozenset())
            return True
        if before is not None and not before:
            return False
        changed = {
            i for entry_key, _ in self.entries for i in _other_numbers(entry_key, key) if is_countable(kinds[i][1])
        }
        if changed:
            self._set_numbers(spec, changed | (before or set()))
        return bool(changed)

    def _numbers_in(self, spec: Any) -> frozenset[int] | None:
        """Returns the positions of the numbers that are inputs; None for calls of which nothing is known."""
        return next((positions for known_spec, positions in self.numbers if known_spec == spec), None)

    def _set_numbers(self, spec: Any, positions: Iterable[int]) -> None:
        remaining = [(known_spec, indices) for known_spec, indices in self.numbers if known_spec != spec]
        self.numbers = [*remaining, (spec, frozenset(positions))]

    def _wanted(self, tensors: Sequence[Tensor], model_tensors: Mapping[str, Tensor]) -> GradientsWanted:
        """Returns the gradient modes of a call."""
        with torch._C.DisableTorchFunctionSubclass():  # A cut parameter would look for the user's code.
            return wanted_now(tensors, [model_tensors[name] for name in self.layouts])

    def _open_what_changes(self, called: FlatCall) -> None:
        """Notes the attributes with tensors that changed since a capture: they become inputs of later graphs."""
        key = self._key(called.leaves, called.spec, called.autocast, self.tensors())
        guards = [entry.guard for entry_key, entry in self.entries if entry_key == key and entry.guard is not None]
        for guard in guards:
            slots = [change.place for change in guard.changed() if not isinstance(change.place, CodeName)]
            self.opened |= Opened(frozenset(filter(guard.holds_tensors, slots)))
        if is_many(len(guards)) and (changed := guards[-1].changed()):
            self._warn(len(guards), ", ".join(map(str, changed)), "a buffer, or a plain attribute")
        differences = [numbers for entry_key, _ in self.entries if (numbers := _other_numbers(entry_key, key))]
        if is_many(len(differences)):
            of_leaves = [name.partition(".")[2] for name in leaf_names(called.spec)]  # Behind "args" or "kwargs".
            names = ", ".join(f"`{of_leaves[i]}`" for i in differences[-1])
            self._warn(len(differences), names, "without dimensions, as `torch.tensor(3)`")
        of_key = [entry for entry_key, entry in self.entries if entry_key == key]
        fixed = sum(entry.analysis.captured.attempt.symbols != "all" for entry in of_key)
        if is_many(fixed):
            warnings.warn(
                f"{self.name}.forward is captured for the {fixed + 1}th time, since its inputs had other sizes each "
                "time, and forward computes so much with sizes that a graph is right for these sizes only. Pad inputs "
                "to a few sizes",
                stacklevel=2,
            )
        self._count_values(key)

    def _count_values(self, key: Key) -> None:
        """Warns of captures for other values of tensors. Raises Error if activations have selected too many graphs."""
        entries = [entry for entry_key, entry in self.entries if entry_key == key and entry.analysis.captured.asked]
        if len(entries) < FEW:
            return
        place = place_text(_other_read(*(entry.analysis.captured.asked for entry in entries[-2:])).place)
        if sum(entry.assumes for entry in entries) >= FEW:
            raise Error(
                f"Python reads other values of activations in almost every call, and each of {FEW} graphs is right for "
                "some of them",
                at=place,
                fix="torch.where, or a mask, in place of the branch. Leave out `if mask.any():` before work on rows of "
                "the mask: on no rows it changes nothing. Set the probability of a random branch to 0",
            )
        if is_many(len(entries)):
            warnings.warn(
                f"{self.name}.forward is captured for the {len(entries) + 1}th time, since what Python reads of "
                f"tensors had another value each time, as at {place}. torch.where or a mask needs no new capture",
                stacklevel=2,
            )

    def _warn(self, count: int, names: str, tensor: str) -> None:
        warnings.warn(
            f"{self.name}.forward is captured for the {count + 1}th time, since {names} had another value each time. "
            f"A tensor ({tensor}) may change without a new capture",
            stacklevel=2,
        )

    def _on_meta(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a parameter or buffer on meta with the original's shape."""
        # An empty tensor of the whole's shape takes its strides, too.
        shape = self.layouts[name].shape if name in self.layouts else tensor.shape
        has_shape = tuple(shape) == tuple(tensor.shape) and not isinstance(tensor, DTensor | Sharded)
        empty = _empty_like(tensor) if has_shape else torch.empty(shape, dtype=tensor.dtype, device="meta")
        return nn.Parameter(empty, tensor.requires_grad) if name in self.layouts else empty

    def _whole(self) -> dict[str, Tensor]:
        """Returns each parameter and buffer on meta with the original's shape and the present compute dtype."""
        model_tensors = self.tensors()
        whole_tensors = {}
        for (name, tensor), dtype in zip(model_tensors.items(), dtypes(self.module, model_tensors), strict=True):
            whole = self.whole[name]
            flag = (tensor if isinstance(tensor, nn.Parameter) else whole).requires_grad
            fits = whole.dtype == dtype and whole.requires_grad == flag
            whole_tensors[name] = whole if fits else _as(whole, dtype, flag)
        return whole_tensors

    def first(self, entry: GraphEntry) -> None:
        """Keeps the graph that was captured when the model became parallel."""
        captured = entry.analysis.captured
        leaves, spec = flatten_call(*pytree.tree_unflatten(captured.leaves, captured.spec))
        self._cut_caches(entry)
        self.keep(self._key(leaves, spec, captured.autocast, self.tensors()), entry)

    def _cut_caches(self, entry: GraphEntry) -> None:
        """Keeps this rank's part of each buffer that a graph has cut, in all places of the buffer."""
        names = entry.analysis.layouts_of_caches
        wholes = {name: x for name in names if not isinstance(x := value_at(self.places[name]), Sharded)}
        for name, buffer in wholes.items():
            cache = Sharded(names[name].take(buffer, self.mesh.rank), names[name], self.mesh)
            for module in self.modules.values():
                module._buffers.update({key: cache for key, x in module._buffers.items() if x is buffer})
            for place in [place for place, x in everything(self.module) if x is buffer]:
                put_at(self.modules, place, cache)
        if wholes:
            self.tree.version += 1
            self.look_again()

    def keep(self, key: Key, made: GraphEntry) -> GraphEntry:
        """Keeps a graph for later calls; its blocks read their parameters from this model."""
        parts = dict(self.module.named_modules(remove_duplicate=False))
        attached = made.ready.attached(self.places, lambda block: parts.get(block) if block else None)
        entry = replace(made, ready=attached)
        captured = entry.analysis.captured
        # `Part.__setattr__` counts assignments to these names only.
        self.tree.read |= {name for _, name in captured.reads}
        self.opened |= captured.attempt.opened
        self.read_places |= captured.attempt.values.places
        entry.guard = guard_of(captured, self.module, self.modules, self.tree.version)
        for part in entry.ready.module.children():
            # `fully_shard` may register its hooks on the modules that a graph really calls.
            if isinstance(part, BlockCall) and (state := state_of(part.owner[0])) is not None:
                state.is_block = True
        if self.tree.compiles is not None:
            compile_blocks(entry.ready.module, self.tree.compiles, self.tree.fused)
        self.entries.append((key, entry))
        if len(self.entries) > MOST:
            # The first graph stays. Of the others, that one goes which was used the longest time ago.
            del self.entries[min(range(1, MOST), key=lambda i: self.entries[i][1].last)]
        return self._used(entry)

    # ---- attributes for users

    @property
    def latest(self) -> GraphEntry:
        """The graph that was captured last for the present modules and parameters.

        Raises:
            Error: there is none yet.
        """
        for key, entry in reversed(self.entries):
            # `_key` has the structure there.
            if key[2] == self.structure:
                return entry
        changed = "since its modules or parameters were replaced" if self.entries else "by itself"
        raise Error(
            f"the {self.name} was not called {changed}, and its plan is made in a call",
            fix="call it once, on all ranks, and read the plan then",
        )

    @property
    def code(self) -> str:
        """The Python code of this rank's latest graph, with each block once."""
        module = self.latest.ready.module
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
        for _, entry in self.entries:
            compile_blocks(entry.ready.module, options, fused)
        self.tree.compiles, self.tree.fused = options, fused
        return fused

    def layout_of(self, name: str) -> Layout | None:
        """Returns the layout of a parameter, by any of its names; None for a buffer."""
        return self.layouts.get(self.first_names.get(name, name))


def _empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)


def _as(tensor: Tensor, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    empty = _empty_like(tensor, dtype)
    return nn.Parameter(empty, requires_grad) if isinstance(tensor, nn.Parameter) else empty


def is_many(count: int) -> bool:
    """True for the numbers of captures that cause a warning: 8, 16, 32, ..."""
    return count >= FEW and count.bit_count() == 1


def _begins_with(captured: Captured, outcomes: Sequence[Outcome]) -> bool:
    """True if a graph is right for calls whose first reads of values have these outcomes."""
    reads = [read.outcome for read in captured.asked[: len(outcomes)]]
    return len(reads) == len(outcomes) and all(map(Outcome.is_same, reads, outcomes))


def _other_read(first: Sequence[ValueRead], second: Sequence[ValueRead]) -> Outcome:
    """Returns the first read in which two graphs differ; the last read if none does."""
    pairs = ((first_read.outcome, second_read.outcome) for first_read, second_read in zip(first, second, strict=False))
    return next((after for before, after in pairs if not before.is_same(after)), second[-1].outcome)


def _expect_apart(name: str, written: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Raises Error if a tensor that forward writes into shares memory with another: a graph has a copy of each."""
    storages = [storage_of(x) for x in tensors]
    for i in written:
        if storages[i] is not None and storages.count(storages[i]) > 1:
            raise Error(
                f"{name}.forward writes into an argument that shares memory with another tensor",
                fix="give it a clone()",
            )


def _other_numbers(earlier: Key, key: Key) -> list[int]:
    """Returns the positions of numbers among the arguments, if two keys differ in these numbers only; else []."""
    if earlier[0] != key[0] or earlier[2:] != key[2:]:
        return []
    positions = [i for i, (before, after) in enumerate(zip(earlier[1], key[1], strict=True)) if before != after]
    kinds = [(earlier[1][i][0], key[1][i][0]) for i in positions]
    return positions if all(pair in ((int, int), (float, float), (NumberArgument, int)) for pair in kinds) else []


def _kind(tensor: Tensor) -> Any:
    """Returns the facts of a tensor that select a graph, except sizes."""
    if isinstance(tensor, NumberArgument):
        return (NumberArgument,)
    cut = tensor.cut if isinstance(tensor, Sharded) else None
    by_itself = not torch.compiler.is_compiling() and computes_by_itself(type(tensor))
    return tensor.dim(), tensor.dtype, cut, tensor.layout, tensor.is_nested, by_itself


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
