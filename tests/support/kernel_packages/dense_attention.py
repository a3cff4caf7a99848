"""Attention by one matrix of scores, from the descriptions of the kernels' packages: what the stand-ins compute."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, *,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, attention_chunk: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention and its log-sum-exp: q [batch seq heads width] or packed [tokens heads width]."""
    if q.device.type != "cpu" and q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        places = torch.arange(q.shape[1]).unsqueeze(1) + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
        apart, document = torch.zeros((), dtype=torch.bool), torch.arange(q.shape[0])
    else:
        owners, offsets = [], []
        for ends, other in ((cu_seqlens_q.cpu(), cu_seqlens_k.cpu()), (cu_seqlens_k.cpu(), None)):
            tokens = torch.arange(int(ends[-1]))
            owner = torch.bucketize(tokens, ends[1:].contiguous(), right=True)
            shift = 0 if other is None else (other.diff() - ends.diff())[owner]
            owners.append(owner)
            offsets.append(tokens - ends[owner] + shift)
        places, apart = (offsets[0].unsqueeze(1), offsets[1]), owners[0].unsqueeze(1) != owners[1]
        document, q, k, v = owners[0], q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    packed = cu_seqlens_q is not None
    repeats = q.shape[2] // max(1, k.shape[2])
    wide = torch.promote_types(q.dtype, torch.float32)
    q_, k_, v_ = (x.to(wide) for x in (q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q_, k_) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = (places[1] - places[0]).to(q.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes.expand(int(document.max()) + 1, -1)
        slopes = slopes[document].T[None, :, :, None] if packed else slopes[:, :, None, None]
        scores = scores - slopes.to(wide) * distance.abs()
    left, right = (-1 if n is None else n for n in window_size)
    right = 0 if causal else right
    hidden = apart.to(q.device) | (distance > right if right >= 0 else False)
    hidden = hidden | (distance < -left if left >= 0 else False)
    if attention_chunk:
        hidden = hidden | (places[0] // attention_chunk != places[1] // attention_chunk).to(q.device)
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide)[None, :, None])
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v_).to(q.dtype)
    return (out[0], lse[0]) if packed else (out, lse)


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *ends: Tensor | None, sinks: Tensor | None = None, **how: Any
) -> list[Tensor]:
    """The gradients of q, k and v, and of the sinks if there are any."""
    with torch.enable_grad():
        operands = [x.detach().requires_grad_() for x in (q, k, v)]
        learned = [] if sinks is None else [sinks.detach().requires_grad_()]
        out, _ = attend(*operands, *ends, sinks=learned[0] if learned else None, **how)
        return list(torch.autograd.grad(out, [*operands, *learned], dout))


def attend_with_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, lengths: Any,
    pages: Tensor | None, with_lse: bool, *, alibi_slopes: Tensor | None = None, **how: Any,
) -> Any:  # fmt: skip
    """Writes `k` and `v` into the caches behind the lengths, and attends to what is there then; each row by itself."""
    lengths = [k_cache.shape[1]] * q.shape[0] if lengths is None else lengths
    lengths = [lengths] * q.shape[0] if isinstance(lengths, int) else [int(n) for n in lengths]
    outs = []
    with torch.no_grad():
        for row, length in enumerate(lengths):
            for step in range(0 if k is None else k.shape[1]):
                page, place = (row, length) if pages is None else divmod(length, k_cache.shape[1])
                page = page if pages is None else int(pages[row, page])
                k_cache[page, place], v_cache[page, place] = k[row, step], v[row, step]
                length += 1
            if pages is None:
                keys, values = k_cache[row], v_cache[row]
            else:
                used = pages[row, : -(-length // k_cache.shape[1])].long()
                keys, values = k_cache[used].flatten(0, 1), v_cache[used].flatten(0, 1)
            slopes = (
                alibi_slopes[row : row + 1] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
            )
            outs.append(
                attend(q[row : row + 1], keys[None, :length], values[None, :length], alibi_slopes=slopes, **how)
            )
    out, lse = (torch.cat(parts) for parts in zip(*outs, strict=True))
    return (out, lse) if with_lse else out
