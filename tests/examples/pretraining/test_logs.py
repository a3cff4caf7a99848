"""The log of a training: rows that go on where a checkpoint was, TensorBoard's events, and the plot."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretraining import logs


def values(loss: float) -> dict[str, float]:
    return {"loss": loss, "rate": 1e-3, "norm": 0.1 + loss, "tokens_per_second": 7.0}


def written(folder: Path, done: int, steps: range, loss: float) -> list[logs.Row]:
    with logs.Log(folder, done) as log:
        for step in steps:
            log.write(step, values(loss) | ({"held_out": 0.3} if step == 2 else {}))
    return logs.read(folder / "log.csv")


def test_rows_are_read_as_written(tmp_path):
    rows = written(tmp_path / "new", 0, range(1, 3), 1 / 3)
    assert rows == [{"step": 1, **values(1 / 3)}, {"step": 2, **values(1 / 3), "held_out": 0.3}]


def test_what_is_behind_the_checkpoint_is_written_again(tmp_path):
    written(tmp_path, 0, range(1, 6), 2.0)
    rows = written(tmp_path, 3, range(4, 7), 1.0)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 2), (2, 2), (3, 2), (4, 1), (5, 1), (6, 1)]
    assert (tmp_path / "log.csv").read_text().splitlines()[2].startswith("2,2.0,0.3,")


def test_a_line_that_was_not_finished(tmp_path):
    written(tmp_path, 0, range(1, 4), 2.0)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("4,1.")
    assert [row["step"] for row in logs.read(tmp_path / "log.csv")] == [1, 2, 3]


def test_tensorboard_has_each_step_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written(tmp_path, 0, range(1, 6), 2.0)
    written(tmp_path, 3, range(4, 7), 1.0)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 2), (2, 2), (3, 2), (4, 1), (5, 1), (6, 1)
    ]  # fmt: skip
    assert set(events.Tags()["scalars"]) == {"loss", "held_out", "rate", "norm", "tokens_per_second"}


def test_plot_draws_a_picture(tmp_path):
    logs.plot(tmp_path / "loss.png", written(tmp_path, 0, range(1, 6), 2.0), "test")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
