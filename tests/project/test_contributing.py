"""What CONTRIBUTING.md shows is what happens."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
SHOWN = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
SCRIPT = "model.py"


def outputs(text: str) -> list[str]:
    """What each block of Python prints; the blocks are one script."""
    names: dict[str, object] = {"__name__": "model"}
    found, source = [], ""
    for code, _ in SHOWN.findall(text):
        source += code
        linecache.cache[SCRIPT] = (len(source), None, source.splitlines(True), SCRIPT)
        above = "\n" * (source.count("\n") - code.count("\n"))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(above + code, SCRIPT, "exec"), names)
        found.append(out.getvalue())
    return found


def without_round_off(text: str) -> str:
    return re.sub(r"worst .*", "worst", text)


def test_worked_example_prints_what_is_shown() -> None:
    text = PAGE.read_text()
    shown = [output for _, output in SHOWN.findall(text)]
    assert [without_round_off(output) for output in outputs(text)] == [without_round_off(output) for output in shown]


def test_contributing_names_files_that_exist() -> None:
    """But for the pass that a reader is told to write."""
    root, text = PAGE.parent, PAGE.read_text()
    named = set(re.findall(r"(?:autotp|passes|tests|examples|benchmarks|docs)/[\w/]+\.(?:py|md)", text))
    assert {name for name in named if not (root / name).exists()} <= {"passes/lower/nothing.py", "docs/name.md"}
