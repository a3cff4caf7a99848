"""published_sizes: models of papers by name, such as `gpt-8.3b`, each with the table that its sizes are from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autotp.models.bert import BERT, BERTConfig
from autotp.models.configs import BERT_SIZES, GPT_SIZES, GPT_SIZES_2021
from autotp.models.gpt import GPT, GPTConfig
from autotp.tools.cli.output import WrongUse


@dataclass(frozen=True)
class MegatronSize:
    """A GPT or a BERT of autotp.models. source: the paper and its table"""

    kind: Callable[..., nn.Module]
    config: GPTConfig | BERTConfig
    source: str

    def model(self, settings: Mapping[str, Any], layers: int | None) -> nn.Module:
        """Builds the model.

        Args:
            settings: values that replace published ones.
            layers: the largest number of layers.

        Raises:
            WrongUse: the settings are not those of such a model.
        """
        fewer = {} if layers is None else {"n_layer": min(layers, self.config.n_layer)}
        try:
            return self.kind(replace(self.config, **fewer, **settings))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise WrongUse(f"--kwargs: {error}") from error


@dataclass(frozen=True)
class ConfiguredSize:
    """A model of transformers. configuration: what its config.json says; source: the paper and its table"""

    configuration: Mapping[str, Any]
    source: str


def _llama_3(layers: int, width: int, inner: int, heads: int) -> ConfiguredSize:
    """Returns a Llama 3, with the 8,192 tokens of its pretraining.

    The paper counts 128,000 words; the released models have 128,256, with those that are reserved.
    """
    sizes = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }  # fmt: skip
    return ConfiguredSize(sizes, "Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv 2407.21783, table 3")


PUBLISHED: dict[str, MegatronSize | ConfiguredSize] = {
    f"{family}-{name.lower()}": MegatronSize(model_class, config, source)
    for family, model_class, sizes, source in (
        ("gpt", GPT, GPT_SIZES, "Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, tables 1 and 2"),
        ("gpt", GPT, GPT_SIZES_2021, "Narayanan et al. 2021, arXiv 2104.04473, table 1"),
        ("bert", BERT, BERT_SIZES, "Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, table 4"),
    )
    for name, config in sizes.items()
} | {
    "llama-3-8b": _llama_3(32, 4096, 14336, 32),
    "llama-3-70b": _llama_3(80, 8192, 28672, 64),
    "llama-3-405b": _llama_3(126, 16384, 53248, 128),
}
"""Name -> the model. `MODEL` of the commands takes these names."""
