"""custom_vjp: a model whose Functions have backwards of their own trains on ranks as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks
from small_models import (
    MORE_ROWS,
    ROWS,
    Clamped,
    Inside,
    Relu,
    Tanh,
    WithLoss,
    expect_equal_training,
    expect_whole,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import autotp
from autotp.options import OPTIONAL


class Block(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.mlp = Inside(function)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Stack(nn.Module):
    """Blocks that are captured once."""

    def __init__(self, function: Any = Clamped, depth: int = 3) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(function) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


@pytest.mark.parametrize("function", [Clamped, Tanh])
@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.rare)])
def test_functions_with_own_backward_are_verified(function: Any, tp: int) -> None:
    torch.manual_seed(0)
    report = autotp.verify(Stack(function), tp, example_inputs=ROWS.float())
    assert report.ok, report


# ---- on real ranks

checks = Checks()


@checks.on(2)
@checks.on(3, rare=True)
def functions_with_own_backward_train_as_one_device(rank: int, n: int) -> None:
    expect_equal_training(lambda: Inside(Tanh), n)
    expect_equal_training(Stack, n)


@checks.on(2)
def functions_with_own_backward_train_recomputed_and_without_passes(rank: int, n: int) -> None:
    expect_equal_training(lambda: Stack(Tanh), n, recompute="full")
    expect_equal_training(Stack, n, without=OPTIONAL)


@checks.on(2)
def functions_with_own_backward_under_torch_func(rank: int, n: int) -> None:
    """One device cannot have the Function under torch.func at all, unless it says `setup_context`."""
    for model in (Inside(Relu), Stack(Tanh)):
        x, one = MORE_ROWS.clone().requires_grad_(), model.double()
        (expected,) = torch.autograd.grad((one(x) ** 2).sum(), x)
        mine = autotp.parallelize(copy.deepcopy(one), n, example_inputs=ROWS)
        own = dict(mine.named_parameters())
        loss: Callable[..., Tensor] = lambda p, x, m=mine: (functional_call(m, p, (x,)) ** 2).sum()  # noqa: E731
        torch.testing.assert_close(grad(loss, argnums=1)(own, MORE_ROWS), expected, rtol=1e-11, atol=1e-12)
        rows = vmap(lambda x, p=own, f=loss: grad(f, argnums=1)(p, x[None])[0])(MORE_ROWS)
        torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)


@checks.on(2)
def functions_with_own_backward_compiled(rank: int, n: int) -> None:
    one = Inside(Tanh).double()
    mine = autotp.parallelize(copy.deepcopy(one), n, example_inputs=ROWS)
    mine(MORE_ROWS)
    both = [x.clone().requires_grad_() for x in (MORE_ROWS, MORE_ROWS)]
    (one(both[0]) ** 2).sum().backward()
    (torch.compile(mine, backend="aot_eager", fullgraph=True)(both[1]) ** 2).sum().backward()
    torch.testing.assert_close(both[1].grad, both[0].grad, rtol=1e-11, atol=1e-12)


@checks.on(2)
def second_derivatives_of_own_backward_are_refused(rank: int, n: int) -> None:
    mine = autotp.parallelize(Inside(Tanh).double(), n, example_inputs=ROWS)
    x = MORE_ROWS.clone().requires_grad_()
    (first,) = torch.autograd.grad((mine(x) ** 2).sum(), x, create_graph=True)
    for how, call in (
        ("a second time", lambda: (first**2).sum().backward()),
        ("a second time", lambda: grad(lambda x: grad(lambda x: (mine(x) ** 2).sum())(x).pow(2).sum())(MORE_ROWS)),
        ("in forward mode", lambda: torch.func.jvp(mine, (MORE_ROWS,), (MORE_ROWS,))),
    ):
        assert message(call) == (
            f"the backward of the torch.autograd.Function `Tanh` would be differentiated {how}\n"
            "  try      first derivatives in backward mode (loss.backward(), torch.func.grad, torch.func.vjp); for"
            " others torch.library.custom_op with register_autograd, and autotp.rule"
        )


@checks.on(2)
def functions_with_own_backward_in_microbatches_and_stages(rank: int, n: int) -> None:
    """In two microbatches, on tensor ranks or pipeline stages."""
    batch = MORE_ROWS[:8], MORE_ROWS[2:] * 20
    for grid in ({"tp": 2}, {"pp": 2}):
        torch.manual_seed(0)
        one = WithLoss(Stack(Clamped)).double()
        mine = autotp.distribute(copy.deepcopy(one), microbatches=2, example_inputs=batch, **grid)
        one(*batch).backward()
        mine.step(*batch)
        for model in (one, mine):
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        expect_whole(mine, one)


def _bloom(dtype: torch.dtype) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 48, "n_layer": 2, "n_head": 6}
    model: nn.Module = BloomForCausalLM(BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0))
    return model.to(dtype).train()


def _steps(model: nn.Module, labels: bool) -> Tensor:
    """The losses of ten steps, each of another shape than the one before."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for i in range(10):
        x = torch.randint(0, 64, (2 + i % 3, 5 + i % 4), generator=torch.Generator().manual_seed(i))
        found = model(input_ids=x, labels=x).loss if labels else model(input_ids=x).logits.logsumexp(-1).mean()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.detach())
    return torch.stack(losses)


def _expect_bloom(n: int, dtype: torch.dtype, labels: bool) -> None:
    one, mine = _bloom(dtype), autotp.parallelize(_bloom(dtype), n)
    bound = {"rtol": 1e-5, "atol": 1e-6}
    if dtype == torch.float64 and not labels:  # With labels transformers computes the loss in float32.
        bound = {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(_steps(mine, labels), _steps(one, labels), **bound)
    for name, tensor in autotp.full_state_dict(mine).items():
        torch.testing.assert_close(tensor, one.state_dict()[name], **bound)


@checks.on(2)
def bloom_gelu_trains_as_one_device(rank: int, n: int) -> None:
    _expect_bloom(n, torch.float64, labels=True)


@checks.on(2, 3, rare=True)
def bloom_gelu_in_every_dtype_with_and_without_labels(rank: int, n: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for labels in (True, False):
            _expect_bloom(n, dtype, labels)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
