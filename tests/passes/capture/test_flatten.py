"""flatten: what forward assigns to buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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
def test_buffers_assigned_in_forward_last_between_calls(assigns: bool, shared: bool) -> None:
    whole = layers(assigns, shared)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=torch.randn(3, 6))
    for size in (1, 4, 0.5):
        x = torch.randn(3, 6) * size
        torch.testing.assert_close(parallel(x), whole(x))
    expected = dict(whole.named_buffers())
    for name, buffer in parallel.named_buffers():
        torch.testing.assert_close(buffer, expected[name])


def test_assigning_a_buffer_with_several_names_is_refused() -> None:
    """Each name has a tensor of its own after the first call."""
    with pytest.raises(autotp.Error) as raised:
        autotp.parallelize(layers(True, True), 1, example_inputs=torch.randn(3, 6))
    assert str(raised.value) == (
        "parallelize(Sequential, tp=1): forward assigns to the buffer `0.largest`, which is one tensor with "
        "`1.largest`, `2.largest`: later calls would find two\n"
        "  try      buffer.copy_(value) under torch.no_grad(), or a buffer of its own for each name"
    )


class Exchanges(nn.Module):
    """Does something with two buffers."""

    first: Tensor
    second: Tensor
    kept: Tensor | None = None

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.register_buffer("first", torch.zeros(6))
        self.register_buffer("second", torch.ones(6))
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.does(self, y.detach().mean(0))
        return y + self.first + self.second


def joins(model: Exchanges, mean: Tensor) -> None:
    model.first = model.second


def assigns_both(model: Exchanges, mean: Tensor) -> None:
    model.first = model.second = mean


def keeps(model: Exchanges, mean: Tensor) -> None:
    model.kept = model.first
    model.first = mean


def swaps(model: Exchanges, mean: Tensor) -> None:
    model.first, model.second = model.second, model.first + mean


def keeps_a_copy(model: Exchanges, mean: Tensor) -> None:
    model.kept = model.first.clone()
    model.first = mean


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (joins, "forward makes one tensor of the buffers `first` and `second`: later calls would find two"),
        (assigns_both, "forward makes one tensor of the buffers `first` and `second`: later calls would find two"),
        (
            keeps,
            "forward assigns to the buffer `first`, and keeps its former tensor as `kept`: the call would change both",
        ),
    ],
)
def test_forward_that_makes_buffers_share_is_refused(does: Callable[[Any, Tensor], Any], message: str) -> None:
    with pytest.raises(autotp.Error) as raised:
        autotp.parallelize(Exchanges(does), 1, example_inputs=torch.randn(3, 6))
    assert str(raised.value).startswith(f"parallelize(Exchanges, tp=1): {message}\n  try      ")


class Plain(nn.Module):
    """Two plain tensors, or a plain one and a buffer, that are one after the first call."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.first: Tensor = torch.zeros(6)
        self.calls = 0
        if buffer:
            self.register_buffer("second", torch.ones(6))
        else:
            self.second = torch.ones(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.calls == 0:
            self.first = self.second
        else:
            self.first += y.detach().mean(0)
        self.calls += 1
        return y + self.second


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (False, "`first` changes from call to call, and is one tensor with `second`"),
        (
            True,
            "forward computes with a tensor that is not one of the model's, such as a buffer in a plain attribute",
        ),
    ],
)
def test_a_changing_tensor_with_two_names_is_refused(buffer: bool, message: str) -> None:
    parallel = autotp.parallelize(Plain(buffer), 1, example_inputs=torch.randn(3, 6))
    parallel(torch.randn(3, 6))
    with pytest.raises(autotp.Error) as raised:
        parallel(torch.randn(3, 6))
    assert str(raised.value).startswith(f"Plain.forward: {message}\n  ")


class Twice(nn.Module):
    """Sets a tensor under two names, and reads both. x: [rows, 6]"""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.first: Tensor = torch.zeros(6)
        self.second: list[Tensor] | Tensor = [torch.zeros(6)] if nested else torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        nested = isinstance(self.second, list)
        y = self.up(x) + self.first + (self.second[0] if nested else self.second)
        self.first = y.detach().mean(0)
        self.second = [self.first] if nested else self.first
        return y


@pytest.mark.parametrize("nested", [False, True])
def test_a_later_capture_refuses_two_names_of_one_tensor(nested: bool) -> None:
    """The graph of separate tensors is right; a later capture finds one tensor, and would read an old one."""
    torch.manual_seed(0)
    whole = Twice(nested)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=torch.randn(3, 6))
    for _ in range(3):
        x = torch.randn(3, 6)
        torch.testing.assert_close(parallel(x), whole(x))
    parallel.eval()
    with pytest.raises(autotp.Error) as raised:
        parallel(torch.randn(3, 6))
    second = "second.0" if nested else "second"
    assert str(raised.value) == (
        f"Twice.forward: `first` changes from call to call, and is one tensor with `{second}`\n"
        "  try      a tensor of its own for each name: tensor.clone()"
    )


@pytest.mark.parametrize("does", [swaps, keeps_a_copy])
def test_swapped_or_copied_buffers_equal_one_device(does: Callable[[Any, Tensor], Any]) -> None:
    torch.manual_seed(0)
    whole = Exchanges(does)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=torch.randn(3, 6))
    for _ in range(4):
        x = torch.randn(3, 6)
        torch.testing.assert_close(parallel(x), whole(x))
        torch.testing.assert_close(parallel.first, whole.first)
        torch.testing.assert_close(parallel.second, whole.second)


def test_a_layer_with_two_names_keeps_its_buffer() -> None:
    """Its buffer has two names, too, and both have the new tensor."""
    whole = layers(True, False)
    whole.append(whole[0])
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=torch.randn(3, 6))
    for size in (1, 4, 0.5):
        x = torch.randn(3, 6) * size
        torch.testing.assert_close(parallel(x), whole(x))
