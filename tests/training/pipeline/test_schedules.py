"""schedules: where stages are, what they keep, and which passes a schedule leaves out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import assert_values_close
from torch import Tensor, nn
from trainers import order_of_a_step, started

import autotp
from autotp.training.pipeline.schedules import ENGINES, Training, stages_of


@pytest.mark.parametrize(
    ("schedule", "ranks", "found"),
    [
        ("1F1B", 4, [4, 3, 2, 1]),
        ("GPipe", 4, [8] * 4),
        # As counted in the orders that torch's schedules print.
        ("interleaved", 2, [4, 3, 2, 1]),
        ("interleaved", 3, [6, 6, 4, 3, 3, 1]),
        ("interleaved", 4, [8, 8, 7, 5, 4, 4, 3, 1]),
        ("zero-bubble", 4, [8] * 4 + [4] * 4),
        ("zero-bubble-v", 4, [8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_schedule_flight_counts_microbatches_under_way(schedule: str, ranks: int, found: list[int]) -> None:
    stages = ranks * ENGINES[schedule].rounds
    assert [ENGINES[schedule].flight(i, stages, 9 if ranks == 3 else 8) for i in range(stages)] == found
    assert ENGINES[schedule].flight(0, stages, 1) == 1
    assert ENGINES[schedule].flight(0, 1, 8) == 1  # no pipeline


@pytest.mark.parametrize(("schedule", "found"), [("zero-bubble", False), ("interleaved", True)])
def test_zero_bubble_leaves_out_the_overlap_pass(schedule: Any, found: bool) -> None:
    assert Training(schedule=schedule).optional("overlap") == found
    assert Training(schedule=schedule).optional("cse")


@pytest.mark.parametrize(
    ("schedule", "ranks", "found"),
    [
        ("1F1B", 3, [[0], [1], [2]]),
        ("interleaved", 3, [[0, 3], [1, 4], [2, 5]]),
        ("zero-bubble-v", 3, [[0, 5], [1, 4], [2, 3]]),
        ("zero-bubble-v", 1, [[0]]),
    ],
)
def test_stages_of_gives_each_rank_its_stages(schedule: Any, ranks: int, found: list[list[int]]) -> None:
    assert [stages_of(Training(schedule=schedule), rank, ranks) for rank in range(ranks)] == found


def ordered(rank: int, n: int, schedule: Any) -> str:
    trainer, _ = started((1, 2, 2), layers=8, zero=1, schedule=schedule)
    return order_of_a_step(trainer)


@pytest.mark.parametrize("schedule", ["1F1B", "interleaved"])
def test_gradients_are_summed_under_the_last_backward(schedule: Any) -> None:
    """Between the first two sums the backward of a block runs: eight products. All is gathered from the start."""
    for text in run_ranks(ordered, 4, schedule, timeout=100):
        _, between, *_ = text.split("S")
        assert between == "." * 8 and text.index(".") > text.rindex("G")


class Added(nn.Module):
    """Blocks over sequences of any length; the loss is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return x.square().sum()


def new_lengths(rank: int, n: int, zero: Any) -> None:
    """In each step another replica gets a length that it has not seen."""
    torch.manual_seed(0)
    alone = Added().double()
    example = torch.zeros(4, 6, 8, dtype=torch.float64)
    trainer = autotp.distribute(
        copy.deepcopy(alone), pp=2, dp=2, microbatches=2, zero=zero, example_inputs=(example[:2],)
    )
    for step, lengths in enumerate([(6, 6), (6, 5), (4, 6), (4, 5), (7, 9)]):
        torch.manual_seed(step)
        rows = [torch.randn(4, length, 8, dtype=torch.float64) for length in lengths]
        evaluated = trainer.evaluate(rows[trainer.mesh["dp"].get_local_rank()])
        loss = trainer.step(rows[trainer.mesh["dp"].get_local_rank()])
        expected = sum(alone(x) for x in rows)
        expected.backward()
        assert_values_close(loss, expected)
        assert_values_close(evaluated, expected)
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    for name, p in trainer.named_parameters():
        assert_values_close(p.grad.full_tensor(), gradients[name], msg=name)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.rare)])
def test_replicas_make_graphs_in_different_steps(zero: Any) -> None:
    """An engine's first run gathers what `zero` divides: a replica that had its engine would gather for another."""
    run_ranks(new_lengths, 4, zero, timeout=100)
