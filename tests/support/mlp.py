"""The smallest model that is worth cutting."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotp


class Plain(nn.Module):
    """An MLP; what a subclass does around it differs."""

    def __init__(self, hidden: int = 8, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden)

    def mlp(self, x: Tensor) -> Tensor:
        """x, result: [... hidden]"""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Negated(torch.autograd.Function):
    """A backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Mlp(nn.Module):
    """What the others remember something of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 30), nn.Linear(30, 8)

    def inner(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))


def x(call: int = 0) -> Tensor:
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(call))


def twins(model: nn.Module, n: int, **given: Any) -> tuple[nn.Module, Any]:
    return model.double(), autotp.parallelize(copy.deepcopy(model.double()), n, example_inputs=(x(),), **given)


def expect_same(whole: nn.Module, parallel: Any, context: object = "") -> None:
    for (name, mine), p in zip(whole.named_parameters(), parallel.parameters(), strict=True):
        layout = parallel.layout_of(name)
        expected = layout.take(mine.grad, parallel.mesh.rank)
        torch.testing.assert_close(
            p.grad, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{context} {n}: {m}"
        )


def as_gathered(value: Any) -> Any:
    return autotp.gather(value) if type(value).__name__ == "Sharded" else value


STEPS = 10
X = {dtype: torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
     for dtype in (torch.float32, torch.float64)}  # fmt: skip


class Normed(Plain):
    """Cut weights, and replicated ones: a bias, a norm's."""

    def __init__(self) -> None:
        super().__init__(8, 30)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.norm(x + self.mlp(x)) - x.roll(1, -1)) ** 2).mean()


@cache
def _made(n: int, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    whole = Normed().to(dtype)
    return whole, autotp.parallelize(copy.deepcopy(whole), n, example_inputs=X[dtype])


def pair(n: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    """One device's model, and a rank of it."""
    whole, parallel = _made(n, dtype)
    return copy.deepcopy(whole), copy.deepcopy(parallel)


def expect_equal_state(whole: nn.Module, parallel: Any, tolerance: float) -> None:
    for (name, mine), theirs in zip(parallel.named_parameters(), whole.parameters(), strict=True):
        expected = parallel.layouts[name].take(theirs.detach(), parallel.mesh.rank)
        torch.testing.assert_close(
            mine.detach(), expected, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


class Branches(nn.Module):
    """`x + mlp(before(x))` for each branch, all of the same `x`, as GPT-NeoX has it."""

    def __init__(
        self, *before: Callable[[nn.Module, Tensor], Tensor], returned: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.before, self.returned, self.scale = before, returned, nn.Parameter(torch.ones(16))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in before)
        self.ups = nn.ModuleList(nn.Linear(16, 64) for _ in before)
        self.downs = nn.ModuleList(nn.Linear(64, 16) for _ in before)

    def forward(self, x: Tensor) -> Any:
        """x: [batch seq 16]"""
        x = torch.tanh(x * self.scale)
        read = [before(norm, x) for before, norm in zip(self.before, self.norms, strict=True)]
        pairs = zip(self.ups, self.downs, read, strict=True)
        y = x + torch.stack([down(F.gelu(up(n))) for up, down, n in pairs]).sum(0)
        return y if self.returned is None else (y, *map(self.returned, read))


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x)
