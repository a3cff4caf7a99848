"""zigzag: an order of positions in which parts of equal length have equal work in causal attention.

    The order of 8 positions for 2 ranks:   0 1 6 7 | 2 3 4 5

Each rank has two pieces. One is from the front, where a query reads few keys, and one from the back, where it reads
many. A length that does not divide has the parts of `torch.chunk`; each part is half a front piece, half a back piece.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.ops.attention.causal_rows import causal_pieces
from autotp.ops.attention.products import attention
from autotp.sharding.partition import chunk_length, chunk_size


def zigzag(x: Tensor, dim: int, parts: int) -> Tensor:
    """Returns `x` with its positions along `dim` in the order of `parts` ranks. x: [... n ...]"""
    return x.index_select(dim, positions(x.shape[dim], parts, x.device))


def in_order(x: Tensor, dim: int, parts: int) -> Tensor:
    """Returns `x` with its positions along `dim` in order again: undoes `zigzag`. x: [... n ...]"""
    # The inverse of a permutation p has i at the place p[i].
    order = positions(x.shape[dim], parts, x.device)
    return x.index_select(dim, torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=x.device)))


def positions(n: int, parts: int, device: torch.device | None = None) -> Tensor:
    """Returns the position at each place of the order. [n]"""
    longest = chunk_length(n, parts)
    place = torch.arange(n, device=device)
    rank = place // max(longest, 1)
    length, offset = (n - rank * longest).clamp(max=longest), place % max(longest, 1)
    front = (length + 1) // 2
    # The earlier ranks have (longest + 1)//2 positions each from the front, and longest//2 each from the back.
    from_back = n - rank * (longest // 2) - length + offset
    return torch.where(offset < front, rank * ((longest + 1) // 2) + offset, from_back)


def pieces(n: int, parts: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns (start, stop) of a rank's front piece and of its back piece."""
    longest, length = chunk_length(n, parts), chunk_size(n, parts, rank)
    start, stop = min(rank * ((longest + 1) // 2), n), max(n - rank * (longest // 2), 0)
    return (start, start + (length + 1) // 2), (stop - length // 2, stop)


def zigzag_rows(
    query: Tensor, key: Tensor, value: Tensor, parts: int, rank: int | None, scale: float | None, enable_gqa: bool,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Returns causal attention of queries in the order of `zigzag`, or of the part of one rank.

    Args:
        query: all queries, or those of a rank, [batch heads seq/parts width].
        key, value: those of all positions, in order, [batch heads seq width].
        rank: whose queries they are; None for all.
        scale, enable_gqa, dropout_p: as for `scaled_dot_product_attention`. A rank with dropout has `fast_zigzag_rows`.
    """
    n = key.shape[-2]
    if rank is None:
        read = torch.arange(n, device=key.device) <= positions(n, parts, key.device).unsqueeze(1)
        return attention(query, key, value, read, dropout_p, scale=scale, enable_gqa=enable_gqa)
    return causal_pieces(query, key, value, pieces(n, parts, rank), scale, enable_gqa)


# ---- example values, which assume nothing of lengths


def zigzag_like(x: Tensor, dim: int, parts: int) -> Tensor:
    """Returns a tensor without values, of the shape that `zigzag` and `in_order` return."""
    return x.new_empty(x.shape)


def zigzag_rows_like(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> Tensor:
    """Returns a tensor without values, of the shape that `zigzag_rows` returns."""
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
