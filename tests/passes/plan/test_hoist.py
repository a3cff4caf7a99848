"""hoist: where a copy stands before whole work and where behind it; the numbers are one device's either way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Branches, Grouped, normed
from torch import Tensor, nn
from torch.nn import functional as F

import autotp


def dropped(norm: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(norm(x), 0.3)


def scaled(norm: nn.Module, x: Tensor) -> Tensor:
    return x * 3


def exchanged(model: nn.Module, x: Tensor, tp: int = 2) -> tuple[int, int]:
    """How many activations are summed in backward, and modules' parameters, of a model that equals one device."""
    torch.manual_seed(0)
    report = autotp.verify(model, tp, example_inputs=x)
    assert report.ok, report
    sends = [sent for sent in report.plan.traffic.sends if sent.backward]
    return sum(not sent.parameter for sent in sends), sum(sent.parameter for sent in sends)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param([normed], (1, 0), id="one-norm"),
        pytest.param([normed, normed], (1, 2), id="two-norms"),
        pytest.param([normed, normed, normed], (1, 3), id="three-norms"),
        pytest.param([normed, scaled], (1, 1), id="a-norm-and-a-scale"),
        pytest.param([dropped, dropped], (2, 0), id="behind-what-is-drawn"),
    ],
)
@pytest.mark.parametrize("returned", [None, lambda n: n, lambda n: n[:, 1:]], ids=["alone", "returned", "in-part"])
def test_hoist_places_copies_for_fewest_exchanges(before: list[Any], expected: tuple[int, int], returned: Any) -> None:
    assert exchanged(Branches(*before, returned=returned), torch.randn(3, 5, 16)) == expected


@pytest.mark.parametrize("cache", [False, True], ids=["alone", "cached"])
def test_hoist_copies_key_weights_in_place_of_keys(cache: bool) -> None:
    """Two key/value heads on three ranks: all need all keys. What is summed is as large as their weights."""
    activations, parameters = exchanged(
        nn.Sequential(nn.Linear(12, 12), Grouped(2, 3, "separate", cache)), torch.randn(2, 5, 12), 3
    )
    assert (activations, parameters) == (1, 1)  # weights and biases of k and v, and of the norm of keys


def offset(norm: nn.Module, x: Tensor) -> Tensor:
    """As Gemma has it: the weight is what is added to one."""
    return F.layer_norm(x, (16,)) * (1 + norm.weight)  # type: ignore[operator]


def test_hoist_copies_parameters_before_work_on_them() -> None:
    """Their gradients are as large, and are summed together with others of the block."""
    assert exchanged(Branches(offset, offset), torch.randn(3, 5, 16)) == (1, 1)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(16, 64), nn.Linear(64, 16), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows 16]"""
        x = torch.tanh(x * self.scale)
        return x + self.down(F.gelu(self.up(x.repeat_interleave(4, 0)))).view(-1, 4, 16).sum(1)


def test_hoist_copies_rows_before_they_are_repeated() -> None:
    report = autotp.verify(Repeated(), 2, example_inputs=torch.randn(6, 16))
    assert report.ok, report
    assert [sent.bytes for sent in report.plan.traffic.sends if sent.backward] == [6 * 16 * 8]
