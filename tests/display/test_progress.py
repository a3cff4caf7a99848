"""progress: a line after a while, on a terminal, from the first rank; and nothing else."""

from __future__ import annotations

import io
import sys
import threading
from contextlib import redirect_stderr

import pytest

from autotp.display import progress as module
from autotp.display.progress import progress


class Terminal(io.StringIO):
    """A stderr that is a terminal; says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        if "two" in self.getvalue():
            self.written.set()
        return count


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(module, "DELAY", 0.0)
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    return Terminal()


def test_progress_line_shows_nested_calls_and_count(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress("one", total=4) as line:
        line.count()
        with progress("inner") as inner:
            inner.begin("two")
            assert terminal.written.wait(20)
    assert "one: inner: two" in terminal.getvalue() and "1/4" in terminal.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "autotp.progress"]
    assert line.text == "one"


def test_progress_line_counts_bytes_with_units(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress("one", total=2_000_000, unit="B") as line:
        line.count(1_000_000)
        line.begin("two")
        assert terminal.written.wait(20)
    assert "1.00M/2.00M" in terminal.getvalue()


def test_progress_line_ends_when_the_call_fails(terminal: Terminal) -> None:
    with pytest.raises(KeyError), redirect_stderr(terminal), progress("one"):
        raise KeyError
    with redirect_stderr(terminal), progress("two"):
        assert terminal.written.wait(20)
    assert "one: two" not in terminal.getvalue()


def test_progress_writes_nothing_into_a_file(terminal: Terminal) -> None:
    with redirect_stderr(io.StringIO()) as file, progress("one"):
        assert not [thread for thread in threading.enumerate() if thread.name == "autotp.progress"]
    assert not file.getvalue() and not terminal.getvalue()


def test_progress_writes_nothing_before_its_delay(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY", 60.0)
    with redirect_stderr(terminal), progress("two"):
        pass
    assert not terminal.getvalue()


class Ended:
    """An event of a clock that does not run: the second look at it finds that the work has ended."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return len(self.waits) == 2


def test_progress_line_comes_after_five_seconds() -> None:
    """Then it is drawn anew twice a second."""
    pytest.importorskip("tqdm")
    ended, terminal = Ended(), Terminal()
    module._show(module.Line("one", 4, "", done=1), ended, terminal)  # type: ignore[arg-type]
    assert ended.waits == [5.0, 0.5] and "one:" in terminal.getvalue() and "1/4" in terminal.getvalue()


def test_progress_without_tqdm_writes_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with redirect_stderr(terminal), progress("two"):
        pass
    assert not terminal.getvalue()
