"""docs/limits.md says of each row what happens: refused, a warning, a line of the plan, or nothing."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
TABLE = re.compile(r"^\|[^|]*\| \| write instead \|\n\|---\|---\|---\|\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)
TOLD = re.compile(r"[SWRP](?:$|[ ,;])")
"""How the middle column begins; the page explains the letters at its top."""


def middles() -> list[list[str]]:
    """The middle column of each table."""
    split = re.compile(r"(?<!\\)\|(?=(?:[^`]*`[^`]*`)*[^`]*$)")
    return [
        [split.split(row)[2].strip() for row in found["rows"].splitlines()]
        for found in TABLE.finditer(PAGE.read_text())
    ]


def test_each_row_says_what_happens() -> None:
    tables = middles()
    assert [len(rows) > 10 for rows in tables] == [True, True, True]
    assert [told for rows in tables for told in rows if not TOLD.match(told)] == []
    assert {told[0] for rows in tables for told in rows} == {"S", "W", "R"}
