"""Models that generate, as tests of it make them: tiny, their logits without ties."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import autotp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

VOCAB, NEW = 99, 25
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6,
    "intermediate_size": 80, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=6, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda: transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2}, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=80, word_embed_proj_dim=48),
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=1, n_head=4),
    "mistral": lambda: transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=9),
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCAB, d_model=48, d_kv=8, d_ff=80, num_layers=1, num_heads=6, decoder_start_token_id=0
    ),
}


def built(name: str) -> Any:
    """A model in float64 whose logits have no ties."""
    seed, noise = (2, 0.5) if name == "t5" else (0, 0.2)
    torch.manual_seed(seed)
    config = MODELS[name]()
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    model = kind.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model.float() if name == "bloom" else model  # Bloom in float64 cannot pad: its mask is -inf there.


def both(n: int, name: str, **settings: Any) -> tuple[Any, Any]:
    whole = built(name)
    return whole, autotp.parallelize(copy.deepcopy(whole), n, **settings)


def prompt(length: int = 7) -> dict[str, Tensor]:
    """Two rows, the first one padded on the left."""
    tokens = torch.arange(2 * length).view(2, length) * 17 % (VOCAB - 5) + 5
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    return {"input_ids": tokens, "attention_mask": mask}
