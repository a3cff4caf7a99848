"""Sources of a parallel model's original tensors: reading gathers blocks on the first rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.checkpoint.files.tensor_sources import Box, Shape
from autotp.distributed.mesh import Mesh, group_of
from autotp.groups.one_thread import in_collective
from autotp.sharding.layout import Layout, Range


@dataclass(frozen=True, eq=False)
class GatheredTensor:
    """A tensor whose parts are on the ranks. All ranks read the same boxes in the same order."""

    local: Tensor
    layout: Layout
    mesh: Mesh

    @property
    def shape(self) -> Shape:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def read(self, box: Box) -> Tensor:
        """Returns the elements in `box` on the first rank's CPU; on the others a tensor of this shape on meta.

        The first holder of each part of the box sends it to the first rank, so no rank has more than the box.
        """
        sizes = [b - a for a, b in box]
        first = self.mesh.rank == 0
        elements = torch.empty(sizes, dtype=self.dtype, device="cpu" if first else "meta")
        dim = self.layout.dim
        if dim is None:
            if first:
                elements.copy_(self._part(box))
            return elements
        for rank, (start, stop) in first_holders(self.layout, box[dim]):
            at = box[dim][0]
            part = self._moved((*box[:dim], (start, stop), *box[dim + 1 :]), rank)
            if part is not None:
                elements.narrow(dim, start - at, stop - start).copy_(part)
        return elements

    def _moved(self, box: Box, rank: int) -> Tensor | None:
        """Sends a box of `rank`'s part to the first rank and returns it there; returns None on the others."""
        mine = self._part(box) if rank == self.mesh.rank else None
        if rank == 0:
            return mine
        group = group_of(self.mesh)
        # gloo sends between two processes only from the CPU's memory; as bytes, because it lacks some dtypes.
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else self.mesh.device
        with in_collective("save_pretrained", group.group_name):
            if mine is not None:
                dist.send(mine.to(device).contiguous().view(-1).view(torch.uint8), group=group, group_dst=0)
            if self.mesh.rank:
                return None
            got = torch.empty([b - a for a, b in box], dtype=self.dtype, device=device)
            dist.recv(got.view(-1).view(torch.uint8), group=group, group_src=rank)
        return got

    def _part(self, box: Box) -> Tensor:
        """Returns the elements of `box`, which is within one of this rank's ranges."""
        dim = self.layout.dim
        if dim is not None:
            at = 0
            for a, b in self.layout.pieces[self.mesh.rank]:
                if a <= box[dim][0] < b:
                    at += box[dim][0] - a
                    break
                at += b - a
            box = (*box[:dim], (at, at + box[dim][1] - box[dim][0]), *box[dim + 1 :])
        return self.local.detach()[tuple(slice(a, b) for a, b in box)]


def first_holders(layout: Layout, wanted: Range) -> list[tuple[int, Range]]:
    """Divides the range `wanted` of the cut dimension into ranges, each with the first rank that holds it."""
    left = [wanted]
    result: list[tuple[int, Range]] = []
    for rank, pieces in enumerate(layout.pieces):
        for a, b in pieces:
            inside = [(max(a, c), min(b, d)) for c, d in left if max(a, c) < min(b, d)]
            result += [(rank, piece) for piece in inside]
            left = [rest for c, d in left for rest in ((c, min(d, a)), (max(c, b), d)) if rest[0] < rest[1]]
    return result
