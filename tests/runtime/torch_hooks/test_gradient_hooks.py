"""Hooks of a trainer's parameters see the gradient of the whole batch, once a step, as on one device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from errors import message
from ranks import run_ranks
from small_models import gpt, tokens
from torch import Tensor, nn
from torch.optim import SGD

import autotp
from autotp.runtime.torch_hooks.gradient_hooks import HooksOfStep, move_hooks

STEPS = 3
Step = Callable[[Tensor, Tensor], Any]


def clamped_by_hooks(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.clamp_(-8e-4, 8e-4)


def hooked(parameters: list[nn.Parameter]) -> None:
    """No sum of clamped parts is the clamped sum."""
    for p in parameters:
        p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        p.register_post_accumulate_grad_hook(clamped_by_hooks)


def trained(step: Step, parameters: list[nn.Parameter], hooks_too: bool, share: Callable[[Tensor], Tensor]) -> None:
    """Two batches for each step of one optimizer; and an optimizer for each parameter that steps in a hook."""
    if hooks_too:
        hooked(parameters)
    optimizer = SGD(parameters, lr=1.0)
    for i in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            step(*(share(x) for x in tokens(8, seed=2 * i + part + 1)))
        optimizer.step()
    own = {p: SGD([p], lr=0.1, momentum=0.9) for p in parameters}

    def stepped(p: nn.Parameter) -> None:
        own[p].step()
        own[p].zero_grad()

    optimizer.zero_grad()
    handles = [p.register_post_accumulate_grad_hook(stepped) for p in parameters]
    for i in range(2):
        step(*(share(x) for x in tokens(8, seed=i + 20)))
    for handle in handles:
        handle.remove()
    step(*(share(x) for x in tokens(8, seed=30)))
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in parameters)


def of_one_device(rank: int, n: int, sizes: dict[str, Any], before: bool) -> None:
    whole, model = gpt(seed=0, n_layer=4).double(), gpt(seed=0, n_layer=4).double()
    if before:
        hooked(list(model.parameters()))
    trainer = autotp.distribute(model, **sizes, microbatches=2, example_inputs=tokens(2))
    replica, replicas = trainer.mesh["dp"].get_local_rank(), trainer.mesh["dp"].size()
    trained(trainer.step, list(trainer.parameters()), not before, lambda x: x.chunk(replicas)[replica])
    trained(lambda x, y: whole(x, y).backward(), list(whole.parameters()), True, lambda x: x)
    found, expected = autotp.full_state_dict(trainer), whole.state_dict()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("before", [False, True], ids=["on the trainer", "on the model"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 2},
        {"pp": 2},
        {"dp": 2, "zero": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.rare),
        pytest.param({"dp": 2, "zero": 3}, marks=pytest.mark.rare),
        pytest.param({"pp": 2, "schedule": "zero-bubble"}, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_trainer_hooks_see_the_whole_batch_s_gradient_once(sizes: dict[str, Any], before: bool) -> None:
    run_ranks(of_one_device, 2, sizes, before, timeout=100)


def test_hooks_that_are_put_off_and_moved_keep_their_handles() -> None:
    """Within the region no hook runs, and the handles still remove their hooks after it; also where it fails."""
    p, other, ran = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), list[str]()
    first = p.register_hook(lambda g: ran.append("first"))
    p.register_hook(lambda g: 2 * g)
    hooks = HooksOfStep({p: torch.ones(2)}, {p: "p"})
    with pytest.raises(KeyError), hooks.put_off():
        p.sum().backward()
        raise KeyError
    assert not ran
    hooks.run()
    assert p.grad is not None and p.grad.tolist() == [3, 3] and ran == ["first"]
    move_hooks(p, other)
    first.remove()
    other.sum().backward()
    assert other.grad is not None and other.grad.tolist() == [2, 2] and ran == ["first"]
    assert OrderedDict(p._backward_hooks or {}).keys() == OrderedDict(other._backward_hooks or {}).keys()


def raising(rank: int, n: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    trainer = autotp.distribute(Summed(model), dp=n, example_inputs=torch.ones(2, 4), timeout=timedelta(seconds=20))
    if rank == 1:
        trainer.get_parameter("inner.0.weight").register_hook(lambda grad: {}["missing"])
    return message(lambda: trainer.step(torch.ones(2, 4) + rank))


class Summed(nn.Module):
    """The sum of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch 4]"""
        total: Tensor = self.inner(x).sum()
        return total


def test_a_hook_that_raises_has_a_name_on_every_rank() -> None:
    """The other rank would say that somebody did not answer."""
    waiting, failing = run_ranks(raising, 2, timeout=100)
    assert failing.splitlines()[0] == "Trainer.step: a hook of `inner.0.weight` raised KeyError: 'missing'"
    assert "a hook of `inner.0.weight` raised KeyError: 'missing'" in waiting
