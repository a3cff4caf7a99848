"""`Throughput`: tokens a second of the whole job, and the part of the peak of all its devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from errors import message
from ranks import run_ranks
from small_models import Regression, gpt
from torch.utils.flop_counter import FlopCounterMode
from trainers import SMALL, batch

import autotp
from autotp.tools.estimation import throughput as throughput_module


class Clock:
    """A clock on which each reading is half a second behind the one before."""

    def __init__(self) -> None:
        self.readings = itertools.count()

    def perf_counter(self) -> float:
        return next(self.readings) / 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(throughput_module, "time", Clock())
    yield


def estimated(gpu: str = "a100-80gb", **layout: Any) -> autotp.Estimate:
    with torch.device("meta"):
        model = gpt(**SMALL, n_layer=2)
    return autotp.estimate(model, gpu=gpu, batch=4, **layout)


def test_numbers_of_some_steps(clock: None) -> None:
    """The operations are those that torch counts in a step on one device."""
    estimate = estimated()
    with FlopCounterMode(display=False) as counter:
        gpt(seed=0, **SMALL, n_layer=2)(**batch(0)).backward()
    # The counter has no formula for attention on a CPU.
    assert estimate.flops == pytest.approx(counter.get_total_flops(), rel=0.1) and estimate.tokens == 32
    meter = autotp.Throughput(estimate)
    numbers = meter.measure(steps=3)  # in half a second
    assert numbers["tokens_per_second"] == 3 * 32 / 0.5
    assert numbers["mfu"] == pytest.approx(3 * estimate.flops / 0.5 / 19.5e12)  # float32 of an A100
    half = meter.measure(tokens=48)  # a step and a half
    assert half == {"tokens_per_second": 96.0, "mfu": pytest.approx(numbers["mfu"] / 2)}


def test_the_peak_is_that_of_the_dtype_of_computation(clock: None) -> None:
    wide, narrow = (autotp.Throughput(estimated(dtype=dtype)).measure()["mfu"] for dtype in (None, torch.bfloat16))
    assert wide / narrow == pytest.approx(312 / 19.5)


def test_recomputed_operations_do_not_count(clock: None) -> None:
    plain, again = (autotp.Throughput(estimated(recompute=how)).measure()["mfu"] for how in ("none", "full"))
    assert again == plain


def test_restart_leaves_time_out(clock: None) -> None:
    meter = autotp.Throughput()
    meter.restart()
    assert meter.measure(tokens=5) == {"tokens_per_second": 10.0}


def test_without_a_peak_there_are_tokens_only(clock: None) -> None:
    with pytest.warns(UserWarning, match="^no MFU is measured: the peak of cpu-gloo, a CPU, is not known$"):
        meter = autotp.Throughput(estimated(gpu="cpu-gloo"))
    assert meter.measure() == {"tokens_per_second": 64.0}


def test_rows_without_tokens_count_as_steps(clock: None) -> None:
    x = torch.ones(2, 4)
    estimate = autotp.estimate(Regression(), gpu="a100-80gb", batch=2, example_inputs=x)
    assert autotp.Throughput(estimate).measure(steps=2) == {"mfu": pytest.approx(4 * estimate.flops / 19.5e12)}


def measured(rank: int, n: int, estimate: autotp.Estimate) -> tuple[dict[str, float], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput_module, "time", Clock())
        numbers = autotp.Throughput(estimate).measure()
    other = replace(estimate, layout=replace(estimate.layout, dp=2))
    return numbers, message(autotp.Throughput(other).measure)


def test_ranks_of_one_model_measure_its_tokens_once() -> None:
    """The part of the peak is that of both; an estimate of other devices is refused."""
    estimate = estimated(tp=2)
    for numbers, refused in run_ranks(measured, 2, estimate):
        assert numbers == {"tokens_per_second": 64.0, "mfu": pytest.approx(2 * estimate.flops / 2 / 19.5e12)}
        assert refused == (
            "Throughput.measure: the estimate is of 4 devices, and 2 train\n"
            "  try      an estimate whose tp, cp, pp and dp have the product 2"
        )


def test_what_it_refuses() -> None:
    assert message(autotp.Throughput().measure) == (
        "Throughput.measure: no tokens are known\n  try      measure(tokens=...), or Throughput(estimate)"
    )
    assert message(lambda: autotp.Throughput().log_to(object())) == (
        "Throughput.log_to: trainer is a object\n"
        "  expected a Trainer of transformers; a loop of your own calls measure(tokens=...)"
    )
