"""functions: what stands for a function gives the same, and only inside the mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.passes.capture.replacements.functions import ReplacedFunctions


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_replaced_data_shares_memory_and_version() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    with ReplacedFunctions():
        found = x.data
    assert not found.requires_grad
    assert found.data_ptr() == x.data_ptr()
    assert found._version == x._version  # Of `x.data` itself the version is one of its own.


def test_ctc_loss_is_replaced_only_inside_the_mode() -> None:
    given = torch.randn(4, 1, 3).log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    with Operators() as inside, ReplacedFunctions():
        mine = F.ctc_loss(*given)
    with Operators() as outside:
        torch.testing.assert_close(mine, F.ctc_loss(*given))
    assert "autotp::ctc_loss" in inside.names
    assert "autotp::ctc_loss" not in outside.names


class Noisy(nn.Module):
    """Adds noise of a symbolic size, from no generator of its own. x: [rows, 4]"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn((x.shape[0], 8), generator=None, dtype=x.dtype)
        return self.down(self.up(x).relu() + noise)


def test_draws_with_generator_none_are_verified() -> None:
    assert autotp.verify(Noisy(), 2, example_inputs=torch.randn(3, 4)).ok


def conversions(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Functions that return `x` itself."""
    return {
        "float": lambda: x.float(),
        "to": lambda: x.to(x.device, x.dtype),
        "type_as": lambda: x.type_as(x),
        "cpu": lambda: x.cpu(),
        "positive": lambda: +x,
        "real": lambda: torch.real(x),
        "real_of": lambda: x.real,
        "atleast_1d": lambda: torch.atleast_1d(x),
        "broadcast": lambda: torch.broadcast_tensors(x, x)[0],
        "dropout": lambda: F.dropout(x, 0.1, False),
        "operator_dropout": lambda: torch.ops.aten.dropout(x, 0.1, False),
        "lift_fresh": lambda: torch.ops.aten.lift_fresh(x),
        "vmap": lambda: torch.vmap(lambda row: row)(x),
        "vmap_columns": lambda: torch.vmap(lambda row: row.float(), in_dims=-1, out_dims=-1)(x),
        "vmap_twice": lambda: torch.vmap(torch.vmap(lambda row: row))(x),
    }


class Normed(nn.Module):
    """Divides by a largest element, which has no gradient; or goes on with what the region gives. x: [rows, 6]"""

    def __init__(self, name: str, region: Any, of: str, goes_on: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.name, self.region, self.of, self.goes_on = name, region, of, goes_on

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        one = {"input": x, "weight": self.up.weight, "value": hidden}[self.of]
        with self.region():
            found = conversions(one)[self.name]()
            largest = found.abs().max()
        if self.goes_on:
            hidden = found
        return self.down(hidden.relu() / largest)


@pytest.mark.parametrize(("of", "goes_on"), [("input", False), ("weight", False), ("value", False), ("value", True)])
@pytest.mark.parametrize("name", conversions(torch.ones(1)))
def test_no_op_conversions_under_no_grad_keep_their_gradient(name: str, of: str, goes_on: bool) -> None:
    """NOTE [Functions that return their operand]"""
    model = Normed(name, torch.no_grad, of, goes_on)
    report = autotp.verify(model, 2, example_inputs=torch.randn(3, 6))
    assert report.ok, report


def test_no_op_float_under_no_grad_trains_as_one_device() -> None:
    """In float32, where `float()` changes nothing, on the path that training takes."""
    torch.manual_seed(0)
    whole, x = Normed("float", torch.no_grad, "value", False), torch.randn(3, 6)
    parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=x)
    for model in (whole, parallel):
        model(x).square().sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad, parameter.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", conversions(torch.ones(1)))
def test_no_op_conversions_keep_an_input_s_gradient(name: str) -> None:
    """Captured with an input that needs no gradient, or with one that does."""
    whole = Normed(name, torch.no_grad, "input", False)
    for needs in (False, True):
        parallel = autotp.parallelize(copy.deepcopy(whole), 1, example_inputs=torch.randn(3, 6, requires_grad=needs))
        x = torch.linspace(-1, 2, 18).view(3, 6).requires_grad_()
        (expected,) = torch.autograd.grad(whole(x).square().sum(), x)
        (found,) = torch.autograd.grad(parallel(x).square().sum(), x)
        torch.testing.assert_close(found, expected)


class Makes(nn.Module):
    """Adds what `make` gives without gradients. x: [rows, 6]"""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.make = nn.Linear(6, 24), nn.Linear(24, 6), make

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            made = self.make(hidden)
        return self.down(hidden.relu() + made)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.asarray(x, requires_grad=False),
        lambda x: torch.native_dropout(x, 0.1, False)[0],
        lambda x: torch.ops.aten.native_dropout.default(x, 0.1, False)[0],
        lambda x: torch.vmap(lambda row: row.mul_(2))(x.clone()),
    ],
)  # fmt: skip
def test_new_tensors_of_asarray_have_no_gradient(make: Callable[[Tensor], Tensor]) -> None:
    model = Makes(make)
    report = autotp.verify(model, 2, example_inputs=torch.randn(3, 6))
    assert report.ok, report


class Assigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = F.normalize(self.up.weight.data, dim=1)
        return self.down(self.up(x).relu())


def test_assignment_to_data_is_refused() -> None:
    with pytest.raises(autotp.Error, match=r"forward assigns to `\.data` of a tensor, which a graph does not do"):
        autotp.parallelize(Assigns(), 1, example_inputs=torch.randn(3, 6))


def test_replaced_in_place_functions_write_into_their_operand() -> None:
    x = torch.ones(2, requires_grad=True)
    with ReplacedFunctions(), torch.no_grad():
        x.add_(1)
        torch.mul(x, 2, out=x)
        x[0] = 7
    assert x.tolist() == [7, 4] and x.requires_grad
