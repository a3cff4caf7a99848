"""The walk over all classes of transformers: small models by rules, a file that goes on, a page."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import hf_shrink, hf_walk
from support.hf_shrink import Way, classes, smallest
from support.hf_walk import LARGE, MEMORY, RIGHT, SLOW, UNBUILT, WRONG, Walked, page, read, sampled, verified, walk
from torch import Tensor, nn

import autotp
from autotp.diagnostics.differences import Difference


@pytest.mark.parametrize(("name", "arguments"), [
    ("BertForMaskedLM", {"input_ids", "attention_mask", "labels"}),
    ("ViTForImageClassification", {"pixel_values", "labels"}),
    ("WhisperForConditionalGeneration", {"input_features", "labels"}),
    ("Starcoder2ForSequenceClassification", {"input_ids", "attention_mask", "labels"}),  # It needs a token for padding.
    ("VisionEncoderDecoderModel", {"pixel_values", "labels"}),  # Its configuration has no defaults.
])  # fmt: skip
def test_small_models_run(name: str, arguments: set[str]) -> None:
    model, call = smallest(name)
    assert set(call) == arguments and name in classes()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model(**call).loss.isfinite()


@pytest.mark.parametrize(("name", "arguments"), [
    ("DepthAnythingForDepthEstimation", {"pixel_values"}),  # Its neck needs four layers of the backbone.
    ("Qwen3VLVisionModel", {"hidden_states", "grid_thw"}),
    ("Swinv2Model", {"pixel_values"}),  # It has as many numbers of heads as stages.
    ("GraniteSpeech5ForCTC", {"input_features"}),  # As wide as its first layer.
    ("PatchTSTForRegression", {"past_values"}),
])  # fmt: skip
def test_small_models_of_images_sounds_and_series_run(name: str, arguments: set[str]) -> None:
    model, call = smallest(name)
    assert arguments <= set(call) and model.training
    assert sum(p.numel() for p in model.parameters()) < 1_000_000


def test_a_model_that_does_not_train_is_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = smallest("ReformerForMaskedLM")  # In training its sequence has one length.
    assert not model.training
    monkeypatch.setattr(hf_walk, "smallest", lambda name: (nn.Linear(4, 4).eval(), {"input": torch.ones(2, 4)}))
    found = verified("Linear", (2,))
    assert (found.outcome, found.message) == (RIGHT, hf_walk.EVAL_ONLY)


class Normed(nn.Module):
    """Normalizes values that hardly differ, so that round-off becomes what differs. input: [rows, 4]"""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.spread = spread
        self.first, self.norm, self.last = nn.Linear(4, 12), nn.LayerNorm(12, eps=1e-30), nn.Linear(12, 4)

    def forward(self, input: Tensor) -> Tensor:
        return self.last(self.norm(1 + self.spread * self.first(input)).tanh())


CALL = {"input": torch.linspace(-1, 1, 8).view(2, 4)}


def test_how_much_a_model_magnifies_round_off() -> None:
    assert hf_walk.sensitivity(Normed(1.0), CALL) < 1e-13
    assert 1e-9 < hf_walk.sensitivity(Normed(1e-9), CALL) < 1e-2


@pytest.mark.parametrize(
    ("spread", "difference", "outcome"),
    [(1.0, 1e-8, WRONG), (1.0, float("nan"), WRONG), (1e-9, float("nan"), WRONG), (1e-9, 1e-8, RIGHT)],
)
def test_round_off_that_a_model_magnifies_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, spread: float, difference: float, outcome: str
) -> None:
    report = autotp.verify(Normed(1.0), 2, example_inputs=CALL)
    found = replace(report, gradients=(Difference("first.weight", difference),))
    monkeypatch.setattr(hf_walk, "smallest", lambda name: (Normed(spread), CALL))
    monkeypatch.setattr(autotp, "verify", lambda *_, **__: found)
    walked = verified("Normed", (2,))
    assert walked.outcome == outcome and "on one device if weights change by 1e-15" in walked.message


def test_fields_keep_their_defaults_where_a_model_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second field is tried with the first one whose default changes the error."""
    model = nn.Linear(1, 1), dict[str, object]()
    tried = []

    def built(kind: object, default: object, way: Way, train: bool) -> object:
        tried.append(sorted(way.kept))
        wanted = [field for field in ("hidden_size", "vocab_size") if field not in way.kept]
        return f"needs {wanted[0]} of {len(tried)}" if wanted else model

    monkeypatch.setattr(hf_shrink, "_built", built)
    default = {"hidden_size": 64, "vocab_size": 900, "intermediate_size": 256, "eps": 1.0}
    assert hf_shrink._relaxed(None, default, Way(8), train=True, ends=time.monotonic() + 9) is model
    assert tried == [[], ["hidden_size"], ["intermediate_size"], ["vocab_size"], ["hidden_size", "intermediate_size"],
                     ["hidden_size", "vocab_size"]]  # fmt: skip


def test_heads_are_divided() -> None:
    small = hf_shrink._small({"num_attention_heads": 12, "head_dim": 64, "hidden_size": 768}, Way(8, heads=True))
    assert small == {"num_attention_heads": 1, "head_dim": 64, "hidden_size": 96}


def test_two_labels_are_left() -> None:
    """A mapping of numbers to numbers stays: patches to queries."""
    fields = {"id2label": {0: "a", 1: "b", 2: "c"}, "queries": {"1225": 128, "4900": 256}}
    assert hf_shrink._small(fields, Way(16)) == {"id2label": {0: "a", 1: "b"}, "queries": fields["queries"]}


def test_two_layers_of_different_kinds_are_left() -> None:
    kinds = ["local", "local", "local", "global"] * 2
    small = hf_shrink._small({"num_hidden_layers": 8, "layer_types": kinds}, Way(16))
    assert small == {"num_hidden_layers": 2, "layer_types": ["local", "global"]}


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


class Endless(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        while True:
            pass


def test_a_model_gets_no_more_time_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is that of the processor: a busy machine does not make a model slow."""
    monkeypatch.setattr(hf_walk, "smallest", lambda name: (Endless(4, 4), {"x": torch.ones(2, 4)}))
    monkeypatch.setattr(hf_walk, "BUSY", 1000)
    (found,) = walk(["Endless"], (2,), tmp_path / "found.jsonl", limit=1)
    assert (found.outcome, found.message) == (SLOW, "no end after 1 s")


def test_the_start_of_a_walk_is_a_sample() -> None:
    names = list(classes())
    found = sampled(names)
    assert found == sampled(reversed(names)) and found != names and sorted(found) == names


def test_page() -> None:
    found = [
        Walked("B", "refused", "reads `x` of 3 < 4 | 5", "b.py:1  if x[0](y):"),
        Walked("C", "refused", "reads `y` of 4 < 4 | 5"),
        Walked("A", RIGHT, share=0.96),
        Walked("D", UNBUILT, "no arguments for `x` of 3"),
        Walked("E", UNBUILT, "no arguments for `y` of 4"),
    ]
    text = page(found, (2, 3), 9, 1458)
    assert "in a random order, 5 of 1,458 so far" in text
    assert "**1 of the 3 classes that could be built are right.** 1 right, 2 refused, 0 wrong, " in text
    assert "| 2 | no arguments for ... of N |" in text
    assert text.index("| B | refused | reads `x` of 3 &lt; 4 / 5; b.py:1") < text.index("| C | refused |")
    assert "| A |" not in text and "| D |" not in text, "these are in the data file"
    assert "if x[0]&#40;y):" in text  # No link.
