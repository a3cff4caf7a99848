"""Moves the tensors of a call's arguments to this rank's device; the host does not wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, fx

from autotp.ops.eager_mode import is_plain

aten = torch.ops.aten
READ_ON_HOST: Mapping[object, int] = {
    aten._pack_padded_sequence.default: 1,
    aten.tensor_split.tensor_indices_or_sections: 1,
}
"""Operator -> the position of an operand that has to be on the CPU, also where the others are on a GPU."""


def inputs_on_host(graph: fx.Graph, names: Iterable[str]) -> frozenset[str]:
    """Returns those of the inputs of a graph that an operator wants on the CPU.

    Args:
        names: the names of the inputs.
    """
    operands = [(READ_ON_HOST[node.target], node) for node in graph.nodes if node.target in READ_ON_HOST]
    return frozenset(names) & {str(node.args[position]) for position, node in operands if len(node.args) > position}


def to_device(tensors: Sequence[Tensor], device: torch.device, stay: Sequence[bool]) -> list[Tensor]:
    """Returns the tensors, with copies on the device of those that are on the CPU; warns once that they are moved.

    The copy goes through pinned memory, and the host does not wait for it. A tensor without dimensions stays: operators
    on a GPU take it from the CPU.

    Args:
        stay: for each tensor, whether an operator wants it on the CPU.
    """
    if device.type == "cpu":
        return list(tensors)
    moves = [x.device.type == "cpu" and x.dim() > 0 and not stays for x, stays in zip(tensors, stay, strict=True)]
    if any(moves) and not torch.compiler.is_compiling():
        _tell_once(device)
    return [_copied(x, device) if moved else x for x, moved in zip(tensors, moves, strict=True)]


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    pinnable = tensor.layout is torch.strided and is_plain(tensor) and not tensor.requires_grad and tensor.numel()
    if device.type == "cuda" and pinnable and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@cache
def _tell_once(device: torch.device) -> None:
    warnings.warn(
        f"tensors of the batch are on the CPU, and are copied to {device} in each call (this is said once). "
        "DataLoader(pin_memory=True) and `tensor.to(device, non_blocking=True)` do so ahead of the call",
        stacklevel=2,
    )
