"""Captured: a graph of ATen operators, what its placeholders mean, and the facts of the call around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.guards.attribute_paths import Path, Slot, slot_of
from autotp.passes.capture.guards.attribute_writes import GONE, Change, Write
from autotp.passes.capture.guards.code_names import CodeName
from autotp.passes.capture.guards.python_state import NOT_ASKED, GradientsWanted
from autotp.passes.capture.guards.sizes import Shapes


@dataclass(frozen=True)
class OutputAt:
    """Stands for the output of the graph at this position."""

    at: int


@dataclass(frozen=True)
class InputSize:
    """Stands for a whole number that is computed from sizes and numbers that a call is given."""

    expression: Any


@dataclass(frozen=True)
class Opened:
    """What of a model's attributes is an input of a graph.

    Attributes:
        slots: attributes of which all tensors below are.
        numbers: where whole numbers lie that are, unless they are `fixed`.
        fixed: where whole numbers lie that operators are given: a graph is for one value.
    """

    slots: frozenset[Slot] = frozenset()
    numbers: frozenset[Path] = frozenset()
    fixed: frozenset[Path] = frozenset()

    def __or__(self, other: Opened) -> Opened:
        return Opened(self.slots | other.slots, self.numbers | other.numbers, self.fixed | other.fixed)


NOTHING = Opened()


@dataclass(frozen=True)
class Captured:
    """One graph of a model.

    A state is an argument that the model changes (`passes/capture/pytree.py`): its tensors may be written to.

    Attributes:
        graph: placeholders in the order parameters, buffers, constants, inputs; one output, a tuple of tensors.
        parameters: placeholder name -> the parameter's first name in the model; a tied one has one placeholder.
        buffers: placeholder name -> the buffer's first name in the model.
        constants: placeholder name -> the tensor the model made while it was captured.
        inputs: placeholder names of the tensor inputs, in the order of the flattened arguments.
        assigned: placeholder names of the buffers that the model sets anew; their values are the last outputs.
        outputs: rebuilds the model's output from the flat list of outputs, and gives the states what they hold now.
        owned: those of `inputs` that may be written to: of a state, of attributes, those in `into`.
        kept: positions of the outputs that belong to a state.
        fits: True for shapes of the tensor inputs that the graph is right for.
        example: shapes of the inputs it was captured with.
        leaves, spec: the flattened arguments, tensors on meta, and their structure.
        autocast: what was on around the model; its `device` is the one that the graph names.
        reads: the attributes that were read.
        opened: where the tensors and numbers lie, below attributes, that come behind the arguments' tensors.
        known: what is known to change from call to call.
        changes: what a call does to the model's attributes; leaves are `Place`s, `Size`s, or as they are.
        stays: positions of the outputs that attributes are set to and that the next call is given.
        results: how many of the outputs the model returns; those behind are what attributes are set to.
        into: for each argument that the model writes into its place among the arguments' tensors, and the position of
            the output that it is then.
        sets: what a call sets attributes of classes and globals to, plain values.
        wanted: of what gradients were wanted, as far as the model asked: the graph is for no other calls.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: list[str]
    assigned: list[str]
    outputs: Callable[[Sequence[Any], Sequence[Any]], Any]
    owned: frozenset[str]
    kept: frozenset[int]
    fits: Callable[[Shapes], bool]
    example: tuple[tuple[int, ...], ...]
    leaves: tuple[Any, ...]
    spec: Any
    autocast: Autocast
    reads: frozenset[Slot]
    opened: tuple[Path, ...]
    known: Opened
    changes: tuple[Change | Write, ...]
    stays: frozenset[int]
    results: int
    into: tuple[tuple[int, int], ...] = ()
    sets: tuple[tuple[CodeName, Any], ...] = ()
    wanted: GradientsWanted = NOT_ASKED

    @property
    def input_at(self) -> dict[Path, str]:
        """Where a tensor lies that is an input -> its placeholder's name."""
        paths = [path for path in self.opened if path not in self.known.numbers]
        return dict(zip(paths, self.inputs[len(self.inputs) - len(paths) :], strict=True))

    @property
    def computes_changes(self) -> bool:
        """Whether a call sets attributes to what it computes, or to sizes."""
        values = [v for c in self.changes if isinstance(c, Change) for v in c.values.values() if v is not GONE]
        writes = any(isinstance(change, Write) for change in self.changes)
        return writes or any(isinstance(leaf, OutputAt | InputSize) for leaves, _ in values for leaf in leaves)

    @property
    def written(self) -> frozenset[Slot]:
        """The attributes that a call sets, or below which it changes something."""
        own = [change for change in self.changes if isinstance(change, Change) and len(change.path) == 1]
        named = {(change.path[0], key) for change in own for key in change.values}
        return frozenset(named | {slot_of(change.path) for change in self.changes if len(change.path) > 1})
