"""seconds.txt: its tests are there, shares are disjoint and take about as long."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import seconds
from seconds import COSTLY, OTHERS, SHORTEST, Written, costs, listed, shares, slowness

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = ["a.py::test_x", "a.py::test_y[1]", "b.py::test_x", "c.py::test_x", "d.py::test_x"]


def test_listed_tests_are_there() -> None:
    for name in listed():
        file, _, rest = name.partition("::")
        assert re.search(rf"def {re.escape(rest.partition('[')[0])}\(", (ROOT / file).read_text()), name


def test_what_is_not_listed_takes_less_than_what_is_costly() -> None:
    assert 0 < OTHERS < SHORTEST <= min(listed().values()) and SHORTEST < COSTLY


def test_costs_name_the_longest_file_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seconds.listed", lambda: {"b.py::test_x": 3.0, "a.py::test_y[1]": 2.0})
    assert list(costs(NAMES).items()) == [("b.py", 3.0), ("a.py", 2.0 + OTHERS), ("c.py", OTHERS), ("d.py", OTHERS)]


def test_shares_have_each_file_once() -> None:
    each = [shares(NAMES, f"{i}/3") for i in (1, 2, 3)]
    assert Counter(file for one in each for file in one) == Counter(["a.py", "b.py", "c.py", "d.py"])
    assert shares(NAMES, "1/1") == {"a.py", "b.py", "c.py", "d.py"}


def test_shares_take_about_as_long() -> None:
    names = list(listed())
    each = [shares(names, f"{i}/6") for i in range(1, 7)]
    costs = [sum(listed()[name] for name in names if name.partition("::")[0] in files) for files in each]
    assert max(costs) < 1.2 * min(costs)


@pytest.mark.parametrize("share", ["0/4", "5/4", "1", "a/b", "1/0"])
def test_share_that_is_none_is_wrong_use(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="write --share 2/4"):
        shares(NAMES, share)


def test_written_list_has_what_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a case of `Checks` its CPU counts, of others the longer of both; what is short is left out."""
    monkeypatch.setattr("seconds.LIST", tmp_path / "list")
    (tmp_path / "list").write_text("# head\n3.0 old.py::test_kept\n3.0 b.py::test_on_ranks[2-first one]\n")
    written = Written()
    for name, cpu, duration in [
        ("a.py::test_programs", 0.1, 9.04), ("a.py::test_short", 0.2, 0.3),
        ("b.py::test_on_ranks[2-first one]", 0.4, 30.0), ("b.py::test_on_ranks[2-other]", 2.5, 0.0),
    ]:  # fmt: skip
        report = pytest.TestReport(
            name, ("", 0, ""), {}, "passed", None, "call", duration=duration, user_properties=[("seconds of CPU", cpu)]
        )
        written.pytest_runtest_logreport(report)
    written.pytest_sessionfinish()
    assert listed() == {"a.py::test_programs": 9.0, "b.py::test_on_ranks[2-other]": 2.5, "old.py::test_kept": 3.0}


def test_slowness_is_how_many_times_longer_additions_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.01, 1.0, 1.2, 2.0, 2.1])  # 0.01, 0.2 and 0.1 s: the middle one counts
    monkeypatch.setattr(seconds, "time", SimpleNamespace(process_time=lambda: next(clock)))
    monkeypatch.setattr(seconds, "ADDITIONS", 1)
    assert slowness() == pytest.approx(0.1 / seconds.ADDED_IN)


def test_slowness_of_a_faster_machine_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seconds, "time", SimpleNamespace(process_time=lambda: 0.0))
    assert slowness() == 1.0
