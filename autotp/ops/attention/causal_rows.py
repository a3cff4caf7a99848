"""causal_rows: causal attention of a rank's part of the queries, whose mask is made anew in backward.

A mask would be kept for backward by each layer: with sequences of 32,768 tokens on 4 ranks, 1 GiB in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from autotp.ops.attention.products import attention, attention_weights

aten = torch.ops.aten
FUSED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Pieces = Sequence[tuple[int, int]]
"""The (start, stop) positions of consecutive rows."""


def causal_rows(query: Tensor, key: Tensor, value: Tensor, start: int, scale: float | None, enable_gqa: bool) -> Tensor:
    """Returns attention in which the query at position `start + i` reads the keys up to this position.

    Args:
        query: a part of the queries, [batch heads seq/cp width].
        key, value: those of all positions, [batch heads seq width].
        start: the position of the first query.
        scale, enable_gqa: as for `scaled_dot_product_attention`.
    """
    return causal_pieces(query, key, value, [(start, start + query.shape[-2])], scale, enable_gqa)


def causal_pieces(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Returns attention in which the queries of some pieces of a sequence read the keys up to their positions.

    Each piece is torch's attention that is causal from the bottom right, on the keys up to its last query. For CPUs
    torch has no kernel that keeps no mask of it: there it is `_OnCPU`.

    Args:
        query: the queries of all pieces, [batch heads rows width].
        key, value: those of all positions, [batch heads seq width].
        pieces: the positions of the queries.
        scale, enable_gqa: as for `scaled_dot_product_attention`.
    """
    compiling = torch.compiler.is_compiling()
    # A compiler takes no `_OnCPU`. On a GPU a mask would cost the flash kernel.
    on_cpu = query.device.type == "cpu"
    masked = on_cpu if compiling else torch._C._functorch.peek_interpreter_stack() is not None
    stop = max(stop for _, stop in pieces)
    if masked or not query.numel() or stop > key.shape[-2]:
        return _masked(query, key, value, pieces, scale, enable_gqa)
    key, value = key.narrow(-2, 0, stop), value.narrow(-2, 0, stop)
    query = query if compiling else in_own_memory(query)  # A compiler decides itself what it keeps.
    # The kernel for CPUs takes [batch heads length width], and one width for queries, keys and values.
    fused = on_cpu and query.dtype in FUSED
    if not fused or query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return lower_right_pieces(query, key, value, pieces, scale, enable_gqa)
    if enable_gqa:
        repeats = query.shape[-3] // max(1, key.shape[-3])
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    output: Tensor = _OnCPU.apply(query, key, value, tuple(pieces), scale)[0]
    return output


def in_own_memory(query: Tensor) -> Tensor:
    """Returns the queries in memory of their own: those of one product with keys and values would keep these, too."""
    together = query.untyped_storage().nbytes() > query.numel() * query.element_size()
    return query.clone() if together else query  # In the same order, so that the result has it as well.


