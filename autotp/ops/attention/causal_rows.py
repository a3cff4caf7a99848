"""causal_rows: causal attention of a rank's part of the queries, whose mask is made anew in backward.

A mask would be kept for backward by each layer: with sequences of 32,768 tokens on 4 ranks, 1 GiB in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

aten = torch.ops.aten
FUSED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def causal_rows(query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None, enable_gqa: bool) -> Tensor:
    """Returns attention in which the query at position `start + i` reads the keys up to this position.

    On a GPU it is the fused attention that is causal from the bottom right, on the keys up to the last query.

    Args:
        query: a part of the queries, [batch heads seq/cp width].
        key, value: those of all positions, [batch heads seq width].
        start: the position of the first query.
        scale, enable_gqa: as for `scaled_dot_product_attention`.
    """
    rows, stop = query.shape[-2], start + query.shape[-2]
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or torch.compiler.is_compiling()
    if transformed or not query.numel() or stop > key.shape[-2]:
        return _masked(query, key, value, start, scale, enable_gqa)
    key, value, query = key.narrow(-2, 0, stop), value.narrow(-2, 0, stop), alone(query)
    if query.is_cuda:
        found: Tensor = F.scaled_dot_product_attention(
            query, key, value, causal_lower_right(rows, stop), scale=scale, enable_gqa=enable_gqa
        )
        return found
    if query.dim() != 4 or query.shape[-1] != value.shape[-1] or query.dtype not in FUSED:
        return _masked(query, key, value, start, scale, enable_gqa)
    if enable_gqa:
        repeats = query.shape[-3] // max(1, key.shape[-3])
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return _OnCPU.apply(query, key, value, start, scale)[0]


def alone(query: Tensor) -> Tensor:
    """Returns the queries in memory of their own: those of one product with keys and values would keep these, too."""
    together = query.untyped_storage().nbytes() > query.numel() * query.element_size()
    return query.clone() if together else query  # In the same order, so that the result has it as well.


def _masked(query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None, enable_gqa: bool) -> Tensor:
    mask = _read(query, key, start)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)


def _read(query: Tensor, key: Tensor, start: int) -> Tensor:
    """Returns which keys each query reads. [rows keys]"""
    rows, keys = (torch.arange(x.shape[-2], device=x.device) for x in (query, key))
    return keys <= (rows + start).unsqueeze(1)


def _bias(query: Tensor, key: Tensor, start: int) -> Tensor:
    read = _read(query, key, start)
    return torch.zeros_like(read, dtype=query.dtype).masked_fill(~read, float("-inf"))


class _OnCPU(torch.autograd.Function):
    """The fused attention for CPUs; it keeps what the fused attention keeps, but for the mask."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, False, attn_mask=_bias(query, key, start), scale=scale
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.start, ctx.scale = inputs[3:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:3], *output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        query, key, value, out, total = ctx.saved_tensors
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            gradient, query, key, value, out, total, 0.0, False,
            attn_mask=_bias(query, key, ctx.start), scale=ctx.scale,
        )  # fmt: skip
        return *found, None, None
