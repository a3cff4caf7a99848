"""Lookups of rows, of which each rank has some: an embedding, and an element picked for each row.

Plain functions on plain tensors, the targets of calls in lowered graphs. Each has its row in the table of operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.eager_mode import is_plain


def embedding(weight: Tensor, indices: Tensor, start: int, size: int, padding_idx: int = -1) -> Tensor:
    """This rank's summand of a lookup: its own rows, zero elsewhere (Megatron-LM, Shoeybi et al. 2019, section 3).

    Args:
        weight: [rows hidden], rows `start` to `start + rows` of the table, which has `size`.
        indices: [*] global row numbers.

    Returns:
        [* hidden]; the sum over ranks is the lookup.
    """
    rows = weight.shape[0]
    _expect_within(indices, size)
    if rows == 0:
        return weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    local, outside = own(indices, start, rows)
    padding = padding_idx - start if start <= padding_idx < start + rows else None
    found = F.embedding(local, weight, padding)
    return found.masked_fill(outside.unsqueeze(-1), 0)


def gather(x: Tensor, dim: int, index: Tensor, start: int, size: int) -> Tensor:
    """This rank's summand of `torch.gather`: the elements it has, zero elsewhere.

    Args:
        x: positions `start` onwards of the whole, which has `size`, along `dim`.
        index: positions in the whole.
    """
    length = x.shape[dim]
    _expect_within(index, size)
    if length == 0:
        return x.new_zeros(index.shape) + x.sum()
    local, outside = own(index, start, length)
    return torch.gather(x, dim, local).masked_fill(outside, 0)


def _expect_within(index: Tensor, size: int) -> None:
    """Fails as a lookup on one device does: what no rank has would pass for what another rank has."""
    if is_plain(index):
        torch._assert_async(
            ((index >= 0) & (index < size)).all(), f"an index is out of range: not from 0 to {size - 1}"
        )


def own(index: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Positions of the whole as positions of this rank's part, 0 for those outside; and which are outside."""
    local = index - start
    outside = (local < 0) | (local >= length)
    return local.masked_fill(outside, 0), outside
