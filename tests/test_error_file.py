"""error_file: torchrun's summary has the error of the rank that failed, without `record` in the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, job

from autotp.distributed.launch import TORCHRUN
from autotp.distributed.mesh import tell_errors
from autotp.error_file import VARIABLE


@pytest.mark.system
def test_torchrun_s_summary_has_the_rank_s_error(tmp_path: Path) -> None:
    with job(tmp_path / "job", "failing.py", [], 0) as process:
        told = process.communicate(timeout=100)[0]
    summary = told[told.index("Root Cause (first observed failure)") :]
    assert "rank      : 1 (local_rank: 1)" in summary
    assert "in read_rows" in summary and "ValueError: a file of rows is not there" in summary
    assert told.splitlines()[-1] == "ValueError: a file of rows is not there (rank 1)"


SCRIPT = """
from autotp.error_file import report_errors
report_errors(3)
report_errors(3)
{}
"""


@pytest.mark.parametrize("how", ["raise KeyError('x')", pytest.param("raise SystemExit(3)", marks=pytest.mark.rare)])
def test_error_file_is_written_for_errors_only(how: str, tmp_path: Path) -> None:
    """Only errors are written; the program ends as before."""
    file = tmp_path / "error.json"
    environment = os.environ | {VARIABLE: str(file), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(how)], env=environment, capture_output=True, check=False)
    assert done.returncode == (1 if "Key" in how else 3) and file.exists() == ("Key" in how)
    if file.exists():
        assert "KeyError: 'x'" in json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
        assert b"KeyError: 'x'" in done.stderr


def ended(error: str, environment: dict[str, str]) -> list[str]:
    """The lines of stderr of a process that ends with an error."""
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT.format(f"from autotp.errors import Error\nraise {error}")]
    done = subprocess.run(command, env=clean | environment, capture_output=True, check=False, text=True)
    return done.stderr.splitlines()


WRONG = "Error('the model is small', fix='a larger one', at='a.py:3')"


def test_an_error_is_the_last_line_once_more() -> None:
    """Also under srun and mpirun, which have no file for it."""
    *before, last = ended(WRONG, {})
    assert before[-3:] == ["autotp.Error: the model is small", "  at       a.py:3", "  try      a larger one"]
    assert last == "autotp.Error: the model is small | try: a larger one (rank 3)"


def test_ranks_with_the_same_error_print_it_once(tmp_path: Path) -> None:
    def rank(number: int, error: str) -> tuple[list[str], Any]:
        file = tmp_path / "attempt_0" / str(number) / "error.json"
        file.parent.mkdir(parents=True)
        told = ended(error, {VARIABLE: str(file), "LOCAL_RANK": str(number)})
        return told, json.loads(file.read_text())["message"]["extraInfo"]

    first, of_first = rank(0, WRONG)
    assert first[-1] == "  try      a larger one" and "a larger one" in of_first["py_callstack"]
    second, of_second = rank(1, WRONG)
    assert second == ["rank 3 ends with the same error as another rank"]
    assert "the same error" in of_second["py_callstack"] and of_second["timestamp"] > of_first["timestamp"]
    third, _ = rank(2, "KeyError('another')")
    assert third[-1] == "KeyError: 'another'"


def test_mesh_reports_errors_only_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    before = sys.excepthook
    tell_errors()
    assert sys.excepthook is before
