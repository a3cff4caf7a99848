"""What the user does to a model that a trainer took is an error, on every rank: the trainer would not do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD

import autotp

SCALE = [1.0]


class Head(nn.Module):
    """Reads a setting, a global and a setting of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 2)
        self.temperature = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch 4], y: [batch 2]"""
        h = self.down(self.drop(self.up(x).relu())) / self.temperature * SCALE[0]
        return F.mse_loss(h, y)


def set_temperature(model: nn.Module) -> None:
    model.temperature = 2.0  # type: ignore[assignment]


def set_global(model: nn.Module) -> None:
    SCALE[0] = 2.0


def set_dropout(model: Any) -> None:
    model.drop.p = 0.5


def freeze(model: Any) -> None:
    model.up.requires_grad_(False)


def hook(model: Any) -> None:
    model.up.register_forward_hook(print)


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (set_temperature, "Trainer.step: `temperature` changed after autotp.distribute"),
    (set_global, "SCALE.0` changed after autotp.distribute"),
    (set_dropout, "Trainer.step: `drop.p` changed after autotp.distribute"),
    (freeze, "Trainer.step: requires_grad of `up.weight` changed in the original model"),
    (hook, "Trainer.step: hooks of a Linear of the original model changed after autotp.distribute"),
]
ROWS = torch.ones(4, 4), torch.zeros(4, 2)


def changed_later(rank: int, n: int) -> None:
    """One rank is enough: all ranks have the error, and go on where the change is undone."""
    for change, told in CHANGES:
        model = Head()
        trainer = autotp.distribute(model, tp=n, example_inputs=ROWS)
        trainer.step(*ROWS)
        trainer.evaluate(*ROWS)
        if rank == 1:
            change(model)
        with pytest.raises(autotp.Error) as raised:
            trainer.step(*ROWS)
        assert told in str(raised.value), raised.value
        SCALE[0] = 1.0
    model = Head()
    trainer = autotp.distribute(model, tp=n, example_inputs=ROWS)
    model.config = {"unread": 1}  # type: ignore[assignment]
    model.eval()
    trainer.step(*ROWS)


def stepped(rank: int, n: int) -> None:
    model = Head()
    trainer = autotp.distribute(model, dp=n, zero=1, example_inputs=ROWS)
    before = list(trainer.parameters())
    trainer.step(*(x + rank for x in ROWS))
    with pytest.raises(autotp.Error, match=r"SGD.step: 4 of 4 parameters are the original model's, and the parallel"):
        SGD(model.parameters(), 0.1).step()
    SGD(before, 0.1).step()


def made_before(rank: int, n: int) -> None:
    """`fully_shard` replaces the parameters of an optimizer that was there before; without it they stay."""
    for zero in (0, 1):
        model = Head()
        optimizer = SGD(model.parameters(), 0.1)
        trainer = autotp.distribute(model, dp=n, zero=zero, example_inputs=ROWS)  # type: ignore[arg-type]
        trainer.step(*(x + rank for x in ROWS))
        if zero:
            with pytest.raises(autotp.Error, match="of 4 parameters are the original model's"):
                optimizer.step()
        else:
            optimizer.step()


def in_two_modes(rank: int, n: int) -> None:
    model = Head()
    model.drop.eval()
    with pytest.raises(autotp.Error, match="`drop` is in evaluation mode and the model in training mode, and a step"):
        autotp.distribute(model, tp=n, example_inputs=ROWS)
    model.eval()
    autotp.distribute(model, tp=n, example_inputs=ROWS).step(*ROWS)


@pytest.mark.parametrize("run", [changed_later, stepped, made_before, in_two_modes], ids=lambda it: it.__name__)
def test_changes_of_the_original_model_are_refused(run: Any) -> None:
    run_ranks(run, 2, timeout=100)
