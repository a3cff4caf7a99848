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
from torch.nn.functional import scaled_dot_product_attention

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
def test_isinstance_of_sizes_answers_as_one_device(asks: Callable[[Tensor, Tensor], Any]) -> None:
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


def test_a_size_or_a_pair_of_sizes_is_verified() -> None:
    report = autotp.verify(Resizes(), 2, example_inputs=torch.randn(2, 5, 6))
    assert report.ok, report


class Attends(nn.Module):
    """Asks for causal attention of every fourth position, where these are several. x: [rows, length, 8]"""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.attention = nn.Linear(8, 24), nn.Linear(8, 8), attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        length = x.shape[1] // 4
        q, k, v = q[:, :, :length], k[:, :, :length], v[:, :, :length]
        return self.out(self.attention(q, k, v, is_causal=length > 1).transpose(1, 2).flatten(2))


def imported(*args: Any, **kwargs: Any) -> Tensor:
    """Attention by the name that this file imports."""
    return scaled_dot_product_attention(*args, **kwargs)


SETTINGS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a sum": lambda x, n: x + x.sum(0, keepdim=n != 4),
    "an order": lambda x, n: x.sort(1, descending=n > 4).values,
    "an order, by two": lambda x, n: x.sort(1, descending=(n > 4) & (n < 10)).values,
    "an order, by fractions": lambda x, n: x.sort(1, descending=n / 2 > 2).values,
    "largest": lambda x, n: x + x.topk(2, 1, largest=n <= 4).values.sum(1, keepdim=True),
    "dropout": lambda x, n: F.dropout(x, 1.0, training=n == 5),
}


class Sets(nn.Module):
    """Gives an operator a setting that depends on the length. x: [rows, length, 8]"""

    def __init__(self, operator: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.operator = nn.Linear(8, 16), nn.Linear(16, 8), operator

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.operator(self.up(x), x.shape[1]))


@pytest.mark.parametrize(
    "make",
    [
        *(lambda call=call: Attends(call) for call in (imported, F.scaled_dot_product_attention)),
        *(lambda operator=operator: Sets(operator) for operator in SETTINGS.values()),
    ],
    ids=["imported", "held", *SETTINGS],
)
def test_operator_settings_that_depend_on_sizes_are_guards(make: Callable[[], nn.Module]) -> None:
    """No operator takes a symbol for a bool. The answer is a guard."""
    torch.manual_seed(0)
    model = make()
    parallel = autotp.parallelize(copy.deepcopy(model), 1)
    for length in (9, 5, 4, 10):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(parallel(x), model(x))


def test_operator_settings_that_depend_on_sizes_are_verified() -> None:
    report = autotp.verify(Attends(imported), 2, example_inputs=torch.randn(2, 9, 8))
    assert report.ok, report


def test_a_returned_size_comparison_follows_the_call() -> None:
    class Tells(Asks):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.shape[1] > 4

    parallel = autotp.parallelize(Tells(lambda x, h: True), 1)
    assert [parallel(torch.randn(2, length, 6))[1] for length in (5, 4)] == [True, False]


def test_torch_still_sees_a_symbol() -> None:
    before = builtins.isinstance
    model, dims = Asks(lambda x, h: True), ({1: torch.export.Dim("n")},)
    graph = torch.export.export(model, (torch.randn(2, 5, 6),), dynamic_shapes=dims).graph
    size = next(node.meta["val"].shape[1] for node in graph.nodes if node.name == "x")
    with numbers_of_python():
        assert isinstance(size, int) and isinstance(size, torch.SymInt) and not isinstance(size, float)
        assert (size > 1) is True and size == 5
        assert torch.sym_float(size).node is not None  # torch asks whether it is an int, and is told the truth.
    assert builtins.isinstance is before and not isinstance(size, int)
