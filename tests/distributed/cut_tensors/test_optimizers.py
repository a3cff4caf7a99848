"""Optimizers that take norms, rows, products and masks of parameters: ten steps are one device's, whatever they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks
from support.optimizer_walk import RIGHT, Small, compared
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import autotp

checks = Checks()
Update = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


def by_its_norm(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """As LAMB and LARS do."""
    return g * p.norm() / (g.norm() + 1e-3)


def in_units(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """A norm for each row, as adaptive clipping takes it."""
    rows = [x.flatten(1) if x.dim() > 1 else x[None] for x in (p, g)]
    limit = rows[0].norm(dim=1).clamp(min=1e-3) / rows[1].norm(dim=1).clamp(min=1e-6)
    return g * limit.clamp(max=1).view(-1, *[1] * (g.dim() - 1)) if p.dim() > 1 else g * limit.clamp(max=1)


def by_rows_and_columns(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """As Adafactor does. The means of columns may have the shape of a part that is one row."""
    if p.dim() < 2:
        return g
    rows = state.setdefault("rows", g.new_zeros(len(g), 1)).mul_(0.9).add_(g.square().mean(1, True), alpha=0.1)
    columns = (
        state.setdefault("columns", g.new_zeros(1, g.shape[1])).mul_(0.9).add_(g.square().mean(0, True), alpha=0.1)
    )
    return g / ((rows * columns / rows.mean()).sqrt() + 1e-3)


def by_products(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """As Shampoo does. The products may have the shape of a part."""
    if p.dim() < 2:
        return g
    state["products"] = state.get("products", 0.1 * torch.eye(len(g))) + g @ g.T
    values, vectors = torch.linalg.eigh(state["products"])
    return vectors @ (values.clamp(min=1e-3) ** -0.25)[:, None].mul(vectors.T @ g)


def orthogonal(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """As Muon does."""
    if p.dim() < 2:
        return g
    x = g.T if g.size(0) > g.size(1) else g
    x = x / (x.norm() + 1e-6)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x.T if g.size(0) > g.size(1) else x


def cautious(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """Masks where momentum and gradient differ, and weighs by the share of the rest."""
    momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(g, 0.3)
    mask = (momentum * g > 0).to(g.dtype)
    return momentum * mask / mask.mean().clamp(min=1e-3)


def largest_only(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    """A threshold that is a quantile, and a row that is written."""
    found = torch.where(g.abs() >= g.abs().flatten().quantile(0.4), g, torch.zeros_like(g))
    found[0] = g[-1] * 0.5
    return found


def centred(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
    state["moved"] = state.get("moved", 0.0) + float((p - state.setdefault("first", p.clone())).norm())
    return (g - g.mean(tuple(range(1, g.dim())), keepdim=True) if g.dim() > 1 else g - g.mean()) + 0.01 * state["moved"]


class Updates(torch.optim.Optimizer):
    """Moves each parameter by what a function makes of it, its gradient, and its state."""

    update: Update

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(type(self).update(p, p.grad, self.state[p]), alpha=-group["lr"])


class AdamW(torch.optim.AdamW):
    """Torch's name and its states: clips each gradient by the norm of its parameter, before torch's step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.mul_((p.norm() / (p.grad.norm() + 1e-3)).clamp(max=1))
        super().step()


class Flat(Updates):
    """Steps all parameters as one vector."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        vector, gradient = parameters_to_vector(params), parameters_to_vector([p.grad for p in params])
        before = self.state[params[0]].setdefault("before", torch.zeros_like(gradient))
        step = gradient + gradient.dot(before) / before.dot(before).clamp(min=1e-6) * 0.1 * before
        before.copy_(gradient)
        vector_to_parameters(vector - 0.01 * step, params)


def updating(update: Update) -> Any:
    return type(update.__name__, (Updates,), {"update": staticmethod(update)})


OF_TORCH = [getattr(torch.optim, name) for name in ("AdamW", "SGD", "Muon", "Adafactor", "LBFGS")]
BY_HAND = [
    by_its_norm, in_units, by_rows_and_columns, by_products, orthogonal, cautious, largest_only, centred
]  # fmt: skip


def expect_right(n: int, *kinds: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    whole = Small()
    parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=torch.arange(14).view(2, 7) % 13)
    for kind in kinds:
        # LBFGS magnifies round-off on some processors. `compared` measures by how much on one device.
        outcome, text = compared(kind, whole, parallel)
        assert outcome == RIGHT and (not text or kind is torch.optim.LBFGS), (kind.__name__, text)


@checks.on(2)
def of_torch(rank: int, n: int) -> None:
    expect_right(n, *OF_TORCH)


@checks.on(2)
def by_hand(rank: int, n: int) -> None:
    expect_right(n, *map(updating, BY_HAND), AdamW, Flat)


@checks.on(4)
def with_states_as_large_as_a_part(rank: int, n: int) -> None:
    """Four ranks have parts of other sizes, an empty one, and two that hold the same heads."""
    expect_right(n, *map(updating, (by_rows_and_columns, by_products)))


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
