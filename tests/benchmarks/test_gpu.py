"""The script of the first day on GPUs: its processes, its table, and a rehearsal on pretended cards."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import pytest
import torch
from first_day import processes
from first_day.checks import Check, Differs, Place, Row, Skipped, line
from first_day.equal import expect_equal
from first_day.processes import run_checks
from first_day.speed import Sizes, _length
from first_day.table import CHECKS
from ranks import ROOT, expect_cards


def test_differences_are_relative_to_the_largest_element_of_all() -> None:
    expected = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([0.0])}
    assert expect_equal(expected, {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([0.5])}, 0.5) == 0.125
    with pytest.raises(Differs, match=r"2.5e-01, allowed are 1e-01: b"):
        expect_equal(expected, {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([1.0])}, 0.1)
    assert expect_equal(expected, {}, 0.1) == 0  # The first rank has the gathered gradients.


def test_no_number_differs() -> None:
    expected, nan = {"a": torch.ones(1), "b": torch.ones(1)}, torch.tensor([math.nan])
    with pytest.raises(Differs, match=re.escape("inf, allowed are 9e+00: b")):
        expect_equal(expected, {"a": torch.zeros(1), "b": nan}, 9)


def test_rank_that_died_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "0.0.json").write_text(json.dumps(["ok", "fine", ""]))
    living: list[Any] = [SimpleNamespace(is_alive=lambda a=a: a, exitcode=-9) for a in (True, False, True)]
    began = time.monotonic()
    answers = processes._wait(tmp_path, 0, living, began + 60)
    late = ("FAILED", "took too long", "")
    assert answers == [("ok", "fine", ""), ("FAILED", "rank 1 died with exit code -9", ""), late]
    assert time.monotonic() - began < 20
    row = processes._joined(Check("a", lambda place: ""), 3, answers, 1.0)
    assert (row.verdict, row.figures) == ("FAILED", "rank 1 died with exit code -9")


def test_each_check_has_a_name_of_its_own_and_fits_the_day() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert gpu.TOTAL <= 1800


def test_exposed_time_is_the_length_of_a_union() -> None:
    assert _length([(0, 2), (1, 3), (5, 6)]) == 4


def test_flops_of_a_step() -> None:
    """Of one token and one layer of width 2, counted by hand: 2 FLOPs an element, three times."""
    size = Sizes(hidden=2, inner=3, heads=1, key_heads=1, vocab=5, sequence=1)
    matrices = 4 * (4 * 2 * 2 + 3 * 2 * 3) + 2 * 5
    assert size.matrix_elements == matrices and size.flops == 3 * (2 * matrices + 2 * 4 * 1 * 2)


def test_results_are_kept_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.jsonl"
    machine = Row("the machine", 1, "ok", "kept", 0.1)
    bad = Row("gpt", 2, "DIFFERS", "1.0e+00", 0.1)
    file.write_text("".join(json.dumps(row.to_dict()) + "\n" for row in (machine, bad)))
    assert gpu.main(["--only", "the machine", "--results", str(file)]) == 1
    said = capsys.readouterr().out
    assert line(machine) in said and "2 checks, 1 not ok" in said


def test_what_failed_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.jsonl"
    file.write_text(json.dumps(Row("the machine", 1, "FAILED", "no", 0.1).to_dict()) + "\n")
    assert gpu.main(["--only", "the machine", "--results", str(file)]) == 0
    assert "1 checks, 0 not ok" in capsys.readouterr().out


def rehearsed(only: str, folder: Path) -> dict[str, str]:
    """The names of the checks that ran on two pretended cards -> what came out."""
    expect_cards()
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--pretend", "2", "--ranks", "1", "2"]
    process = subprocess.run(
        [*command, "--only", only, "--results", str(folder / "gpu.jsonl")], capture_output=True, text=True, timeout=280
    )
    rows = [Row(**json.loads(text)) for text in (folder / "gpu.jsonl").read_text().splitlines()]
    assert process.returncode == 0, process.stdout + process.stderr
    return {row.name: row.verdict for row in rows}


def test_rehearsal_on_pretended_cards(tmp_path: Path) -> None:
    """Checks of one name run on two ranks; the exit status says that all are right."""
    assert rehearsed("bert", tmp_path) == {"bert padded": "ok", "bert dropout exact": "ok"}


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_rehearsal_of_each_check(name: str, tmp_path: Path) -> None:
    assert set(rehearsed(name, tmp_path).values()) <= {"ok", "skipped"}


def test_skipped_differs_and_failed_are_told_apart() -> None:
    place = Place(0, 1, True)

    def raises(error: BaseException) -> Check:
        def run(place: Place) -> str:
            raise error

        return Check("a", run)

    cases = [(Skipped("no"), "skipped"), (Differs("1"), "DIFFERS"), (ValueError("x"), "FAILED")]
    assert [processes._outcome(raises(error), place)[0] for error, _ in cases] == [verdict for _, verdict in cases]


def test_no_rank_is_started_for_no_check() -> None:
    assert list(run_checks([], 2, True, time.monotonic())) == []
