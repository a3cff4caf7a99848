"""docs/complaints.md says what torch's and transformers' own tools do, as the attempts show it."""

from __future__ import annotations

import re

import pytest
from peers import complaints
from ranks import run_ranks


def rows(rank: int, n: int) -> list[tuple[str, str, str]]:
    return complaints.table()


@pytest.mark.rare
def test_the_table_is_what_the_attempts_show() -> None:
    """With the pinned versions."""
    text = complaints.PAGE.read_text().partition(complaints.HEADING)[2]
    shown = [tuple(line.strip("| ").split(" | ")) for line in re.findall(r"^\| .*$", text, re.MULTILINE)][1:]
    assert run_ranks(rows, 2, timeout=100, fresh=True)[0] == shown


def test_each_attempt_is_of_a_complaint() -> None:
    scripts = {path.stem for path in (complaints.PAGE.parents[1] / "examples" / "complaints").glob("*/[a-z]*.py")}
    assert {script for script, _ in complaints.ATTEMPTS} < scripts
