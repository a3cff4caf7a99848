"""The original tensors of a parallel model, gathered in blocks on the first rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.checkpoint.files.tensor_sources import Box, Shape
from autotp.distributed.mesh import Mesh, group_of
from autotp.ops.collectives import naming_lost
from autotp.sharding.layout import Layout, Range


@dataclass(frozen=True, eq=False)
class Whole:
    """What the ranks hold parts of. All of them read the same boxes in the same order."""

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
        """The elements in `box` on the first rank's CPU; of its shape, without values, on the others.

        Each part of the box goes from the first rank that holds it to the first rank, so nobody has more than the box.
        """
        sizes = [b - a for a, b in box]
        first = self.mesh.rank == 0
        found = torch.empty(sizes, dtype=self.dtype, device="cpu" if first else "meta")
        dim = self.layout.dim
        if dim is None:
            if first:
                found.copy_(self._part(box))
            return found
        for rank, (start, stop) in holders(self.layout, box[dim]):
            at = box[dim][0]
            part = self._moved((*box[:dim], (start, stop), *box[dim + 1 :]), rank)
            if part is not None:
                found.narrow(dim, start - at, stop - start).copy_(part)
        return found

    def _moved(self, box: Box, rank: int) -> Tensor | None:
        """The part of `rank` in `box`, within one of its ranges, on the first rank; None on the others."""
        mine = self._part(box) if rank == self.mesh.rank else None
        if rank == 0:
            return mine
        group = group_of(self.mesh)
        # gloo sends from one process to another out of the CPU's memory alone; bytes, as it has not every dtype.
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else self.mesh.device
        with naming_lost("save_pretrained", group.group_name):
            if mine is not None:
                dist.send(mine.to(device).contiguous().view(-1).view(torch.uint8), group=group, group_dst=0)
            if self.mesh.rank:
                return None
            got = torch.empty([b - a for a, b in box], dtype=self.dtype, device=device)
            dist.recv(got.view(-1).view(torch.uint8), group=group, group_src=rank)
        return got

    def _part(self, box: Box) -> Tensor:
        """What this rank holds of `box`, which is within one of its ranges."""
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


def holders(layout: Layout, wanted: Range) -> list[tuple[int, Range]]:
    """Disjoint ranges of the cut dimension that make up `wanted`, each with the first rank that holds it."""
    left = [wanted]
    found: list[tuple[int, Range]] = []
    for rank, pieces in enumerate(layout.pieces):
        for a, b in pieces:
            inside = [(max(a, c), min(b, d)) for c, d in left if max(a, c) < min(b, d)]
            found += [(rank, piece) for piece in inside]
            left = [rest for c, d in left for rest in ((c, min(d, a)), (max(c, b), d)) if rest[0] < rest[1]]
    return found
