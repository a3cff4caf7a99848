"""Attention of a rank that has no queries: torch gives its mask no gradient, where other ranks' masks have one.

A sequence may be so short that a rank has none of its positions (5 positions on `cp=4`). Ranks sum the gradients of a
block's parameters together, and a gradient that is there on some ranks only would be summed with another one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import _nn


def masked_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Returns torch's attention; a mask that learns has zeros as its gradient, and not None, if there are no queries.

    Args:
        query, key, value: [... query or key, head width].
        attn_mask: of bool, or numbers that are added, [... query, key].
        args, kwargs: as torch's `scaled_dot_product_attention`.
    """
    found: Tensor = _nn.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    if query.shape[-2] == 0 and attn_mask.requires_grad:
        found = found + 0 * attn_mask.sum()
    return found
