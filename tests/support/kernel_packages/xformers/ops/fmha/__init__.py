"""xformers' memory_efficient_attention, from its description: scores with a bias, softmax, dropout."""

from __future__ import annotations

import torch
from torch import Tensor
from xformers.ops.fmha import attn_bias as attn_bias


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None,
                               output_dtype=None):  # fmt: skip
    """q, k, v: [batch seq heads width], [batch seq width] or [batch seq groups heads width]."""
    joined = [x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, -2) for x in (query, key, value)]
    q, k, v = (x.transpose(1, 2) for x in joined)
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    bias = attn_bias
    if bias is not None and hasattr(bias, "materialize"):
        bias = bias.materialize(scores.shape, scores.dtype, scores.device)
    elif isinstance(bias, Tensor):
        bias = bias.unsqueeze(1) if query.dim() == 3 else bias.flatten(1, -3)
    scores = scores if bias is None else scores + bias
    output = torch.nn.functional.dropout(scores.softmax(-1), p) @ v
    return output.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])