def lower_right_pieces(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None, enable_gqa: bool,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Returns the same as `causal_pieces` on any device, by the kernels that torch has there; arguments as there.

    In each piece the last query reads all keys up to its own, and each query before it one key less.
    """
    parts = []
    for rows, (start, stop) in zip(query.split([b - a for a, b in pieces], -2), pieces, strict=True):
        if stop > start:
            keys, values = key.narrow(-2, 0, stop), value.narrow(-2, 0, stop)
            rule: Any = _LowerRight(rows.shape[-2], keys.shape[-2])
            parts.append(CausalBias._dispatch(rows, keys, values, rule, dropout_p, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(parts, -2) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class _LowerRight:
    """What torch asks of its `CausalBias`, which is a tensor in name only.

    A graph runs where nobody asks tensors for their class, and there a CausalBias would be a tensor of
    [2 queries keys] numbers that nobody has set. So torch's function for it gets this instead.
    """

    seq_len_q: int
    seq_len_kv: int
    variant: CausalVariant = CausalVariant.LOWER_RIGHT

    def _materialize(self, device: torch.device) -> Tensor:
        """Returns True where a query reads a key, for kernels that need a mask. [queries keys]"""
        rows = torch.ones(self.seq_len_q, self.seq_len_kv, dtype=torch.bool, device=device)
        return rows.tril(self.seq_len_kv - self.seq_len_q)


def _masked(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None, gqa: bool) -> Tensor:
    return attention(query, key, value, mask_of_pieces(key, pieces), scale=scale, enable_gqa=gqa)


def mask_of_pieces(key: Tensor, pieces: Pieces) -> Tensor:
    """Returns True where a query of the pieces reads a key. [rows keys]"""
    places = [torch.arange(start, stop, device=key.device) for start, stop in pieces]
    return torch.arange(key.shape[-2], device=key.device) <= torch.cat(places).unsqueeze(1)


def _differentiable(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, pieces: Pieces, scale: float | None
) -> tuple[Tensor, ...]:
    """Returns the gradients of query, key and value by products, which have derivatives and take batches of gradients:
    no fused kernel does.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Clones, because `requires_grad_` would change the tensors that this backward has saved.
        q, k, v = (x if x.requires_grad else x.requires_grad_() for x in map(torch.clone, (query, key, value)))
        weights, values = attention_weights(q, k, v, mask_of_pieces(k, pieces), False, scale, False)
        output = weights @ values
    return torch.autograd.grad(output, (q, k, v), gradient, create_graph=again)


def _bias(query: Tensor, start: int, stop: int) -> Tensor:
    """Returns 0 where a query at the positions of a piece reads a key, -inf elsewhere. [rows keys]"""
    rows, keys = (torch.arange(a, stop, device=query.device) for a in (start, 0))
    later = keys > rows.unsqueeze(1)
    return torch.zeros_like(later, dtype=query.dtype).masked_fill(later, float("-inf"))


def _of_pieces(
    pieces: Pieces, of_rows: Sequence[Tensor], of_keys: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor], tuple[int, int]]]:
    """Yields the rows of a piece, and the keys that they read, as views. [batch heads length width] each"""
    offset = 0
    for start, stop in pieces:
        if stop > start:
            rows = [x.narrow(2, offset, stop - start) for x in of_rows]
            yield rows, [x.narrow(2, 0, stop) for x in of_keys], (start, stop)
        offset += stop - start


class _OnCPU(torch.autograd.Function):
    """The fused attention for CPUs, piece by piece; it keeps what the fused attention keeps, but for the mask."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None) -> Any:
        parts, totals = [], []
        for (q,), (k, v), bounds in _of_pieces(pieces, (query,), (key, value)):
            output, total = aten._scaled_dot_product_flash_attention_for_cpu.default(
                q, k, v, 0.0, False, attn_mask=_bias(query, *bounds), scale=scale
            )
            parts.append(output.transpose(1, 2))  # As it lies in memory.
            totals.append(total)
        return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).transpose(1, 2), *totals

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.pieces, ctx.scale = inputs[3:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:3], *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        query, key, value, out, *totals = ctx.saved_tensors
        # Gradients that torch batches the old way cannot be written into tensors without a batch, as below.
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient):
            return *_differentiable(query, key, value, gradient, ctx.pieces, ctx.scale), None, None
        input_grads = [torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)]
        views = _of_pieces(ctx.pieces, (gradient, query, out, input_grads[0]), (key, value, *input_grads[1:]))
        for ((g, q, o, of_q), (k, v, of_k, of_v), bounds), total in zip(views, totals, strict=True):
            of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                g, q, k, v, o, total, 0.0, False, attn_mask=_bias(query, *bounds), scale=ctx.scale
            )
            # A query is in one piece; a key is read by the queries of each later piece, so its gradients add up.
            of_q.copy_(of_query)
            of_k.add_(of_key)
            of_v.add_(of_value)
        return *input_grads, None, None
