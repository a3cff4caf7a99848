"""in_step: ranks that left out a forward or a backward are told soon, on every rank; ranks in step are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import autotp
from autotp.distributed.peers import heartbeat, in_step

LONGEST = 15.0  # seconds


class Tokens(nn.Module):
    """Its forward and its backward have collectives of the same size. tokens: [rows, length] -> loss []"""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return (x + self.mlp(self.norm(x))).square().mean()


class Images(Tokens):
    """The same, of numbers that are not whole. tokens: [rows, length, 8] -> loss []"""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Identity()  # type: ignore[assignment]


def model_of(n: int, images: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = (Images if images else Tokens)().double()
    return autotp.parallelize(model, n, example_inputs=batch(0, images), timeout=timedelta(seconds=3))


def batch(step: int, images: bool = False) -> Tensor:
    if images:
        return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step)).double()
    return torch.arange(step, step + 6).reshape(2, 3) % 16


def leaves_out_a_backward(rank: int, model: nn.Module) -> bool:
    return rank == 0


def makes_one_more_call(rank: int, model: nn.Module) -> bool:
    if rank == 1:
        model(batch(40))
    return False


def leaves_out_a_batch(rank: int, model: nn.Module) -> bool:
    return rank == 1


ODD: dict[str, tuple[Callable[[int, nn.Module], bool], bool, str]] = {
    "backward": (leaves_out_a_backward, True, "collectives at call"),
    "call": (makes_one_more_call, False, "collectives at call"),
    "batch": (leaves_out_a_batch, False, "tp rank 1 got another batch in call"),
    "images": (leaves_out_a_batch, False, "tp rank 1 got another batch in call"),
}
"""Name -> what happens at a step (True: it ends there), whether that is after forward, and what is said."""


def loop(rank: int, n: int, odd: str) -> tuple[str, int, float]:
    """Trains until an error; returns it, the step and the seconds since ranks came apart."""
    images, (happens, after_forward, _) = odd == "images", ODD[odd]
    model = model_of(n, images)
    step, began = 0, time.monotonic()
    try:
        while time.monotonic() < began + LONGEST:
            step += 1
            loss = model(batch(step, images)) if after_forward else None
            if step == 40:
                began = time.monotonic()
                if happens(rank, model):
                    continue
            loss = model(batch(step, images)) if loss is None else loss
            loss.backward()
            time.sleep(0.002)
    except autotp.Error as error:
        return str(error), step, time.monotonic() - began
    return "", step, LONGEST


@pytest.mark.parametrize("odd", ODD)
def test_ranks_that_come_apart_are_told_soon(odd: str) -> None:
    found = run_ranks(loop, 2, odd, alone=True)
    for text, step, seconds in found:
        assert step > 40 and seconds < 12  # One rank raises it, and the other waits for that rank until its timeout.
        assert ODD[odd][2] in text
    assert any("leave one out by" in text for text, _, _ in found)


def calls_in_step(rank: int, n: int) -> None:
    heartbeat.INTERVAL = 0.05
    model = model_of(n)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(150):
        if step % 7 == 0:
            model(batch(step))  # Without a backward, on all ranks.
        if step == 20 or step == 70:
            with pytest.raises(ZeroDivisionError):
                1 / model(batch(step)).mul(0).sum().item()  # On all ranks, between forward and backward.
        model(batch(step)).backward()
        optimizer.step()
        time.sleep(0.002)
    one = next(it for it in in_step._progress.values() if it.kind == in_step.CALL)
    assert one.told >= 128 and not one.apart
    assert 0 < len(one.records) <= in_step.KEPT


def part_of_one_rank(rank: int, n: int) -> None:
    """A module without collectives, whose graph all ranks have, may be called by one."""
    heartbeat.INTERVAL = 0.05
    model: Any = model_of(n)
    x = torch.ones(2, 3, 8).double()
    for _ in range(3):
        model.norm(x)
    for step in range(100):
        if rank == 0:
            model.norm(x)
        model(batch(step)).backward()
        time.sleep(0.002)
    one = next(it for it in in_step._progress.values() if it.kind == in_step.CALL)
    assert 100 <= one.count <= 103 and one.told >= 64 and not one.apart


def test_a_call_without_collectives_is_not_counted() -> None:
    run_ranks(part_of_one_rank, 2, alone=True)


def test_ranks_in_step_get_no_error() -> None:
    run_ranks(calls_in_step, 2, alone=True)
