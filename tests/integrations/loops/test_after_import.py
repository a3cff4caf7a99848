"""after_import: calls back now, and after each import of a named module, and imports nothing itself."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from autotp.integrations.loops.after_import import after_import, change_all


def test_after_import_calls_back_after_each_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_after_import_waits_for_the_outer_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call back while the first one still runs would see a module without its names."""
    (tmp_path / "outer_one.py").write_text("import inner_one\nvalue = 3\n")
    (tmp_path / "inner_one.py").write_text("value = 4\n")
    (tmp_path / "failing_one.py").write_text("import inner_two\nraise ImportError\n")
    (tmp_path / "inner_two.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[list[int]] = []
    names = ["outer_one", "inner_one", "failing_one", "inner_two"]
    after_import(names, lambda: seen.append([sys.modules[name].value for name in names if name in sys.modules]))
    __import__("outer_one")
    assert seen == [[], [3, 4]]
    with pytest.raises(ImportError):
        __import__("failing_one")
    del sys.modules["inner_two"]
    __import__("inner_two")
    assert seen[2:] == [[3, 4, 5]]


def test_a_library_of_another_version_is_imported_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name or a module that autotp changes is not there: one warning says so, and the other changes are made."""
    library = ModuleType("some_library")
    library.__version__ = "9.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_library", library)
    made = []
    changes = [lambda: library.Trainer.save, lambda: sys.modules["some_library.loops"], lambda: made.append(1)]
    with pytest.warns(UserWarning) as warned:
        change_all(changes)
        change_all(changes)
    told = [str(warning.message).partition(",")[0] for warning in warned]
    assert told == [f"some_library 9.1 has no `some_library.{name}`" for name in ("Trainer", "loops")]
    assert made == [1, 1]
