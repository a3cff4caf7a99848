"""A check of the first day: its place among ranks, its result, and the table that lists all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Verdict = Literal["ok", "DIFFERS", "FAILED", "skipped"]


class Differs(Exception):
    """A number is not what it must be."""


class Skipped(Exception):
    """This machine cannot show it; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where a check runs.

    Attributes:
        rank, ranks: this process, and the number of processes. Each has a card of its own.
        small: sizes for a machine that only pretends to have cards: nothing is measured there.
    """

    rank: int
    ranks: int
    small: bool

    @property
    def device(self) -> torch.device:
        """This process's card; the CPU if there is none."""
        return torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")

    def need_real_cards(self, what: str) -> None:
        """Raises Skipped where cards are pretended, or absent: they do not have `what`."""
        if self.small:
            raise Skipped(f"{what}: on real cards only")


Run = Callable[[Place], str]
"""A check: runs on every rank, and returns the figures for the table. Raises Differs, Skipped, or whatever fails."""


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        name: of the check. With the number of ranks it names the row.
        run: the check.
        ranks: the numbers of ranks on which it is tried; a larger number than there are cards is left out.
        seconds: the longest that it may take.
        alone: whether it runs in the process that starts the others, which starts ranks of its own.
    """

    name: str
    run: Run
    ranks: tuple[int, ...] = (2, 4, 8)
    seconds: int = 60
    alone: bool = False


@dataclass(frozen=True)
class Row:
    """What a check gave.

    Attributes:
        name, ranks: which check.
        verdict: "ok", "DIFFERS" (a wrong number), "FAILED" (an exception, no end in time), "skipped".
        figures: a line for the table.
        seconds: how long it took.
        detail: the end of the traceback, if it failed.
    """

    name: str
    ranks: int
    verdict: Verdict
    figures: str = ""
    seconds: float = 0.0
    detail: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """Names the row."""
        return self.name, self.ranks

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        return asdict(self)


HEAD = f"{'check':<44}{'ranks':>5}  {'':<8}{'seconds':>8}  figures"


def line(row: Row) -> str:
    """Returns the row as a line under `HEAD`."""
    figures = row.figures.strip().splitlines()
    return f"{row.name:<44}{row.ranks:>5}  {row.verdict:<8}{row.seconds:>8.1f}  {figures[-1][:160] if figures else ''}"
