"""Lookups in a table that is cut: an embedding, and `gather`, which picks an element for each row.

The functions take plain tensors; lowered graphs call them. Each has its row in the table of operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.eager_mode import is_plain


def embedding(weight: Tensor, indices: Tensor, start: int, size: int, padding_idx: int = -1) -> Tensor:
    """Returns this rank's term of a lookup: its own rows, zero elsewhere (Megatron-LM, Shoeybi et al. 2019, section 3).

    Args:
        weight: [rows hidden], the rows `start` to `start + rows` of a table of `size` rows.
        indices: [*] global row numbers.

    Returns:
        [* hidden]; the sum over ranks is the lookup.
    """
    rows = weight.shape[0]
    _expect_within(indices, size)
    if rows == 0:
        # The sum of nothing is 0, and ties the result to the table: its gradient exists, and ranks sum equally many.
        return weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    local, outside = local_index(indices, start, rows)
    padding = padding_idx - start if start <= padding_idx < start + rows else None
    result = F.embedding(local, weight, padding)
    return result.masked_fill(outside.unsqueeze(-1), 0)


def gather(x: Tensor, dim: int, index: Tensor, start: int, size: int) -> Tensor:
    """Returns this rank's term of `torch.gather`: the elements that it has, zero elsewhere.

    Args:
        x: the positions from `start` on, along `dim`, of a tensor with `size` positions.
        index: positions in the whole tensor.
    """
    length = x.shape[dim]
    _expect_within(index, size)
    if length == 0:
        # As above, so that `x` has a gradient on this rank, too.
        return x.new_zeros(index.shape) + x.sum()
    local, outside = local_index(index, start, length)
    return torch.gather(x, dim, local).masked_fill(outside, 0)


def _expect_within(index: Tensor, size: int) -> None:
    """Fails for an index out of range, as one device does; each rank would take it for another rank's index."""
    if is_plain(index):
        torch._assert_async(
            ((index >= 0) & (index < size)).all(), f"an index is out of range: not from 0 to {size - 1}"
        )


def local_index(index: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns global positions as positions in this rank's part, 0 for others; and the mask of the others."""
    local = index - start
    outside = (local < 0) | (local >= length)
    # Position 0 is legal in any part that is not empty; the callers mask what they read or add there.
    return local.masked_fill(outside, 0), outside
