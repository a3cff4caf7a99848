"""Captured: a graph of ATen operators, the meaning of its placeholders, and the facts of the call around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.guards.gradient_queries import NOT_ASKED, GradientsWanted
from autotp.passes.capture.guards.sizes import Fits
from autotp.passes.capture.guards.values import NO_VALUES, KnownValues, Outcome, Place, ValueRead
from autotp.passes.capture.python_state.attribute_writes import Change, Write
from autotp.passes.capture.python_state.code_names import CodeName
from autotp.passes.capture.python_state.walk import GONE, Path, Slot, slot_of
from autotp.passes.capture.unsupported.long_sizes import Symbols


@dataclass(frozen=True)
class OutputAt:
    """Stands for the output of the graph at this position."""

    at: int


@dataclass(frozen=True)
class InputSize:
    """Stands for a number or a truth value that is computed from the sizes and numbers among a call's arguments.

    Attributes:
        expression: of symbols; in a `Captured` a function of the shapes.
        kind: int, float or bool.
    """

    expression: Any
    kind: type = int


@dataclass(frozen=True)
class Opened:
    """The attributes of a model whose values are inputs of a graph.

    Attributes:
        slots: attributes whose tensors, at any depth, are inputs.
        numbers: paths of the whole numbers that are inputs, unless they are `fixed`.
        fixed: paths of the whole numbers that are arguments of operators: the graph is right for one value only.
    """

    slots: frozenset[Slot] = frozenset()
    numbers: frozenset[Path] = frozenset()
    fixed: frozenset[Path] = frozenset()

    def __or__(self, other: Opened) -> Opened:
        return Opened(self.slots | other.slots, self.numbers | other.numbers, self.fixed | other.fixed)


NOTHING_OPENED = Opened()
Blocks = Literal["by objects", "by tensors", "each"]
"""Blocks that are alike are captured once, by what they do with objects or with tensors; or each by itself."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What one capture of a model tries. A capture that fails says what the next one tries instead.

    NOTE [How often forward runs]
    The exporter runs `forward` once in each attempt, and a run without the exporter finds the values that Python reads.
    Most models need one attempt. A further one is made for a reason, and each reason only ever takes something away or
    adds something, so it cannot come back: `symbols` become fewer (2 times at most), `looks` and `exactly` are given up
    or asked for (once), `blocks` are captured in a plainer way (2 times, and again after each other reason), `opened`
    grows by attributes of the model, and `values` by places of its code. `passes/capture/capture.py` has the one loop.

    Attributes:
        opened: the attributes whose values are inputs of the graph.
        values: what is known of the values that Python reads of tensors.
        symbols: the dimensions of inputs that are symbols at most: NOTE [Sizes that become numbers]
        looks: whether the graph may be one for batches with padding, or without: NOTE [Looks at masks]
        exactly: whether masks are kept that attention would not need: `ModelLibrary.during_capture`.
        blocks: how blocks that are alike are captured.
    """

    opened: Opened = NOTHING_OPENED
    values: KnownValues = NO_VALUES
    symbols: Symbols = "all"
    looks: bool = True
    exactly: bool = False
    blocks: Blocks = "by objects"


FIRST_ATTEMPT = Attempt()


@dataclass(frozen=True)
class Captured:
    """One graph of a model.

    A state is an argument that the model changes, such as a key-value cache (`passes/capture/pytree.py`).

    Attributes:
        graph: placeholders in the order parameters, buffers, constants, inputs; one output, a tuple of tensors.
        parameters: placeholder name -> the parameter's first name in the model; a tied one has one placeholder.
        buffers: placeholder name -> the buffer's first name in the model.
        constants: placeholder name -> a tensor that the model created during capture, or held outside of its buffers.
        inputs: placeholder names of the tensor inputs, in the order of the flattened arguments.
        assigned: placeholder names of the buffers that the model sets anew; their values are the last outputs.
        outputs: rebuilds the model's output from the flat list of outputs, and puts the new values into the states.
        owned: the inputs that the graph may write to: tensors of states and of attributes, and those in `into`.
        kept: positions of the outputs that belong to a state.
        fits: returns True for shapes of the tensor inputs that the graph is right for.
        example: shapes of the inputs during capture.
        leaves, spec: the flattened arguments, tensors on meta, and their structure.
        autocast: the settings of autocast during capture; the graph names their `device`.
        reads: the attributes that the model read.
        opened: paths of the tensors and numbers in attributes that are inputs; they follow the arguments' tensors.
        changes: the changes of a call to the model's attributes; leaves are `OutputAt`, `InputSize` or plain values.
        stays: positions of the outputs that attributes are set to and that are inputs of the next call.
        results: the number of outputs that the model returns; the outputs after them are new values of attributes.
        into: for each argument that the model writes into: its place among the arguments' tensors, and the position of
            the output that holds its new value.
        sets: the plain values that a call sets attributes of classes and globals to.
        wanted: the answers to the model's questions about gradients: the graph is right only for calls with the same.
        hooks: forward hooks that the call registers: path of the module and hook; only those of a library of models.
        asked: what Python read of tensors, in order; the tensors are outputs after all that `changes` and `into` name.
        attempt: what the capture tried: the attributes that are inputs, the places at which values are needed.
        symbolic: the places of numbers that sizes in the graph are made of, of which it has no values.
        input_values: graph of what Python reads of the inputs' values (canonicalize); None before that pass, or if it
            reads nothing.
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
    fits: Fits
    example: tuple[tuple[int, ...], ...]
    leaves: tuple[Any, ...]
    spec: Any
    autocast: Autocast
    reads: frozenset[Slot]
    opened: tuple[Path, ...]
    attempt: Attempt
    changes: tuple[Change | Write, ...]
    stays: frozenset[int]
    results: int
    into: tuple[tuple[int, int], ...] = ()
    sets: tuple[tuple[CodeName, Any], ...] = ()
    wanted: GradientsWanted = NOT_ASKED
    hooks: tuple[tuple[str, Any], ...] = ()
    asked: tuple[ValueRead, ...] = ()
    symbolic: frozenset[Place] = frozenset()
    input_values: fx.Graph | None = None

    @property
    def read_at(self) -> list[int]:
        """Positions of the outputs that Python reads values of, and that nothing else is made of."""
        return [x.at for read in self.asked if not read.of_inputs for x in read.given if isinstance(x, OutputAt)]

    @property
    def input_at(self) -> dict[Path, str]:
        """Path of a tensor in an attribute that is an input -> name of its placeholder."""
        # Whole numbers have no placeholders; tensors of attributes come last among the inputs.
        paths = [path for path in self.opened if path not in self.attempt.opened.numbers]
        return dict(zip(paths, self.inputs[len(self.inputs) - len(paths) :], strict=True))

    @property
    def computes_changes(self) -> bool:
        """True if a call sets attributes to computed tensors or to sizes."""
        values = [v for c in self.changes if isinstance(c, Change) for v in c.values.values() if v is not GONE]
        writes = any(isinstance(change, Write) for change in self.changes)
        return writes or any(isinstance(leaf, OutputAt | InputSize) for leaves, _ in values for leaf in leaves)

    @property
    def written(self) -> frozenset[Slot]:
        """The attributes that a call sets, or whose contents it changes."""
        attribute_changes = [change for change in self.changes if isinstance(change, Change) and len(change.path) == 1]
        named = {(change.path[0], key) for change in attribute_changes for key in change.values}
        return frozenset(named | {slot_of(change.path) for change in self.changes if len(change.path) > 1})


