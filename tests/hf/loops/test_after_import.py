"""after_import: calls back now, and after each import of a named module, and imports nothing itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotp.hf.loops.after_import import after_import


def test_calls_after_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("watched_one", "watched_two", "other_one"):
        (tmp_path / f"{name}.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[list[int]] = []

    def note() -> None:
        seen.append([module.value for name, module in sys.modules.items() if name.startswith("watched_")])

    for _ in range(2):  # Asked again, it calls back now, and once after each import all the same.
        after_import(["watched_one", "watched_two"], note)
    assert seen == [[], []]
    __import__("other_one")
    assert len(seen) == 2
    __import__("watched_two")
    __import__("watched_one")
    assert seen[2:] == [[3], [3, 3]]
