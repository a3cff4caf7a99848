"""What happens between host and device: `host_waits`, `collective_order`, `pinned_requests`."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cards.pretend import REAL, pretended

ROOT = Path(__file__).resolve().parents[3]
OWN = tuple(str(ROOT / folder) for folder in ("autotp", "passes", "models"))
HARMLESS = ("async copy", "pageable copy", "attention", "seed of", "state of")
"""Beginnings of what is reported and makes nobody wait."""


@dataclass
class Traffic:
    """What was reported in a region.

    Attributes:
        events: (what happened, the lines that caused it, innermost first) -> how often.
        elements: what happened -> the elements that were copied.
    """

    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)

    @property
    def waits(self) -> dict[tuple[str, str], int]:
        """The events for which the host waited, with their lines."""
        return {event: count for event, count in self.events.items() if not event[0].startswith(HARMLESS)}

    @property
    def own_waits(self) -> dict[tuple[str, str], int]:
        """The waits that a line of autotp causes."""
        return {event: count for event, count in self.waits.items() if event[1].startswith(("autotp/", "passes/"))}

    def count(self, beginning: str) -> int:
        """Returns how often something happened whose name begins so."""
        return sum(count for (name, _), count in self.events.items() if name.startswith(beginning))

    def __str__(self) -> str:
        rows = sorted(self.waits.items(), key=lambda row: -row[1])
        return "\n".join(f"{count:4d} {name:<40} {lines}" for (name, lines), count in rows) or "no waits"


_open: list[Traffic] = []


_warning = [False]


def warn_of_waits(on: bool) -> None:
    """Sets whether each wait of the host is a warning, too."""
    _warning[0] = on
    pretended().set_spy(report)
    pretended().set_spying(on or bool(_open))


def report(event: str, elements: int) -> None:
    """Notes an event in all open regions."""
    if _warning[0] and not event.startswith(HARMLESS):
        warnings.warn(f"called a synchronizing CUDA operation: {event}", stacklevel=2)
    if _open:
        lines = _lines()
        for traffic in _open:
            traffic.events[event, lines] += 1
            traffic.elements[event] += elements


def _lines() -> str:
    """Returns up to three lines of autotp on the stack, innermost first; else the innermost lines of others."""
    frames = [frame for frame in traceback.extract_stack() if str(Path(__file__).parent) not in frame.filename]
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(ROOT) and _is_own(frame.filename)]
    shown = (own or [frame for frame in frames if "site-packages" in frame.filename] or frames)[::-1][:3]
    return " < ".join(f"{_short(frame.filename)}:{frame.lineno}" for frame in shown)


def _is_own(path: str) -> bool:
    return str(Path(path).resolve()).startswith(OWN)


def _short(path: str) -> str:
    resolved = Path(path).resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else path.rpartition("site-packages/")[2]


@contextmanager
def host_waits() -> Iterator[Traffic]:
    """A region; yields what is reported in it. On real cards: torch's own warnings of synchronizing calls."""
    traffic = Traffic()
    if REAL:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield traffic
            finally:
                torch.cuda.set_sync_debug_mode("default")
        told = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
        traffic.events.update(("wait", f"{_short(warning.filename)}:{warning.lineno}") for warning in told)
        return
    pretended().set_spy(report)
    pretended().set_spying(True)
    _open.append(traffic)
    try:
        yield traffic
    finally:
        _open.remove(traffic)
        pretended().set_spying(bool(_open))


@contextmanager
def pinned_requests() -> Iterator[list[int]]:
    """A region; yields the bytes of each request for pinned memory, rounded up to a power of two as torch rounds it."""
    sizes: list[int] = []
    before = len(pretended().pinned_requests())
    try:
        yield sizes
    finally:
        sizes += [1 << max(size - 1, 0).bit_length() for size in pretended().pinned_requests()[before:]]


@contextmanager
def collective_order() -> Iterator[list[str]]:
    """A region; yields the collectives that start in it, in order: "group: operation dtype[sizes]"."""
    order: list[str] = []
    pretended().set_logging(True)
    try:
        yield order
    finally:
        order += pretended().collective_log()
        pretended().set_logging(False)
