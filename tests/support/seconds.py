"""Which tests take long: `seconds.txt` lists them. The longest files come first, and shares take about as long."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parent.parent / "seconds.txt"
COSTLY = 0.75
"""The seconds from which on a test is for `make test-rest`."""
SHORTEST = 0.5
"""The seconds from which on a test is listed."""
OTHERS = 0.1
"""Seconds of a test that is not listed, on average."""
ADDITIONS = 1_000_000
ADDED_IN = 0.05
"""The seconds of CPU for so many additions on the machine of the budgets, while its other core works, too."""


def slowness() -> float:
    """How many times slower than the machine of the budgets this one is now; 1 for a faster one.

    Virtual machines of one kind differ by a factor of three, and from one minute to the next.
    """
    seconds = []
    for _ in range(3):
        began, total = time.process_time(), 0
        for number in range(ADDITIONS):
            total += number
        seconds.append(time.process_time() - began)
    return max(1.0, sorted(seconds)[1] / ADDED_IN)


def listed() -> dict[str, float]:
    """Node id -> seconds, of the tests that are listed."""
    rows = [line.split(" ", 1) for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return {name: float(seconds) for seconds, name in rows}


def costs(names: Sequence[str]) -> dict[str, float]:
    """File -> seconds of these tests, by node id; the longest file first."""
    seconds, found = listed(), defaultdict[str, float](float)
    for name in names:
        found[name.partition("::")[0]] += seconds.get(name, OTHERS)
    return dict(sorted(found.items(), key=lambda row: (-row[1], row[0])))


def shares(names: Sequence[str], share: str) -> set[str]:
    """The files of a share such as "2/4" of these tests, by node id.

    Raises:
        pytest.UsageError: it is no such share.
    """
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", share)
    which, count = (int(one) for one in found.groups()) if found else (2, 1)
    if which > count:
        raise pytest.UsageError(f"--share {share}: write --share 2/4 for the second of four")
    made: list[tuple[float, set[str]]] = [(0.0, set()) for _ in range(count)]
    for file, cost in costs(names).items():
        least = min(range(count), key=lambda i: made[i][0])
        made[least] = made[least][0] + cost, made[least][1] | {file}
    return made[which - 1][1]


class Written:
    """A plugin that writes what the tests of a session took into the list; others keep their lines.

    Of the cases of `Checks` only the CPU counts, for the first of them waits for all. Of others it is the longer of
    time and CPU: the programs that a test starts are not counted.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a test."""
        if report.when == "call":
            cpu = next((float(value) for name, value in report.user_properties if name == "seconds of CPU"), 0.0)
            of_checks = re.search(r"::test_on_ranks\[\d+-", report.nodeid)
            self.seconds[report.nodeid] = cpu if of_checks else max(cpu, report.duration)

    def pytest_sessionfinish(self) -> None:
        """Writes the list."""
        rows = {name: seconds for name, seconds in (listed() | self.seconds).items() if seconds >= SHORTEST}
        head = "# Seconds of the tests that take longest, on two cores; written by `pytest --seconds`.\n"
        lines = [f"{seconds:.1f} {name}\n" for name, seconds in sorted(rows.items())]
        LIST.write_text(head + "".join(lines))
