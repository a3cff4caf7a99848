"""Runs a fixed set of tests under several versions of Python, torch and transformers, and writes docs/versions.md.

python docs/versions.py                            # every row whose Python is on this machine: an hour on two cores
python docs/versions.py --only "3.11 2.12 5.17"    # one row; the other rows of the page stay
python docs/versions.py --python 3.13=/opt/py/bin/python3

python docs/versions.py --cpu                      # only rows for which pip finds a `+cpu` wheel of torch

Each row has a virtual environment of its own in a temporary folder, which is deleted at the end of the row. pip takes
torch from the index that it is set up with: of PyPI's wheels for Linux each is 3 GB with the CUDA packages that it
stands on. With `--cpu` none of these is installed; with `PIP_EXTRA_INDEX_URL` pip also finds PyTorch's own index of
wheels for CPUs.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")
NEWEST = "newest"
PACKAGES = ("torch", "transformers", "peft", "numpy")
TOOLS = ("expecttest", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
TESTS = (
    "tests/project/test_import.py",
    "tests/models",
    "tests/rules/test_table.py",
    "tests/passes/capture/python_state/test_guard.py",
    "tests/passes/lower/test_lower.py",
    "tests/diagnostics/test_verify.py",
    "tests/tools/pass_by_pass/test_stages.py",
    "tests/runtime/test_module.py",
    "tests/training/test_distribute.py",
    "tests/training/pipeline/test_schedules.py",
    "tests/checkpoint/test_save.py",
    "tests/integrations/transformers/test_hf_calls.py",
    "tests/integrations/transformers/test_generation.py",
    "tests/integrations/transformers/test_lora.py",
    "tests/integrations/transformers/test_pretrained.py",
)
"""Import, rules, capture, the graphs, verify, real ranks, pipelines and replicas, files, transformers and peft."""
LIMIT = 1800  # seconds that the tests of a row may take
OPENING = """Use Python 3.11, torch 2.13 and transformers 5.17: `constraints.txt` has them, and all tests run with
them. This page says what else was tried. `make versions` makes a virtual environment for each row and runs the same
tests in it: imports, the rules of all operators, capture, the graphs of a rank, `verify`, pipelines and replicas on
real ranks, checkpoints, and the models of transformers and peft. The rows are a covering set of what one may install,
not the full product. A row with "not run" says nothing: so far only Python 3.11 was tried, and torch 2.12 to 2.14. The
numbers of tests differ because tests were added between the days. A row that could not run this time keeps what it
said before, with its day."""

CAUSES = """What is known of the failures. torch 2.12 is older than setup.cfg asks for: its `torch.export` fixes sizes
that torch 2.13 leaves open, so most models would be captured again for each length. The failures of torch 2.14 beside
transformers 5.17 have been mended since the day of that row: the newest of both passed later. One test is skipped with
transformers 5.24, which asks for peft 0.22 there. Causes that were found with other versions and mended: `Trainer` of
transformers 5.0 and 5.1 switches NEFTune on by a method, and could not be imported beside autotp; outputs of 5.0 have
no names for torch's pytree; gradient checkpointing has another name in 5.24; torch 2.14 warns of `torch.jit.script`,
which DeBERTa uses; and with a wheel of torch for GPUs on a machine without one, a cache that is offloaded asks for a
stream of a GPU. `torch.autograd.Function.apply` is written in C++ in torch 2.14; a model's own backward is kept there
since 2026-11-29 as with 2.13, and the rows of 2.14 are older. No row of torch 2.11 has a
result; `benchmarks/gpu.py` passes with it on the CPU, and a Llama trains, generates with both caches and compiles its
blocks on two ranks as with torch 2.13 (2026-11-26)."""


@dataclass(frozen=True)
class Row:
    """The versions of a row, as they are asked for: "3.11", "2.12", "newest"."""

    python: str
    torch: str
    transformers: str

    def __str__(self) -> str:
        return f"{self.python} {self.torch} {self.transformers}"


ROWS = (
    Row("3.10", "2.11", "5.17"),
    Row("3.11", "2.11", "5.0"),
    Row("3.11", "2.12", "5.17"),
    Row("3.10", "2.13", "5.17"),
    Row("3.11", "2.13", "5.0"),
    Row("3.11", "2.13", "5.17"),
    Row("3.12", "2.13", "5.17"),
    Row("3.13", "2.13", "5.17"),
    Row("3.11", "2.13", NEWEST),
    Row("3.11", "2.14", "5.17"),
    Row("3.11", NEWEST, NEWEST),
    Row("3.13", NEWEST, NEWEST),
)


@dataclass(frozen=True)
class Outcome:
    """What a row of the page says behind its versions."""

    ran: str  # the versions that pip installed, or why nothing ran
    result: str = ""  # "310 passed"
    failed: tuple[str, ...] = ()  # the tests that failed
    day: str = ""  # when the tests ran


def requirement(name: str, version: str) -> str:
    """What pip is asked for: any patch release of a version, or the newest of all."""
    return name if version == NEWEST else f"{name}=={version}.*"


def beside() -> list[str]:
    """What autotp and its extra `hf` ask for beside the two libraries whose versions a row has."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    asked = config["options"]["install_requires"].split() + config["options.extras_require"]["hf"].split()
    return [name for name in asked if re.match(r"[\w-]+", name)[0] not in ("torch", "transformers")]  # type: ignore[index]


class NoWheel(Exception):
    """pip finds no wheel of this torch for CPUs."""


def cpu_release(listed: str, version: str) -> str | None:
    """The `+cpu` release of a version among those that `pip index versions torch` lists, the newest first."""
    _, _, line = listed.partition("Available versions: ")
    releases = line.partition("\n")[0].split(", ")
    start = releases[0].partition("+")[0] if version == NEWEST else f"{version}."
    return next((x for x in releases if x.startswith(start) and x.endswith("+cpu")), None)


