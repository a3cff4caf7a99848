"""Attention by products, and attention of a rank that has no elements: there too, each input has a gradient.

A rank may have no heads, or none of the positions of a short sequence (5 positions on `cp=4`). Then torch's attention
returns at once a result that does not depend on the mask, so the mask has no gradient. But a rank must sum as many
gradients as the others sum. And the keys and the values have one gradient there, which compiled code sends once where
other ranks send two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._C import _nn


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns torch's `scaled_dot_product_attention`, whose arguments it takes; without elements, by products.

    Args:
        query, key, value: [... heads, queries or keys, head width].
        attn_mask: of bool, or numbers that are added, [... queries, keys].
        dropout_p, is_causal, scale, enable_gqa: as for torch's attention.
    """
    if query.numel() and value.numel():
        output: Tensor = _nn.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output
    weights, value = attention_weights(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return weights @ value


def attention_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> tuple[Tensor, Tensor]:
    """Returns softmax(q k^T) of this rank's heads, [... heads, queries, keys], and the values of each head."""
    # A rank may have no heads; there is nothing to repeat then.
    if grouped and key.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # As in torch's own products: both are scaled before, so that scores in 16 bits do not overflow in between.
    root = math.sqrt(abs(scale))
    scores = (query * (root if scale > 0 else -root)) @ (key * root).transpose(-2, -1)
    if causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # Zeros, and not NaN, for a query that may read no key: as torch's attention.
    return torch.ops.aten._safe_softmax.default(scores, -1), value
