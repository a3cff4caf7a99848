"""benchmarks/predicted/measured.py: a row is predicted and measured, and the memory is as predicted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from predicted import measured
from predicted.measured import Row
from ranks import run_ranks


def row(rank: int, n: int, layout: str) -> dict[str, Any]:
    return asdict(measured.compared("gpt", layout, "cpu-gloo", 2))


@pytest.mark.parametrize("layout", ["dp 2", "tp 2"])
def test_a_row_is_predicted_and_measured(layout: str) -> None:
    first, second = (Row(**measured_row) for measured_row in run_ranks(row, 2, layout, timeout=100))
    assert first == second  # Of all ranks.
    assert first.memory[0] == pytest.approx(first.memory[1], rel=0.05)
    assert min(*first.compute, *first.wall, first.speed) > 0 and first.quartiles[0] <= first.quartiles[1]


def test_the_table_says_how_many_rows_are_within_the_goals() -> None:
    good = Row(
        model="gpt", layout="tp 2", wall=(1.0, 2.0), compute=(1.0, 1.05), memory=(1e6, 1.2e6), quartiles=(1, 2),
        waited=0.5, speed=1.0,
    )  # fmt: skip
    lines = list(measured.table([good]))
    assert lines[1].split()[-5:] == ["1.0", "1.2", "0.83", "50%", "1.00"]
    assert lines[2] == "compute: mean error 4.8%, median 4.8%, worst 4.8%; 1 of 1 within 10%"
    assert lines[4].endswith("0 of 1 within 5%")


@pytest.mark.parametrize("name", measured.MODELS)
def test_each_model_takes_its_batch(name: str) -> None:
    batch = measured.rows_for(name)
    found = measured.MODELS[name]()(**{key: x[:1] for key, x in batch.items()})
    loss = found if name in ("gpt", "bert") else found.loss
    assert loss.isfinite().all()
