"""sampler: the rows of each replica in each step."""

from __future__ import annotations

from typing import Any

import pytest
from errors import message

import autotp
from autotp.training.sampler import Sampler


class Mesh:
    def __init__(self, dp: int, rank: int) -> None:
        self.dp, self.rank = dp, rank

    def __getitem__(self, name: str) -> Mesh:
        return self

    def size(self) -> int:
        return self.dp

    def get_local_rank(self) -> int:
        return self.rank


class At(autotp.Trainer):
    """A trainer of which nothing is asked but its step and its place."""

    def __init__(self, steps: int, dp: int = 1, rank: int = 0) -> None:
        vars(self).update(steps=steps, mesh=Mesh(dp, rank))


def taken(count: int, at: Any, size: int = 11, seed: int | None = 0) -> list[list[int]]:
    return [rows for rows, _ in zip(Sampler(size, 4, at, seed), range(count), strict=False)]


def test_sampler_takes_each_row_at_most_once_an_epoch() -> None:
    rows = taken(4, At(0))
    for epoch in (rows[:2], rows[2:]):
        assert len({row for some in epoch for row in some}) == 8
    assert rows[:2] != rows[2:]
    assert taken(2, At(0), seed=None) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_sampler_begins_at_the_trainer_s_step() -> None:
    assert taken(3, At(5)) == taken(8, At(0))[5:]


def test_sampler_divides_a_batch_among_replicas() -> None:
    whole, shares = taken(3, At(0)), [taken(3, At(0, 2, rank)) for rank in range(2)]
    assert [first + second for first, second in zip(*shares, strict=True)] == whole


@pytest.mark.parametrize(
    ("size", "dp", "expected"),
    [
        (11, 3, "Sampler: batch_size=4 does not divide into 3 replicas\n  try      batch_size=3"),
        (3, 1, "Sampler: a data set of 3 rows, and a batch has 4\n  try      more rows, or a smaller batch_size"),
    ],
)
def test_sampler_refuses_batches_that_do_not_divide(size: int, dp: int, expected: str) -> None:
    assert message(lambda: taken(1, At(0, dp), size)) == expected
