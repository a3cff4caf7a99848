"""error_file: torchrun's summary has the error of the rank that failed, without `record` in the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT, job

from autotp.error_file import VARIABLE, report_errors


@pytest.mark.system
def test_torchrun_s_summary_has_the_rank_s_error(tmp_path: Path) -> None:
    with job(tmp_path / "job", "failing.py", [], 0) as process:
        told = process.communicate(timeout=100)[0]
    summary = told[told.index("Root Cause (first observed failure)") :]
    assert "rank      : 1 (local_rank: 1)" in summary
    assert "in read_rows" in summary and "ValueError: a file of rows is not there" in summary


SCRIPT = """
from autotp.error_file import report_errors
report_errors()
report_errors()
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


def test_report_errors_without_torchrun_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = sys.excepthook
    report_errors()
    assert sys.excepthook is before
