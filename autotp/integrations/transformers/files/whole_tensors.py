"""Sources of a parallel model's original tensors: reading gathers blocks on the first rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.checkpoint.files.staging import on_host
from autotp.checkpoint.state_dict import gather_like
from autotp.distributed.mesh import Mesh, group_of
from autotp.groups.one_thread import in_collective
from autotp.groups.process_group import backend_of
from autotp.integrations.transformers.files.tensor_sources import Box, Shape, blocks_of_box
from autotp.runtime.holdings import Holdings
from autotp.sharding.layout import Layout, Range


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor of a trainer's model, gathered when it is read. Some ranks hold a part of it, and others nothing.

    All ranks read the same boxes in the same order.

    Attributes:
        parts: what this rank holds.
        name: the tensor's first name.
    """

    parts: Holdings
    name: str
    dtype: torch.dtype
    _gathered: list[Tensor | None] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        return self.parts.shapes[self.name]

    def read(self, box: Box) -> Tensor:
        """Returns the elements in `box` on the first rank's CPU; on the others a tensor of this shape on meta."""
        if not self._gathered:
            self._gathered.append(gather_like(self.parts, self.name, self.parts.held.get(self.name)))
        tensor = self._gathered[0]
        elements = torch.empty([b - a for a, b in box], dtype=self.dtype, device="meta")
        if tensor is not None:
            elements = tensor[tuple(slice(a, b) for a, b in box)].clone()
        if all(stop == n for (_, stop), n in zip(box, self.shape, strict=True)):
            self._gathered.clear()  # The last block was read: no more than one whole tensor is in memory.
        return elements


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

        NOTE [Parts are summed]
        The first holder of each part of a block has it, and the others have zeros: the sum of bytes on the first rank
        is the block. So the group of the model is enough, where sending from one rank to another would make NCCL
        connect these two, and each rank has a block at most.
        """
        first, blocks = self.mesh.rank == 0, list(blocks_of_box(box, self.dtype.itemsize))
        if first and len(blocks) == 1:
            return on_host(self._gathered(box))
        elements = torch.empty([b - a for a, b in box], dtype=self.dtype, device="cpu" if first else "meta")
        for block in blocks:
            gathered = self._gathered(block)
            if first:
                place = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(block, box, strict=True))
                elements[place] = on_host(gathered)  # Pinned memory is of a block's size, and the next one gets it.
        return elements

    def _gathered(self, block: Box) -> Tensor:
        """Returns the elements of a block on the first rank; on the others a tensor without a meaning."""
        dim = self.layout.dim
        if dim is None:
            return self._part(block)
        holders = first_holders(self.layout, block[dim])
        elements = self._mine(block, holders)
        # All ranks see the same holders, so all know whether there is something to send.
        if any(rank for rank, _ in holders):
            group = group_of(self.mesh)
            if backend_of(group.group_name, elements.device.type) == "gloo":  # It sums on the CPU only.
                elements = elements.cpu()
            with in_collective("save_pretrained", group.group_name):
                # As bytes: in floating point -0.0 plus the zero of another rank is 0.0, and not every dtype can be
                # summed.
                dist.reduce(elements.view(-1).view(torch.uint8), group=group, group_dst=0)
        return elements

    def _mine(self, block: Box, holders: Sequence[tuple[int, Range]]) -> Tensor:
        """Returns a block with the elements that this rank is to give, and zeros."""
        dim = self.layout.dim
        assert dim is not None
        elements = torch.zeros([b - a for a, b in block], dtype=self.dtype, device=self.local.device)
        for rank, (start, stop) in holders:
            if rank == self.mesh.rank:
                place = elements.narrow(dim, start - block[dim][0], stop - start)
                place.copy_(self._part((*block[:dim], (start, stop), *block[dim + 1 :])))
        return elements

    def _part(self, box: Box) -> Tensor:
        """Returns the elements of `box`, which is within one of this rank's ranges."""
        dim = self.layout.dim
        if dim is not None:
            offset = 0
            for a, b in self.layout.pieces[self.mesh.rank]:
                if a <= box[dim][0] < b:
                    offset += box[dim][0] - a
                    break
                offset += b - a
            box = (*box[:dim], (offset, offset + box[dim][1] - box[dim][0]), *box[dim + 1 :])
        return self.local.detach()[tuple(slice(a, b) for a, b in box)]


def first_holders(layout: Layout, requested: Range) -> list[tuple[int, Range]]:
    """Divides the range `requested` of the cut dimension into ranges, each with the first rank that holds it."""
    remaining = [requested]
    result: list[tuple[int, Range]] = []
    for rank, pieces in enumerate(layout.pieces):
        for a, b in pieces:
            inside = [(max(a, c), min(b, d)) for c, d in remaining if max(a, c) < min(b, d)]
            result += [(rank, piece) for piece in inside]
            remaining = [rest for c, d in remaining for rest in ((c, min(d, a)), (max(c, b), d)) if rest[0] < rest[1]]
    return result
