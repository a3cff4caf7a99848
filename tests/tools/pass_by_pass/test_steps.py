"""steps: the passes in the order of the compiler, each with the seconds of its own, and what it got and returned."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from graphs import noted_passes
from torch import Tensor, nn

from autotp import compiler
from autotp.options import Options
from autotp.tools.pass_by_pass import steps as module
from autotp.tools.pass_by_pass.steps import run_steps


class Twice(nn.Module):
    """Computes one value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() + self.up(x).relu())


X = torch.ones(3, 8)


def test_each_pass_gets_what_the_one_before_returned() -> None:
    found = list(run_steps(Twice(), 2, Options(without=("bucket",)), X))
    expected = [*compiler.CANONICALIZE, *compiler.PLAN, *compiler.LOWER]
    wanted = [(each.stage, each.name) for each in expected if each.wanted(Options(without=("bucket",)))]
    assert [(step.stage, step.name) for step in found] == [
        ("capture", "capture"), *wanted, ("check", "check"), ("emit", "emit"),
    ]  # fmt: skip
    assert found[0].graphs[0] == () and found[0].was() == str(Twice())
    for before, after in itertools.pairwise(found):
        assert before.graphs[1] == after.graphs[0]
        assert after.name == "emit" or before.name == "check" or before.became() == after.was()
    cse = next(step for step in found if step.name == "cse")
    assert cse.was().count("relu(") == 2 and cse.became().count("relu(") == 1
    assert "up.weight: f32[16@tp, 8]" in found[-2].became().splitlines()
    assert "fresh=True" in found[-1].became() and not found[-3].types and len(found[-2].types) > 8


def test_steps_run_each_pass_but_the_last() -> None:
    """A row that is added to the tables is a step, or a part of the step `emit`, too. The last row writes Python."""
    with noted_passes() as ran:
        list(run_steps(Twice(), 2, Options(), X))
    tables = (*compiler.CANONICALIZE, *compiler.PLAN, *compiler.LOWER, *compiler.EMIT[:-1])
    assert ran == [row.name for row in tables if row.wanted(Options())]


def test_seconds_are_those_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only two passes turn; what the caller does between two steps does not count."""
    now = [0.0]

    def slow(table: str, name: str, seconds: float) -> None:
        def slowed(row: compiler.Pass) -> compiler.Pass:
            def run(*args: object) -> object:
                now[0] += seconds * (row.name == name)
                return row.run(*args)

            return replace(row, run=run)

        monkeypatch.setattr(compiler, table, tuple(map(slowed, getattr(compiler, table))))

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    slow("CANONICALIZE", "cse", 100.0), slow("LOWER", "fuse_bias", 10.0)
    seconds = {}
    for step in run_steps(Twice(), 2, Options(), X):
        seconds[step.name] = step.seconds
        now[0] += 7.0
    assert {name: spent for name, spent in seconds.items() if spent} == {"cse": 100.0, "fuse_bias": 10.0}
