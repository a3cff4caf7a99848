"""The blocks of an optimizer's state: elements of the whole tensor with one scale, wherever ranks cut the tensor.

NOTE [States that no layout changes]
A block is a run of `SIZE` elements in a row of the whole tensor, where a row is the last dimension, or as many of the
last dimensions as give a whole block. Dimension 0 is never in a row: replicas shard it. So most cuts go between blocks:
all cuts of dimension 0, and cuts of a row at multiples of `SIZE`. Where a cut goes through a block (width 11,008 on two
ranks, heads of 64, sizes that do not divide), both ranks have elements of it, and its largest element is the larger one
of both: `shared` says which blocks these are, and ranks exchange the largest elements of these alone. So a state is the
same in every layout, bit for bit, and nothing need divide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autotp.sharding.layout import Layout

SIZE = 256
"""The number of elements of a block: the scale of 4 bytes is 1/64 byte an element."""
SMALLEST = 4096
"""Whole tensors of fewer elements are not packed: their bytes do not count, and some (norms) are sensitive."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks that a rank has elements of.

    Attributes:
        lead: the number of dimensions before a row.
        count: the number of blocks in a row of this rank's part.
        places: where each element of such a row lies in `count` whole blocks. [elements]
        are_whole: whether these blocks have all their elements here, in order.
        shared: the numbers, in a row of this part, of the blocks that other ranks have elements of, too. [shared here]
        shared_places: which ones these are of all blocks that several ranks have elements of. [shared here]
        shared_count: the number of blocks that several ranks have elements of; the same on all ranks.
    """

    lead: int
    count: int
    places: Tensor
    are_whole: bool
    shared: Tensor
    shared_places: Tensor
    shared_count: int


@lru_cache(maxsize=1024)
def state_blocks(layout: Layout, rank: int, device: torch.device) -> Blocks | None:
    """Returns the blocks of a tensor of this layout on a rank; None if such a tensor is not packed."""
    shape = layout.shape
    if len(shape) < 2 or math.prod(shape) < SMALLEST:
        return None
    lead = max((d for d in range(1, len(shape)) if math.prod(shape[d:]) >= SIZE), default=1)
    whole_row = torch.arange(math.prod(shape[lead:])).view(shape[lead:])
    if layout.dim is None or layout.dim < lead:
        rows = [whole_row.flatten()]
        rank = 0
    else:
        rows = [_row_of(whole_row, layout, lead, other) for other in range(len(layout.pieces))]
    blocks, positions = torch.unique(rows[rank] // SIZE, return_inverse=True)
    ranks_by_block = torch.cat([torch.unique(row // SIZE) for row in rows]).bincount(minlength=1)
    several = (ranks_by_block > 1).nonzero().flatten()
    shared = torch.isin(blocks, several).nonzero().flatten()
    places = positions * SIZE + rows[rank] % SIZE
    are_whole = torch.equal(places, torch.arange(len(blocks) * SIZE))
    return Blocks(
        lead, len(blocks), places.to(device), are_whole, shared.to(device),
        torch.searchsorted(several, blocks[shared]).to(device), len(several),
    )  # fmt: skip


def _row_of(whole_row: Tensor, layout: Layout, lead: int, rank: int) -> Tensor:
    """Returns the positions in a whole row of the elements in a row of a rank's part. [elements]"""
    assert layout.dim is not None
    pieces = [whole_row.narrow(layout.dim - lead, a, b - a) for a, b in layout.pieces[rank]]
    return torch.cat(pieces, layout.dim - lead).flatten() if pieces else whole_row.flatten()[:0]
