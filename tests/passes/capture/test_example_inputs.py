"""example_inputs: the arguments a model is captured with where the user gave none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import gpt
from torch import Tensor, nn

import autotp
from autotp.models.bert import BERT, BERTConfig
from autotp.passes.capture.example_inputs import example_inputs

IDS, LABELS = (torch.int64, (2, 5)), (torch.int64, (2, 5))


class Tokens(nn.Module):
    """A language model in nanoGPT's manner."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)

    def logits(self, idx: Tensor) -> Tensor:
        return self.head(self.embedding(idx))

    def forward(self, idx: Tensor, targets: Tensor | None = None, mask: Tensor | None = None) -> Any:
        logits = self.logits(idx)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class NeedsLabels(Tokens):
    def forward(self, idx: Tensor, labels: Tensor, reduction: str = "mean") -> Any:  # type: ignore[override]
        return F.cross_entropy(self.logits(idx).flatten(0, 1), labels.flatten(), reduction=reduction)


class Classifier(Tokens):
    """Labels of two kinds: one for each sequence, and one for each token."""

    def forward(self, idx: Tensor, label: Tensor | None = None, lm_labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.logits(idx)
        if label is None or lm_labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, 0], label) + F.cross_entropy(logits.flatten(0, 1), lm_labels.flatten())
        return {"loss": loss, "logits": logits}


