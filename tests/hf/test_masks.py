"""masks: attention leaves out the masks that it leaves out on one device; most models need no look at the padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    DogeConfig,
    DogeModel,
    GemmaConfig,
    GemmaModel,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5Model,
)
from transformers.masking_utils import create_bidirectional_mask

import autotp
from autotp.compiler import analyse
from autotp.hf.masks import as_on_one_device
from autotp.passes.capture.skeleton import skeleton_of

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 60}
IDS = torch.arange(2, 16).view(2, 7)
FULL, PADDED = torch.ones_like(IDS), (torch.arange(7) < torch.tensor([[7], [5]])).long()


def umt5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = UMT5Config(vocab_size=60, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0, **sizes)
    return UMT5Model(config)


def bart() -> nn.Module:
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    sizes = {**dict.fromkeys(names, 2), "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 40}
    return BartModel(BartConfig(vocab_size=60, d_model=32, dropout=0.0, **sizes))


def doge() -> nn.Module:
    """Adds a mask of its own to the causal one; without a causal one its attention is not causal."""
    return DogeModel(DogeConfig(**SIZES, num_key_value_heads=2, keep_window_size=64))


class Mixed(GemmaModel):  # type: ignore[misc]
    """Gives causal masks to attention whose modules say that they are not causal, as PaliGemma."""

    def __init__(self) -> None:
        super().__init__(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8))
        for layer in self.layers:
            layer.self_attn.is_causal = False


def call(model: nn.Module, mask: Tensor | None) -> dict[str, Any]:
    given = {"input_ids": IDS, **({} if mask is None else {"attention_mask": mask})}
    return {**given, "decoder_input_ids": IDS} if isinstance(model, UMT5Model | BartModel) else given


@pytest.mark.system
@pytest.mark.parametrize("mask", [FULL, PADDED, None], ids=["full", "padded", "none"])
@pytest.mark.parametrize("make", [umt5, bart, Mixed, doge], ids=["umt5", "bart", "mixed", "doge"])
def test_equal_to_one_device(make: Any, mask: Tensor | None) -> None:
    torch.manual_seed(0)
    model = make().eval()
    report = autotp.verify(model, 2, example_inputs=call(model, mask))
    assert report.ok, report


def reads(model: nn.Module, mask: Tensor) -> list[Any]:
    found = analyse(skeleton_of(model.eval()), (), call(model, mask), 2)
    return [read.outcome.value for read in found.captured.asked]


@pytest.mark.parametrize("mask", [FULL, PADDED], ids=["full", "padded"])
def test_no_look_at_the_padding(mask: Tensor) -> None:
    """Causal masks for causal modules, bidirectional ones for the others: the graph is right for all padding."""
    assert reads(LlamaModel(LlamaConfig(**SIZES)), mask) == []
    assert reads(BertModel(BertConfig(**SIZES)), mask) == []


def test_no_look_where_blocks_are_captured_one_by_one() -> None:
    """Blocks that are alike, and cannot be captured once, are no reason to look: such a model may be distributed."""
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    given = {"input_ids": IDS, "labels": IDS, "decoder_input_ids": IDS, "attention_mask": PADDED}
    assert autotp.verify(model, 2, pp=2, microbatches=2, example_inputs={**given, "decoder_attention_mask": PADDED}).ok


def test_a_look_where_it_makes_a_difference() -> None:
    assert set(reads(Mixed(), FULL)) == {True}
    assert set(reads(Mixed(), PADDED)) == {False}
    assert set(reads(doge(), FULL)) == {True}
    assert set(reads(doge(), PADDED)) == {False}


class Expecting(nn.Module):
    """Takes no mask: on one device, without padding, transformers makes none. x: [rows, seq, 32]"""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.up = BertConfig(**SIZES, attn_implementation="eager"), nn.Linear(32, 32)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=padding)
        if mask is not None:
            raise ValueError(f"a mask of {mask.shape}")
        return self.up(x).square().mean()


def test_a_model_that_fails_with_a_mask() -> None:
    """It runs as on one device; with padding it fails there, too."""
    inputs = torch.randn(2, 7, 32), FULL
    assert autotp.verify(Expecting(), 2, example_inputs=inputs).ok
    with pytest.raises(autotp.Error, match="does not run on these inputs: ValueError: a mask of"):
        autotp.verify(Expecting(), 2, example_inputs=(inputs[0], PADDED))


def test_the_region_ends() -> None:
    from transformers import masking_utils, modeling_utils

    before = masking_utils._ignore_causal_mask_sdpa, modeling_utils.AttentionInterface._global_mapping["sdpa"]
    with as_on_one_device(False):
        assert masking_utils._ignore_causal_mask_sdpa is not before[0]
    assert (masking_utils._ignore_causal_mask_sdpa, modeling_utils.AttentionInterface._global_mapping["sdpa"]) == before
