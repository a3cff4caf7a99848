"""progress: a line on stderr about a call that takes long. tqdm draws it, where it is installed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from torch import distributed as dist

DELAY = 5.0
"""Seconds before a call shows a line."""
INTERVAL = 0.5
"""Seconds between two looks at a line."""


@dataclass
class Line:
    """What a call is doing.

    Attributes:
        what: the call, or its work.
        total: the amount of work, or None if it is unknown.
        unit: "B" for bytes; "" for steps.
        step: the present step.
        done: the amount of work that is done.
        inner: the region within this one that runs now.
    """

    what: str
    total: int | None
    unit: str
    step: str = ""
    done: int = 0
    inner: Line | None = None

    def begin(self, step: str) -> None:
        """Says which step begins."""
        self.step = step

    def count(self, done: int = 1) -> None:
        """Counts work that is done."""
        self.done += done

    @property
    def text(self) -> str:
        """The call, its step, and those of the regions within it."""
        inner = self.inner
        return ": ".join(filter(None, (self.what, self.step, inner.text if inner else "")))


_of_threads = threading.local()


@contextmanager
def progress(task: str, total: int | None = None, unit: str = "") -> Iterator[Line]:
    """A region whose progress is shown after DELAY seconds, on the first rank and if stderr is a terminal.

    A region within another is shown in the other's line.

    Args:
        total: the amount of work, counted by `Line.count`.
        unit: "B" for bytes.
    """
    outer: Line | None = getattr(_of_threads, "line", None)
    line = Line(task, total, unit)
    _of_threads.line, ended = line, threading.Event()
    thread = None
    if outer is not None:
        outer.inner = line
    elif _is_first() and sys.stderr.isatty():
        thread = threading.Thread(target=_show, args=(line, ended, sys.stderr), name="autotp.progress", daemon=True)
        thread.start()
    try:
        yield line
    finally:
        _of_threads.line = outer
        ended.set()
        if outer is not None:
            outer.inner = None
        if thread is not None:
            thread.join()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _show(line: Line, ended: threading.Event, to: TextIO) -> None:
    """Shows a line until the work has ended. All that tqdm does happens in this thread."""
    began = time.time()
    # A call that ends earlier shows nothing.
    if ended.wait(DELAY):
        return
    try:
        # Only here, so that the import of autotp and short calls do not load it.
        from tqdm import tqdm
    except ImportError:
        return
    scaled = line.unit == "B"
    with tqdm(total=line.total, unit=line.unit or "step", unit_scale=scaled, leave=False, file=to) as bar:
        bar.start_t = began
        while True:
            bar.set_description_str(line.text, refresh=False)
            bar.n = line.done
            bar.refresh()
            if ended.wait(INTERVAL):
                return