def torch_requirement(pip: list[str], version: str, cpu: bool) -> str:
    """What pip is asked for. Raises NoWheel if it must be a wheel for CPUs, and pip finds none."""
    if not cpu:
        return requirement("torch", version)
    listed = subprocess.run([*pip, "index", "versions", "torch"], check=True, capture_output=True, text=True).stdout
    release = cpu_release(listed, version)
    if release is None:
        raise NoWheel(version)
    return f"torch=={release}"


def install(python: str, row: Row, home: Path, cpu: bool = False) -> Path:
    """Makes a virtual environment with the versions of a row. Returns its Python. Raises NoWheel.

    autotp is installed without what it asks for: it asks for the tested torch, and a row may have an older one.
    """
    subprocess.run([python, "-m", "venv", home], check=True)
    own = home / "bin" / "python"
    torch = torch_requirement([str(own), "-m", "pip"], row.torch, cpu)
    wanted = [torch, requirement("transformers", row.transformers), *beside(), *TOOLS]
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([*pip, *wanted], check=True)
    subprocess.run([*pip, "--no-deps", "-e", ROOT], check=True)
    return own


def installed(python: Path) -> str:
    """The versions of Python and of what is installed."""
    code = f"""if True:
        import platform
        from importlib.metadata import version
        found = ["Python " + platform.python_version(), *(name + " " + version(name) for name in {PACKAGES})]
        print(", ".join(found))
    """
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def tried(python: Path) -> Outcome:
    """What the tests say under a Python."""
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--tb=short"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *TESTS], cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT)
    print(done.stdout[-20000:], done.stderr[-2000:], flush=True)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last))
    return Outcome(installed(python), counts or f"pytest ended with {done.returncode}", failed(done.stdout), today())


def today() -> str:
    """The day, in UTC."""
    return datetime.now(timezone.utc).date().isoformat()


def failed(printed: str) -> tuple[str, ...]:
    """The tests that failed, by what pytest printed; their names may have spaces."""
    return tuple(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE))


def found_python(version: str) -> str | None:
    """A Python of this version that runs: on PATH, or among those of pyenv. (A shim of pyenv may be there and fail.)"""
    among = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for python in (shutil.which(f"python{version}"), *map(str, among)):
        if python and subprocess.run([python, "-V"], capture_output=True).returncode == 0:
            return python
    return None


def outcome(row: Row, pythons: Mapping[str, str], cpu: bool = False) -> Outcome:
    """Installs the versions of a row, and runs the tests."""
    python = pythons.get(row.python) or found_python(row.python)
    if python is None:
        return Outcome(f"not run: no Python {row.python}")
    with tempfile.TemporaryDirectory(prefix="autotp-versions-") as home:
        try:
            return tried(install(python, row, Path(home), cpu))
        except NoWheel:
            return Outcome(f"not run: pip has no `+cpu` wheel of torch {row.torch} for Python {row.python}")
        except subprocess.CalledProcessError as error:
            what = " ".join(map(str, error.cmd[1:4])).replace(home, "").strip()
            return Outcome(f"not run: `{what}` ended with status {error.returncode}")
        except subprocess.TimeoutExpired:
            return Outcome("not run to the end", f"stopped after {LIMIT} s", day=today())


def later(before: Outcome, now: Outcome) -> Outcome:
    """What the page says: what was found now, or before, if nothing ran now."""
    return now if now.result or not before.result else before


def written(outcomes: Mapping[Row, Outcome]) -> str:
    """The page."""
    parts = ["# Versions", fill(OPENING, 120)]
    table = ["| Python | torch | transformers | ran with | result | day |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        x = outcomes[row]
        table.append(f"| {row.python} | {row.torch} | {row.transformers} | {x.ran} | {x.result} | {x.day} |")
    parts += ["\n".join(table), fill(CAUSES, 120, break_on_hyphens=False, break_long_words=False)]
    for row in ROWS:
        if outcomes[row].failed:
            parts.append(f"Failed under {row}:")
            parts.append("\n".join(f"- `{test}`" for test in outcomes[row].failed))
    return "\n\n".join(parts) + "\n"


def read(page: str) -> dict[Row, Outcome]:
    """The rows of a page that was written before."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and Row(*cells[:3]) in ROWS:
            row = Row(*cells[:3])
            _, _, after = page.partition(f"\nFailed under {row}:\n\n")
            tests = re.match(r"(?:- `.*`\n)*", after)
            found[row] = Outcome(cells[3], cells[4], tuple(re.findall("`(.*)`", tests[0] if tests else "")), cells[5])
    return found


def main() -> int:
    """Runs the rows that the command line names, and writes the page."""
    parser = argparse.ArgumentParser(description="Runs the tests of each row, and writes docs/versions.md.")
    parser.add_argument("--only", nargs="+", choices=list(map(str, ROWS)), help="these rows, as `3.11 2.12 5.17`")
    parser.add_argument("--python", nargs="+", default=[], metavar="3.13=PATH", help="Pythons that are not on PATH")
    parser.add_argument("--cpu", action="store_true", help="only where pip finds a wheel of torch for CPUs")
    given = parser.parse_args()
    pythons = dict(each.split("=", 1) for each in given.python)
    page = PAGE.read_text() if PAGE.exists() else ""
    outcomes = {row: Outcome("not run yet") for row in ROWS} | read(page)
    for row in ROWS:
        if not given.only or str(row) in given.only:
            now = outcome(row, pythons, given.cpu)
            print(f"{row}: {now}", flush=True)
            outcomes[row] = later(outcomes[row], now)
            PAGE.write_text(written(outcomes))
    return int(any(found.failed for found in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
