"""`autotp doctor`: alone, with a problem, and among ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from autotp.tools import environment
from autotp.tools.environment import LIBRARIES, TESTED


def test_doctor_of_one_process_is_ready(autotp_command) -> None:
    done = autotp_command("doctor")
    assert (done.status, done.err) == (0, "") and "no launcher" in done.out and "all-reduce" not in done.out
    last = done.out.splitlines()[-1]
    assert last.startswith("verdict       ready") and "torchrun --nproc-per-node" in last
    data = autotp_command("doctor", "--json").json
    assert (
        data["ok"] and data["launcher"] is None and data["all_reduce"] is None and data["backend"] in ("gloo", "nccl")
    )
    assert data["packages"]["torch"]["state"] in ("tested", "untested")


def column(out: str, name: str) -> dict[str, str]:
    """Returns a column of the table of libraries: library -> its cell, of all lines of its row."""
    lines = out.split("\n\n")[1].splitlines()
    head = lines[0]
    names = ["library", "here", "tests", "what works"]
    starts = [head.index(each) for each in names]
    at, end = starts[names.index(name)], [*starts, None][names.index(name) + 1]
    found, library = dict[str, str](), ""
    for line in lines[1:]:
        library = line[starts[0] : starts[1]].strip() or library
        found[library] = f"{found.get(library, '')} {line[at:end].strip()}".strip()
    return found


def test_doctor_says_what_works_with_each_library(autotp_command, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the table, in JSON, and in the variables that say what is not there."""
    version = environment.version

    def without_peft(name: str) -> str:
        if name == "peft":
            raise PackageNotFoundError(name)
        return version(name) if name != "tqdm" else "0.0.1"

    monkeypatch.setattr(environment, "version", without_peft)
    done = autotp_command("doctor")
    told = column(done.out, "what works")
    assert set(LIBRARIES) <= set(told) and told["torch"] == ""
    assert {name: told[name].replace(" ", "") for name in LIBRARIES} == {
        name: text.replace(" ", "") for name, text in LIBRARIES.items()
    }
    here, tested = column(done.out, "here"), column(done.out, "tests")
    assert (here["peft"], tested["peft"]) == ("missing", TESTED["peft"]) and tested["deepspeed"] == "none"
    assert here["tqdm"] == "0.0.1" and "not the versions that were tested together: tqdm" in done.out
    data = autotp_command("doctor", "--json").json["packages"]
    assert {name: data[name]["works"] for name in LIBRARIES} == LIBRARIES
    assert data["peft"] == {
        "version": "", "tested": TESTED["peft"], "state": "missing", "works": LIBRARIES["peft"],
    }  # fmt: skip
    assert (data["tqdm"]["state"], data["torch"]["works"]) == ("untested", "")


def test_doctor_prints_a_problem_with_status_1(autotp_command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    done = autotp_command("doctor", "--json")
    assert done.status == 1 and not done.json["ok"] and done.json["variables"]["SLURM_JOB_ID"] == "7"
    told = autotp_command("doctor").out
    assert "problem       in a SLURM allocation" in told
    assert told.splitlines()[-1] == "verdict       not ready: 1 problem, see above"


@pytest.mark.system
def test_doctor_of_two_ranks_prints_once() -> None:
    """Only the first one prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, "-m", "autotp", "doctor", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["launcher"] == {
        "by": "torchrun", "rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "job": "",
    }  # fmt: skip
    assert data["all_reduce"]["bytes"] == 2**24 and data["all_reduce"]["seconds"] > 0
