"""attention_to_pages: continuous batching of transformers on ranks beside one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from errors import message
from ranks import Checks

import autotp
from autotp.integrations.transformers.pages.attention_to_pages import undivided_pages

transformers: Any = pytest.importorskip("transformers")
checks = Checks(timeout=300)
PROMPTS = [[1, 5, 7, 9], [3, 4], [8, 8, 8, 2, 4, 5, 6], [11]]


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=48,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=None, **{"num_key_value_heads": 2, **more},
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


def batched(model: Any, implementation: str) -> list[list[int]]:
    """The tokens of continuous batching, in which prompts are cut into pieces and wait for each other."""
    model.set_attn_implementation(implementation)
    how = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = transformers.ContinuousBatchingConfig(num_blocks=12, block_size=4, max_batch_tokens=6)
    results = model.generate_batch(PROMPTS, generation_config=how, continuous_batching_config=pages)
    return [result.generated_tokens for result in results.values()]


@checks.on(2)
def continuous_batching_equals_one_device(rank: int, n: int) -> None:
    """With pages of this rank's heads; every rank has all results, and generates by itself afterwards."""
    plain, parallel = llama(), autotp.parallelize(llama(), tp=n)
    for implementation in ("paged|sdpa", "paged|eager"):
        expected = batched(llama(), implementation)
        assert len(expected) == len(PROMPTS)
        assert batched(parallel, implementation) == expected
    assert "attention_to_pages" in parallel.code
    parallel.set_attn_implementation("sdpa")
    inputs = {"inputs": torch.tensor(PROMPTS[:1]), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(parallel.generate(**inputs), plain.generate(**inputs))


def test_pages_that_transformers_would_not_divide_are_refused() -> None:
    assert undivided_pages(llama(num_key_value_heads=1), 2) == "tp=2 does not divide 1 heads of keys"
    assert not undivided_pages(llama(), 2)


def test_pages_without_a_cache_are_refused() -> None:
    model = llama()
    model.set_attn_implementation("paged|sdpa")
    text = message(lambda: autotp.explain(model, tp=2))
    assert "which a parallel model does not have outside of generate_batch" in text, text


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_continuous_batching_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
