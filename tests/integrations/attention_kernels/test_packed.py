"""packed: attention inside documents, against torch's own attention with a mask, and against its derivatives."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autotp
from autotp.integrations.attention_kernels.packed import ScoreSettings, packed_attention, packed_attention_backward

ENDS = torch.tensor([0, 4, 4, 9, 12], dtype=torch.int32)
"""Documents of 4, 0, 5 and 3 tokens."""
SETTINGS = [
    ScoreSettings(),
    ScoreSettings(scale=0.3, window=(-1, 0)),
    ScoreSettings(window=(2, 0)),
    ScoreSettings(window=(1, 1), softcap=2.0),
    ScoreSettings(window=(-1, 0), slopes=torch.tensor([0.5, 0.25, 0.125, 0.1])),
    ScoreSettings(slopes=torch.rand(4, 4, generator=torch.Generator().manual_seed(0))),
    ScoreSettings(sinks=torch.linspace(-1, 1, 4, dtype=torch.float64), window=(2, 0)),
    ScoreSettings(window=(-1, 0, 2)),
    ScoreSettings(window=(-1, -1, 3), softcap=2.0),
]


def operands(groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(12, heads, 8, dtype=torch.float64) for heads in (4, groups, groups))


def by_mask(query: Tensor, key: Tensor, value: Tensor, scores: ScoreSettings) -> Tensor:
    """The same by one softmax over all tokens, with a mask and a bias."""
    document = torch.bucketize(torch.arange(12), ENDS[1:], right=True)
    distance = torch.arange(12) - torch.arange(12).unsqueeze(1)
    allowed = document == document.unsqueeze(1)
    before, after, *chunk = scores.window
    allowed &= (distance >= -before) if before >= 0 else torch.tensor(True)
    allowed &= (distance <= after) if after >= 0 else torch.tensor(True)
    if chunk:
        chunks = (torch.arange(12) - ENDS[document]) // chunk[0]
        allowed &= chunks == chunks.unsqueeze(1)
    key, value = (x.repeat_interleave(4 // x.shape[1], 1) for x in (key, value))
    scale = scores.scale or 1 / math.sqrt(8)
    logits = torch.einsum("shd,thd->hst", query, key) * scale
    logits = scores.softcap * torch.tanh(logits / scores.softcap) if scores.softcap else logits
    if scores.slopes is not None:
        slopes = scores.slopes if scores.slopes.dim() == 1 else scores.slopes[document].t().unsqueeze(-1)
        logits = logits - slopes.double().view(4, -1, 1) * distance.abs()
    logits = logits.masked_fill(~allowed, -math.inf)
    if scores.sinks is not None:
        logits = torch.cat([logits, scores.sinks.view(4, 1, 1).expand(-1, logits.shape[1], 1)], -1)
    weights = logits.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hst,thd->shd", weights, value)


@pytest.mark.parametrize("scores", SETTINGS, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_packed_attention_equals_attention_with_a_mask(scores: ScoreSettings, groups: int) -> None:
    leaves = [x.requires_grad_() for x in operands(groups)]
    sinks = [] if scores.sinks is None else [scores.sinks.requires_grad_()]
    expected = by_mask(*leaves, scores)
    gradient = torch.randn_like(expected)
    with torch.no_grad():
        output, totals = packed_attention(*leaves, ENDS, ENDS, scores)
        grads = packed_attention_backward(gradient, *leaves, output, totals, ENDS, ENDS, scores)
    torch.testing.assert_close(output, expected)
    grads = grads if sinks else grads[:3]
    for got, of_mask in zip(grads, torch.autograd.grad(expected, [*leaves, *sinks], gradient), strict=True):
        torch.testing.assert_close(got, of_mask)


def test_packed_attention_aligns_the_last_query_with_the_last_key() -> None:
    """As in a kernel's decoding: two queries behind five keys read four and five of them."""
    query, key, value = operands(4)
    ends = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    output, _ = packed_attention(query[:2], key[:5], value[:5], *ends, ScoreSettings(window=(-1, 0)))
    mask = torch.ones(2, 5, dtype=torch.bool).tril(3)
    expected = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (query[:2], key[:5], value[:5])), mask)
    torch.testing.assert_close(output, expected.transpose(0, 1))


def test_a_query_that_reads_no_key_has_zeros_and_no_gradient() -> None:
    query, key, value = operands(4)
    ends = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    output, totals = packed_attention(query[:3], key[:1], value[:1], *ends, ScoreSettings(window=(-1, 0)))
    assert not output[:2].any() and output[2].any() and totals[:, :2].isneginf().all()
    gradient = torch.ones_like(output)
    grads = packed_attention_backward(
        gradient, query[:3], key[:1], value[:1], output, totals, *ends, ScoreSettings(window=(-1, 0))
    )
    assert all(x.isfinite().all() for x in grads) and not grads[0][:2].any()


def test_packed_attention_computes_16_bits_in_float32() -> None:
    query, key, value = (x.bfloat16() for x in operands())
    output, totals = packed_attention(query, key, value, ENDS, ENDS, ScoreSettings())
    exact, _ = packed_attention(query.double(), key.double(), value.double(), ENDS, ENDS, ScoreSettings())
    assert output.dtype == torch.bfloat16 and totals.dtype == torch.float32
    torch.testing.assert_close(output, exact.bfloat16(), rtol=2**-8, atol=2**-9)


@pytest.mark.parametrize("ends", [[0, 4, 11], [0, 4, 13], [1, 12], [0, 9, 4, 12]], ids=str)
def test_ends_that_are_not_those_of_the_tokens_are_refused(ends: list[int]) -> None:
    """A kernel would leave out tokens, or read memory beyond them."""
    with pytest.raises(autotp.Error, match="ascend from 0 to the number of tokens, 12"):
        packed_attention(*operands(), *[torch.tensor(ends, dtype=torch.int32)] * 2, ScoreSettings())


def test_queries_and_keys_have_the_same_number_of_documents() -> None:
    with pytest.raises(autotp.Error, match="4 documents, and keys those of 1"):
        packed_attention(*operands(), ENDS, torch.tensor([0, 12], dtype=torch.int32), ScoreSettings())
