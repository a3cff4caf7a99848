"""A model from a configuration alone: of fewer layers, on meta, never of code or of a hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autotp

transformers = pytest.importorskip("transformers")
from autotp.integrations.transformers.files.from_configuration import model_from_configuration  # noqa: E402

TINY: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"vocab_size": 99, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
T5 = {"vocab_size": 99, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 4, "num_decoder_layers": 3, "num_heads": 6}
KINDS = ["sliding_attention"] * 4 + ["full_attention", "sliding_attention"]


def written(folder: Path, model_type: str, architecture: str, **settings: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": model_type, "architectures": [architecture], **settings}))
    return file


def blocks(model: torch.nn.Module) -> set[str]:
    """The names of the blocks: `model.layers.1`."""
    names = (name.split(".") for name, _ in model.named_parameters())
    return {".".join(parts[: i + 1]) for parts in names for i, part in enumerate(parts) if part.isdigit()}


@pytest.mark.parametrize("layers", [1, 2, 99])
def test_model_from_configuration_has_fewer_layers(tmp_path: Path, layers: int) -> None:
    file = written(tmp_path, "llama", "LlamaForCausalLM", **TINY)
    with torch.device("meta"):
        model = model_from_configuration(file, {}, layers=layers)
    assert type(model).__name__ == "LlamaForCausalLM" and model.training
    assert len(blocks(model)) == min(layers, 6) and all(p.is_meta for p in model.parameters())
    assert autotp.explain(model, 4).cuts


def test_model_from_configuration_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    written(tmp_path, "gemma2", "Gemma2ForCausalLM", **TINY, head_dim=8, layer_types=KINDS)
    model: Any = model_from_configuration(tmp_path, {}, layers=2)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]


def test_both_halves_of_an_encoder_and_decoder_get_fewer(tmp_path: Path) -> None:
    written(tmp_path, "t5", "T5ForConditionalGeneration", **T5, decoder_start_token_id=0)
    model: Any = model_from_configuration(tmp_path, {}, layers=2)
    assert (len(model.encoder.block), len(model.decoder.block)) == (2, 2)


def test_model_from_configuration_takes_settings_dtype_attention_and_class(tmp_path: Path) -> None:
    file = written(tmp_path, "gpt2", "GPT2LMHeadModel", **GPT2).rename(tmp_path / "small.json")
    given: Any = {"dtype": torch.bfloat16, "attention": "eager", "model_class": "AutoModelForSequenceClassification"}
    model: Any = model_from_configuration(file, {"n_embd": 24}, layers=1, **given)
    assert type(model).__name__ == "GPT2ForSequenceClassification" and len(model.transformer.h) == 1
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.config.n_embd == 24
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("settings", "given", "told"),
    [
        ({"auto_map": {"AutoModel": "code.py"}}, {}, "the checkpoint has code of its own"),
        ({}, {"model_class": "NoSuchModel"}, "transformers has no class NoSuchModel"),
        ({"architectures": []}, {}, "config.json names no class"),
        ({}, {"attention": "nonsense"}, "LlamaForCausalLM cannot be built"),
        ({"num_attention_heads": 5}, {}, "the configuration cannot be read"),
    ],
    ids=["code", "class", "no-class", "attention", "sizes"],
)
def test_model_from_configuration_refuses_code_hubs_and_wrong_values(
    tmp_path: Path, settings: dict[str, Any], given: dict[str, Any], told: str
) -> None:
    written(tmp_path, "llama", "LlamaForCausalLM", **{**TINY, **settings})
    with pytest.raises(autotp.Error, match=told):
        model_from_configuration(tmp_path, {}, **given)


def test_model_from_configuration_refuses_a_model_without_a_number_of_layers(tmp_path: Path) -> None:
    written(tmp_path, "resnet", "ResNetModel", depths=[1, 1], hidden_sizes=[8, 16])
    with pytest.raises(autotp.Error, match="no number of layers"):
        model_from_configuration(tmp_path, {}, layers=2)
