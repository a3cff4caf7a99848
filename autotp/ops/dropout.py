"""Dropout on a rank's part of a value, and in attention on its heads: one device's mask, or one of the rank's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.sharding.strides import memory_order


def exact_dropout(x: Tensor, p: float, shape: Sequence[int], dim: int, pieces: Sequence[tuple[int, int]]) -> Tensor:
    """Dropout with the mask one device would draw: drawn for the global shape, of which this rank keeps its part.

    Args:
        x: this rank's part.
        shape: the global shape; dimensions that the cut lies inside of may be opened (`heads 64` for `heads*64`).
        dim: the dimension of `shape` that is cut.
        pieces: this rank's (start, stop) ranges of it.
    """
    opened = len(shape) - x.dim()  # 0, or 2: then `dim` is the middle one of three that are one dimension of `x`.
    at = dim - opened // 2
    places = [[d + opened * (d > at) + i for i in range(1 + opened * (d == at))] for d in range(x.dim())]
    order = [place for d in memory_order(x) for place in places[d]]
    ones = torch.ones([shape[d] for d in order], dtype=x.dtype, device=x.device)
    noise = F.dropout(ones, p, True).permute([order.index(d) for d in range(len(order))])
    parts = [noise.narrow(dim, a, b - a) for a, b in pieces] or [noise.narrow(dim, 0, 0)]
    return x * torch.cat(parts, dim).reshape(x.shape)


def fast_dropout(x: Tensor, p: float, rank: int) -> Tensor:
    """Dropout with a mask of this rank's own, of its part alone.

    Every rank draws one number from the CPU's generator, the same on all: however much a rank needs, all draw as much
    from the shared stream, so that replicated masks stay equal.
    """
    return x * keep(x.detach(), p, torch.randint(2**62, ()), rank) * (1 / (1 - p) if p < 1 else 0.0)


@torch.library.custom_op("autotp::keep", mutates_args=())
def keep(x: Tensor, p: float, seed: Tensor, rank: int) -> Tensor:
    """A mask like `x`, true with probability `1 - p`, from a stream of this rank's own: of `seed` plus the rank.

    Args:
        x: its sizes, strides and device count.
        seed: a number on the CPU.
    """
    generator = torch.Generator(x.device).manual_seed(int(seed) + rank)
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)


@keep.register_fake
def _(x: Tensor, p: float, seed: Tensor, rank: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


@keep.register_vmap
def _(info, in_dims, x, p, seed, rank):  # type: ignore[no-untyped-def]
    """With randomness="different" there are as many seeds as samples: the first is enough for all their elements."""
    at, _, seeds, _ = in_dims
    if seeds is None:
        return keep(x.select(at, 0), p, seed, rank), None
    every = x if at is not None else x.expand(info.batch_size, *x.shape)
    return keep(every, p, seed.select(seeds, 0), rank), at or 0


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None,
    grouped: bool, shape: Sequence[int], dim: int, pieces: Sequence[tuple[int, int]],
) -> Tensor:  # fmt: skip
    """Attention whose dropped weights are those one device drops; `shape` is that of all heads' weights."""
    weights, value = _weights(query, key, value, mask, causal, scale, grouped)
    return exact_dropout(weights, p, shape, dim, pieces) @ value


def fast_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None,
    grouped: bool, rank: int,
) -> Tensor:  # fmt: skip
    """Attention with dropout on this rank's heads alone, the mask its own."""
    weights, value = _weights(query, key, value, mask, causal, scale, grouped)
    return fast_dropout(weights, p, rank) @ value


def _weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T) of this rank's heads, and the values one for each head."""
    if grouped and key.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.ops.aten._safe_softmax.default(scores, -1), value
