"""optimizer_trial: an optimizer that steps a parameter in another way beside others is found, whatever its name is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors import message
from torch import nn
from torch.optim import SGD, Optimizer

import autotp
from autotp.runtime.torch_hooks.optimizer_trial import (
    expect_alone,
    expect_elementwise,
    steps_alone,
    unhooked_step,
)


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 3))]


class ByAllNorms(SGD):
    """Divides by the norm of all gradients where this is large, as some versions of LAMB do."""

    def step(self, closure: Any = None) -> Any:
        every = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in every]).norm()
        for grad in every if norm > 1 else ():
            grad.div_(norm)
        return super().step(closure)


class BySmallNorms(SGD):
    """Does something only where all gradients are small."""

    def step(self, closure: Any = None) -> Any:
        every = [p.grad for group in self.param_groups for p in group["params"]]
        if all(grad.norm() < 1 for grad in every):
            for grad in every:
                grad.mul_(len(every))
        return super().step(closure)


class Drawing(SGD):
    """Adds random numbers."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.add_(torch.randn_like(p.grad))
        return super().step(closure)


class ByStack(Optimizer):
    """Stacks the gradients of a group, which have one shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p, gradient in zip(group["params"], torch.stack([p.grad for p in group["params"]]), strict=True):
                p.sub_(gradient / gradient.norm())


@pytest.mark.parametrize("kind", [ByAllNorms, BySmallNorms, Drawing])
def test_steps_alone_finds_what_depends_on_other_parameters(kind: type[Optimizer]) -> None:
    make: Callable[..., Any] = kind
    assert not steps_alone(make(parameters(), lr=0.1))
    assert message(lambda: expect_alone(make(parameters(), lr=0.1), "a rank has some parameters")) == (
        f"a rank has some parameters, and {kind.__name__} uses the gradients of several parameters at once\n"
        "  try      AdamW, SGD, Lion or the like; or pp=1"
    )


def test_steps_alone_tries_all_groups() -> None:
    first, second = parameters()
    assert not steps_alone(ByAllNorms([{"params": [first]}, {"params": [second], "lr": 0.2}], lr=0.1))


MADE: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "groups": lambda p: SGD([{"params": p[:1]}, {"params": p[1:], "lr": 1}], lr=0.1),
    "by-stack": lambda p: ByStack(p),
}


@pytest.mark.parametrize("name", MADE)
def test_trial_changes_neither_random_state_nor_parameters(name: str) -> None:
    every = parameters()
    values, random_state = [p.clone() for p in every], torch.get_rng_state()
    optimizer = MADE[name](every)
    states = copy.deepcopy(optimizer.state_dict()["state"])
    assert steps_alone(optimizer)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(every, values, strict=True))
    of_groups = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(every, of_groups, strict=True))
    torch.testing.assert_close(optimizer.state_dict()["state"], states, rtol=0, atol=0)


def test_trial_of_a_closure_that_is_needed() -> None:
    assert message(lambda: steps_alone(torch.optim.LBFGS(parameters()))) == (
        "LBFGS does not step a small tensor without a closure: TypeError: LBFGS.step() missing 1 required positional "
        "argument: 'closure'\n"
        "  try      an optimizer that steps each element by itself, such as torch.optim.AdamW"
    )


def test_expect_elementwise_refuses_norms_of_a_whole() -> None:
    expect_elementwise(torch.optim.AdamW(parameters()), "a rank has rows")
    with pytest.raises(autotp.Error, match="a rank has rows, and Muon does not step each element by itself"):
        expect_elementwise(torch.optim.Muon(parameters()), "a rank has rows")


def test_unhooked_step() -> None:
    """torch's hooks around a step are those of the optimizer that the user has."""

    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    plain = Own.step
    assert unhooked_step(Own) is plain
    Own(parameters(), lr=0.1)
    assert Own.step is not plain and unhooked_step(Own) is plain


def test_trial_has_tensors_of_as_many_dimensions_as_the_parameters() -> None:
    seen: list[int] = []

    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(p.dim() for group in self.param_groups for p in group["params"])
            return super().step(closure)

    for dims in (4, 0):
        steps_alone(Own([nn.Parameter(torch.randn((2, 3, 4, 5)[:dims]))], lr=0.1))
        assert set(seen) == {dims}
        seen.clear()
