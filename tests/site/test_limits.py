"""docs/limits.md begins each table with what autotp does not tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
TABLE = re.compile(r"^\|[^|]*\| \| write instead \|\n\|---\|---\|---\|\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)
UNTOLD = ("", "not noticed", "an error in a later step, or nothing")
"""How the middle column begins where autotp may say nothing."""


def rank(told: str) -> int:
    """0 for what autotp does not tell, 1 for a warning or a line, 2 for what is refused."""
    return 0 if not told or told.startswith(UNTOLD[1:]) else 2 if told.startswith("R") else 1


def tables() -> list[list[str]]:
    return [
        [row.split(" | ")[1].strip(" |") if " | | " not in row else "" for row in found["rows"].splitlines()]
        for found in TABLE.finditer(PAGE.read_text())
    ]


@pytest.mark.parametrize("at", range(2))
def test_what_autotp_does_not_tell_comes_first(at: int) -> None:
    ranks = [rank(told) for told in tables()[at]]
    assert len(ranks) > 20 and set(ranks) == {0, 1, 2} and ranks == sorted(ranks)
