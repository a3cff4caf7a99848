"""Dropout on a rank's part of a value, and in attention on its heads: with the mask of one device, or one per rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.attention.products import attention_weights
from autotp.sharding.strides import memory_order

Cut = tuple[int, tuple[int, int, int], Sequence[tuple[int, int]]]
"""The dimension that is cut over the ranks of one mesh axis; its sizes (major, cut, minor); a rank's (start, stop)
ranges of the cut one."""


def exact_dropout(input: Tensor, p: float, shape: Sequence[int], cuts: Sequence[Cut], order: Sequence[int]) -> Tensor:
    """Dropout with the mask of one device: draws it for the global shape, and keeps this rank's part.

    Args:
        input: this rank's part.
        shape: the global shape.
        cuts: one for each mesh axis; a later one is a cut of the part that the earlier ones leave.
        order: the dimensions of the whole in their order in memory, when the model was captured. It counts where this
            rank has one position of a dimension, or none: strides do not say where such a dimension lies.
    """
    if all(n > 1 or whole == 1 for n, whole in zip(input.shape, shape, strict=True)):
        order = memory_order(input)
    ones = torch.ones([shape[d] for d in order], dtype=input.dtype, device=input.device)
    noise = F.dropout(ones, p, True).permute([order.index(d) for d in range(len(order))])
    for dim, sizes, ranges in cuts:
        opened = noise.unflatten(dim, sizes)
        parts = [opened.narrow(dim + 1, a, b - a) for a, b in ranges] or [opened.narrow(dim + 1, 0, 0)]
        noise = torch.cat(parts, dim + 1).flatten(dim, dim + 2)
    return input * noise


def fast_dropout(input: Tensor, p: float, rank: int) -> Tensor:
    """Dropout with a separate mask on each rank, for its part only; `rank` counts all ranks with parts of the value.

    Every rank draws one seed from the CPU's generator, which is the same on all ranks. So all ranks draw equally often
    from the shared stream, and masks of replicated values stay equal.
    """
    kept = keep(input.detach(), p, torch.randint(2**62, ()), rank)
    return input * kept * (1 / (1 - p) if p < 1 else 0.0)


@torch.library.custom_op("autotp::keep", mutates_args=())
def keep(x: Tensor, p: float, seed: Tensor, rank: int) -> Tensor:
    """Returns a mask like `x`, True with probability `1 - p`, from a generator with the seed `seed` plus the rank.

    Args:
        x: only its sizes, strides and device are used.
        seed: a number on the CPU.
    """
    generator = torch.Generator(x.device).manual_seed(int(seed) + rank)
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)


@keep.register_fake
def _(x: Tensor, p: float, seed: Tensor, rank: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


@keep.register_vmap
def _(info, in_dims, x, p, seed, rank):  # type: ignore[no-untyped-def]
    """Returns one mask for all samples. With randomness="different" each sample has a seed: the first is used."""
    at, _, seeds, _ = in_dims
    if seeds is None:
        return keep(x.select(at, 0), p, seed, rank), None
    every = x if at is not None else x.expand(info.batch_size, *x.shape)
    return keep(every, p, seed.select(seeds, 0), rank), at or 0


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, shape: Sequence[int], cuts: Sequence[Cut],
) -> Tensor:  # fmt: skip
    """Attention that drops the same weights as one device; `shape` is the shape of all heads' weights."""
    weights, value = attention_weights(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return exact_dropout(weights, dropout_p, shape, cuts, range(weights.dim())) @ value


def fast_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, rank: int,
) -> Tensor:  # fmt: skip
    """Attention on this rank's heads or queries, with a separate dropout mask on each rank."""
    weights, value = attention_weights(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return fast_dropout(weights, dropout_p, rank) @ value
