"""A model and its parallel twin: a GPT in float64, and the comparison of their gradients."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import autotp
from autotp.models.gpt import GPT, GPTConfig
from autotp.runtime.module import executable_of

VOCAB = 97


def gpt(dropout: float = 0.0) -> GPT:
    """Its vocabulary and its three heads divide by no number of ranks."""
    return GPT(GPTConfig(block_size=16, vocab_size=VOCAB, n_layer=2, n_head=3, n_embd=48, dropout=dropout)).double()


def tokens(batch: int = 3, seq: int = 7) -> tuple[Tensor, Tensor]:
    count = torch.arange(batch * seq).view(batch, seq)
    return count * 31 % VOCAB, count * 17 % VOCAB


def both(n: int, whole: nn.Module, **settings: Any) -> tuple[nn.Module, autotp.ParallelModule]:
    return whole, autotp.parallelize(copy.deepcopy(whole), n, **settings)


def graphs(parallel: autotp.ParallelModule) -> int:
    """How many signatures it has met."""
    return len(executable_of(parallel).entries)


def expect_gradients(whole: nn.Module, parallel: autotp.ParallelModule, tolerance: float = 1e-12) -> None:
    scale = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    for (name, a), b in zip(whole.named_parameters(), parallel.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            mine = parallel.layouts[name].take(a.grad, parallel.mesh.rank)
            torch.testing.assert_close(b.grad, mine, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")
