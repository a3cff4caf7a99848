"""optimizer_state: a state dict of parts is told once for each line; torch's and autotp's own code may read it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks, shared, silence
from small_models import ROWS, Plain, WithLoss
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, AdamW, Optimizer

import autotp

checks = Checks()


def told(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in found]


def stepped(n: int, kind: Callable[..., Optimizer] = AdamW, **more: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = autotp.parallelize(Plain().double(), n, example_inputs=ROWS)
    optimizer = kind(model.parameters(), lr=0.1, **more)
    with silence():
        optimizer.state_dict()  # There is nothing in it.
    model(ROWS).sum().backward()
    optimizer.step()
    return model, optimizer


REMEDY = (
    "autotp.save_checkpoint, with autotp.distribute in place of autotp.parallelize, saves the whole of optimizer and "
    "model; autotp.full_state_dict(model), on all ranks, has the whole model"
)


@checks.on(2)
def once_for_each_line(rank: int, n: int) -> None:
    _, optimizer = stepped(n)
    text = f"`AdamW.state_dict()` has this rank's parts only: the state of `up.weight` and 2 more is cut. {REMEDY}"
    for expected in ([text], []):
        assert told(lambda: optimizer.state_dict()) == expected
    assert told(lambda: optimizer.state_dict()) == [text], "another line"


@checks.on(2)
def the_line_of_the_user(rank: int, n: int) -> None:
    _, optimizer = stepped(n)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.state_dict()
    assert [one.filename for one in found] == [__file__]


@checks.on(2)
def what_has_no_state_of_parts(rank: int, n: int) -> None:
    """A step without momentum keeps nothing; parameters that no rank cuts; a model of the user's own."""
    _, plain = stepped(n, SGD)
    model, _ = stepped(n)
    whole = AdamW([model.get_parameter("down.bias")])
    other = nn.Linear(2, 2)
    own = AdamW(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    for optimizer in (whole, own):
        optimizer.step()
    with silence():
        for optimizer in (plain, whole, own):
            optimizer.state_dict()


@checks.on(2)
def torchs_own_code(rank: int, n: int) -> None:
    """It reads for the user, who gets the parts; to load, it only fills what it reads."""
    model, optimizer = stepped(n)
    found: list[dict[str, Any]] = []
    options = StateDictOptions(full_state_dict=True)
    texts = told(lambda: found.append(get_optimizer_state_dict(model, optimizer, options=options)))
    assert texts == [
        f"`AdamW.state_dict()` has this rank's parts only: the state of `up.weight` and 2 more is cut. {REMEDY}"
    ]
    (text,) = told(lambda: found.append(get_model_state_dict(model, options=options)))
    assert text.startswith("`state_dict()` has this rank's parts only: `up.weight`")
    with silence():
        set_model_state_dict(model, found[1])
        set_optimizer_state_dict(model, optimizer, found[0])


def trainer_of(**layout: int) -> tuple[autotp.Trainer, Optimizer]:
    torch.manual_seed(0)
    model = WithLoss(nn.Sequential(*(Plain() for _ in range(2)))).double()
    trainer = autotp.distribute(model, **layout, microbatches=2, example_inputs=(ROWS[:2], ROWS[:2]))
    optimizer = AdamW(trainer.parameters(), lr=0.1)
    trainer.step(ROWS[:2], ROWS[:2] * 2)
    optimizer.step()
    return trainer, optimizer


@checks.on(2)
def trainers(rank: int, n: int) -> None:
    """autotp's own checkpoint says nothing. Replicas have the whole; a stage of a pipeline does not."""
    for layout, text in (
        ({"tp": 2}, "the state of `model.0.up.weight` and 5 more is cut"),
        ({"pp": 2}, "it has the parameters of this rank's stages"),
    ):
        trainer, optimizer = trainer_of(**layout)
        with silence():
            autotp.save_checkpoint(shared(rank) / "ckpt", trainer, optimizer, 1)
        found = told(lambda optimizer=optimizer: optimizer.state_dict())
        assert found == [f"`AdamW.state_dict()` has this rank's parts only: {text}. {REMEDY}"]


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
