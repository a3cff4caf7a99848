"""The comparison of other libraries' models on real ranks: what is right, what is not, what is missing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import library_walk
from support.hf_walk import CRASHED, REFUSED, RIGHT, SLOW, WRONG, Walked, read
from support.library_models import LIBRARIES, MODELS, built
from support.library_walk import FILES, PAGE, RESULTS, libraries, page
from support.rank_checks import TOLERANCE, Compared, compared
from torch import Tensor, nn

import autotp


def test_torch_layers_on_real_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank has a hash seed of its own. What the file has is not compared again; a missing library is named."""
    file = tmp_path / "found.jsonl"
    libraries(["torch/encoder-padding"], file, (), 100)
    (found,) = read(file)
    assert (found.name, found.outcome) == ("torch/encoder-padding", RIGHT) and found.share > 0.9
    assert found.version == torch.__version__
    file.write_text(file.read_text().replace("0.9", "0.8"))
    libraries(["torch/encoder-padding"], file, (), 100)
    assert len(file.read_text().splitlines()) == 1


def test_a_missing_library_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_walk, "MODULES", dict.fromkeys(LIBRARIES, "no_such_library"))
    libraries([], tmp_path / "found.jsonl", (), 100)
    assert "timm is not installed: its " in capsys.readouterr().out
    assert not (tmp_path / "found.jsonl").exists()


class Different(nn.Module):
    """Computes something else in its copy, which is made parallel, or something that cannot be parallel."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.copied = how, False
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.copied = True

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "cast":
            x = x.float()
        if self.how == "refused":
            torch.manual_seed(0)
        if self.how == "buffer":
            self.calls += 2 if self.copied else 1
        y = self.up(x).relu()
        if self.how == "rows" and x.shape[0] == 3:
            y = y * (2 if self.copied else 1)
        return self.down(y * 2 if self.how == "gradient" and self.copied else y)


@pytest.mark.parametrize(("how", "found"), [
    ("none", ""), ("cast", ""), ("gradient", "train, same values"), ("buffer", "train, same values"),
    ("rows", "longer values"),
])  # fmt: skip
def test_a_difference_is_found(how: str, found: str) -> None:
    answer = compared(lambda: (Different(how), (torch.ones(2, 4),)), 1, 0)
    assert bool(answer.difference) == bool(found) and found in answer.difference, answer
    assert not answer.error and not answer.crash


def test_all_ranks_start_in_train_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has compared a model before has its default activation, in evaluation mode."""
    activation, modes = nn.ReLU().eval(), list[bool]()

    def parallelize(model: nn.Module, *args: Any, **given: Any) -> nn.Module:
        modes.extend(module.training for module in model.modules())
        return model

    monkeypatch.setattr(autotp, "parallelize", parallelize)
    compared(lambda: (nn.Sequential(nn.Linear(4, 4), activation), (torch.ones(2, 4),)), 1, 0)
    assert modes == [True, True, True]


def test_errors_are_told_apart() -> None:
    assert (
        "forward sets torch's random state" in compared(lambda: (Different("refused"), (torch.ones(2, 4),)), 1, 0).error
    )
    assert compared(lambda: 1 // 0, 1, 0).crash.startswith("ZeroDivisionError")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(("answers", "outcome"), [
    ([Compared(), Compared()], RIGHT),
    ([Compared(), Compared(difference="1.0 of the loss")], WRONG),
    ([Compared(error="f: no\n  at  x.py:1  y"), Compared(error="f: no\n  at  x.py:1  y")], REFUSED),
    ([Compared(), Compared(error="f: no")], CRASHED),
    ([Compared(crash="KeyError: x"), Compared()], CRASHED),
])  # fmt: skip
def test_the_ranks_together(answers: list[Compared], outcome: str) -> None:
    assert library_walk._outcome("a", 2, answers).outcome == outcome


def test_page() -> None:
    found = [
        Walked("timm/vit", RIGHT, share=0.96, version="1.0"),
        Walked("timm/deit", RIGHT, share=0.66, version="1.0"),
        Walked("timm/x", REFUSED, "reads < 3", version="1.0"),
        Walked("torch/encoder", SLOW, "no end after 9 s", version="2.13.0+cpu"),
    ]
    text = page(found)
    assert "with torch 2.13.0." in text
    assert "**2 of 4 models are right.** 2 right, 1 refused, 0 wrong" in text
    assert "| timm | 1.0 | 3 | 2 | 1 | 0 | 0 |\n| torch | 2.13.0 | 1 | 0 | 0 | 0 | 1 |\n\n" in text
    assert "\n\n- timm/x is refused: reads &lt; 3.\n- torch/encoder is too slow: no end after 9 s.\n\n" in text
    assert text.endswith("\n\n- timm: vit, deit (66%)\n- torch: \n")


def test_the_page_is_of_now() -> None:
    """`python examples/hf_coverage.py --libraries` writes it again from the file of results."""
    known = {one.name: one for one in read(RESULTS)}
    assert page([known[name] for name in MODELS]) == PAGE.read_text().partition(FILES)[0]


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("torch/")])
def test_models_run(name: str) -> None:
    model, given = built(name)
    call: Any = model(**given) if isinstance(given, dict) else model(*given)
    assert call is not None and TOLERANCE < 1e-3
