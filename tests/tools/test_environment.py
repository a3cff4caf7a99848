"""What is said about where autotp runs is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from autotp.tools.environment import LIBRARIES, TESTED, Installed, advice_of, examine, problems_of

ROOT = Path(__file__).resolve().parents[2]
RUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}


def test_the_tested_versions_are_those_that_are_pinned() -> None:
    pins = re.findall(r"^([\w-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {name: found for name, found in reversed(pins) if name in TESTED} == TESTED
    assert TESTED.keys() - {"torch", "numpy"} <= LIBRARIES.keys()


@pytest.mark.parametrize(
    ("found", "tested", "state"),
    [("", "1.0", "missing"), ("1.0", "1.0", "tested"), ("1.0+cpu", "1.0", "tested"), ("1.1", "1.0", "untested"),
     ("1.0", "", "untested")],
)  # fmt: skip
def test_installed_says_how_a_version_compares(found: str, tested: str, state: str) -> None:
    assert Installed("x", found, tested).state == state


@pytest.mark.parametrize(
    ("variables", "gpus", "told"),
    [
        ({}, 0, []),
        (RUN, 2, []),
        (RUN, 1, ["2 processes here share 1 GPUs"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            0,
            ["some of torchrun's variables are set, but not MASTER_ADDR, MASTER_PORT"],
        ),
        ({**RUN, "RANK": "first"}, 0, ["RANK=first is no number"]),
        ({"SLURM_JOB_ID": "7"}, 0, ["in a SLURM allocation, but not started by srun"]),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, 0, []),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "SLURM_PROCID": "0"}, 0, []),
    ],
    ids=["alone", "torchrun", "gpus", "some", "number", "slurm", "srun", "address"],
)
def test_problems_of_variables_and_gpus_are_told(variables: dict[str, str], gpus: int, told: list[str]) -> None:
    found = problems_of(variables, gpus)
    assert len(found) == len(told) and all(a.startswith(b) for a, b in zip(found, told, strict=True))


def test_problems_have_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert problems_of({}, 0) == ["torch 2.9.1 is too old: pip install 'torch>=2.13'"]


def test_examine_of_a_process_alone_finds_no_problem() -> None:
    found = examine()
    assert found.launcher is None and found.all_reduce is None and found.ok
    assert found.packages["torch"] == Installed("torch", torch.__version__, TESTED["torch"])


def test_older_gpus_need_one_queue_of_work() -> None:
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert not advice_of({}, []) and not advice_of({}, [10, 12]) and not advice_of(one, [8, 9])
    for variables in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}):
        assert [line.split(",")[0] for line in advice_of(variables, [9])] == ["CUDA_DEVICE_MAX_CONNECTIONS=1"]
