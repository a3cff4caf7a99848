"""whole_optimizer: the whole state of an optimizer of several models; with trainers in `test_trainer_calls.py`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from ranks import run_ranks
from torch import nn
from torch.optim import Adafactor

import autotp
from autotp.checkpoint.whole_optimizer import whole_state_dict

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
