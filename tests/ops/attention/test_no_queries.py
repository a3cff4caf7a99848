"""no_queries: a mask that learns has a gradient on every rank, also on one without queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import autotp
from autotp.ops.attention.no_queries import masked_attention


@pytest.mark.parametrize("queries", [0, 3])
def test_a_mask_that_learns_has_a_gradient(queries: int) -> None:
    q, k, v = (torch.randn(2, 2, n, 4, requires_grad=True) for n in (queries, 5, 5))
    bias = torch.full((2, queries, 5), -1e30).requires_grad_()
    found = masked_attention(q, k, v, bias, 0.0, scale=0.5)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, bias, scale=0.5))
    found.sum().backward()
    for x in (q, k, v, bias):
        assert x.grad is not None and x.grad.isfinite().all()


class Relative(nn.Module):
    """Attention with a bias for each distance, as in T5. tokens: [rows, seq] -> loss []"""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias, self.head = nn.Embedding(20, 16), nn.Embedding(32, 2), nn.Linear(16, 20)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = (part(x).unflatten(2, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        places = torch.arange(tokens.shape[1], device=tokens.device)
        bias = self.bias(places[None] - places[:, None] + 16).permute(2, 0, 1)[None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x + mixed).flatten(0, 1), tokens.flatten())


def short_sequences(rank: int, n: int) -> None:
    torch.manual_seed(0)
    whole: Any = Relative().double()
    torch.manual_seed(0)
    cut: Any = autotp.parallelize(Relative().double(), 1, cp=n, example_inputs=torch.arange(14).view(2, 7))
    for length in (7, 5, 9, 2):  # Of 5 and 9 the last rank has none.
        tokens = (torch.arange(2 * length) * 7 % 20).view(2, length)
        expected, found = whole(tokens), cut(tokens)
        expected.backward()
        found.backward()
        torch.testing.assert_close(found, expected)
        for (name, one), part in zip(whole.named_parameters(), cut.parameters(), strict=True):
            torch.testing.assert_close(part.grad, one.grad, msg=name)


def test_ranks_without_positions_sum_the_same_gradients() -> None:
    run_ranks(short_sequences, 4, alone=True)
