"""The walk over all classes of transformers: small models by rules, a file that goes on, a page."""

from pathlib import Path

import pytest
import torch
from support import hf_walk
from support.hf_shrink import classes, smallest
from support.hf_walk import LARGE, MEMORY, RIGHT, UNBUILT, Walked, page, read, sampled, verified, walk
from torch import Tensor, nn


@pytest.mark.parametrize(("name", "arguments"), [
    ("BertForMaskedLM", {"input_ids", "attention_mask", "labels"}),
    ("ViTForImageClassification", {"pixel_values", "labels"}),
    ("WhisperForConditionalGeneration", {"input_features", "labels"}),
])  # fmt: skip
def test_small_models_run(name: str, arguments: set[str]) -> None:
    model, call = smallest(name)
    assert set(call) == arguments and name in classes()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model(**call).loss.isfinite()


def test_what_does_not_run_says_why() -> None:
    with pytest.raises(LookupError, match="does not export"):
        smallest("NoSuchModel")
    assert verified("NoSuchModel", (2,)).outcome == UNBUILT


def test_a_walk_goes_on(tmp_path: Path) -> None:
    """What the file has is not verified again."""
    file = tmp_path / "found.jsonl"
    (first,) = walk(["NoSuchModel"], (2,), file)
    known = Walked("BertModel", RIGHT, share=0.5)
    file.write_text(file.read_text() + str(known.__dict__).replace("'", '"').replace("()", "[]") + "\n")
    assert list(walk(["NoSuchModel", "BertModel"], (2,), file)) == [first, known] == read(file)
    file.write_text(file.read_text().replace("right", "refused"))
    assert list(walk(["NoSuchModel"], (2,), file, again=["refused"])) == [first]  # Only what is asked for.


class Large(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(2 * MEMORY, dtype=torch.int8, device=x.device)[0]


def test_a_walk_goes_on_after_a_model_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no more memory than the limit, in a process of its own."""
    monkeypatch.setattr(hf_walk, "smallest", lambda name: (Large(4, 4), {"x": torch.ones(2, 4)}))
    (found,) = walk(["Large"], (2,), tmp_path / "found.jsonl")
    assert (found.outcome, found.message) == (LARGE, "more than 8 GiB")


def test_the_start_of_a_walk_is_a_sample() -> None:
    names = list(classes())
    found = sampled(names)
    assert found == sampled(reversed(names)) and found != names and sorted(found) == names


def test_page() -> None:
    found = [
        Walked("B", "refused", "reads `x` of 3 < 4 | 5", "b.py:1  if x:"),
        Walked("C", "refused", "reads `y` of 4 < 4 | 5"),
        Walked("A", RIGHT, share=0.96),
        Walked("D", UNBUILT, "no arguments"),
    ]
    text = page(found, (2, 3), 9)
    assert "**1 of the 3 classes that could be built are right.** 1 right, 2 refused, 0 wrong, " in text
    assert "| 2 | refused | reads ... of N &lt; N / N |" in text
    assert text.index("| A | right | 96% |  |") < text.index("| B | refused |  | reads `x` of 3 &lt; 4 / 5; b.py:1")
