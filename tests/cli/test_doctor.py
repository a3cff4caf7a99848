"""`autotp doctor`: alone, with a problem, and among ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def test_alone(autotp_command) -> None:
    done = autotp_command("doctor")
    assert (done.status, done.err) == (0, "") and "no launcher" in done.out and "all-reduce" not in done.out
    last = done.out.splitlines()[-1]
    assert last.startswith("verdict       ready") and "torchrun --nproc-per-node" in last
    data = autotp_command("doctor", "--json").json
    assert (
        data["ok"] and data["launcher"] is None and data["all_reduce"] is None and data["backend"] in ("gloo", "nccl")
    )
    assert data["packages"]["torch"]["state"] in ("tested", "untested")


def test_a_problem(autotp_command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    done = autotp_command("doctor", "--json")
    assert done.status == 1 and not done.json["ok"] and done.json["variables"]["SLURM_JOB_ID"] == "7"
    told = autotp_command("doctor").out
    assert "problem       in a SLURM allocation" in told
    assert told.splitlines()[-1] == "verdict       not ready: 1 problem, see above"


@pytest.mark.system
def test_two_ranks() -> None:
    """Only the first one prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, "-m", "autotp", "doctor", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["launcher"] == {"by": "torchrun", "rank": 0, "size": 2, "local_rank": 0, "local_size": 2}
    assert data["all_reduce"]["bytes"] == 2**24 and data["all_reduce"]["seconds"] > 0
