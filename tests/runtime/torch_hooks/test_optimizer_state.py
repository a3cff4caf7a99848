"""optimizer_state: states of cut parameters behave as wholes; a state dict without some states is told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks, shared, silence
from small_models import ROWS, Plain, WithLoss
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW, Optimizer

import autotp
from autotp.runtime.torch_hooks.optimizer_state import OwnedStates

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
def optimizer_states_of_cut_parameters_behave_as_wholes(rank: int, n: int) -> None:
    """They behave as wholes, and nothing is said, whoever reads."""
    model, optimizer = stepped(n)
    options = StateDictOptions(full_state_dict=True)
    with silence():
        states = optimizer.state_dict()["state"]
        shapes = [x["exp_avg"].shape for x in states.values()]
        assert shapes == [p.shape for p in model.parameters()] and shapes[0] == model.layouts["up.weight"].shape
        read = get_optimizer_state_dict(model, optimizer, options=options)
        state = get_model_state_dict(model, options=options)
        assert state["up.weight"].shape == read["state"]["up.weight"]["exp_avg"].shape == shapes[0]
        set_model_state_dict(model, state)
        set_optimizer_state_dict(model, optimizer, read)


class Owned(OwnedStates, AdamW):
    """Has the state of the first parameter on rank 0, and of the others on rank 1."""

    def owner(self, parameter: Tensor) -> int | None:
        return int(parameter is not self.param_groups[0]["params"][0])


@checks.on(2)
def partial_state_dict_warns_once_a_line(rank: int, n: int) -> None:
    """States that other ranks own."""
    torch.manual_seed(0)
    model = autotp.parallelize(Plain().double(), n, example_inputs=ROWS)
    names, optimizer = [name for name, _ in model.named_parameters()], Owned(model.parameters(), lr=0.1)
    model(ROWS).sum().backward()
    optimizer.step()
    texts = told(lambda: optimizer.state_dict())
    others = [
        f"`{names[1]}` is on tp rank 1, and {len(names) - 2} more are on other ranks",
        f"`{names[0]}` is on tp rank 0",
    ]
    assert texts == [f"`Owned.state_dict()` has what this rank steps only: the state of {others[rank]}. {REMEDY}"]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.state_dict()
    assert [one.filename for one in found] == [__file__]


def trainer_of(**layout: int) -> tuple[autotp.Trainer, Optimizer]:
    torch.manual_seed(0)
    model = WithLoss(nn.Sequential(*(Plain() for _ in range(2)))).double()
    trainer = autotp.distribute(model, **layout, microbatches=2, example_inputs=(ROWS[:2], ROWS[:2]))
    optimizer = AdamW(trainer.parameters(), lr=0.1)
    trainer.step(ROWS[:2], ROWS[:2] * 2)
    optimizer.step()
    return trainer, optimizer


@checks.on(2)
def state_dict_of_pipeline_stages_warns_and_checkpoints_do_not(rank: int, n: int) -> None:
    """autotp's own checkpoint says nothing. Replicas and parts have the whole; a stage of a pipeline does not."""
    for layout, text in (({"tp": 2}, ""), ({"pp": 2}, "it has the parameters of this rank's stages")):
        trainer, optimizer = trainer_of(**layout)
        with silence():
            autotp.save_checkpoint(shared(rank) / "ckpt", trainer, optimizer, 1)
        found = told(lambda optimizer=optimizer: optimizer.state_dict())
        assert found == [f"`AdamW.state_dict()` has what this rank steps only: {text}. {REMEDY}"] * bool(text)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
