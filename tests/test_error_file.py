"""error_file: torchrun's summary has the error of the rank that failed, without `record` in the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ROOT, job
from torch._utils import KeyErrorMessage

from autotp.distributed.launch import TORCHRUN
from autotp.distributed.mesh import tell_errors
from autotp.error_file import VARIABLE, one_line, write_error
from autotp.errors import Error


@pytest.mark.system
def test_torchrun_s_summary_has_the_rank_s_error(tmp_path: Path) -> None:
    with job(tmp_path / "job", "failing.py", [], 0) as process:
        told = process.communicate(timeout=100)[0]
    summary = told[told.index("Root Cause (first observed failure)") :]
    assert "rank      : 1 (local_rank: 1)" in summary
    assert "in read_rows" in summary and "ValueError: a file of rows is not there" in summary
    assert told.splitlines()[-1] == "ValueError: a file of rows is not there (rank 1)"


SCRIPT = """
import sys
def tracked(kind, error, trace):
    print("tracked", kind.__name__)
    sys.__excepthook__(kind, error, trace)
sys.excepthook = tracked
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


def ended(error: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A process that has ended with an error."""
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT.format(f"from autotp.errors import Error\nraise {error}")]
    return subprocess.run(command, env=clean | environment, capture_output=True, check=False, text=True)


WRONG = "Error('the model is small', fix='a larger one', at='a.py:3')"


def test_an_error_is_the_last_line_once_more() -> None:
    """Also under srun and mpirun, which have no file for it."""
    *before, last = ended(WRONG, {}).stderr.splitlines()
    assert before[-3:] == ["autotp.Error: the model is small", "  at       a.py:3", "  try      a larger one"]
    assert last == "autotp.Error: the model is small | try: a larger one (rank 3)"


def test_ranks_with_the_same_error_print_it_once(tmp_path: Path) -> None:
    """torchrun's file of each rank has its stack, and the user's own hook is called on each."""

    def rank(number: int) -> tuple[str, list[str], Any]:
        file = tmp_path / "attempt_0" / str(number) / "error.json"
        file.parent.mkdir(parents=True)
        done = ended(WRONG, {VARIABLE: str(file), "LOCAL_RANK": str(number)})
        return done.stdout, done.stderr.splitlines(), json.loads(file.read_text())["message"]["extraInfo"]

    tracked, first, of_first = rank(0)
    assert tracked == "tracked Error\n" and first[-1] == "  try      a larger one"
    tracked, second, of_second = rank(1)
    assert tracked == "tracked Error\n" and second == ["rank 3 ends with the same error as another rank"]
    assert of_second["py_callstack"] == of_first["py_callstack"] and "a larger one" in of_first["py_callstack"]
    assert of_second["timestamp"] > of_first["timestamp"]


@pytest.fixture
def of_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Makes this process a rank of torchrun's, and returns its file."""

    def of_rank(rank: int) -> Path:
        file = tmp_path / str(rank) / "error.json"
        file.parent.mkdir()
        monkeypatch.setenv(VARIABLE, str(file))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        return file

    return of_rank


def read_row(row: str) -> None:
    raise KeyError(row)


def read_column(column: str) -> None:
    raise KeyError(column)


def raised_by(run: Callable[[], None]) -> Exception:
    with pytest.raises(Exception) as raised:
        run()
    return raised.value


def test_errors_are_the_same_by_all_of_their_text_and_lines(of_rank: Callable[[int], Path]) -> None:
    errors = [Error("the mask is bool", got="bool"), Error("the mask is bool", got="int64")]
    errors += [raised_by(lambda read=read: read("x")) for read in (read_row, read_column)]  # type: ignore[misc]
    for rank, error in enumerate([*errors, *errors]):
        file = of_rank(rank)
        assert write_error(error, rank) == (rank < 4)
        stack = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
        assert stack == "".join(traceback.format_exception(error))


class Silent(ValueError):
    def __str__(self) -> str:
        raise ValueError


def test_one_line_is_one_line_of_the_error() -> None:
    noted = ValueError("the file is not there\nor empty")
    noted.__notes__ = ["of epoch 3"]  # type: ignore[attr-defined]  # What `add_note` of Python 3.11 writes.
    worker = "Caught KeyError in worker process 0.\nOriginal Traceback (most recent call last):\n  File ...\n{}\n"
    lines = {
        noted: "ValueError: the file is not there",
        KeyError(KeyErrorMessage(worker.format("KeyError: 'x'"))): "KeyError: 'x'",
        RuntimeError(worker.format("ValueError: 3")): "RuntimeError: ValueError: 3",
        ValueError("\n\n  no rows\n"): "ValueError: no rows",
        ValueError(): "ValueError",
        torch.OutOfMemoryError("no\nmemory"): "torch.OutOfMemoryError: no",
        SyntaxError("invalid", ("a.py", 3, 1, "x y", 3, 2)): "SyntaxError: invalid (a.py, line 3)",
        Error("small\nmodel", fix="a larger one,\nor none"): "autotp.Error: small | try: a larger one,",
    }
    assert {one_line(error) for error in lines} == set(lines.values())
    assert one_line(Silent()).startswith("test_error_file.Silent: <")


def test_no_character_of_an_error_is_too_much(of_rank: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for torchrun's file, nor for the command that prints the error behind torchrun's summary."""
    for name in ("RESTART_COUNT", "MAX_RESTARTS"):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", "0")
    commands: list[list[str | bytes]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    file = of_rank(0)
    assert write_error(FileNotFoundError("no file a\udcff\ud800"), 0)
    assert json.loads(file.read_text())["message"]["message"] == "FileNotFoundError: no file a\udcff\ud800"
    assert os.fsencode(commands[0][-1]) == rb"FileNotFoundError: no file a\udcff\ud800 (rank 0)"


def test_mesh_reports_errors_only_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    before = sys.excepthook
    tell_errors()
    assert sys.excepthook is before
