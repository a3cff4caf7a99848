"""Dropout on a rank's part of a value, and in attention on its heads: with the mask of one device, or one per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.attention.causal_rows import Pieces, lower_right_pieces, mask_of_pieces
from autotp.ops.attention.products import attention, attention_weights
from autotp.ops.attention.zigzag import pieces
from autotp.ops.eager_mode import runs_at_once
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
    return input * _part(noise, cuts)


def _part(whole: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """Returns a rank's part of a tensor."""
    for dim, sizes, ranges in cuts:
        opened = whole.unflatten(dim, sizes)
        parts = [opened.narrow(dim + 1, a, b - a) for a, b in ranges] or [opened.narrow(dim + 1, 0, 0)]
        whole = torch.cat(parts, dim + 1).flatten(dim, dim + 2)
    return whole


def fast_dropout(input: Tensor, p: float, rank: int) -> Tensor:
    """Dropout with a separate mask on each rank, for its part only; `rank` counts all ranks with parts of the value.

    All ranks draw equally often from the streams that they share, so masks of replicated values stay equal.
    """
    if runs_at_once(input):
        with own_stream(input.device, rank):
            return torch.native_dropout(input, p, True)[0]  # On CPUs, too, it keeps one byte an element.
    mask = keep(input.detach(), p, torch.randint(2**62, (), device=input.device), rank)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0)


@contextmanager
def own_stream(device: torch.device, rank: int) -> Iterator[None]:
    """A region in which the generator of a device gives other numbers on each rank; after it the same as before it.

    Torch's operators draw from this generator only, its fused attention too. The seed comes from the generator of the
    CPU, which is in the same state on all ranks, and which recomputation sets back. The host waits for nothing: states
    and seeds are its own. A recorded CUDA graph would draw the same mask each time, and so it has `keep`.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    on_card = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index] if on_card else torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed + rank)
    try:
        yield
    finally:
        generator.set_state(state)


def keep(x: Tensor, p: float, seed: Tensor, rank: int) -> Tensor:
    """Returns a mask for `x`, True with probability `1 - p`: a hash of the seed, the rank and each position.

    It has no state, so that a CUDA graph may record it, and draws anew each time, and torch.compile makes one kernel of
    it. The hash is MurmurHash3's last step, once for each half of the seed (Appleby, 2011).

    Args:
        x: only its sizes and device are used.
        seed: a number on the device of `x`.
    """
    rank_seed = seed + rank * ODD
    mixed = torch.arange(x.numel(), device=x.device).view(x.shape)
    for half in (rank_seed & LOW, (rank_seed >> 32) & LOW):
        mixed = (mixed * ODD + half) & LOW
        mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & LOW
        mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & LOW
        mixed = mixed ^ (mixed >> 16)
    return mixed >= p * 2**32


ODD, LOW = 0x9E3779B1, 2**32 - 1
"""A number without a pattern in its bits; those of the lower half of a whole number."""


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, shape: Sequence[int], cuts: Sequence[Cut],
) -> Tensor:  # fmt: skip
    """Attention that drops the same weights as one device; `shape` is the shape of all heads' weights."""
    rows = [(0, sizes, ranges) for dim, sizes, ranges in cuts if dim == len(shape) - 2]
    if is_causal and rows:  # A part of the queries knows its positions by its cuts.
        places = _part(torch.arange(shape[-2], device=key.device), rows)
        attn_mask, is_causal = torch.arange(shape[-1], device=key.device) <= places.unsqueeze(1), False
    weights, value = attention_weights(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return exact_dropout(weights, dropout_p, shape, cuts, range(weights.dim())) @ value


def fast_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, rank: int,
) -> Tensor:  # fmt: skip
    """Attention on this rank's heads or queries, with a separate dropout mask on each rank.

    It is torch's own attention, whose fused kernels draw the mask again in backward, and keep no weights. Torch has no
    such kernel for CPUs, and what it has there instead keeps 12 bytes a weight; the products below keep 9.
    """
    if not query.is_cpu and runs_at_once(query) and query.numel() and value.numel():
        with own_stream(query.device, rank):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    weights, value = attention_weights(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return fast_dropout(weights, dropout_p, rank) @ value


def fast_causal_rows(
    query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None, enable_gqa: bool, dropout_p: float,
    rank: int,
) -> Tensor:  # fmt: skip
    """Returns `causal_rows`, whose arguments it takes, with a separate dropout mask on each rank."""
    bounds = [(start, start + query.shape[-2])]
    return _fast_pieces(query, key, value, bounds, scale, enable_gqa, dropout_p, rank)


def fast_zigzag_rows(
    query: Tensor, key: Tensor, value: Tensor, parts: int, place: int, scale: float | None, enable_gqa: bool,
    dropout_p: float, rank: int,
) -> Tensor:  # fmt: skip
    """Returns `zigzag_rows`, of the part at `place`, with a separate dropout mask on each rank."""
    bounds = pieces(key.shape[-2], parts, place)
    return _fast_pieces(query, key, value, bounds, scale, enable_gqa, dropout_p, rank)


def _fast_pieces(
    query: Tensor, key: Tensor, value: Tensor, bounds: Pieces, scale: float | None, enable_gqa: bool, dropout_p: float,
    rank: int,
) -> Tensor:  # fmt: skip
    """Returns causal attention of pieces of a sequence, by torch's kernels or by products as `fast_attention`."""
    if not query.is_cpu and runs_at_once(query) and query.numel() and value.numel():
        with own_stream(query.device, rank):
            return lower_right_pieces(query, key, value, bounds, scale, enable_gqa, dropout_p)
    mask = mask_of_pieces(key, bounds)
    weights, value = attention_weights(query, key, value, mask, False, scale, enable_gqa)
    return fast_dropout(weights, dropout_p, rank) @ value


OWN_MASKS = fast_dropout, fast_attention, fast_causal_rows, fast_zigzag_rows
"""The functions that draw another mask on each rank."""
