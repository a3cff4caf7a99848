"""number_classes: what the model's code asks about the class of a size or of a number is answered as on one device."""

from __future__ import annotations

import builtins
import copy
import numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp
from autotp.passes.capture.replacements.number_classes import numbers_of_python


class Asks(nn.Module):
    """Computes twice as much if `asks` says so. x: [rows, length, 6]"""

    def __init__(self, asks: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.asks = nn.Linear(6, 12), nn.Linear(12, 6), asks

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden * (2 if self.asks(x, hidden) else 3))


@pytest.mark.parametrize(
    "asks",
    [
        lambda x, h: isinstance(x.shape[1], int),
        lambda x, h: isinstance(x.shape[1] * 2, (int, tuple)),
        lambda x, h: isinstance(x.shape[1] / 2, float),
        lambda x, h: isinstance(x.shape[1] / 2, int),
        lambda x, h: isinstance(x.shape[1] > 2, bool),
        lambda x, h: isinstance(x.shape[1], numbers.Integral),
        lambda x, h: isinstance(x.shape[1], int | None),
        lambda x, h: isinstance(x.shape[1], (str, Tensor)),
        lambda x, h: isinstance(h.std().item(), float),
        lambda x, h: isinstance(x.argmax().item(), int),
    ],
)
def test_the_class_of_a_number(asks: Callable[[Tensor, Tensor], Any]) -> None:
    torch.manual_seed(0)
    whole = Asks(asks)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1)
    for length in (5, 4):
        x = torch.randn(2, length, 6)
        torch.testing.assert_close(parallel(x), whole(x))


class Resizes(nn.Module):
    """The idiom of a size that may be a pair. x: [rows, length, 6]"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        size: Any = x.shape[1] * 2
        if isinstance(size, int):
            size = (size, 6)
        return self.down(self.up(F.interpolate(x[:, None], size=size)))


def test_a_size_or_a_pair_of_sizes() -> None:
    report = autotp.verify(Resizes(), 2, example_inputs=torch.randn(2, 5, 6))
    assert report.ok, report


def test_torch_still_sees_a_symbol() -> None:
    before = builtins.isinstance
    model, dims = Asks(lambda x, h: True), ({1: torch.export.Dim("n")},)
    graph = torch.export.export(model, (torch.randn(2, 5, 6),), dynamic_shapes=dims).graph
    size = next(node.meta["val"].shape[1] for node in graph.nodes if node.name == "x")
    with numbers_of_python():
        assert isinstance(size, int) and isinstance(size, torch.SymInt) and not isinstance(size, float)
        assert torch.sym_float(size).node is not None  # torch asks whether it is an int, and is told the truth.
    assert builtins.isinstance is before and not isinstance(size, int)
