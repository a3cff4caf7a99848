"""Tiny models of transformers: families, LoRA adapters, models that generate, training loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from small_models import assert_values_close
from torch import Tensor, nn

import autotp

pytest.importorskip("transformers")
import transformers
from support.hf_families import FAMILIES

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


def checkpoint_blocks(model: Any) -> None:
    """Asks a model of transformers for gradient checkpointing. It has another name from transformers 5.24 on."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


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


# ---- models that generate, their logits without ties


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


# ---- models that are saved and read


LAYOUTS = {
    "gpt2": "fused q | k | v, turned weights, a tied head, no head in the file",
    "gpt_neox": "q, k and v interleaved by head",
    "llama": "two key/value heads: uneven on three ranks, empty parts; gated",
    "phi3": "gate and up in one weight",
    "mixtral": "experts apart in the file, stacked and joined in the module",
    "gpt_oss": "experts stacked in the file",
    "bert": "a tied decoder with a bias of its own",
    "t5": "three names of one weight",
    "marian": "positions that are in no file",
}
BATCHED = {"experts_implementation": "batched_mm"}


def family(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A model, inputs, and what else must be said about it."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    return model, inputs, {"config": BATCHED if name in ("mixtral", "gpt_oss") else None, "example_inputs": inputs}


def saved(model: Any, folder: Path, rank: int, **given: Any) -> Path:
    """The folder, with the model in it as transformers saves it."""
    if rank == 0:
        model.save_pretrained(folder, **given)
    dist.barrier()
    return folder


def files_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def expect_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# ---- training loops


def on_cpu(parallel: bool) -> bool:
    """Returns whether a loop is told to stay on the CPU: one device's is, a parallel model's only without cards."""
    return not (parallel and torch.cuda.is_available())


LLAMA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Texts of unequal length, padded on the right."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.randint(0, 97, (12,), generator=torch.Generator().manual_seed(i))
        mask = torch.arange(12) < 12 - i % 4
        return {"input_ids": x, "labels": x.masked_fill(~mask, -100), "attention_mask": mask.long()}


def words() -> Any:
    """A tokenizer of 97 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"bos_token": "w0", "eos_token": "w1", "pad_token": "w2", "unk_token": "w3"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **ends)


def texts(kind: str) -> list[dict[str, Any]]:
    """Sixteen rows of these words, for a trainer of TRL: of the kind that a key of them names."""

    def text(i: int, length: int) -> str:
        return " ".join(f"w{(i * 31 + j * 17) % 93 + 4}" for j in range(length))

    makers: dict[str, Callable[[int], dict[str, Any]]] = {
        "text": lambda i: {"text": text(i, 6 + i % 5)},
        "chosen": lambda i: {"prompt": text(i, 4), "chosen": text(i + 50, 3 + i % 3), "rejected": text(i, 4)},
        "label": lambda i: {"prompt": text(i, 4), "completion": text(i + 50, 3 + i % 3), "label": i % 2 == 0},
        "prompt": lambda i: {"prompt": text(i, 4)},
    }
    return [makers[kind](i) for i in range(16)]


def llama_in_float64(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **more)).double()


def expect_close(found: Any, expected: Any) -> None:
    """In models of transformers norms and losses compute in float32."""
    assert_values_close(found, expected, rtol=1e-5, atol=1e-6)


# ---- a folder with a model and a tokenizer


WORDS = ("a", "dog", "sees", "the", "old", "house", "and", "runs")


def write_llama(folder: Path) -> None:
    """Writes a Llama of random weights, and a tokenizer of a few words."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(("<unk>", *WORDS))}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>").save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=32, initializer_range=0.5, eos_token_id=None, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
