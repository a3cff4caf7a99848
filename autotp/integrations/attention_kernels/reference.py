"""reference: attention by products as an operator with a backward, which keeps no scores; for CPUs.

It takes batches, [batch seq heads width], and packed rows, [tokens heads width]. Each row of a batch is a document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotp.integrations.attention_kernels.packed import ScoreSettings, packed_attention, packed_attention_backward


@torch.library.custom_op("autotp::attention_reference", mutates_args=())
def _reference(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor | None, key_ends: Tensor | None,
    slopes: Tensor | None, sinks: Tensor | None, scale: float | None, window: list[int], softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns attention and its log-sum-exp; arguments as those of `attention_kernel` and `ScoreSettings`."""
    scores = ScoreSettings(scale, tuple(window), softcap, slopes, sinks)
    return attention_in_one_row(packed_attention, query, key, value, query_ends, key_ends, scores)


REFERENCE = torch.ops.autotp.attention_reference


@_reference.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    *rows, tokens, heads, _width = query.shape
    totals = query.new_empty((*rows, heads, tokens), dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty((*query.shape[:-1], value.shape[-1])), totals


@torch.library.custom_op("autotp::attention_reference_backward", mutates_args=())
def _reference_backward(
    gradient: Tensor, output: Tensor, totals: Tensor, query: Tensor, key: Tensor, value: Tensor,
    query_ends: Tensor | None, key_ends: Tensor | None, slopes: Tensor | None, sinks: Tensor | None,
    scale: float | None, window: list[int], softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of query, key, value and sinks; an empty one without sinks."""
    scores = ScoreSettings(scale, tuple(window), softcap, slopes, sinks)
    ends = _ends(query, key, query_ends, key_ends)
    if query_ends is not None:
        return packed_attention_backward(gradient, query, key, value, output, totals, *ends, scores)
    rows = (x.flatten(0, 1) for x in (gradient, query, key, value, output))
    totals = totals.transpose(0, 1).flatten(1)
    *grads, of_sinks = packed_attention_backward(*rows, totals, *ends, scores)  # type: ignore[call-arg, arg-type]
    pairs = zip(grads, (query, key, value), strict=True)
    return *(x.reshape(like.shape) for x, like in pairs), of_sinks  # type: ignore[return-value]


@_reference_backward.register_fake
def _(
    gradient: Tensor, output: Tensor, totals: Tensor, query: Tensor, key: Tensor, value: Tensor,
    query_ends: Tensor | None, key_ends: Tensor | None, slopes: Tensor | None, sinks: Tensor | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    made = [x.new_empty(x.shape) for x in (query, key, value)]
    return *made, query.new_empty(0) if sinks is None else torch.empty_like(sinks)  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])  # As in the kernels.
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.settings = inputs[7:]


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    *grads, of_sinks = torch.ops.autotp.attention_reference_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, None, None, of_sinks if ctx.needs_input_grad[6] else None, None, None, None


_reference.register_autograd(_backward, setup_context=_keep)


def attention_in_one_row(
    attend: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, value: Tensor,
    query_ends: Tensor | None, key_ends: Tensor | None, scores: ScoreSettings,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the result of `attend`, a function of packed rows, for a batch or for packed rows.

    Args:
        query: [batch seq heads width], or [tokens heads width].
        key, value: the same with groups in place of heads.
        query_ends, key_ends: of packed rows, [documents + 1]; None for a batch.
        scores: how scores are computed.
    """
    if query_ends is not None:
        return attend(query, key, value, query_ends, key_ends, scores)
    rows = [x.flatten(0, 1) for x in (query, key, value)]
    output, totals = attend(*rows, *_ends(query, key, query_ends, key_ends), scores)
    totals = totals.unflatten(1, query.shape[:2]).transpose(0, 1).contiguous()
    return output.reshape(*query.shape[:-1], value.shape[-1]), totals


def _ends(query: Tensor, key: Tensor, query_ends: Tensor | None, key_ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns where documents begin and end: those that are given, or those of the rows of a batch."""
    if query_ends is not None and key_ends is not None:
        return query_ends, key_ends
    of_queries, of_keys = (
        torch.arange(x.shape[0] + 1, dtype=torch.int32, device="cpu") * x.shape[1] for x in (query, key)
    )
    return of_queries, of_keys
