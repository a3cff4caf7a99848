"""The graphs of a module, one for each kind of call: which fits a call, and what a further capture makes an input."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.errors import Error
from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.captured import NOTHING_OPENED, Captured, Opened
from autotp.passes.capture.guards.gradient_queries import NOT_ASKED
from autotp.passes.capture.guards.values import Outcome, Place, ValueRead, place_text
from autotp.passes.capture.python_state.code_names import CodeName
from autotp.passes.capture.python_state.freeze import freeze_argument
from autotp.passes.capture.pytree import computes_by_itself, leaf_names
from autotp.passes.capture.replacements.number_arguments import NumberArgument, is_countable
from autotp.runtime.calls.graph_entry import GraphEntry
from autotp.runtime.calls.structure import Structure
from autotp.runtime.fsdp import dtypes

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


class GraphCache:
    """The graphs of one module of a parallel model.

    Attributes:
        structure: the module's parameters, buffers and modules.
        entries: each graph with the key of its calls.
        opened: the attributes that are known to change from call to call; graphs have them as inputs.
        numbers: structure of the arguments, and positions of the numbers among them that change, which are inputs, too;
            none where each number needs a graph of its own.
        read_places: the places at which Python needs values of tensors.
        count: how often a graph was found for a call, or made.
    """

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.entries: list[tuple[Key, GraphEntry]] = []
        self.opened = NOTHING_OPENED
        self.numbers: list[tuple[Any, frozenset[int]]] = []
        self.read_places = frozenset[Place]()
        self.count = 0

    def key(self, leaves: Sequence[Any], spec: Any, autocast: Autocast, model_tensors: Mapping[str, Tensor]) -> Key:
        """Returns all facts of a call that select a graph, except sizes and values of tensors."""
        settings = self.structure.tree.settings
        with torch._C.DisableTorchFunctionSubclass():  # A part would look for the user's code.
            kinds = tuple([_kind(leaf) if isinstance(leaf, Tensor) else freeze_argument(leaf) for leaf in leaves])
            used = dtypes(self.structure.module, model_tensors)
        requested = autocast.dtype, torch.get_default_dtype(), settings.outputs, settings.recompute
        return spec, kinds, self.structure.facts, self.structure.modes, used, *requested

    def find(
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
                return self.used(entry)
            if not entry.assumes and other_outcomes is not None:
                input_outcomes = other_outcomes
            elif other_outcomes is None and (best is None or entry.last > best.last):
                best = entry
        return None if best is None else self.used(best)

    def used(self, entry: GraphEntry) -> GraphEntry:
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
        captured, guard, version = entry.analysis.captured, entry.guard, self.structure.tree.version
        if guard is None or (captured.opened and not guard.holds(version)):
            return None
        operands, shapes = self.structure.graph_inputs(captured, tensors)
        if not captured.fits(shapes) or not _begins_with(captured, outcomes):
            return None
        gradients = captured.wanted
        if gradients != NOT_ASKED and not gradients.covers(self.structure.gradients_wanted(tensors, parameters)):
            return None
        return operands if captured.opened or guard.holds(version) else None

    def keep(self, key: Key, entry: GraphEntry) -> GraphEntry:
        """Keeps a graph for later calls."""
        captured = entry.analysis.captured
        self.opened |= captured.attempt.opened
        self.read_places |= captured.attempt.values.places
        self.entries.append((key, entry))
        if len(self.entries) > MOST:
            # The first graph stays. Of the others, that one goes which was used the longest time ago.
            del self.entries[min(range(1, MOST), key=lambda i: self.entries[i][1].last)]
        return self.used(entry)

    @property
    def latest(self) -> GraphEntry:
        """The graph that was captured last for the present modules and parameters.

        Raises:
            Error: there is none yet.
        """
        for key, entry in reversed(self.entries):
            # `key` has the structure there.
            if key[2] == self.structure.facts:
                return entry
        changed = "since its modules or parameters were replaced" if self.entries else "by itself"
        raise Error(
            f"the {self.structure.name} was not called {changed}, and its plan is made in a call",
            fix="call it once, on all ranks, and read the plan then",
        )

    def learns_numbers(self, key: Key) -> bool:
        """Notes the whole numbers among the arguments that change from call to call; True if there are new ones.

        They are inputs of later graphs (`number_arguments.py`), unless the model asks so much of them that there is a
        graph for each all the same.
        """
        spec, kinds, *_ = key
        before = self.numbers_in(spec)
        if before and sum(entry_key == key for entry_key, _ in self.entries) >= GRAPHS_OF_NUMBERS:
            self.set_numbers(spec, frozenset())
            return True
        if before is not None and not before:
            return False
        changed = {
            i for entry_key, _ in self.entries for i in _other_numbers(entry_key, key) if is_countable(kinds[i][1])
        }
        if changed:
            self.set_numbers(spec, changed | (before or set()))
        return bool(changed)

    def numbers_in(self, spec: Any) -> frozenset[int] | None:
        """Returns the positions of the numbers that are inputs; None for calls of which nothing is known."""
        return next((positions for known_spec, positions in self.numbers if known_spec == spec), None)

    def set_numbers(self, spec: Any, positions: Iterable[int]) -> None:
        """Notes which numbers of calls of this kind are inputs of graphs."""
        remaining = [(known_spec, indices) for known_spec, indices in self.numbers if known_spec != spec]
        self.numbers = [*remaining, (spec, frozenset(positions))]

    def open_what_changes(self, called: FlatCall) -> None:
        """Notes the attributes with tensors that changed since a capture: they become inputs of later graphs."""
        key = self.key(called.leaves, called.spec, called.autocast, self.structure.tensors())
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
                f"{self.structure.name}.forward is captured for the {fixed + 1}th time, since its inputs had other "
                "sizes each time, and forward computes so much with sizes that a graph is right for these sizes only. "
                "Pad inputs to a few sizes",
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
                f"{self.structure.name}.forward is captured for the {len(entries) + 1}th time, since what Python reads "
                f"of tensors had another value each time, as at {place}. torch.where or a mask needs no new capture",
                stacklevel=2,
            )

    def _warn(self, count: int, names: str, tensor: str) -> None:
        warnings.warn(
            f"{self.structure.name}.forward is captured for the {count + 1}th time, since {names} had another value "
            f"each time. A tensor ({tensor}) may change without a new capture",
            stacklevel=2,
        )


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
