"""schedules: where stages are, what they keep, and which passes a schedule leaves out."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks
from trainers import order_of_a_step, started

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
