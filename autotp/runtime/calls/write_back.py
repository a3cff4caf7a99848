"""What a call writes behind its graph: arguments, buffers and attributes, as the original forward does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotp.distributed.cut_tensors.sharded_tensor import CutOutput, Sharded, whole
from autotp.errors import Error
from autotp.passes.capture.captured import Captured, InputSize, OutputAt
from autotp.passes.capture.guards.sizes import Shapes
from autotp.passes.capture.python_state.attribute_writes import AnyChange, Change, Write, make_changes, write_into
from autotp.passes.capture.python_state.walk import found_at, put_at
from autotp.passes.capture.skeleton import storage_of
from autotp.passes.emit.attach_parameters import value_at
from autotp.runtime.calls.graph_entry import GraphEntry
from autotp.runtime.calls.structure import Structure
from autotp.runtime.tree import table_of


def copy_what_is_written(
    structure: Structure, captured: Captured, tensors: list[Tensor], check: Callable[..., Any]
) -> dict[int, Tensor]:
    """Returns the caller's tensors that the model writes into, by the position of the output with their new values.

    It replaces them in `tensors` by copies, so that tensors saved for backward do not change.

    Args:
        check: calls a function that Dynamo does not trace: `check(function, *args)`.

    Raises:
        Error: such a tensor requires a gradient, or shares memory with another one.
    """
    written = {index: tensors[i] for i, index in captured.outputs.into}
    # torch refuses to write into such a tensor on one device, too.
    if torch.is_grad_enabled() and any(x.requires_grad and x.is_leaf for x in written.values()):
        raise Error(
            f"{structure.name}.forward writes into an argument that requires a gradient",
            fix="give it a clone()",
        )
    if written:
        places = [i for i, _ in captured.outputs.into]
        check(_expect_apart, structure.name, places, [*tensors, *structure.tensors().values()])
    for i, _ in captured.outputs.into:
        tensors[i] = tensors[i].clone()
    return written


def result_of(
    structure: Structure,
    entry: GraphEntry,
    outputs: Sequence[Any],
    changed: Sequence[Any],
    written: Mapping[int, Tensor],
    shapes: Shapes,
) -> Any:
    """Rebuilds the model's result from the outputs of a graph, and notes the layout of each tensor on it.

    Updates buffers, attributes, and the arguments that the model changes; cut values in these become `Sharded`.

    Args:
        changed: the arguments that have a state, which the model may change.
        written: the caller's tensors that the model writes into, by position of the output.
        shapes: those of the graph's inputs.
    """
    with torch.no_grad():
        # In reverse: a buffer that was written to and then replaced comes twice, with its final value first.
        updated, first = entry.updated, len(outputs) - len(entry.updated)
        for i, name in reversed(list(enumerate(updated, first))):
            _update(value_at(structure.places[name]), outputs[i], entry.cut.get(i))
    results = list(outputs)
    for index, output in entry.cut.items():
        results[index] = output.of(results[index])
    captured = entry.analysis.captured
    for index, tensor in written.items():
        write_into(tensor, results[index])
        # The caller gets its own tensor back, not the graph's copy of it.
        results[index] = tensor
    if captured.changes:
        _change(structure, captured.changes, results, shapes)
    return captured.outputs(results, changed)


def _update(buffer: Tensor, value: Tensor, cut: CutOutput | None) -> None:
    """Writes the new value of a buffer. cut: makes a cut tensor of this rank's part of it; None if it is whole"""
    if isinstance(buffer, Sharded) and cut is not None:
        buffer.part.copy_(value)
    elif isinstance(buffer, Sharded):
        buffer.write(value)
    else:
        buffer.copy_(value if cut is None else whole(cut.of(value)))


def _change(structure: Structure, changes: Sequence[AnyChange], results: Sequence[Any], shapes: Shapes) -> None:
    """Makes the changes that the original forward makes."""

    def leaf(x: Any) -> Any:
        if isinstance(x, OutputAt):
            return results[x.at]
        return x.kind(x.expression(shapes)) if isinstance(x, InputSize) else x

    for change in changes:
        if isinstance(change, Write):
            _write(structure, change, results[change.at])
    make_changes(changes, structure.modules, leaf, table_of)
    if any(isinstance(change, Change) and change.path[1:] == ("_buffers",) for change in changes):
        structure.tree.version += 1  # A buffer has another shape now.


def _write(structure: Structure, change: Write, value: Tensor) -> None:
    """Writes into a tensor of an attribute; a value that becomes cut, or whole, replaces the tensor."""
    before = found_at(structure.modules, change.path)
    if isinstance(value, Sharded) and isinstance(before, Sharded):
        write_into(before.part, value.part)
    elif isinstance(value, Sharded) or isinstance(before, Sharded):
        put_at(structure.modules, change.path, value)
    else:
        write_into(before, value)


def _expect_apart(name: str, written: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Raises Error if a tensor that forward writes into shares memory with another: a graph has a copy of each."""
    storages = [storage_of(x) for x in tensors]
    for i in written:
        if storages[i] is not None and storages.count(storages[i]) > 1:
            raise Error(
                f"{name}.forward writes into an argument that shares memory with another tensor",
                fix="give it a clone()",
            )
