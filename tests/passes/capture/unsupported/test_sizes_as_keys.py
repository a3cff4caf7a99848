"""Sizes as keys: a dict of the model gets a number, a function with a cache computes anew."""

import functools
from typing import ClassVar

import torch
from torch import Tensor, nn

import autotp
from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of


@functools.lru_cache(16)
def halves(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As einops keeps the sizes of a rearrangement."""
    return *shape[:-1], 2, shape[-1] // 2


class Rearranging(nn.Module):
    """Views its input by sizes from a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:  # x: [batch seq 12]
        y = self.up(x).relu()
        for _ in range(2):
            y = y.view(halves(tuple(y.shape))).flatten(-2)
        return self.down(y)


class Remembering(Rearranging):
    """Keeps a scale for each length in a dict."""

    SCALES: ClassVar = {5: 2.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) * self.SCALES.get(x.shape[1], 1.0)


def test_function_caches_keep_no_symbolic_size() -> None:
    halves.cache_clear()
    model, x = Rearranging(), torch.ones(2, 5, 12)
    captured = capture(skeleton_of(model), (x,), {})
    assert captured.fits([[3, 6, 12]])  # The sizes are still symbols.
    assert model(x).shape == x.shape  # The same shape, without a graph.
    assert all(type(size) is int for size in halves((2, 5, 24)))
    assert autotp.verify(model, 2, example_inputs=x).ok
    assert autotp.verify(model, 2, example_inputs=torch.ones(3, 5, 12)).ok


def test_sizes_as_dict_keys_become_numbers() -> None:
    captured = capture(skeleton_of(Remembering()), (torch.ones(2, 5, 12),), {})
    assert captured.fits([[3, 5, 12]]) and not captured.fits([[2, 6, 12]])
    assert autotp.verify(Remembering(), 2, example_inputs=torch.ones(2, 5, 12)).ok
