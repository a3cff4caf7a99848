"""Each way to compute attention, in each layout: docs/attention.md says what comes of it, and this is where from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kernel_packages
import pytest
import torch
from kernel_packages import flash_attn, flash_attn_interface
from ranks import run_ranks
from torch import Tensor, nn

import autotp

transformers = pytest.importorskip("transformers")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "attention.md"
EQUAL = "equal"
VOCAB = 48


def around_kernel(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
    """A user's function around a kernel."""
    operands = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attn.flash_attn_func(*operands, causal=True, softmax_scale=settings["scaling"]), None


def of_torch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
    """A user's function of torch's operators."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * settings["scaling"]
    earlier = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return (scores.masked_fill(~earlier, float("-inf")).softmax(-1) @ value).transpose(1, 2), None


REGISTERED = {"a function around a kernel": around_kernel, "a function of torch's operators": of_torch}
"""Row of the table -> what is registered with transformers' `AttentionInterface`."""


def llama(attention: str, layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    if attention in REGISTERED:
        transformers.AttentionInterface.register("mine", REGISTERED[attention])
        attention = "mine"
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=64, attn_implementation=attention, pad_token_id=0,
    )  # fmt: skip
    hub = patch("transformers.integrations.hub_kernels.get_kernel", lambda name, **which: flash_attn_interface)
    available = patch("transformers.integrations.hub_kernels.is_kernels_available", lambda: True)
    with hub, available, kernel_packages.usable_in_transformers():
        return transformers.LlamaForCausalLM(config)


def batch(step: int, rows: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def trained(plain: nn.Module, parallel: Callable[..., Any], parameters: Any, longer: int = 5) -> None:
    """Two models take three steps, the last two on sequences that are `longer` than at capture."""
    optimizers = [torch.optim.SGD(each, 0.5) for each in (plain.parameters(), parameters)]
    for step in range(3):
        inputs = batch(step, length=12 + longer * (step > 0))
        losses = [plain(**inputs).loss, parallel(**inputs)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def by_parallelize(attention: str, compiled: bool = False, **layout: Any) -> None:
    plain = llama("sdpa")  # torch's flex_attention has no backward on a CPU.
    model = autotp.parallelize(llama(attention), example_inputs=batch(0), **layout)
    function = torch.compile(model, backend="aot_eager") if compiled else model
    if compiled:
        model(**batch(0))
    longer = 0 if compiled else 5  # Another length would be compiled again.
    trained(plain, lambda **inputs: function(**inputs).loss, model.parameters(), longer)


def by_distribute(attention: str, **layout: Any) -> None:
    plain = llama("sdpa", 2)
    trainer = autotp.distribute(llama(attention, 2), example_inputs=batch(0), **layout)
    trained(plain, trainer.step, trainer.parameters())


def generated(attention: str, **layout: Any) -> None:
    plain = llama("sdpa").eval()
    model = autotp.parallelize(llama(attention), **layout).eval()
    inputs = batch(0)["input_ids"]
    tokens = [m.generate(inputs, max_new_tokens=5, do_sample=False) for m in (plain, model)]
    assert torch.equal(*tokens)


WAYS: dict[str, Callable[[str], None]] = {
    "`tp`": lambda name: by_parallelize(name, tp=2),
    "`sequence_parallel`": lambda name: by_parallelize(name, tp=2, sequence_parallel=True),
    "`cp`": lambda name: by_parallelize(name, tp=1, cp=2),
    "`pp`": lambda name: by_distribute(name, pp=2, microbatches=2),
    "`recompute`": lambda name: by_parallelize(name, tp=2, recompute="full"),
    "`overlap`": lambda name: by_parallelize(name, tp=2, overlap="batch"),
    "`generate`": lambda name: generated(name, tp=2),
    "`torch.compile`": lambda name: by_parallelize(name, tp=2, compiled=True),
}
"""Column of the table -> what is tried; an assertion fails where the ranks differ from one device."""


def table() -> dict[str, dict[str, str]]:
    """The page's table: implementation -> column -> what comes of it."""
    lines = PAGE.read_text().partition("## Tried in each layout")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    head = rows[0][1:]
    return {row[0].strip('`"'): dict(zip(head, row[1:], strict=True)) for row in rows[1:]}


def outcome(rank: int, n: int, attention: str, way: str) -> str:
    try:
        WAYS[way](attention)
    except autotp.Error as error:
        return f"refused: {error}"
    return EQUAL


ALIKE = {"flash_attention_3", "flash_attention_4", "kernels-community/vllm-flash-attn3", *REGISTERED}
"""Rows for most ways of which others stand: of kernels `flash_attention_2`, and of products `eager`."""
OWN = {"`tp`", "`generate`"}


def cells() -> list[Any]:
    """Each row in each way."""
    return [
        pytest.param(
            attention, way, id=f"{attention}-{re.sub(r'[^a-z0-9_]', '', way.lower())}",
            marks=[pytest.mark.rare] * (attention in ALIKE and way not in OWN),
        )
        for attention in table() for way in WAYS
    ]  # fmt: skip


@pytest.mark.timeout(240)  # Dynamo takes long on a busy machine.
@pytest.mark.parametrize(("attention", "way"), cells())
def test_attention_is_that_of_one_device_where_the_page_says_so(attention: str, way: str) -> None:
    for result in run_ranks(outcome, 2, attention, way, timeout=200):
        assert result.partition(":")[0] == table()[attention][way].partition(" ")[0], result


def test_the_page_has_each_way() -> None:
    assert all(list(row) == list(WAYS) for row in table().values())
    assert {"sdpa", "eager", *REGISTERED} <= table().keys()
