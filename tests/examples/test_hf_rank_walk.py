"""The walk over classes of transformers on real ranks: what is right, what differs, what is refused, what ends."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from support import hf_rank_walk, hf_walk
from support.hf_rank_walk import SECTION, on_ranks, precision_of, section
from support.hf_shrink import classes
from support.hf_walk import CRASHED, REFUSED, RIGHT, UNBUILT, WRONG, Walked
from torch import Tensor, nn

import autotp
from autotp.passes.emit.python_calls import PYTHON_CALLS

CALL = {"input": torch.linspace(-1, 1, 32).view(4, 8)}


class Fed(nn.Module):
    """An MLP that does something before. input: [rows, 8]"""

    def __init__(self, more: Any = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.more = nn.Linear(8, 16), nn.Linear(16, 8), more

    def forward(self, input: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.more(input))))


def ended(x: Tensor) -> Tensor:
    return x if "RANK" not in os.environ or torch.compiler.is_compiling() else os._exit(3)


def walked(monkeypatch: pytest.MonkeyPatch, model: nn.Module, low: str = "") -> hf_walk.Walked:
    monkeypatch.setattr(hf_rank_walk, "smallest", lambda name: (model, CALL))
    monkeypatch.setattr(hf_rank_walk, "precision_of", lambda name: low)
    return on_ranks("Fed", (2,))


@pytest.mark.parametrize("low", ["", "bfloat16", "autocast"])
def test_a_right_model(monkeypatch: pytest.MonkeyPatch, low: str) -> None:
    found = walked(monkeypatch, Fed(), low)
    assert (found.outcome, found.message, found.arguments) == (RIGHT, low, ("input",))
    assert found.share > 0.9


@pytest.mark.parametrize(("low", "slope"), [("", 1.001), ("bfloat16", 2.0), ("autocast", 2.0)])
def test_a_wrong_model(monkeypatch: pytest.MonkeyPatch, low: str, slope: float) -> None:
    """The last pass is wrong: always, or in low precision only."""
    gelu = torch.ops.aten.gelu.default

    def steeper(x: Tensor, **kwargs: Any) -> Tensor:
        reduced = x.dtype != torch.float64
        return gelu(x, **kwargs) * (slope if reduced == bool(low) else 1.0)

    monkeypatch.setitem(PYTHON_CALLS, gelu, steeper)
    found = walked(monkeypatch, Fed(), low)
    assert found.outcome == WRONG and found.message.startswith(f"{low or 'train'}: "), found


def in_single(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        raise RuntimeError("dtype")
    return x


def of_no_leaf(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling() and not x.is_leaf:
        raise RuntimeError("only leaves")
    return x


@pytest.mark.parametrize("more", [in_single, of_no_leaf, lambda x: x + x.relu().log()])
def test_a_model_that_is_right_in_its_own_way(monkeypatch: pytest.MonkeyPatch, more: Any) -> None:
    """It trains in float32 only, reads its input as a leaf, or has values that are no numbers in the same places."""
    found = walked(monkeypatch, Fed(more))
    assert (found.outcome, found.message) == (RIGHT, ""), found


def test_a_model_that_does_not_train_in_bfloat16_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.ones(8, dtype=torch.float64)

    def in_no_bfloat16(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else x @ table

    found = walked(monkeypatch, Fed(in_no_bfloat16), "bfloat16")
    assert (found.outcome, found.message) == (RIGHT, "does not train in bfloat16 on one device"), found


def test_a_refused_model_and_a_rank_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise autotp.Error("parallelize(Fed, tp=2): no", fix="another model")

    with monkeypatch.context() as patched:
        patched.setattr(autotp, "parallelize", refuse)
        assert walked(patched, Fed()).outcome == REFUSED
    found = walked(monkeypatch, Fed(ended))
    assert found.outcome == CRASHED and found.message.startswith("ranks ended: ")


def test_what_does_not_run_says_why() -> None:
    assert on_ranks("NoSuchModel", (2,)).outcome == UNBUILT


def test_section() -> None:
    walked = [
        Walked("BModel", RIGHT, "bfloat16", arguments=("input_ids",)),
        Walked("AModel", RIGHT),
        Walked("DModel", REFUSED, "a loop", "d.py:3"),
        Walked("CModel", UNBUILT, "no argument"),
    ]
    text = section(walked, 1458)
    assert text.startswith(SECTION) and "walked 4 of 1,458 classes" in text
    assert "**2 of the 3 classes that could be built are right**, 1 of them in bfloat16" in text
    assert text.splitlines()[-1] == "| DModel | refused | a loop; d.py:3 |"


def test_a_fifth_is_in_low_precision() -> None:
    counted = Counter(map(precision_of, classes()))
    assert autotp and all(0.08 < counted[low] / len(classes()) < 0.12 for low in ("bfloat16", "autocast"))
