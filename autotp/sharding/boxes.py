"""The place of a rank's part in the whole tensor, as boxes: for files, and for norms that count each element once.

A rank holds a part by its layout (`layout.py`), of which `fully_shard` may hold it a run of rows again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from autotp.sharding.layout import Layout, Range


@dataclass(frozen=True)
class Box:
    """A box of a tensor: where it begins in the whole and in what this rank holds, and its sizes."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        """Where it is in the whole, as an index."""
        return tuple(slice(start, start + size) for start, size in zip(self.whole, self.sizes, strict=True))

    def of(self, local: Tensor) -> Tensor:
        """This box of what the rank holds, as a view."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that is sharded, or the tensor itself; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def boxes(tensor: Tensor, layout: Layout, rank: int, first: bool = True) -> list[Box]:
    """The boxes that a rank of the tensor-parallel axis holds of a tensor, none of them empty.

    Args:
        tensor: a parameter, or what lies as one does: its gradient, a moment.
        layout: how the parameter is cut.
        first: leave out what a rank before this one holds, too. (A tensor that is whole on all is everybody's.)
    """
    shape, (low, high) = layout.local_shape(rank), _rows(tensor)
    if not shape:
        return [Box((), (), ())]
    dim, found = layout.dim or 0, []
    for (start, stop), at in [((0, shape[0]), 0)] if layout.dim is None else _runs(layout, rank, first):
        whole, local, sizes = [0] * len(shape), [0] * len(shape), list(shape)
        whole[0], sizes[0] = low, high - low
        if dim:
            whole[dim], local[dim], sizes[dim] = start, at, stop - start
        else:  # Rows of the part, of which this process holds some.
            after, before = max(at, low), min(at + stop - start, high)
            whole[0], local[0], sizes[0] = start + after - at, after - low, before - after
        found.append(Box(tuple(whole), tuple(local), tuple(sizes)))
    return [box for box in found if all(size > 0 for size in box.sizes)]


def _rows(tensor: Tensor) -> Range:
    """Which rows of its part a process holds: the partition is `torch.chunk`'s here, too."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    assert list(tensor.placements) == [Shard(0)], tensor.placements
    longest = -(-tensor.shape[0] // tensor.device_mesh.size())
    start = min(longest * tensor.device_mesh.get_local_rank(), tensor.shape[0])
    return start, min(start + longest, tensor.shape[0])


def _runs(layout: Layout, rank: int, first: bool) -> list[tuple[Range, int]]:
    """Runs of positions in the whole, each with where it begins in the part."""
    found, at = list[tuple[Range, int]](), 0
    mine: Sequence[Range] = layout.first(rank) if first else [(0, layout.lengths()[rank])]
    for start, stop in layout.pieces[rank]:
        for low, high in mine:
            low, high = max(low, at), min(high, at + stop - start)
            if low < high:
                found.append(((start + low - at, start + high - at), low))
        at += stop - start
    return found
