"""Lookups in a table that is cut: an embedding, and `gather`, which picks an element for each row.

The functions take plain tensors; lowered graphs call them. Each has its row in the table of operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.eager_mode import is_kept, is_plain, no_transform


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


def tied_embedding(
    weight: Tensor, indices: Tensor, start: int, size: int, padding_idx: int = -1
) -> tuple[Tensor, Tensor]:
    """Returns a lookup, and the table again, whose gradient has that of the lookup added in place.

    So a table that a head reads, too, has one gradient in memory. The readers of the second result must return new
    tensors as its gradient: `passes/emit/tied_gradients.py` sees to it.

    Args:
        weight, indices, start, size, padding_idx: as of `embedding`; the whole table has `start` 0 and all rows.

    Returns:
        [* hidden] and [rows hidden]
    """
    if weight.requires_grad and torch.is_grad_enabled() and len(weight) and no_transform(weight, indices):
        rows, table = _TiedEmbedding.apply(weight, indices, start, size, padding_idx)
        return rows, table
    return _looked_up(weight, indices, start, size, padding_idx), weight


def _looked_up(weight: Tensor, indices: Tensor, start: int, size: int, padding_idx: int) -> Tensor:
    if weight.shape[0] == size:
        return torch.embedding(weight, indices, padding_idx)
    return embedding(weight, indices, start, size, padding_idx)


class _TiedEmbedding(torch.autograd.Function):
    """The lookup and the table, with one gradient of both."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, start: int, size: int, padding_idx: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(indices)
        ctx.start, ctx.padding_idx, ctx.shape = start, padding_idx, weight.shape
        ctx.set_materialize_grads(False)
        return _looked_up(weight, indices, start, size, padding_idx), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor | None, of_table: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_table is None and of_rows is not None:
            of_table = of_rows.new_zeros(ctx.shape)
        if of_table is None or of_rows is None or not of_rows.numel():
            return of_table, None, None, None, None
        (indices,) = ctx.saved_tensors
        local, outside = local_index(indices.reshape(-1), ctx.start, ctx.shape[0])
        local = local.masked_fill(outside | (indices.reshape(-1) == ctx.padding_idx), -1)
        of_rows = of_rows.reshape(len(local), -1)
        if torch.is_grad_enabled() or is_kept(of_table):
            of_rows = of_rows.masked_fill((local < 0)[:, None], 0)
            return of_table.index_add(0, local.clamp(min=0), of_rows), None, None, None, None
        return of_table.index_add_(0, *_sums_of_equal(local, of_rows)), None, None, None, None


def _sums_of_equal(index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each index once, with the sum of its rows; further ones are 0, and their rows are 0.

    The sums are those that the gradient of an embedding has: on a GPU in one order, and of 16 bits in float32.

    Args:
        index: [n]; rows with -1 do not count.
        rows: [n hidden]
    """
    index = index.long()
    ordered, order = index.sort()
    # The number of smaller indices that differ: it is below n, however large the table is.
    place_in_order = (ordered.diff(prepend=ordered[:1]) != 0).cumsum(0)
    place = torch.empty_like(index).scatter_(0, order, place_in_order)
    once = torch.full_like(index, -1).scatter_(0, place, index)
    sums = torch.ops.aten.embedding_dense_backward(rows, place, len(index), -1, False)
    return once.clamp(min=0), sums.masked_fill_((once < 0)[:, None], 0)


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
