"""The comparison of sizes of GPT: its table, that two ranks measure what one does, what it asserts."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import gpt_sizes
import pytest
from gpt_sizes import Run, Size
from ranks import run_ranks


def run(folder: Path, *more: str) -> None:
    """A short run of the script."""
    sizes = ["--sizes", "1x16", "2x32", "--head", "8", "--block", "8", "--batch", "4", "--held-out", "6"]
    steps = ["--steps", "20", "--every", "10", "--warmup", "4", "--data", __file__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpt_sizes.py", "--out", str(folder), *sizes, *steps, *more])
        gpt_sizes.main()


def table(folder: Path) -> list[dict[str, str]]:
    """What it wrote."""
    with (folder / "gpt_sizes.csv").open(newline="") as rows:
        return list(csv.DictReader(rows))


def test_the_table_has_each_measurement(tmp_path: Path) -> None:
    run(tmp_path, "--seeds", "3", "4")
    found = [(row["layers"], row["width"], row["seed"], row["step"], row["tokens"]) for row in table(tmp_path)]
    assert found == [
        (layers, width, seed, step, str(int(step) * 32))
        for layers, width in (("1", "16"), ("2", "32"))
        for seed in "34"
        for step in ("10", "20")
    ]
    assert all(1 < float(row["perplexity"]) < 400 for row in table(tmp_path))
    assert (tmp_path / "gpt_sizes.png").read_bytes().startswith(b"\x89PNG")


def on_a_rank(rank: int, n: int, folder: Path) -> None:
    run(folder, "--seeds", "0")


def test_two_ranks_measure_what_one_does(tmp_path: Path) -> None:
    run_ranks(on_a_rank, 2, tmp_path / "two", timeout=110)
    on_a_rank(0, 1, tmp_path / "one")
    together, alone = ([float(row["perplexity"]) for row in table(tmp_path / n)] for n in ("two", "one"))
    assert together == pytest.approx(alone, rel=1e-3)


def runs(large: list[float]) -> list[Run]:
    steps = [10, 20, 30, 40]
    return [Run(Size(1, 8, 100), 0, steps, [9.0, 7.0, 6.0, 5.5]), Run(Size(2, 8, 200), 0, steps, large)]


def test_steps_until_a_perplexity() -> None:
    (one, _) = runs([])
    assert [one.steps_until(mark) for mark in (9.5, 7.0, 5.4)] == [10, 20, None]


@pytest.mark.parametrize(
    ("large", "problem"),
    [
        ([8.0, 6.0, 5.5, 5.0], None),
        ([9.0, 8.0, 7.0, 5.6], "does not end below"),
        ([9.0, 8.0, 7.0, 5.4], "needs 40 steps for the perplexity"),
    ],
)
def test_larger_must_be_faster(large: list[float], problem: str | None) -> None:
    if problem is None:
        gpt_sizes.check(runs(large))
    else:
        with pytest.raises(AssertionError, match=problem):
            gpt_sizes.check(runs(large))


def test_there_is_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(Path(), "--every", "30")
    assert "--steps 20 must be --every, 30, at least" in capsys.readouterr().err
