"""Optimizers on cards: ranks are compared by checksums of the card, and neither these nor Muon make the host wait."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cards.spies import host_waits
from errors import message
from ranks import Checks
from small_models import Normed, X, expect_equal_state
from torch import Tensor, nn
from trainers import batch, mine, started, wide_muon

import autotp
from autotp.runtime.torch_hooks import optimizer_guard
from autotp.runtime.torch_hooks.optimizer_guard import CHECKED_STEPS, LATER

checks = Checks(cards=True)
EVERY = 8
"""In these tests ranks are compared in every eighth step."""
FLOAT64 = torch.float64


def normed(n: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    whole = Normed().double()
    return whole, autotp.parallelize(copied(whole), n, example_inputs=X[FLOAT64])


def copied(model: nn.Module) -> nn.Module:
    made = type(model)().double()
    made.load_state_dict(model.state_dict())
    return made


def stepped(model: Any, optimizer: Any, step: int, change: Callable[[], Any] = lambda: None) -> None:
    optimizer.zero_grad()
    x = X[FLOAT64].to(next(model.parameters()).device)
    model(x * (1 + step % 3)).backward()
    change()
    optimizer.step()


@checks.on(2)
def a_state_from_before_follows_its_parameter(rank: int, n: int) -> None:
    """A model on the CPU, with an optimizer that has stepped, becomes parallel on cards."""
    models: list[nn.Module] = [Normed().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        stepped(model, optimizer, 0)
    parallel: Any = autotp.parallelize(models[1], n, example_inputs=X[FLOAT64])
    for model, optimizer in zip((models[0], parallel), optimizers, strict=True):
        stepped(model, optimizer, 1)
    states = [x for state in optimizers[1].state.values() for x in state.values() if x.dim() > 0]
    assert states and all(x.is_cuda for x in states)
    expect_equal_state(models[0], parallel, 1e-11)


# ---- the guard


@checks.on(2)
def replicas_send_checksums_of_the_card(rank: int, n: int) -> None:
    """Two numbers of each parameter and gradient, where the ranks are compared; after the first steps nobody waits."""
    trainer, optimizer = started((1, 1, 2))
    tensors, elements = 2 * len(list(trainer.parameters())), sum(p.numel() for p in trainer.parameters())
    rows = {step: {name: x.cuda() for name, x in mine(batch(step), rank, n).items()} for step in range(3 * EVERY)}
    with patch.object(optimizer_guard, "EVERY", EVERY):
        for step in range(3 * EVERY):
            trainer.step(**rows[step])
            with host_waits() as traffic:
                optimizer.step()
            compared = step < CHECKED_STEPS or step % EVERY == 0
            assert traffic.elements.total() == (2 * tensors if compared else 0) < elements, step
            assert not traffic.waits or step < CHECKED_STEPS, str(traffic)
            optimizer.zero_grad()


@checks.on(2)
def drift_is_an_error_some_steps_later(rank: int, n: int) -> None:
    """At once in the first steps; later four steps behind the comparison."""
    for at, seen in ((2, 2), (EVERY, EVERY + LATER), (EVERY + 1, 2 * EVERY + LATER)):
        _, parallel = normed(n)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2)

        def drifts(parallel: Any = parallel) -> None:
            parallel.norm.bias.grad += rank

        with patch.object(optimizer_guard, "EVERY", EVERY):
            for step in range(seen):
                stepped(parallel, optimizer, step, drifts if step == at else lambda: None)
            told = message(lambda: stepped(parallel, optimizer, seen, drifts if seen == at else lambda: None))  # noqa: B023
        assert "` differs between ranks by " in told and "they would drift apart" in told, told


@checks.on(2)
def last_bits_are_mended_and_told_as_what_they_are(rank: int, n: int) -> None:
    """Kernels that add in another order on each card: all ranks go on alike, and one line says that it is no error."""
    _, parallel = normed(n)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2)

    def last_bit() -> None:
        parallel.norm.weight.grad *= 1 + 2 * torch.finfo(FLOAT64).eps * rank

    with warnings.catch_warnings(record=True) as caught, patch.object(optimizer_guard, "EVERY", EVERY):
        warnings.simplefilter("always")
        for step in range(2 * EVERY + LATER + 1):
            stepped(parallel, optimizer, step, last_bit if step >= CHECKED_STEPS else lambda: None)
    (told,) = [str(w.message) for w in caught if "differed between ranks" in str(w.message)]
    assert "`norm.weight` differed between ranks by " in told
    assert told.endswith(
        ". This is round-off and no error: sums over replicas, and sums within kernels of GPUs, may have another order "
        "on each rank. All ranks go on with the first rank's numbers (this is said once)"
    )
    both = [torch.empty_like(parallel.norm.bias) for _ in range(n)]
    dist.all_gather(both, parallel.norm.bias.detach())
    assert torch.equal(*both)


# ---- Muon


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().sum()


def muons(n: int) -> list[tuple[Any, Any]]:
    """The model on one device and a rank of it, with their optimizers."""
    torch.manual_seed(0)
    whole = Matrices().double()
    parallel = autotp.parallelize(copied(whole), n, example_inputs=X[FLOAT64])
    return [
        (whole, torch.optim.Muon(whole.parameters(), lr=0.02)),
        (parallel, autotp.whole_matrices(torch.optim.Muon)(parallel.parameters(), lr=0.02)),
    ]


@checks.on(2)
def muon_waits_for_no_card(rank: int, n: int) -> None:
    with wide_muon():
        (whole, _), (parallel, _) = both = muons(n)
        for step in range(8):
            for model, optimizer in both:
                optimizer.zero_grad()
                model(X[FLOAT64].to(next(model.parameters()).device) * (1 + step % 3)).backward()
                with host_waits() as traffic:
                    optimizer.step()
                assert not traffic.waits or step < CHECKED_STEPS, str(traffic)
    expect_equal_on_card(whole, parallel)


def expect_equal_on_card(whole: nn.Module, parallel: Any) -> None:
    expect_equal_state(whole.to(next(parallel.parameters()).device), parallel, 1e-12)


@checks.on(2)
def values_that_other_code_writes_are_sent_again(rank: int, n: int) -> None:
    """In place, or as new memory."""

    def clamp(p: Any) -> None:
        with torch.no_grad():
            p.clamp_(-0.2, 0.2)

    def replace(p: Any) -> None:
        p.data = p.data.clamp(-0.1, 0.1)

    with wide_muon():
        (whole, _), (parallel, _) = both = muons(n)
        for write in (clamp, replace, clamp):
            for step in range(2):
                for model, optimizer in both:
                    stepped(model, optimizer, step)
            for model, _ in both:
                for p in model.parameters():
                    write(p)
        for model, optimizer in both:
            stepped(model, optimizer, 0)
    expect_equal_on_card(whole, parallel)


@checks.on(2)
def a_write_that_torch_does_not_count_is_an_error(rank: int, n: int) -> None:
    """On one rank: all ranks learn of it as soon as its card has told."""
    _, (parallel, optimizer) = muons(n)
    for step in range(4):
        stepped(parallel, optimizer, step)
    if rank:
        parallel.down.weight.to_local().data.clamp_(-0.1, 0.1)
    told = message(lambda: [stepped(parallel, optimizer, step) for step in range(3)])
    lines = told.splitlines()
    assert lines[0] == (
        "Muon.step: `down.weight` was written through `.data`, which torch does not count, before one of the last "
        "steps: its owner has stepped the values from before"
    )
    assert (
        "  try      `with torch.no_grad(): parameter.clamp_(...)`, or another write into the parameter itself" in lines
    )
    assert rank or "  on       tp rank 1" in lines


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_cards(n: int, name: str) -> None:
    checks.expect(n, name)
