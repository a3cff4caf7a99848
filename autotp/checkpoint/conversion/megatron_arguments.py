"""megatron_arguments: the arguments in a checkpoint of Megatron-LM, and the configuration of transformers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from autotp.checkpoint.conversion.torch_files import Unread
from autotp.errors import Error

UNLIKE: dict[str, tuple[Any, ...]] = {
    "swiglu": (False, None),
    "squared_relu": (False, None),
    "num_experts": (None, 0),
    "group_query_attention": (False, None),
    "normalization": ("LayerNorm", None),
    "position_embedding_type": ("learned_absolute", "absolute", None),
    "use_rotary_position_embeddings": (False, None),
    "apply_layernorm_1p": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
}
"""Argument -> the values with which the model is the one that transformers has under the same names."""
TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""Names of transformers for the approximation of GELU by tanh, which Megatron-LM calls openai_gelu."""


def value_of(args: Namespace, name: str, default: Any = None) -> Any:
    """Returns an argument; the default if there is none, or if it is no plain data."""
    found = getattr(args, name, default)
    return default if isinstance(found, Unread) else found


def number_of(args: Namespace, name: str) -> int:
    """Returns an argument that is a number of something.

    Raises:
        Error: there is no such argument, or it is no number.
    """
    found = value_of(args, name)
    if type(found) is not int or found < 1:
        raise Error(f"the checkpoint's arguments have no {name}")
    return found


def config_of(args: Namespace, kind: str, vocabulary: int, segments: int, tied: bool) -> dict[str, Any]:
    """Returns the configuration of transformers for these arguments.

    Raises:
        Error: transformers' GPT2 and MegatronBert are not this model: names the argument.
    """
    for name, allowed in UNLIKE.items():
        if value_of(args, name) not in allowed:
            raise Error(
                f"the checkpoint's model has {name}={value_of(args, name)!r}, which transformers' model does not have",
                expected=f"{name}={allowed[0]!r}",
            )
    tanh = bool(value_of(args, "openai_gelu", False) or value_of(args, "bias_gelu_fusion", True))
    gelu, hidden = "gelu_new" if tanh else "gelu", number_of(args, "hidden_size")
    sizes = [number_of(args, name) for name in ("num_layers", "num_attention_heads", "max_position_embeddings")]
    wide = value_of(args, "ffn_hidden_size") or 4 * hidden
    drop = value_of(args, "hidden_dropout", 0.1), value_of(args, "attention_dropout", 0.1)
    eps, std = value_of(args, "layernorm_epsilon", 1e-5), value_of(args, "init_method_std", 0.02)
    if kind == "GPT":
        return {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": vocabulary, "n_embd": hidden,
            "n_layer": sizes[0], "n_head": sizes[1], "n_positions": sizes[2], "n_inner": wide,
            "activation_function": gelu, "layer_norm_epsilon": eps, "initializer_range": std, "embd_pdrop": drop[0],
            "resid_pdrop": drop[0], "attn_pdrop": drop[1], "tie_word_embeddings": tied, "bos_token_id": None,
            "eos_token_id": None,
        }  # fmt: skip
    return {
        "model_type": "megatron-bert", "architectures": ["MegatronBertForPreTraining"], "vocab_size": vocabulary,
        "hidden_size": hidden, "num_hidden_layers": sizes[0], "num_attention_heads": sizes[1],
        "max_position_embeddings": sizes[2], "intermediate_size": wide, "hidden_act": gelu, "layer_norm_eps": eps,
        "initializer_range": std, "hidden_dropout_prob": drop[0], "attention_probs_dropout_prob": drop[1],
        "type_vocab_size": segments,
    }  # fmt: skip


def arguments_of(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns Megatron-LM's arguments for a configuration of transformers, without those of the layout.

    Raises:
        Error: Megatron-LM has no such model: names the setting.
    """
    names = (
        {"num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
         "max_position_embeddings": "n_positions", "ffn_hidden_size": "n_inner", "layernorm_epsilon":
         "layer_norm_epsilon", "init_method_std": "initializer_range", "hidden_dropout": "resid_pdrop",
         "attention_dropout": "attn_pdrop"}
        if kind == "GPT" else
        {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
         "max_position_embeddings": "max_position_embeddings", "ffn_hidden_size": "intermediate_size",
         "layernorm_epsilon": "layer_norm_eps", "init_method_std": "initializer_range",
         "hidden_dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob"}
    )  # fmt: skip
    defaults = {"layernorm_epsilon": 1e-5 if kind == "GPT" else 1e-12, "init_method_std": 0.02, "hidden_dropout": 0.1,
                "attention_dropout": 0.1}  # fmt: skip
    found = {theirs: config.get(ours, defaults.get(theirs)) for theirs, ours in names.items()}
    found["ffn_hidden_size"] = found["ffn_hidden_size"] or 4 * (found["hidden_size"] or 0)
    lacking = [names[name] for name, value in found.items() if value is None or (value == 0 and name in REQUIRED)]
    if lacking:
        raise Error(f"the configuration has no {lacking[0]}")
    gelu = config.get("activation_function" if kind == "GPT" else "hidden_act", "gelu_new" if kind == "GPT" else "gelu")
    if gelu not in (*TANH, "gelu"):
        raise Error(f"Megatron-LM has no activation {gelu!r}", expected=", ".join(("gelu", *TANH)))
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(name):
            raise Error(f"Megatron-LM has no {name}")
    return {
        **found, "openai_gelu": gelu in TANH, "bias_gelu_fusion": False, "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute", "add_position_embedding": True, "swiglu": False,
        "seq_length": found["max_position_embeddings"],
        "kv_channels": found["hidden_size"] // found["num_attention_heads"],
        "apply_residual_connection_post_layernorm": False,
    }  # fmt: skip


REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
