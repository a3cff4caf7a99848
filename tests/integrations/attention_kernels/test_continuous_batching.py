"""attention_to_pages: continuous batching of transformers on ranks beside one device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import kernel_packages
import pytest
import torch
from errors import message
from ranks import Checks

import autotp
from autotp.integrations.transformers.pages.attention_to_pages import KEYS, divided

transformers: Any = pytest.importorskip("transformers")
checks = Checks(timeout=300)
PROMPTS = [[1, 5, 7, 9], [3, 4], [8, 8, 8, 2, 4, 5, 6], [11]]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 4,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
OF_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 48, "n_positions": 64, "pad_token_id": 0}
WITH_SINKS = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}


def built(family: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # So that tokens differ, and no two have nearly the same score.
    return model if family == "GptOss" else model.double()  # Its experts multiply in float32.


def batched(model: Any, implementation: str) -> list[list[int]]:
    """The tokens of continuous batching, in which prompts are cut into pieces and wait for each other."""
    model.set_attn_implementation(implementation)
    how = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = transformers.ContinuousBatchingConfig(num_blocks=12, block_size=4, max_batch_tokens=6)
    results = model.generate_batch(PROMPTS, generation_config=how, continuous_batching_config=pages)
    return [result.generated_tokens for result in results.values()]


def expect_the_tokens_of_one_device(
    family: str, sizes: dict[str, Any], layout: dict[str, int], *names: str
) -> tuple[Any, set[int]]:
    """Returns the parallel model, and the numbers of heads that it wrote into pages."""
    parallel, heads = autotp.parallelize(built(family, sizes), **layout), set[int]()
    pages = transformers.generation.continuous_batching.PagedAttentionCache
    update = pages.update

    def noting(cache: Any, **named: Any) -> Any:
        heads.add(named["key_states"].shape[1])
        return update(cache, **named)

    with kernel_packages.usable_in_transformers():
        for name in names:
            expected = batched(built(family, sizes), f"paged|{name}")
            assert len(expected) == len(PROMPTS) and all(len(tokens) == 6 for tokens in expected)
            with patch.object(pages, "update", noting):
                assert batched(parallel, f"paged|{name}") == expected, (name, expected)
    return parallel, heads


@checks.on(2)
def continuous_batching_equals_one_device(rank: int, n: int) -> None:
    """With pages of this rank's heads; every rank has all results, and generates by itself afterwards."""
    names = "sdpa", "eager", "flash_attention_2"
    parallel, heads = expect_the_tokens_of_one_device("Llama", SIZES, {"tp": n}, *names)
    assert heads == {1}
    parallel.set_attn_implementation("sdpa")
    inputs = {"inputs": torch.tensor(PROMPTS[:1]), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(parallel.generate(**inputs), built("Llama", SIZES).generate(**inputs))


@checks.on(2)
def a_model_without_a_plan_is_cut_by_heads(rank: int, n: int) -> None:
    """transformers has no `tp_plan` of GPT-2."""
    assert expect_the_tokens_of_one_device("GPT2", OF_GPT2, {"tp": n}, "sdpa")[1] == {2}


@checks.on(2, rare=True)
def sinks_are_cut_by_heads(rank: int, n: int) -> None:
    """Layers with windows, too. transformers gives sinks to no other kernel for pages but one of the hub."""
    assert expect_the_tokens_of_one_device("GptOss", WITH_SINKS, {"tp": n}, "eager")[1] == {1}


@checks.on(2)
def ranks_of_a_sequence_have_the_same_pages(rank: int, n: int) -> None:
    parallel, heads = expect_the_tokens_of_one_device("Llama", SIZES, {"tp": 1, "cp": n}, "sdpa")
    assert heads == {2}
    on_cpu = transformers.ContinuousBatchingConfig(num_blocks=12, block_size=4, cpu_offload_space=0.01)
    text = message(lambda: parallel.init_continuous_batching(continuous_batching_config=on_cpu))
    assert "keeps pages on the CPU, too, for heads of keys that tp divides, and no cp" in text


@checks.on(3, 4)
def fewer_heads_of_keys_than_ranks_equal_one_device(rank: int, n: int) -> None:
    """Of four ranks two have the same head of keys."""
    heads = expect_the_tokens_of_one_device("Llama", SIZES, {"tp": n}, "sdpa", "flash_attention_2")[1]
    assert heads == {1} or (n == 3 and not heads)


@checks.on(4)
def two_axes_of_ranks_equal_one_device(rank: int, n: int) -> None:
    assert expect_the_tokens_of_one_device("Llama", SIZES, {"tp": 2, "cp": 2}, "eager")[1] == {1}


def test_the_plan_tells_transformers_which_heads_autotp_cuts() -> None:
    config, others = transformers.LlamaConfig(**SIZES), {"layers.*.mlp.up_proj": "colwise"}
    assert divided(others | dict.fromkeys(KEYS, "x"), config, 4, 1) == others
    assert divided(None, config, 2, 1) == dict.fromkeys(KEYS, "colwise")
    assert divided(None, config, 2, 2) == {}


def test_pages_without_a_cache_are_refused() -> None:
    model = built("Llama", SIZES)
    model.set_attn_implementation("paged|sdpa")
    text = message(lambda: autotp.explain(model, tp=2))
    assert "which generate_batch alone has" in text, text


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_continuous_batching_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
