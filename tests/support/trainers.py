"""Trainings that tests start, go on with and compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

import autotp
from autotp.models.gpt import GPT, GPTConfig

Layout = tuple[int, int, int]


def gpt(dropout: float = 0.0, layers: int = 2) -> GPT:
    """Fused q | k | v, a tied head, a vocabulary that four does not divide."""
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=8, vocab_size=49, n_layer=layers, n_head=4, n_embd=16, dropout=dropout))


def batch(step: int) -> dict[str, Tensor]:
    x = (torch.arange(32).view(4, 8) * 7 + step * 5) % 49
    return {"tokens": x, "labels": x.roll(1, 1).masked_fill(x % 3 == 0, -100)}


def started(
    layout: Layout, dropout: float = 0.0, layers: int = 2, model: Any = None, **more: Any
) -> tuple[autotp.Trainer, AdamW]:
    tp, pp, dp = layout
    example = {name: x[: max(1, 4 // (2 * dp))] for name, x in batch(0).items()}
    trainer = autotp.distribute(
        model or gpt(dropout, layers), tp=tp, pp=pp, dp=dp, microbatches=2, example_inputs=example, **more
    )
    return trainer, AdamW(trainer.parameters(), lr=0.01, weight_decay=0.1)


def trained(trainer: autotp.Trainer, optimizer: AdamW, steps: range) -> list[float]:
    """The losses of these steps."""
    losses, dp, rank = [], trainer.mesh["dp"].size(), trainer.mesh["dp"].get_local_rank()
    for step in steps:
        losses.append(trainer.step(**{name: x.chunk(dp)[rank] for name, x in batch(step).items()}).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def fingerprint(trainer: autotp.Trainer, optimizer: AdamW) -> str:
    """All that a checkpoint may change, as text."""
    state = [p.tolist() for p in trainer.parameters()], optimizer.state_dict(), torch.get_rng_state().tolist()
    return repr((state, trainer.steps))


def mine(batch: dict[str, Tensor], rank: int, dp: int) -> dict[str, Tensor]:
    """A replica's part of a batch."""
    return {name: value.chunk(dp)[rank] for name, value in batch.items()}
