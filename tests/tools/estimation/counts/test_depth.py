"""A model of many blocks is captured with few, and counted with all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.models.gpt import GPT, GPTConfig
from autotp.tools.estimation.counts import pieces
from autotp.tools.estimation.counts.depth import shorten, whole_order


class Windows(nn.Module):
    """Blocks that are alike but for a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        for i, block in enumerate(self.h):
            block.window = i % 2  # type: ignore[assignment]


class Counting(nn.Module):
    """A model that counts on its number of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch seq]"""
        x = self.embed(tokens)
        for i in range(6):
            x = torch.relu(self.h[i](x))
        return x.mean()


def gpt(layers: int = 9) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(block_size=32, vocab_size=128, n_layer=layers, n_head=4, n_embd=64))


def estimated(model: nn.Module, **given: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"gpu": "a100-80gb", "batch": 16, "sequence": 32, "dtype": torch.bfloat16, **given}
    return autotp.estimate(model, **options).to_dict()


def test_four_blocks_stand_for_all() -> None:
    model = gpt()
    assert shorten(model) == {"h": 9} and len(model.h) == 4
    order = whole_order([f"h.{i}" for i in range(4)], {"h": 9})
    assert [name for name, _ in order] == [f"h.{i}" for i in range(9)]
    assert [like for _, like in order] == ["h.0", *["h.1"] * 6, "h.2", "h.3"]


def test_blocks_with_other_attributes_are_not_alike() -> None:
    assert shorten(Windows()) == {} and shorten(gpt(4)) == {}


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 2, "pp": 3},
        {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"},
        {"recompute": "selective"},
    ],
    ids=["tp-pp", "sp-full", "selective"],
)
def test_the_estimate_is_that_of_the_whole_model(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    short = estimated(gpt(), **given)
    monkeypatch.setattr(pieces, "shorten", lambda model: {})
    whole = estimated(gpt(), **given)
    assert short["seconds"] == pytest.approx(whole["seconds"]) and short["stages"] == whole["stages"]
    for ours, theirs in zip(short["memory"], whole["memory"], strict=True):
        assert ours == pytest.approx(theirs)


def test_an_encoder_and_a_decoder_are_both_short(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    t5 = transformers.T5Config(d_model=64, d_ff=96, num_layers=6, num_heads=4, d_kv=16, vocab_size=128)
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(t5)
    short = estimated(model, tp=2)
    monkeypatch.setattr(pieces, "shorten", lambda model: {})
    whole = estimated(model, tp=2)
    assert short["seconds"] == pytest.approx(whole["seconds"]) and short["memory"][0] == pytest.approx(
        whole["memory"][0]
    )


def test_a_model_that_counts_on_its_blocks_is_captured_whole() -> None:
    found = estimated(Counting(), sequence=16)
    assert found["stages"][0] == [f"h.{i}" for i in range(6)]
