"""`Estimate.watch`: a trainer's steps beside an estimate, and nothing after the last one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from errors import message
from ranks import run_ranks
from small_models import gpt
from trainers import SMALL, batch, started

import autotp
from autotp.costs.hardware import KINDS
from autotp.tools.estimation.watch import Comparison


def estimated(**layout: Any) -> autotp.Estimate:
    with torch.device("meta"):
        model = gpt(**SMALL, n_layer=2)
    return autotp.estimate(model, gpu="cpu-gloo", batch=4, micro_batch=2, **layout)


def watched(rank: int, n: int) -> tuple[list[str], list[float], int]:
    trainer, optimizer = started((2, 1, 1))
    shown: list[str] = []
    found = estimated(tp=2).watch(trainer, steps=5, show=lambda it: shown.append(str(it)))
    for step in range(7):
        trainer.step(**batch(step))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        assert not shown or step >= 5
    return shown, found.seconds, len(trainer._watchers)


def test_after_its_steps_it_shows_predicted_and_measured() -> None:
    first, second = run_ranks(watched, 2, timeout=100)
    assert second[0] == [] and first[2] == second[2] == 0  # The first rank shows; nobody watches any more.
    assert len(first[1]) == 3 and min(first[1]) > 0.05  # Of five steps three count, from beginning to beginning.
    (text,) = first[0]
    lines = text.splitlines()
    assert lines[0] == "tp=2, pp=1, dp=1, micro_batch=2: the median of 3 steps"
    assert lines[2].split() == ["predicted", "measured"]
    assert [line.split("  ")[0] for line in lines[3:]] == ["a step", "TFLOP/s a device", "tokens a second"]


def test_on_a_gpu_it_shows_the_share_of_the_peak() -> None:
    """Twice as long as predicted: half the tokens, and half the share of the peak."""
    est = replace(estimated(tp=2), device=KINDS["a100-80gb"])
    twice = Comparison(estimate=est, steps=3, rank=0, seconds=[2 * est.seconds])
    rows = {line.split("  ")[0]: line for line in str(twice).splitlines()}
    assert f"{est.mfu:.1%}" in rows["of peak"] and rows["of peak"].split()[-2:] == [f"{est.mfu / 2:.1%}", "-50%"]
    speed = est.tokens / est.seconds
    assert est.tokens == 4 * 8 and rows["tokens a second"].split()[3:] == [
        f"{speed:.4g}", f"±{est.error:.0%}", f"{speed / 2:.4g}", "-50%",
    ]  # fmt: skip


def refused(rank: int, n: int) -> list[str]:
    trainer, _ = started((1, 1, 1))
    return [
        message(lambda: estimated(tp=2).watch(trainer)),
        message(lambda: estimated().watch(trainer, steps=2)),
        message(lambda: estimated().watch(torch.nn.Linear(2, 2))),
    ]


def test_watch_refuses_another_layout_or_model() -> None:
    (found,) = run_ranks(refused, 1)
    assert found == [
        "watch: the estimate has tp=2, the trainer tp=1\n  try      tp=1",
        "watch: steps=2: the first 2 are not counted\n  try      steps=20",
        "watch: watch takes a Trainer, not a Linear\n  try      autotp.distribute(...)",
    ]


@pytest.mark.parametrize("steps", [True, "20", 0])
def test_a_number_of_steps_that_is_none(steps: Any) -> None:
    assert "the first 2 are not counted" in run_ranks(refused_steps, 1, steps)[0]


def refused_steps(rank: int, n: int, steps: Any) -> str:
    trainer, _ = started((1, 1, 1))
    return message(lambda: estimated().watch(trainer, steps=steps))