class NoLoss(Tokens):
    """It takes labels, but no scalar comes of it."""

    def forward(self, idx: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        scale = torch.rand((), device="cpu") if self.training else 1.0
        return self.logits(idx if labels is None else idx + labels) * scale


class NoLossForCausalLM(NoLoss):
    """It ran on meta, so its name tells nothing."""


class ReadsValues(Tokens):
    """It cannot run on meta."""

    def forward(self, idx: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        return self.logits(idx)[: int(idx.max())]


class ReadsValuesForCausalLM(ReadsValues):
    """The name tells the labels' shape."""


class ReadsValuesAndLabels(Tokens):
    def forward(self, idx: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return self.logits(idx + labels)[: int(idx.max())]


class PositionalOnly(Tokens):
    def forward(self, idx: Tensor, /) -> Any:  # type: ignore[override]
        return self.logits(idx)


class Bags(nn.Module):
    """Ids like those of an embedding; its first linear layer would say features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(7, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.bags(ids))


class Dummy(Tokens):
    """Ids above the vocabulary, as in Hugging Face's `dummy_inputs` of a small configuration."""

    dummy_inputs = {"idx": torch.tensor([[1, 6, 7], [50, 2, 0]]), "scale": torch.tensor([9.5])}  # noqa: RUF012

    def forward(self, idx: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
        return self.logits(idx) * scale


class PassesOn(nn.Module):
    """As peft's wrappers: the model within has the names."""

    dummy_inputs = {"idx": torch.tensor([[1, 6, 5], [4, 2, 0]])}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tokens()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class PassesNoLabelsOn(PassesOn):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.logits(kwargs["idx"])


class OthersDummy(Dummy):
    """As Hugging Face's vision models: the names are not those of forward."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.logits(x)


class Image(nn.Module):
    """It takes images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.head = nn.Linear(8, 2)

    def forward(self, pixels: Tensor | None = None, other: Tensor | None = None) -> Any:
        return self.head(self.patches(pixels).flatten(2).mT)


class Digits(Image):
    """It takes images of 28 places by 28."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(1, 2, 4, stride=4), nn.Linear(98, 2)

    def forward(self, pixels: Tensor) -> Any:  # type: ignore[override]
        return self.head(self.patches(pixels).flatten(1))


class Named(Image):
    """It says of what size its images are."""

    img_size = (8, 12)


class ReadsValuesAndTargets(Tokens):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(idx[: int(idx.max())], targets)


def test_example_inputs_warn_of_left_out_labels() -> None:
    """Without them no loss is planned, and nothing else says so."""
    with pytest.warns(
        UserWarning, match=r'`targets` is left out .* Pass example_inputs=\{"idx": ..., "targets": ...\}'
    ):
        args, kwargs = example_inputs(ReadsValuesAndTargets())
    assert args == () and list(kwargs) == ["idx"]


FOUND: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tokens": (Tokens, {"idx": IDS, "targets": LABELS}),
    "bags": (Bags, {"ids": IDS}),
    "needs-labels": (NeedsLabels, {"idx": IDS, "labels": LABELS}),
    "classifier": (Classifier, {"idx": IDS, "label": (torch.int64, (2,)), "lm_labels": LABELS}),
    "no-loss": (NoLoss, {"idx": IDS}),
    "no-loss-named": (NoLossForCausalLM, {"idx": IDS}),
    "reads-values": (ReadsValues, {"idx": IDS}),
    "reads-values-and-labels": (ReadsValuesAndLabels, {"idx": IDS, "labels": LABELS}),
    "reads-values-named": (ReadsValuesForCausalLM, {"idx": IDS, "labels": LABELS}),
    "dummy": (Dummy, {"idx": (torch.int64, (2, 3)), "scale": (torch.float32, (1,))}),
    "passes-on": (PassesOn, {"idx": (torch.int64, (2, 3)), "targets": (torch.int64, (2, 3))}),
    "passes-no-labels-on": (PassesNoLabelsOn, {"idx": (torch.int64, (2, 3))}),
    "others-dummy": (OthersDummy, {"x": IDS}),
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4)), {"input": (torch.float32, (2, 5, 3))}),
    "bfloat16": (lambda: nn.Linear(3, 4, dtype=torch.bfloat16), {"input": (torch.bfloat16, (2, 5, 3))}),
    "layer-norm": (lambda: nn.Sequential(nn.LayerNorm((3, 4))), {"input": (torch.float32, (2, 5, 3, 4))}),
    "rms-norm": (lambda: nn.RMSNorm(6, elementwise_affine=False), {"x": (torch.float32, (2, 5, 6))}),
    "image": (Image, {"pixels": (torch.float32, (2, 3, 64, 64))}),
    "digits": (Digits, {"pixels": (torch.float32, (2, 1, 28, 28))}),
    "named-size": (Named, {"pixels": (torch.float32, (2, 3, 8, 12))}),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16), {"src": (torch.float32, (2, 5, 8))}),
    "gpt": (
        lambda: gpt(block_size=8, vocab_size=9, n_layer=1, n_head=1, n_embd=4),
        {"tokens": (torch.int64, (2, 7)), "labels": (torch.int64, (2, 7))},
    ),
    "bert": (
        lambda: BERT(BERTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=1, n_embd=4)),
        dict.fromkeys(("tokens", "types", "mask", "labels"), (torch.int64, (2, 7)))
        | {"next_sentence": (torch.int64, (2,))},
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", FOUND)
@pytest.mark.filterwarnings("ignore:.* is left out of the example inputs")
def test_example_inputs_are_found_from_the_model(name: str, device: str) -> None:
    make, want = FOUND[name]
    with torch.device(device):
        model = make()
    state = torch.get_rng_state()
    args, kwargs = example_inputs(model)
    assert args == ()
    assert {n: (x.dtype, tuple(x.shape)) for n, x in kwargs.items()} == want
    assert torch.equal(torch.get_rng_state(), state)
    if device == "cpu":
        model(**kwargs)  # the values are valid


def test_example_inputs_of_positional_only_arguments() -> None:
    args, kwargs = example_inputs(PositionalOnly())
    assert kwargs == {}
    assert [x.tolist() for x in args] == [[[0, 1, 2, 3, 4], [5, 6, 0, 1, 2]]]


def test_dummy_ids_are_below_the_size_of_the_embedding() -> None:
    _, kwargs = example_inputs(Dummy())
    assert kwargs["idx"].tolist() == [[1, 6, 6], [6, 2, 0]]
    assert kwargs["scale"].tolist() == [9.5]


X, Y = torch.zeros(3), torch.ones(4)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        pytest.param({"x": X, "flag": True}, ((), {"x": X, "flag": True}), id="dict"),
        pytest.param({}, ((), {}), id="empty"),
        pytest.param((X, Y), ((X, Y), {}), id="tuple"),
        pytest.param([X, None], ((X, None), {}), id="list"),
        pytest.param(X, ((X,), {}), id="tensor"),
    ],
)
def test_example_inputs_take_what_is_given(given: Any, want: Any) -> None:
    assert example_inputs(Dummy(), given) == want


HUGGING_FACE: dict[str, dict[str, tuple[int, ...]]] = {
    "BertForPreTraining": {"input_ids": (3, 5), "labels": (3, 5), "next_sentence_label": (3,)},
    "BertForSequenceClassification": {"input_ids": (3, 5), "labels": (3,)},
    "BertForQuestionAnswering": {"input_ids": (3, 5)},
    "LlamaForCausalLM": {"input_ids": (3, 5), "labels": (3, 5)},
    "OPTForCausalLM": {"input_ids": (3, 5), "labels": (3, 5)},  # it cannot run on meta
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_example_inputs_of_transformers_language_models(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 6}
    config = getattr(transformers, name).config_class(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    args, kwargs = example_inputs(model)
    assert args == ()
    assert {n: tuple(x.shape) for n, x in kwargs.items()} == HUGGING_FACE[name]
    assert int(kwargs["input_ids"].max()) == 5


VISION: dict[str, dict[str, tuple[int, ...]]] = {
    "ViTModel": {"pixel_values": (2, 3, 16, 16)},
    "ViTForImageClassification": {"pixel_values": (2, 3, 16, 16), "labels": (2,)},
    "Dinov2Model": {"pixel_values": (2, 3, 16, 16)},
}


@pytest.mark.parametrize("name", VISION)
def test_example_inputs_of_transformers_vision_models(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    model = getattr(transformers, name)(getattr(transformers, name).config_class(**sizes)).eval()
    _, kwargs = example_inputs(model)
    assert {n: tuple(x.shape) for n, x in kwargs.items()} == VISION[name]
    assert autotp.verify(model, tp=2).ok


# ---- what it refuses


class Memory(Tokens):
    def forward(self, idx: Tensor, memory: Tensor, size: int, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        return self.logits(idx)


class MemoryOnly(Tokens):
    def forward(self, idx: Tensor, memory: Tensor, /) -> Any:  # type: ignore[override]
        return self.logits(idx)


class Anything(Tokens):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.logits(args[0])


class Sound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(1, 8, 4)

    def forward(self, wave: Tensor | None = None, labels: Tensor | None = None) -> Any:
        return self.frames(wave)


WHAT = ", with a small tensor, or what your own calls pass, for each ..."
ERRORS: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "more": (
        Memory,
        None,
        """cannot infer what Memory.forward takes as `memory` and `size`
  try      example_inputs={"idx": torch.zeros(2, 5, dtype=torch.int64), "memory": ..., "size": ...}"""
        + WHAT,
    ),
    "positional": (
        MemoryOnly,
        None,
        """cannot infer what MemoryOnly.forward takes as `memory`
  try      example_inputs=(torch.zeros(2, 5, dtype=torch.int64), ...,)"""
        + WHAT,
    ),
    "anything": (
        Anything,
        None,
        """cannot infer what Anything.forward takes as *args
  try      example_inputs=(...,)"""
        + WHAT,
    ),
    "sound": (
        Sound,
        None,
        """cannot infer what Sound.forward takes as `wave`
  try      example_inputs={"wave": ...}"""
        + WHAT,
    ),
    "no-layer": (
        nn.Identity,
        None,
        """cannot infer what Identity.forward takes as `input`
  try      example_inputs={"input": ...}"""
        + WHAT,
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2),
        None,
        """cannot infer what MultiheadAttention.forward takes as `key` and `value`
  try      example_inputs={"query": torch.randn(2, 5, 8), "key": ..., "value": ...}"""
        + WHAT,
    ),
    "type": (
        Tokens,
        "tokens",
        """example_inputs is of type str
  expected a dict of keyword arguments, a tuple of positional ones, or one tensor""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_example_inputs_say_what_is_missing(name: str) -> None:
    make, given, message = ERRORS[name]
    with pytest.raises(autotp.Error) as error:
        example_inputs(make(), given)
    assert str(error.value) == message
