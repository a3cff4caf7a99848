"""Offloaded states on cards: they lie in pinned memory, no step waits for them, and the steps keep their bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cards.pretend import pretended
from cards.spies import host_waits
from ranks import run_ranks
from small_models import gpt
from torch import Tensor
from trainers import mine

import autotp
from autotp import low_memory
from autotp.training.low_memory import parts
from autotp.training.low_memory.stored_state import CHUNK, StoredState

SIZES: dict[str, Any] = {"block_size": 8, "vocab_size": 97, "n_layer": 2, "n_head": 4, "n_embd": 64}


def batch(step: int) -> dict[str, Tensor]:
    tokens, labels = torch.randint(97, (2, 8, 8), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "labels": labels}


def stepped(trainer: Any, optimizer: Any, steps: range) -> list[dict[tuple[str, str], int]]:
    """What the host waited for in each step of the optimizer."""
    waits = []
    for step in steps:
        trainer.step(**mine(batch(step), trainer.mesh["dp"].get_local_rank(), trainer.mesh["dp"].size()))
        autotp.clip_grad_norm_(trainer, 0.5)
        with host_waits() as traffic:
            optimizer.step()
        waits.append(traffic.waits)
        optimizer.zero_grad()
    return waits


def parameters_after_steps(rank: int, n: int, dp: int, states: Any, folder: str) -> None:
    """With and without offload, with few and many buckets; and in a checkpoint."""
    after = list[list[Tensor]]()
    for offload in (False, True):
        if offload:
            parts.BUCKET = 8192  # Many buckets, and parameters in several pieces.
        trainer = autotp.distribute(
            gpt(seed=0, **SIZES), tp=n // dp, dp=dp, zero=1 if dp > 1 else 0, microbatches=2,
            example_inputs={key: x[:2] for key, x in batch(0).items()},
        )  # fmt: skip
        optimizer = low_memory(torch.optim.AdamW, states, offload=offload)(trainer.parameters(), lr=1e-2)
        before = pretended().live_pinned_bytes()
        waits = stepped(trainer, optimizer, range(6))
        assert not any(waits[4:]), waits[4:]  # Before, ranks are compared.
        if offload:  # At once, while states are on their way.
            autotp.save_checkpoint(folder, trainer, optimizer, 6, wait=False)
        after.append([p.detach().cpu().clone() for p in trainer.parameters()])
        stored = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, StoredState)]
        if offload:
            assert all(x.is_pinned() for state in stored for x in state.tensors())
            assert 0 < pretended().live_pinned_bytes() - before < 2 * CHUNK
            stepped(trainer, optimizer, range(6, 8))
            after.append([p.detach().cpu().clone() for p in trainer.parameters()])
            assert autotp.load_checkpoint(folder, trainer, optimizer) == 6
            stepped(trainer, optimizer, range(6, 8))
            after.append([p.detach().cpu().clone() for p in trainer.parameters()])
        else:
            assert all(x.is_cuda for state in stored for x in state.tensors())
    assert all(torch.equal(a, b) for a, b in zip(after[0], after[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after[2], after[3], strict=True))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("dp", "states"), [(1, "8bit"), pytest.param(2, "unchanged", marks=pytest.mark.rare)])
def test_offloaded_states_change_no_bit_and_nobody_waits(dp: int, states: Any, tmp_path: Path) -> None:
    run_ranks(parameters_after_steps, 2, dp, states, str(tmp_path), cards=True, alone=True, timeout=150)
