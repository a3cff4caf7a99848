"""Tiny Hugging Face models, and LoRA adapters of them; tests that import this are skipped where transformers is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from hf_families import FAMILIES

TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
RANK = 3


def tiny(family: str, attention: str | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """A random model in training, the same each time, and the arguments of a call with labels; attention: how."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    if attention is not None:
        model = type(model)._from_config(model.config, attn_implementation=attention)  # type: ignore[attr-defined]
    return model.train(), inputs


def adapted(family: str, dropout: float = 0.0, **given: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The same under LoRA adapters that change what it computes."""
    peft = pytest.importorskip("peft")
    model, inputs = tiny(family)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=8, lora_dropout=dropout, fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM",
        **{"target_modules": TARGETS[family]} | given,
    )  # fmt: skip
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero in the beginning
            nn.init.normal_(parameter, std=0.3)
    return model.train(), inputs
