"""alone: an optimizer that steps a parameter in another way beside others is found, whatever its name is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from errors import message
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import autotp
from autotp.runtime.optim.alone import unhooked_step
from autotp.runtime.optim.whole_matrices import whole_matrices


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


class Twice(SGD):
    """Needs the gradients at another point, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "a closure"
        closure()
        return super().step(closure)


@pytest.mark.parametrize("kind", [ByAllNorms, BySmallNorms, Drawing])
def test_whole_matrices_refuses_parameters_that_depend_on_each_other(kind: type[Optimizer]) -> None:
    make: Callable[..., Any] = whole_matrices(kind)
    assert message(lambda: make(parameters(), lr=0.1)) == (
        f"whole_matrices({kind.__name__}): {kind.__name__} steps a parameter in another way beside other parameters "
        "than alone: it uses the gradients of several parameters at once, or random numbers\n"
        "  try      an optimizer of each parameter by itself, such as torch.optim.Muon; for the norm of all gradients "
        "autotp.clip_grad_norm_\n"
        "  or       autotp.distribute with tp=1, pp=1 and zero=0, where each rank steps all parameters, whole"
    )


def test_whole_matrices_refuses_groups_that_depend_on_each_other() -> None:
    first, second = parameters()
    with pytest.raises(autotp.Error, match="beside other parameters"):
        whole_matrices(ByAllNorms)([{"params": [first]}, {"params": [second], "lr": 0.2}], lr=0.1)


def test_whole_matrices_refuses_optimizers_that_need_a_closure() -> None:
    make: Any = whole_matrices(Twice)
    assert message(lambda: make(parameters(), lr=0.1)) == (
        "whole_matrices(Twice): Twice does not step a small tensor without a closure: AssertionError: a closure\n"
        "  try      an optimizer that uses each gradient once, such as torch.optim.Muon\n"
        "  or       autotp.distribute with tp=1, pp=1 and zero=0, where each rank steps all parameters, whole"
    )


def test_whole_matrices_refuses_lbfgs() -> None:
    """It needs a closure, in which all parameters are as they were."""
    build = partial(whole_matrices(torch.optim.LBFGS), [nn.Parameter(torch.ones(2, 2))])
    assert "LBFGS does not step a small tensor without a closure" in message(build)


ACCEPTED: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "muon": lambda p: whole_matrices(torch.optim.Muon)(p, lr=0.02),
    "adafactor": lambda p: whole_matrices(torch.optim.Adafactor)(p),
    "adamw": lambda p: whole_matrices(torch.optim.AdamW)(p, lr=1e-3, foreach=True),
    "adam-fused": lambda p: whole_matrices(torch.optim.Adam)(p, lr=torch.tensor(1e-3), fused=True),
    "adagrad": lambda p: whole_matrices(torch.optim.Adagrad)(p),
    "groups": lambda p: whole_matrices(torch.optim.SGD)([{"params": p[:1]}, {"params": p[1:], "lr": 1}], lr=0.1),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_whole_matrices_tries_without_a_trace(name: str) -> None:
    """The trial changes neither the random state nor the parameters."""
    given = parameters()
    values, state = [p.clone() for p in given], torch.get_rng_state()
    ACCEPTED[name](given)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(given, values, strict=True))


def test_unhooked_step_is_the_step_of_the_class() -> None:
    """torch's hooks around a step are those of the optimizer that the user has."""

    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    plain = Own.step
    assert unhooked_step(Own) is plain
    Own(parameters(), lr=0.1)
    assert Own.step is not plain and unhooked_step(Own) is plain


def test_trial_has_the_dimensions_of_the_parameters() -> None:
    """Of parameters with four dimensions a trial has four."""
    seen: list[int] = []

    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(p.dim() for group in self.param_groups for p in group["params"])
            return super().step(closure)

    given: list[Tensor] = [nn.Parameter(torch.randn(2, 3, 4, 5))]
    whole_matrices(Own)(given, lr=0.1)
    assert set(seen) == {4}
