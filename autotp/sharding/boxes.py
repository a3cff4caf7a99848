"""Gives the place of a rank's part in the whole tensor as boxes: for files, and for norms that count elements once.

A rank holds a part by its layout (`layout.py`); `fully_shard` may keep only some rows of this part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from autotp.sharding.layout import Layout, Range
from autotp.sharding.partition import chunk_bounds


@dataclass(frozen=True)
class Box:
    """A box of a tensor: its start in the whole tensor, its start in this rank's part, and its sizes."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        """Its place in the whole tensor, as an index."""
        return tuple(slice(start, start + size) for start, size in zip(self.whole, self.sizes, strict=True))

    def of(self, local: Tensor) -> Tensor:
        """Returns this box of the rank's part, as a view."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


def local_of(tensor: Tensor) -> Tensor:
    """Returns this process's part of a DTensor, or the tensor itself; without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_rows(tensor: DTensor) -> Tensor:
    """Returns the tensor whose parts processes have: all of them call this."""
    # One axis of a mesh after the other, the last one first: torch warns where it joins two in a call.
    for dim in reversed(range(tensor.device_mesh.ndim)):
        tensor = tensor.redistribute(placements=[*tensor.placements[:dim], Replicate(), *tensor.placements[dim + 1 :]])
    return tensor.to_local()


def has_dtensors(tensors: Iterable[Tensor]) -> bool:
    """True if there is a DTensor among many tensors."""
    return any(issubclass(cls, DTensor) for cls in set(map(type, tensors)))


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor of which each process holds a part; replicas may hold one whole."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def boxes(tensor: Tensor, layout: Layout, rank: int, first: bool = True) -> list[Box]:
    """Returns the boxes that a rank of the tensor-parallel axis holds of a tensor, without empty ones.

    Args:
        tensor: a parameter, or a tensor with the same layout: its gradient, a moment.
        layout: the layout of the parameter.
        first: whether to leave out elements that an earlier rank holds, too. (Whole tensors are not left out.)
    """
    shape, (low, high) = layout.local_shape(rank), _rows(tensor)
    # A tensor without dimensions is one element: a box without sides.
    if not shape:
        return [Box((), (), ())]
    # A whole tensor is taken as one run of dimension 0, since `fully_shard` may have kept some rows of it.
    dim, result = layout.dim or 0, []
    for (start, stop), local_start in [((0, shape[0]), 0)] if layout.dim is None else _runs(layout, rank, first):
        whole, local, sizes = [0] * len(shape), [0] * len(shape), list(shape)
        whole[0], sizes[0] = low, high - low
        if dim:
            whole[dim], local[dim], sizes[dim] = start, local_start, stop - start
        else:  # Dimension 0 is cut twice: this process holds some rows of the part.
            after, before = max(local_start, low), min(local_start + stop - start, high)
            whole[0], local[0], sizes[0] = start + after - local_start, after - low, before - after
        result.append(Box(tuple(whole), tuple(local), tuple(sizes)))
    return [box for box in result if all(size > 0 for size in box.sizes)]


def inner_box(outer_boxes: Sequence[Box], whole: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    """Returns a box of the whole tensor that is within one of `outer_boxes`, with its place in the rank's part."""
    for box in outer_boxes:
        start = [position - low for position, low in zip(whole, box.whole, strict=True)]
        sides = zip(start, sizes, box.sizes, strict=True)
        if all(low >= 0 and low + size <= length for low, size, length in sides):
            return Box(whole, tuple(offset + low for offset, low in zip(box.local, start, strict=True)), sizes)
    raise AssertionError("the box is not in this rank's part")


def _rows(tensor: Tensor) -> Range:
    """Returns the rows of its part that a process holds; `fully_shard` partitions as torch.chunk does."""
    if not isinstance(tensor, DTensor) or not is_sharded(tensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    return rows_along(tensor, tensor.device_mesh.ndim)


def rows_along(tensor: DTensor, dims: int) -> Range:
    """Returns the rows that the first dimensions of a mesh leave to a process: each divides those of the one before.

    Args:
        tensor: its rows are divided along all dimensions of its mesh.
        dims: the number of dimensions of the mesh.
    """
    mesh, (start, stop) = tensor.device_mesh, (0, tensor.shape[0])
    assert all(placement == Shard(0) for placement in tensor.placements), tensor.placements
    for dim in range(dims):
        low, high = chunk_bounds(stop - start, mesh.size(dim), mesh.get_local_rank(dim))
        start, stop = start + low, start + high
    return start, stop


def _runs(layout: Layout, rank: int, first: bool) -> list[tuple[Range, int]]:
    """Returns ranges of positions in the whole tensor, each with its start in the part."""
    runs, local_start = list[tuple[Range, int]](), 0
    local_ranges: Sequence[Range] = layout.first(rank) if first else [(0, layout.lengths()[rank])]
    for start, stop in layout.pieces[rank]:
        # Positions in the rank's part, where this piece begins at `local_start`.
        for low, high in local_ranges:
            low, high = max(low, local_start), min(high, local_start + stop - start)
            if low < high:
                runs.append(((start + low - local_start, start + high - local_start), low))
        local_start += stop - start
    return runs
