"""The rows of parameters that are stepped together, and a rank's parts of parameters and their states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autotp.distributed.cut_tensors.cut_parameter import CutTensor, part_like
from autotp.errors import Error
from autotp.sharding.boxes import boxes, local_of
from autotp.sharding.layout import Layout
from autotp.training.low_memory.blocks import Blocks, state_blocks
from autotp.training.low_memory.stored_state import StoredState

BUCKET = 2**24
"""The number of elements of whole parameters whose states are open at a time."""


@dataclass(frozen=True, eq=False)
class ParameterRows:
    """Some rows of a parameter, which are stepped together.

    Attributes:
        group: the number of the parameter's group.
        parameter: the parameter.
        rows: of this rank's part.
        last: whether these are its last rows.
    """

    group: int
    parameter: Tensor
    rows: slice
    last: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Returns these rows of a plain tensor; one without dimensions as it is."""
        return tensor[self.rows] if tensor.dim() else tensor


def pieces_of(group: int, p: Tensor) -> Iterator[tuple[ParameterRows, int]]:
    """Yields a parameter in pieces of `BUCKET` elements at most, but a row at least; each with its elements.

    They are counted as those of the whole, as the parts of ranks may have other sizes.
    """
    row = max(prod(layout_of_parameter(p).shape[1:]), 1)
    length, many = local_of(p).shape[0] if p.dim() else 1, max(BUCKET // row, 1)
    for start in range(0, max(length, 1), many):
        stop = min(start + many, length)
        yield ParameterRows(group, p, slice(start, stop), stop == length), row * (stop - start)


def in_buckets(parameters: Iterable[tuple[int, Tensor]]) -> list[list[ParameterRows]]:
    """Returns pieces of parameters in buckets of `BUCKET` elements at most, but a piece at least.

    Args:
        parameters: the number of each parameter's group, and the parameter.
    """
    buckets, size = list[list[ParameterRows]](), BUCKET
    for piece, elements in (pair for i, p in parameters for pair in pieces_of(i, p)):
        if size + elements > BUCKET or not buckets:
            buckets.append([])
            size = 0
        buckets[-1].append(piece)
        size += elements
    return buckets


def plain_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part as a plain tensor, without a copy."""
    return local_of(tensor.detach()).as_subclass(Tensor)


def layout_of_parameter(p: Tensor) -> Layout:
    """Returns the layout of a parameter; one that is not cut is whole."""
    layout: Layout | None = p.autotp_cut.layout if hasattr(p, "autotp_cut") else None
    return Layout(tuple(p.shape)) if layout is None else layout


def rank_of_parts(p: Tensor) -> int:
    """Returns the number of this rank among those that hold parts of a parameter."""
    rank: int = p.autotp_cut.mesh.rank if hasattr(p, "autotp_cut") else 0
    return rank


def group_of_parts(p: Tensor) -> str | None:
    """Returns the group of the ranks that hold parts of a parameter."""
    group: str | None = p.autotp_cut.mesh.group if hasattr(p, "autotp_cut") else None
    return group


def blocks_of_parameter(p: Tensor) -> Blocks | None:
    """Returns the blocks of a parameter that this rank has elements of; None if its states are not packed."""
    return state_blocks(layout_of_parameter(p), rank_of_parts(p), p.device)


def part_of_state(p: Tensor, key: str, state: Tensor) -> Tensor:
    """Returns this rank's part of a state that was loaded, or is from before the parameter was cut."""
    plain, shape = local_of(state.detach()).as_subclass(Tensor), local_of(p).shape
    if plain.shape == shape:
        return plain
    if tuple(plain.shape) != layout_of_parameter(p).shape:
        raise Error(
            f"`{key}` is {list(plain.shape)}, and the parameter {list(layout_of_parameter(p).shape)}, of which this "
            f"rank has {list(shape)}",
            fix="each rank loads the optimizer's state that it saved; or autotp.save_checkpoint, with "
            "autotp.distribute, saves the whole for any layout",
        )
    part = plain.new_empty(shape)
    for box in boxes(p, layout_of_parameter(p), rank_of_parts(p), first=False):
        box.of(part).copy_(plain[box.place])
    return part


def as_torch(p: Tensor, state: Any) -> Any:
    """Returns a state as torch's own optimizer has it: opened, and a part or a DTensor as its parameter is."""
    if not isinstance(state, StoredState):
        return state
    with torch._C.DisableTorchFunctionSubclass():
        opened: Tensor = state.opened()
        if isinstance(p, DTensor):
            opened = DTensor.from_local(
                opened, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        return part_like(opened, p) if isinstance(p, CutTensor) else opened
