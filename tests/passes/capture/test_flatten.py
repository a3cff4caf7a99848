"""flatten: what forward assigns to buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autotp


class Largest(nn.Module):
    """Divides by the largest number so far, which is assigned, or written into the buffer. x: [rows, 6]"""

    largest: Tensor

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("largest", torch.ones(8))
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            largest = torch.maximum(self.largest, hidden.abs().amax(0))
            if self.assigns:
                self.largest = largest
            else:
                self.largest.copy_(largest)
        return x + self.down((hidden / self.largest).relu())


def layers(assigns: bool, shared: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Largest(assigns) for _ in range(3)))
    for layer in model if shared else ():
        layer.largest = model[0].largest
    return model


@pytest.mark.parametrize(("assigns", "shared"), [(True, False), (False, True), (False, False)])
def test_later_calls_find_what_earlier_ones_left(assigns: bool, shared: bool) -> None:
    whole = layers(assigns, shared)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=torch.randn(3, 6))
    for size in (1, 4, 0.5):
        x = torch.randn(3, 6) * size
        torch.testing.assert_close(parallel(x), whole(x))
    expected = dict(whole.named_buffers())
    for name, buffer in parallel.named_buffers():
        torch.testing.assert_close(buffer, expected[name])


def test_a_buffer_with_several_names() -> None:
    """Each name has a tensor of its own after the first call."""
    with pytest.raises(autotp.Error) as raised:
        autotp.parallelize(layers(True, True), 1, example_inputs=torch.randn(3, 6))
    assert str(raised.value) == (
        "parallelize(Sequential, tp=1): forward assigns to the buffer `0.largest`, which is one tensor with "
        "`1.largest`, `2.largest`: later calls would find two\n"
        "  try      buffer.copy_(value) under torch.no_grad(), or a buffer of its own for each name"
    )


def test_a_layer_with_two_names() -> None:
    """Its buffer has two names, too, and both have the new tensor."""
    whole = layers(True, False)
    whole.append(whole[0])
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=torch.randn(3, 6))
    for size in (1, 4, 0.5):
        x = torch.randn(3, 6) * size
        torch.testing.assert_close(parallel(x), whole(x))
