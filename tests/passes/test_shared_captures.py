"""Models that tests build alike are captured once, also by several processes, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graphs import CAPTURED_ANEW, CAPTURES, shared_captures
from small_models import Plain, gpt, tokens
from torch import nn

import autotp
from autotp import compiler


def count(monkeypatch: pytest.MonkeyPatch, test: Path, models: list[nn.Module], x: torch.Tensor) -> int:
    """How many captures the plans of these models take."""
    captured, real = [], compiler.capture
    monkeypatch.setattr(compiler, "capture", lambda *asked: captured.append(asked) or real(*asked))
    CAPTURES.clear()
    with shared_captures(test):
        for model in models:
            autotp.explain(model, 2, example_inputs=x)
    return len(captured)


def setting(model: nn.Module) -> None:
    model.setting = 1  # type: ignore[assignment]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "mode": lambda model: model.eval(),
    "attribute": setting,
    "frozen": lambda model: model.requires_grad_(False),
    "width": lambda model: setattr(model, "down", nn.Linear(32, 4)),
}


def test_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(monkeypatch, Path(__file__), [Plain(), Plain()], torch.ones(2, 8)) == 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed(change: Callable[[nn.Module], object], monkeypatch: pytest.MonkeyPatch) -> None:
    other = Plain()
    change(other)
    assert count(monkeypatch, Path(__file__), [Plain(), other], torch.ones(2, 8)) == 2


def test_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What one process wrote, another reads: the plan and all values and gradients are as with a capture of its own."""
    captured, real = [], compiler.capture
    monkeypatch.setattr(compiler, "capture", lambda *asked: captured.append(asked) or real(*asked))
    plans, counts = [], []
    for _ in range(2):
        CAPTURES.clear()  # as in a new process
        with shared_captures(Path(__file__), tmp_path):
            plans.append(str(autotp.explain(gpt(), 2, example_inputs=tokens())))
            assert autotp.verify(gpt(), 2, example_inputs=tokens()).ok
        counts.append(len(captured))
        assert len(CAPTURES) == len(list(tmp_path.glob("*.lock"))) == counts[0]
    assert plans[0] == plans[1]
    assert counts == [2, 2], "explain and verify, for verify has float64"


def test_tests_of_capture_capture_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(monkeypatch, CAPTURED_ANEW / "test.py", [Plain(), Plain()], torch.ones(2, 8)) == 2
