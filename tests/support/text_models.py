"""A folder with a model and a tokenizer, as transformers writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

WORDS = ("a", "dog", "sees", "the", "old", "house", "and", "runs")


def write_llama(folder: Path) -> None:
    """Writes a Llama of random weights, and a tokenizer of a few words."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
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
