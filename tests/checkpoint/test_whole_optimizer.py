"""whole_optimizer and optimizers: states of several models, of owners and of several optimizers.

With trainers of other libraries: `test_trainer_calls.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW
from trainers import batch, mine, started

import autotp
from autotp.checkpoint.whole_optimizer import whole_state_dict
from autotp.runtime.torch_hooks.optimizer_state import OF_RANK, OwnedStates

X = torch.linspace(-1, 1, 16).double().view(2, 8)


def stepped(models: Sequence[Any]) -> Adafactor:
    """An optimizer that has means of rows and columns, which are no parts of parameters."""
    optimizer = Adafactor([p for model in models for p in model.parameters()], lr=0.1)
    for model in models:
        model(X).square().sum().backward()
    optimizer.step()
    return optimizer


def of_two_models(rank: int, n: int) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)).double() for _ in range(2)]
    parallels = [autotp.parallelize(copy.deepcopy(model), n, example_inputs=X) for model in models]
    expected = stepped(models).state_dict()["state"]
    state = whole_state_dict(stepped(parallels))
    assert state is not None
    torch.testing.assert_close(state["state"], {} if rank else expected, rtol=1e-9, atol=1e-12)


def test_an_optimizer_of_two_models() -> None:
    run_ranks(of_two_models, 2)


class OnLast(OwnedStates, SGD):
    """Has all states on rank 1, and its state dict says so."""

    def owner(self, parameter: Tensor) -> int | None:
        return 1


def of_owners(rank: int, n: int) -> None:
    model = autotp.parallelize(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)).double(), n, example_inputs=X)
    optimizer = OnLast(model.parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, state: state.update({OF_RANK: [rank, n]}))
    states = {i: {"moment": torch.full((3,), float(i)), "steps": i} for i in range(4)}
    if rank == 1:
        optimizer.state.update(dict(zip(model.parameters(), states.values(), strict=True)))
    state = whole_state_dict(optimizer)
    assert state is not None and state.keys() == {"state", "param_groups"}
    torch.testing.assert_close(state["state"], {} if rank else states, rtol=0, atol=0)


def test_states_of_owners_come_to_the_first_rank() -> None:
    run_ranks(of_owners, 2)


# ---- checkpoints


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
