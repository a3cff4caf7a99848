"""Captured: a graph of ATen operators, the meaning of its placeholders, and the facts of the call around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import fx

from autotp.passes.capture.autocast_regions import Autocast
from autotp.passes.capture.guards.gradient_queries import NOT_ASKED, GradientsWanted
from autotp.passes.capture.guards.sizes import Fits
from autotp.passes.capture.guards.values import NO_VALUES, KnownValues, Outcome, Place, ValueRead, first_other
from autotp.passes.capture.python_state.attribute_writes import AddedHook, AnyChange, Change, Write
from autotp.passes.capture.python_state.walk import GONE, Path, Slot, slot_of
from autotp.passes.capture.pytree import Built, builder_of, unflatten_outcome
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


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The meaning of a graph's outputs; called with their values, it rebuilds the model's result.

    Attributes:
        leaves: leaves of the result, and of the states; `OutputAt` for tensors and sizes.
        spec: their structure.
        results: the number of outputs that the model returns; the outputs after them are new values of attributes.
        kept: positions of the outputs that belong to a state.
        stays: positions of the outputs that attributes are set to and that are inputs of the next call.
        into: for each argument that the model writes into: its place among the arguments' tensors, and the position of
            the output that holds its new value.
        assigned: placeholder names of the buffers that the model sets anew; their values are the last outputs.
        omitted: positions of results that are not computed (`only_loss`); the loss is there in their place.
    """

    leaves: Sequence[Any]
    spec: Any
    results: int
    kept: frozenset[int]
    stays: frozenset[int]
    into: tuple[tuple[int, int], ...]
    assigned: tuple[str, ...]
    omitted: frozenset[int] = frozenset()

    def __call__(self, outputs: Sequence[Any], states: Sequence[Any]) -> Any:
        """Returns the model's result, and puts new values into the states."""
        leaves = [outputs[leaf.at] if type(leaf) is OutputAt else leaf for leaf in self.leaves]
        # torch.compile traces pytree's own functions, and not these.
        builders = None if torch.compiler.is_compiling() else self.builders
        return unflatten_outcome(leaves, self.spec, states, builders)

    @cached_property
    def builders(self) -> tuple[Built, Built]:
        """Build the result, and the states."""
        return builder_of(self.spec[0]), builder_of(self.spec[1])

    def __getstate__(self) -> dict[str, Any]:
        # Functions that are made here cannot be pickled.
        return {name: value for name, value in vars(self).items() if name != "builders"}


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
        outputs: the meaning of the graph's outputs.
        owned: the inputs that the graph may write to: tensors of states and of attributes, and those in `outputs.into`.
        fits: returns True for shapes of the tensor inputs that the graph is right for.
        example: shapes of the inputs during capture.
        leaves, spec: the flattened arguments, tensors on meta, and their structure.
        autocast: the settings of autocast during capture; the graph names their `device`.
        reads: the attributes that the model read.
        opened: paths of the tensors and numbers in attributes that are inputs; they follow the arguments' tensors.
        changes: what a call changes: attributes of the model (leaves are `OutputAt`, `InputSize` or plain values), of
            classes and globals, and hooks.
        wanted: the answers to the model's questions about gradients: the graph is right only for calls with the same.
        asked: what Python read of tensors, in order; the tensors are outputs after those that all else here names.
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
    outputs: Outputs
    owned: frozenset[str]
    fits: Fits
    example: tuple[tuple[int, ...], ...]
    leaves: tuple[Any, ...]
    spec: Any
    autocast: Autocast
    reads: frozenset[Slot]
    opened: tuple[Path, ...]
    attempt: Attempt
    changes: tuple[AnyChange, ...]
    wanted: GradientsWanted = NOT_ASKED
    asked: tuple[ValueRead, ...] = ()
    symbolic: frozenset[Place] = frozenset()
    input_values: fx.Graph | None = None

    @property
    def assumes(self) -> bool:
        """True if outcomes of activations are assumed, which a call compares after its run."""
        return any(not read.of_inputs for read in self.asked)

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
    def changes_of_model(self) -> list[AnyChange]:
        """What a call changes, except hooks of libraries, which parts of a batch can share."""
        return [change for change in self.changes if not isinstance(change, AddedHook)]

    @property
    def computes_changes(self) -> bool:
        """True if a call sets attributes to computed tensors or to sizes."""
        values = [v for c in self.changes if isinstance(c, Change) for v in c.values.values() if v is not GONE]
        writes = any(isinstance(change, Write) for change in self.changes)
        return writes or any(isinstance(leaf, OutputAt | InputSize) for leaves, _ in values for leaf in leaves)

    @property
    def written(self) -> frozenset[Slot]:
        """The attributes that a call sets, or whose contents it changes."""
        changes = [change for change in self.changes if isinstance(change, Change | Write)]
        of_modules = [change for change in changes if isinstance(change, Change) and len(change.path) == 1]
        named = {(change.path[0], key) for change in of_modules for key in change.values}
        return frozenset(named | {slot_of(change.path) for change in changes if len(change.path) > 1})


def contradicted(captured: Captured, outputs: Sequence[Any], first: int = 0) -> KnownValues | None:
    """Returns what is known of a call's reads, if one of them is not the assumed one; None if all are.

    Args:
        outputs: of the graph in this call.
        first: the number of reads that an earlier graph made in this call. They are not compared: rounding may differ
            between two graphs, and each would name the other for ever.
    """
    outcomes = first_other(
        captured.asked,
        lambda i, read: i >= first and not read.of_inputs,
        lambda read: read.made(partial(_output, outputs)),
    )
    places = captured.attempt.values.places
    return None if outcomes is None else KnownValues(places, outcomes, _guesses(captured, outputs))


def _guesses(captured: Captured, outputs: Sequence[Any]) -> tuple[Outcome, ...]:
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
