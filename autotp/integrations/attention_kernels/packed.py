"""packed: attention of documents that lie one after another in one row of tokens, by products; for CPUs.

    documents of 3, 2 and 4 tokens:   tokens [a a a b b c c c c],   ends [0, 3, 5, 9]

Kernels of attention compute this on GPUs only. These functions compute the same on any device and in any dtype, one
document after another, so that a model with such a kernel can be proved on a machine without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.errors import Error
from autotp.ops.attention.documents import documents_in


class ScoreSettings(NamedTuple):
    """How kernels of attention compute scores.

    Attributes:
        scale: of the products of queries and keys; None for 1/sqrt(width).
        window: how many keys before and after its own position a query reads, -1 for all. Perhaps a third number:
            the length of the chunks of a document, of which a query reads its own; 0 for none.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0 for none.
        slopes: ALiBi's slopes, [heads] or [documents heads]: scores sink by `slope * distance`.
        sinks: [heads], a score beside those of the keys, which takes a share of the weights and adds nothing.
        dropout: the probability with which a weight is dropped.
    """

    scale: float | None = None
    window: tuple[int, ...] = (-1, -1)
    softcap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, scores: ScoreSettings
) -> tuple[Tensor, Tensor]:
    """Returns attention inside each document, [queries heads width], and its log-sum-exp, [heads queries].

    As in the kernels, the last query of a document is at the position of its last key. A query that may read no key
    gets zeros, and -inf as its log-sum-exp.

    Args:
        query: [queries heads width].
        key, value: [keys groups width]; each head of a group reads the same keys.
        query_ends, key_ends: where documents begin and end, [documents + 1], from 0 to the number of tokens.
        scores: how scores are computed.
    """
    output = query.new_zeros((*query.shape[:2], value.shape[-1]))
    totals = query.new_full((query.shape[1], query.shape[0]), -math.inf, dtype=_accumulated(query))
    for i, rows, columns in _documents(query_ends, key_ends, query, key):
        q, k, v = _heads_first(query[rows], key[columns], value[columns])
        logits, _ = _logits(q, k, scores, i)
        total = _total(logits, scores)
        weights = F.dropout(_weights(logits, total), scores.dropout)
        output[rows] = (weights @ v).transpose(0, 1).to(output.dtype)
        totals[:, rows] = total.detach()
    return output, totals


def packed_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    totals: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    scores: ScoreSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key, value and sinks of `packed_attention` without dropout.

    Without sinks the last one is empty.

    Args:
        gradient: that of the output, [queries heads width].
        output, totals: what `packed_attention` returned.
        query, key, value, query_ends, key_ends, scores: as there.
    """
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    of_sinks = query.new_zeros(0) if scores.sinks is None else torch.zeros_like(scores.sinks)
    for i, rows, columns in _documents(query_ends, key_ends, query, key):
        q, k, v = _heads_first(query[rows], key[columns], value[columns])
        out, grad, _ = _heads_first(output[rows], gradient[rows], gradient[rows])
        logits, slope = _logits(q, k, scores, i)
        weights = _weights(logits, totals[:, rows])
        # The derivative of softmax: each score's gradient, less the mean of those of its row.
        mean = (grad * out).sum(-1, keepdim=True)
        if scores.sinks is not None:
            share = _weights(scores.sinks.to(mean.dtype)[:, None, None], totals[:, rows])
            of_sinks -= (share * mean).sum((1, 2)).to(of_sinks.dtype)
        of_logits = weights * (grad @ v.transpose(-2, -1) - mean) * slope
        of_logits = of_logits * _scale(query, scores)
        of_query, of_key, of_value = of_logits @ k, of_logits.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ grad
        grads[0][rows] = of_query.transpose(0, 1).to(query.dtype)
        for target, of_heads in ((grads[1], of_key), (grads[2], of_value)):
            # A group's keys are read by all its heads, so the gradients of the heads add up.
            summed = of_heads.unflatten(0, (key.shape[1], -1)).sum(1) if key.shape[1] else of_heads
            target[columns] = summed.transpose(0, 1).to(target.dtype)
    return *grads, of_sinks


def _documents(query_ends: Tensor, key_ends: Tensor, query: Tensor, key: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Yields the number of each document, its queries and its keys; reads the ends on the host.

    Raises:
        Error: the ends are not those of documents in these tokens, where a kernel would read other memory.
    """
    rows = documents_in(query_ends, query.shape[0])
    columns = documents_in(key_ends, key.shape[0])
    if len(rows) != len(columns):
        raise Error(
            f"queries have the ends of {len(rows) - 1} documents, and keys those of {len(columns) - 1}",
            fix="the same documents for both",
        )
    for i in range(len(rows) - 1):
        if rows[i + 1] > rows[i] and columns[i + 1] > columns[i]:
            yield i, slice(rows[i], rows[i + 1]), slice(columns[i], columns[i + 1])


def _accumulated(x: Tensor) -> torch.dtype:
    """Returns the dtype of scores: kernels compute them in float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Returns the tensors of a document, [heads tokens width], with keys and values repeated for each head."""
    heads = query.shape[1]
    repeated = [x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value)]
    return [x.transpose(0, 1).to(_accumulated(x)) for x in (query, *repeated)]


def _scale(query: Tensor, scores: ScoreSettings) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scores.scale is None else scores.scale


def _logits(query: Tensor, key: Tensor, scores: ScoreSettings, document: int) -> tuple[Tensor, Tensor | float]:
    """Returns a document's scores, -inf where a query may not read a key, and the derivative of the soft cap."""
    logits = query @ key.transpose(-2, -1) * _scale(query, scores)
    slope: Tensor | float = 1.0
    if scores.softcap:
        capped = (logits / scores.softcap).tanh()
        logits, slope = capped * scores.softcap, 1 - capped.square()
    places = torch.arange(query.shape[1], device=query.device).unsqueeze(1) + key.shape[1] - query.shape[1]
    distance = torch.arange(key.shape[1], device=query.device) - places
    if scores.slopes is not None:
        slopes = scores.slopes[document] if scores.slopes.dim() == 2 else scores.slopes
        logits = logits - slopes.to(logits.dtype)[:, None, None] * distance.abs()
    before, after, chunk = (*scores.window, 0)[:3]
    unread = torch.zeros_like(distance, dtype=torch.bool)
    unread = unread if before < 0 else unread | (distance < -before)
    unread = unread if after < 0 else unread | (distance > after)
    if chunk:
        unread = unread | ((distance + places) // chunk != places // chunk)
    return logits.masked_fill(unread, -math.inf), slope


def _total(logits: Tensor, scores: ScoreSettings) -> Tensor:
    """Returns the log-sum-exp of the scores of each query, [heads queries]."""
    if scores.sinks is None:
        return logits.logsumexp(-1)
    return torch.logaddexp(logits.logsumexp(-1), scores.sinks.to(logits.dtype).unsqueeze(-1))


def _weights(logits: Tensor, totals: Tensor) -> Tensor:
    """Returns softmax of the scores by their log-sum-exp; zeros for a query that reads nothing."""
    return (logits - totals.unsqueeze(-1)).exp().nan_to_num(0.0)
