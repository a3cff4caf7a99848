"""products: attention whose inputs have gradients on every rank, also on one without queries or heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.ops.attention.products import attention, attention_weights


@pytest.mark.parametrize("queries", [0, 3])
def test_attention_gives_a_learnt_mask_its_gradient(queries: int) -> None:
    q, k, v = (torch.randn(2, 2, n, 4, requires_grad=True) for n in (queries, 5, 5))
    bias = torch.full((2, queries, 5), -1e30).requires_grad_()
    found = attention(q, k, v, bias, 0.0, scale=0.5)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, bias, scale=0.5))
    found.sum().backward()
    for x in (q, k, v, bias):
        assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("grouped", [False, True])
def test_attention_without_heads_has_gradients_of_zeros(grouped: bool) -> None:
    """A mask of numbers has a gradient without elements, also under transforms. torch's own attention gives none."""
    q, k, v = (torch.ones(2, 0, 4, 3, requires_grad=True) for _ in range(3))
    whole, own = torch.ones(4, 4, requires_grad=True), torch.ones(0, 4, 4, requires_grad=True)
    for mask in (whole, own):
        lost = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)
        assert torch.autograd.grad(lost.sum(), mask, allow_unused=True) == (None,)
        found = attention(q, k, v, mask, enable_gqa=grouped)
        assert found.shape == lost.shape
        for grad, x in zip(torch.autograd.grad(found.sum(), (q, k, v, mask)), (q, k, v, mask), strict=True):
            assert grad.shape == x.shape and not grad.any()
        assert torch.func.grad(lambda m: attention(q, k, v, m).sum())(mask).shape == mask.shape
    assert attention(q, k, v, torch.ones(4, 4, dtype=torch.bool)).shape == (2, 0, 4, 3)


@pytest.mark.parametrize("scale", [None, 0.5, 0.0, -0.5])
def test_weights_are_those_of_torchs_attention(scale: float | None) -> None:
    q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.double) for n in (3, 5, 5))
    weights, values = attention_weights(q, k, v, None, False, scale, False)
    torch.testing.assert_close(weights @ values, F.scaled_dot_product_attention(q, k, v, scale=scale))


class Layer(nn.Module):
    """Attention with a bias for each distance, as in T5. x: [rows, seq, 16]"""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(32, 2)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1], device=x.device)
        bias = self.bias(places[None] - places[:, None] + 16).permute(2, 0, 1)[None]
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


class Relative(nn.Module):
    """Two such layers. tokens: [rows, seq] -> loss []"""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.table(tokens))).flatten(0, 1), tokens.flatten())


def short_sequences(rank: int, n: int, compiled: str) -> None:
    torch.manual_seed(0)
    whole: Any = Relative().double()
    torch.manual_seed(0)
    cut: Any = autotp.parallelize(Relative().double(), 1, cp=n, example_inputs=torch.arange(14).view(2, 7))
    assert cut.plan.cp == n and cut.plan.in_sequence, "positions are cut"
    called = torch.compile(cut, backend="aot_eager") if compiled == "whole" else cut
    if compiled == "blocks":
        cut.compile_blocks(backend="aot_eager")
    for length in (7, 5) if compiled else (7, 5, 9, 2):  # Of 5 and 9 the last rank has none.
        tokens = (torch.arange(2 * length) * 7 % 20).view(2, length)
        expected, found = whole(tokens), called(tokens)
        expected.backward()
        found.backward()
        torch.testing.assert_close(found, expected)
        for (name, one), part in zip(whole.named_parameters(), cut.parameters(), strict=True):
            torch.testing.assert_close(part.grad, one.grad, msg=name)


def test_ranks_without_positions_sum_the_same_gradients() -> None:
    run_ranks(short_sequences, 4, "", alone=True)


@pytest.mark.costly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("compiled", ["blocks", "whole"])
def test_compiled_ranks_without_positions_sum_the_same_gradients(compiled: str) -> None:
    run_ranks(short_sequences, 4, compiled, alone=True, timeout=300)