def contradicted(captured: Captured, outputs: Sequence[Any], first: int = 0) -> tuple[Outcome, ...] | None:
    """Returns the outcomes of a call's reads up to the first that is not the assumed one; None if there is none.

    Args:
        outputs: of the graph in this call.
        first: the number of reads that an earlier graph made in this call. They are not compared: rounding may differ
            between two graphs, and each would name the other for ever.
    """

    for i, read in enumerate(captured.asked):
        if i >= first and not read.of_inputs:
            outcome = read.made(partial(_output, outputs))
            if not outcome.is_same(read.outcome):
                return (*(earlier.outcome for earlier in captured.asked[:i]), outcome)
    return None


def guesses(captured: Captured, outputs: Sequence[Any]) -> tuple[Outcome, ...]:
    """Returns the outcomes of a call's reads in a run that assumed another outcome for one of them."""
    outcomes = list[Outcome]()
    for read in captured.asked:
        try:
            outcomes.append(read.outcome if read.of_inputs else read.made(partial(_output, outputs)))
        except Exception:  # After another outcome, later reads may be of nothing, as int() of infinity.
            break
    return tuple(outcomes)


def _output(outputs: Sequence[Any], x: Any) -> Any:
    return outputs[x.at] if isinstance(x, OutputAt) else x
