"""step_facts: what made a loss infinite is named; facts of a step are used once they have arrived on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors import message
from torch import nn

from autotp.distributed.mesh import Mesh
from autotp.training.step_facts import finite_tensors, raise_nonfinite

FIX = "\n  try      autotp.load_checkpoint(...), and a smaller learning rate from there"


def model(parameter: float = 1.0, gradient: float | None = 1.0) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        made[1].weight[0, 0] = parameter
    if gradient is not None:
        made[0].bias.grad = torch.tensor([1.0, gradient])
    return made


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"parameter": float("nan")}, f": `1.weight` is infinite or undefined{FIX}"),
        ({"gradient": float("inf")}, f": the gradient of `0.bias` is infinite or undefined{FIX}"),
        ({"parameter": float("inf"), "gradient": float("inf")}, f": `1.weight` is infinite or undefined{FIX}"),
        ({"gradient": None}, ", and every parameter and gradient is finite"),
    ],
)
def test_what_is_named(given: Any, text: str) -> None:
    told = message(lambda: raise_nonfinite(float("nan"), 7, *finite_tensors(model(**given)), Mesh()))
    assert told == f"the loss of step 7 is nan{text}"
