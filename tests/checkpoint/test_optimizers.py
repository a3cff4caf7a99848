"""optimizers: a training has several, in one order; a state that has an owner is saved and loaded there alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.optim import SGD, AdamW
from trainers import batch, mine, started

import autotp
from autotp.runtime.torch_hooks.optimizer_state import OwnedStates


def refused(rank: int, n: int, folder: Path) -> None:
    trainer, _ = started((2, 1, 1))
    first, *others = trainer.parameters()
    adamw, sgd = AdamW([first]), SGD(others)
    autotp.save_checkpoint(folder, trainer, [adamw, sgd], 0)
    for optimizers, text in (
        ([sgd, adamw], "has the state of AdamW and SGD, and this is SGD and AdamW"),
        (adamw, "has the state of AdamW and SGD, and this is AdamW"),
        ([adamw, sgd, sgd], "two optimizers have the same parameter"),
        ([adamw, "sgd"], "str is no optimizer"),
    ):
        with pytest.raises(autotp.Error, match=text):
            autotp.load_checkpoint(folder, trainer, optimizers)
    with pytest.raises(autotp.Error, match="list is no optimizer"):
        autotp.save_checkpoint(folder, trainer, [], 1)


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    run_ranks(refused, 2, tmp_path / "ckpt")


class OnFirstOrLast(OwnedStates, SGD):
    """Has the state of matrices on the last rank, and of vectors on the first one."""

    rank: int | None = None
    """The last rank, once owners are chosen."""

    def choose_owners(self) -> None:
        self.rank = dist.get_world_size() - 1

    def owner(self, parameter: Tensor) -> int | None:
        return None if self.rank is None else self.rank if parameter.dim() == 2 else 0


def owned(rank: int, n: int, folder: Path) -> dict[str, Any]:
    trainer, _ = started((2, 1, 1))
    optimizer = OnFirstOrLast(trainer.parameters(), lr=0.0)
    trainer.step(**mine(batch(0), 0, 1))
    optimizer.step()
    optimizer.choose_owners()
    for name, p in trainer.named_parameters():
        if optimizer.owner(p) == rank:
            optimizer.state[p] = {"moment": torch.full((3, 5), float(len(name))), "steps": len(name)}
    autotp.save_checkpoint(folder, trainer, optimizer, 1)
    later = OnFirstOrLast(trainer.parameters(), lr=0.0)
    assert autotp.load_checkpoint(folder, trainer, later) == 1
    assert later.state.keys() == optimizer.state.keys()
    for p, state in optimizer.state.items():
        assert torch.equal(later.state[p]["moment"], state["moment"]) and later.state[p]["steps"] == state["steps"]
    return {name: optimizer.owner(p) for name, p in trainer.named_parameters() if p in later.state}


def test_a_state_is_saved_and_loaded_by_its_owner(tmp_path: Path) -> None:
    """It is whole, of a shape of its own, and no other rank reads it."""
    of_ranks = run_ranks(owned, 2, tmp_path / "ckpt")
    assert [set(owners.values()) for owners in of_ranks] == [{0}, {1}]
