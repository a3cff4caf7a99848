"""Functions with a cache: they keep no tensor of a capture, and a capture reads none that they have kept."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of


@functools.lru_cache(16)
def positions(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32) / 3


def unless_compiled(function: Any) -> Any:
    """As transformers' decorator: a capture calls the function itself."""
    kept = functools.lru_cache(16)(function)

    @functools.wraps(function)
    def call(n: int) -> Any:
        return function(n) if torch.compiler.is_compiling() else kept(n)

    return call


@unless_compiled
def turned(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32) / 7


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * positions(8)).relu() + positions(16))


class Turned(Placed):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * turned(8)).relu() + turned(16))


@pytest.mark.parametrize("kind", [Placed, Turned])
def test_cached_functions_compute_anew_in_verify(kind: type[nn.Module]) -> None:
    """The numbers are thirds and sevenths: kept in float32, they would not be those of float64."""
    model, x = kind(), torch.randn(2, 8)
    expected = model(x)
    for _ in range(2):
        assert autotp.verify(model, 2, example_inputs=x).ok
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert positions(8).dtype == turned(8).dtype == torch.float32


def test_capture_makes_no_constant_of_cached_tensors() -> None:
    model, x = Placed(), torch.randn(2, 8)
    expected = model(x)
    captured = capture(skeleton_of(model), (x,), {})
    assert not captured.constants  # The graph computes what the function had kept.
    assert model(x).equal(expected)
