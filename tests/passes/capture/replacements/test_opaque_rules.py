"""opaque code with a rule: a kernel that nobody has made an operator is cut as its rule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import message
from torch import Tensor, nn

import autotp


class Gate(torch.autograd.Function):
    """silu(x) * y by a kernel that reads memory by its address: numpy stands for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return torch.from_numpy(F.silu(x.detach()).numpy() * y.detach().numpy())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * y * s * (1 + x * (1 - s)), gradient * F.silu(x)


class KernelNorm(nn.Module):
    """An RMS norm in numpy, with its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        values = x.detach().numpy()
        scale = torch.from_numpy((values**2).mean(-1, keepdims=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x.detach() * scale * weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        y, wide = x * scale, gradient * weight
        return scale * (wide - y * (wide * y).mean(-1, keepdim=True)), (gradient * y).flatten(0, -2).sum(0)


RULE = "* h, * h -> * h"
gated = autotp.opaque(lambda x, y: Gate.apply(x, y), like=lambda x, y: torch.empty_like(x), rule=RULE)


class Block(nn.Module):
    def __init__(self, gate: Any = gated) -> None:
        super().__init__()
        self.norm = autotp.opaque(KernelNorm(8), like=torch.empty_like, rule="* h^, h^ -> * h^")
        self.up, self.gate = nn.Linear(8, 24), nn.Linear(8, 24)
        self.down, self.function = nn.Linear(24, 8), [gate]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.function[0](self.up(y), self.gate(y)))


X = torch.rand(3, 5, 8)


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"tp": 3}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "recompute": "full"}], ids=str
)
def test_a_kernel_with_a_rule_is_cut(layout: dict[str, Any]) -> None:
    report = autotp.verify(nn.Sequential(Block(), Block()), example_inputs=X, **layout)
    assert report.ok, report
    assert "no rule" not in str(report.plan)
    assert {row.name: row.layout.dim for row in report.plan.cuts if "weight" in row.name} == {
        f"{block}.{name}.weight": dim for block in (0, 1) for name, dim in (("up", 0), ("gate", 0), ("down", 1))
    }
    assert set(report.plan.traffic.forward) <= {"all-reduce", "reduce-scatter", "all-gather"}


def test_a_tensor_that_is_two_arguments_is_two_operands() -> None:
    report = autotp.verify(Block(lambda x, y: gated(x, x) + y), 2, example_inputs=X)
    assert report.ok and report.plan.traffic.forward == {"all-reduce": 1}, report


class Tuned(nn.Module):
    """Multiplies by a buffer, which it may write."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.gain, self.writes = nn.Buffer(torch.rand(24)), writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.gain.mul_(2)
        return x * self.gain


def test_a_buffer_has_a_term() -> None:
    """With `like`, the code changes none."""
    tuned = autotp.opaque(Tuned(), like=torch.empty_like, rule="* h, h -> * h")
    report = autotp.verify(nn.Sequential(nn.Linear(8, 24), tuned, nn.Linear(24, 8)), 2, example_inputs=X)
    assert report.ok and report.plan.traffic.forward == {"all-reduce": 1}, report
    written = autotp.opaque(Tuned(writes=True), like=torch.empty_like, rule="* h, h -> * h")
    text = message(lambda: autotp.explain(nn.Sequential(nn.Linear(8, 24), written), tp=2, example_inputs=X))
    assert "`Tuned` changes its buffer `gain`" in text


def test_other_lengths_than_at_capture() -> None:
    model = nn.Sequential(Block(), Block())
    parallel = autotp.parallelize(model, tp=1, example_inputs=X)
    for shape in ((3, 5), (2, 7), (1, 1)):
        x = torch.rand(*shape, 8)
        torch.testing.assert_close(parallel(x), model(x))


def test_rows_are_those_of_the_rule() -> None:
    """`distribute` proves that a row depends on no other."""
    trainer = autotp.distribute(Scalar(), example_inputs=X)
    torch.testing.assert_close(trainer.step(X), Scalar()(X))


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean()


def test_a_rule_that_is_not_true_is_refused() -> None:
    mixed = autotp.opaque(lambda x, y: (x * y).cumsum(-1), rule=RULE)
    text = message(lambda: autotp.explain(Block(mixed), tp=2, example_inputs=X))
    assert "the rule of autotp.opaque(" in text and "is not true of this call" in text


def test_a_rule_that_is_not_true_is_refused_on_one_rank() -> None:
    """Its rows would be microbatches, each with a mean of its own."""
    model = Scalar()
    model.block.function = [autotp.opaque(lambda x, y: x * y - x.mean(0, keepdim=True), rule=RULE)]
    text = message(lambda: autotp.distribute(model, example_inputs=X[:2], microbatches=2))
    assert "is not true of this call" in text


def test_a_rule_that_does_not_fit_is_refused() -> None:
    few = autotp.opaque(lambda x, y: x * y, rule="* h -> * h")
    assert "does not fit" in message(lambda: autotp.explain(Block(few), tp=2, example_inputs=X))
    assert "rows=True" in message(lambda: autotp.opaque(torch.relu, rows=True, rule="* -> *"))
    assert "parallel form" in message(lambda: autotp.opaque(torch.relu, rule="b! -> b!"))
