"""The comparison of optimizers of other packages: what is right, what differs, what cannot be compared, the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import optimizer_walk
from support.optimizer_walk import ALONE, PAGE, REFUSED, RIGHT, WRONG, Small, compared, optimizers_of, page

import autotp


class Told(torch.optim.SGD):
    """Steps otherwise, raises, or needs a closure."""

    how, made = "", 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self).made += 1  # Twice in a training. The third one is that of the parallel model.

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.how == "error":
            raise autotp.Error("no")
        if self.how == "closure":
            assert closure is not None
            closure()
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(2 if self.how == "twice" and self.made in (5, 6) else 1)
        return super().step()


@pytest.mark.parametrize(("how", "outcome"), [
    ("", RIGHT), ("closure", RIGHT), ("twice", WRONG), ("error", ALONE),
])  # fmt: skip
def test_outcomes(how: str, outcome: str) -> None:
    whole, other = Small(), Small()
    other.load_state_dict(whole.state_dict())
    assert compared(type("Told", (Told,), {"how": how, "made": 0}), whole, other)[0] == outcome


def test_classes_of_a_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert {"AdamW", "Muon", "LBFGS"} <= optimizers_of("torch").keys()
    monkeypatch.setitem(optimizer_walk.PACKAGES, "none", "no_such_package")
    assert optimizers_of("none") == {}
    assert capsys.readouterr().out == "none is skipped: No module named 'no_such_package'\n"


def test_page() -> None:
    found = {"torch": {"SGD": (RIGHT, ""), "A": (ALONE, "x | y\nz"), "B": (REFUSED, "no"), "C": (WRONG, "differs")}}
    text = page(found, 2)
    assert "**1 of 3 optimizers that train so on one device are right.**" in text
    assert "| 1 | 1 | 1 | 1 | SGD |\n\n| package" in text and "| torch | A | not on one device | x / y |" in text


def test_the_readme_has_the_count_of_the_page() -> None:
    counts = re.search(r"\*\*(\d+) of (\d+) optimizers", PAGE.read_text())
    assert counts is not None and int(counts[2]) >= 200
    assert f"{counts[1]} of {counts[2]} " in (Path(PAGE).parents[1] / "README.md").read_text()
