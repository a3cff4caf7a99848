"""docs/versions.md has a row for each version that we speak of, and says what ran on it."""

from __future__ import annotations

import configparser
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from subprocess import CompletedProcess

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = spec_from_file_location("versions_page", ROOT / "docs" / "versions.py")
assert SPEC is not None and SPEC.loader is not None
versions = module_from_spec(SPEC)
sys.modules["versions_page"] = versions  # dataclasses look there.
SPEC.loader.exec_module(versions)
FAILED = versions.Outcome(
    "Python 3.11.7, torch 2.13.0", "1 failed, 2 passed", ("tests/a.py::b[x y]", "tests/c.py::d"), "2026-01-01"
)
LISTED = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.13.1, 2.13.0+cpu, 2.13.0, 2.12.1\n"


def test_each_version_has_a_row() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    pythons = set(re.findall(r":: (3\.\d+)$", config["metadata"]["classifiers"], re.MULTILINE))
    assert {row.python for row in versions.ROWS} == pythons
    assert {row.torch for row in versions.ROWS} == {"2.11", "2.12", "2.13", "2.14", "newest"}
    assert {row.transformers for row in versions.ROWS} == {"5.0", "5.17", "newest"}
    assert "torch>=2.13" in config["options"]["install_requires"]
    assert all((ROOT / path).exists() for path in versions.TESTS)


def test_the_page_is_what_the_script_writes() -> None:
    page = versions.PAGE.read_text()
    assert page == versions.written(versions.read(page)), "make versions"


def test_a_row_that_is_run_alone_keeps_the_others() -> None:
    outcomes = {row: versions.Outcome(f"not run: no Python {row.python}") for row in versions.ROWS}
    outcomes[versions.ROWS[1]] = outcomes[versions.ROWS[-1]] = FAILED
    assert versions.read(versions.written(outcomes)) == outcomes


def test_a_row_that_cannot_run_keeps_what_it_said() -> None:
    nothing = versions.Outcome("not run: no Python 3.13")
    assert versions.later(FAILED, nothing) == FAILED
    assert versions.later(versions.Outcome("not run yet"), nothing) == nothing
    assert versions.later(FAILED, versions.Outcome("Python 3.13", "3 passed")).result == "3 passed"


def test_a_python_that_is_not_there() -> None:
    row = versions.Row("9.9", "2.13", "5.17")
    assert versions.outcome(row, {}) == versions.Outcome("not run: no Python 9.9")


def test_a_python_that_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shim of pyenv is on PATH for each version of all; the real ones are beside."""
    shim, real = tmp_path / "python9.9", tmp_path / ".pyenv" / "versions" / "9.9.1" / "bin" / "python"
    real.parent.mkdir(parents=True)
    for path, status in ((shim, 127), (real, 0)):
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert versions.found_python("9.9") == str(real)
    real.unlink()
    assert versions.found_python("9.9") is None


def test_outcome_names_the_command_that_failed() -> None:
    """A failed command is named: it need not be pip, nor versions that do not go together."""
    found = versions.outcome(versions.Row("3.11", "2.13", "5.17"), {"3.11": "/bin/false"})
    assert found == versions.Outcome("not run: `-m venv` ended with status 1")


def test_failed_reads_the_names_of_failed_tests() -> None:
    printed = "FAILED tests/a.py::b[(1, 2)-x y] - Error: no - more\nERROR tests/c.py\n1 failed, 1 error\n"
    assert versions.failed(printed) == ("tests/a.py::b[(1, 2)-x y]", "tests/c.py")


def test_requirement_is_what_pip_is_asked_for() -> None:
    assert versions.requirement("torch", "2.12") == "torch==2.12.*"
    assert versions.requirement("torch", versions.NEWEST) == "torch"


def test_cpu_release_is_the_newest_with_a_wheel() -> None:
    """The newest torch is the newest of all: an older one is not run in its name."""
    assert versions.cpu_release(LISTED, "2.13") == "2.13.0+cpu"
    assert versions.cpu_release(LISTED, "2.12") is None
    assert versions.cpu_release(LISTED, versions.NEWEST) is None
    everywhere = LISTED.replace("2.15.0, ", "2.15.0+cpu, 2.15.0, ")
    assert versions.cpu_release(everywhere, versions.NEWEST) == "2.15.0+cpu"
    assert versions.cpu_release(everywhere, "2.12") is None
    assert versions.cpu_release("", "2.13") is None


def test_no_cuda_package_is_installed_where_there_is_no_wheel_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[object], **options: object) -> CompletedProcess[str]:
        ran.append([str(x) for x in command])
        return CompletedProcess(ran[-1], 0, stdout=LISTED)

    monkeypatch.setattr(versions.subprocess, "run", run)
    found = versions.outcome(versions.Row("3.12", "2.12", "5.17"), {"3.12": "python3"}, cpu=True)
    assert found == versions.Outcome("not run: pip has no `+cpu` wheel of torch 2.12 for Python 3.12")
    assert not [command for command in ran if "install" in command]


def test_a_row_may_have_an_older_torch_than_autotp_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(versions.subprocess, "run", lambda command, check: ran.append([str(x) for x in command]))
    versions.install("python3", versions.Row("3.11", "2.11", "5.0"), tmp_path)
    _, first, second = ran
    assert {"torch==2.11.*", "transformers==5.0.*", "numpy", "peft", "pytest"} <= set(first)
    assert not [x for x in first if x.startswith("torch") and x != "torch==2.11.*"]
    assert "--no-deps" in second and str(ROOT) in second


def test_tried_reads_counts_and_failed_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts and the tests that failed are read from what pytest prints."""
    test = ROOT / "tests" / "project" / "test_tests.py"
    monkeypatch.setattr(versions, "TESTS", (f"{test}::test_each_module_has_a_test_of_its_name",))
    found = versions.tried(Path(sys.executable))
    assert found.result == "1 passed" and not found.failed
    assert re.fullmatch(r"Python [\d.]+, torch \S+, transformers \S+, peft \S+, numpy \S+", found.ran)
