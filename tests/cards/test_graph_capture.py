"""A warm training step, and a decoded token, do nothing that a CUDA graph may not capture: the lint finds nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import Architecture, arguments, model
from cards.graph_lint import findings_of, graph_lint
from ranks import Checks
from small_models import gpt, tokens
from support.hf_families import FAMILIES
from torch import Tensor, nn

import autotp

checks = Checks()


def step_of(parallel: nn.Module, given: dict[str, Any]) -> Callable[[], None]:
    def step() -> None:
        parallel.zero_grad(set_to_none=True)
        found = parallel(**given)
        loss = getattr(found, "loss", found)
        loss = loss[-1] if isinstance(loss, tuple) else loss
        loss.float().sum().backward()

    return step


def expect_clean(step: Callable[[], None]) -> None:
    # `own_stream` seeds a generator in each call; while a CUDA graph is recorded, masks are a hash instead.
    found = [one for one in findings_of(step) if ": dropout.py" not in one]
    assert not found, found


@checks.on(2)
def gpt_with_dropout(rank: int, n: int) -> None:
    x, labels = tokens()
    for settings in ({}, {"sequence_parallel": True}, {"randomness": "exact"}, {"recompute": "full"}):
        parallel = autotp.parallelize(gpt(dropout=0.1).train(), n, **settings)
        expect_clean(step_of(parallel, {"tokens": x, "labels": labels}))


@checks.on(2)
def transformers_families(rank: int, n: int) -> None:
    """Among them key/value heads that both ranks hold, and experts that compute all rows."""
    for name in ("llama", "mixtral-batched", "gpt_bigcode", "falcon-mqa"):
        made, given = FAMILIES[name]()
        # At a mask the host looks, and transformers' auxiliary loss without a mask counts with `bincount`.
        given = {key: value for key, value in given.items() if key != "attention_mask"}
        given |= {"output_router_logits": False} if "mixtral" in name else {}
        expect_clean(step_of(autotp.parallelize(made.train(), n, example_inputs=given), given))


@checks.on(2)
def held_heads(rank: int, n: int) -> None:
    """Key/value heads that both ranks hold, in one weight with what is cut: their gradients are slices."""
    for qkv in ("split", "slice", "per_group", "per_group_index"):
        for late in (True, False):
            arch = Architecture(qkv=qkv, kv_heads=1)
            without = () if late else ("late_sums",)
            parallel = autotp.parallelize(model(arch), n, example_inputs=arguments(arch), without=without)
            expect_clean(step_of(parallel, arguments(arch)))


@checks.on(2)
def decoded_tokens(rank: int, n: int) -> None:
    from transformers import DynamicCache, StaticCache

    made, given = FAMILIES["llama"]()
    x = given["input_ids"]
    parallel = autotp.parallelize(made.eval(), n, example_inputs={"input_ids": x})
    for cache in (DynamicCache(), StaticCache(made.config, max_cache_len=32)):
        with torch.no_grad():
            parallel(input_ids=x, past_key_values=cache, use_cache=True)
            expect_clean(lambda cache=cache: parallel(input_ids=x[:, :1], past_key_values=cache, use_cache=True))


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


SEEN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "the host reads a tensor (_local_scalar_dense)"),
    "branch": (lambda x: bool(x.sum() > 3), "the host reads a tensor (__bool__)"),
    "list": (lambda x: x.tolist(), "the host reads a tensor (tolist)"),
    "nonzero": (lambda x: x.nonzero(), "the host reads a tensor (nonzero)"),
    "mask": (lambda x: x[x > 3], "the host reads a mask (index)"),
    "constant": (lambda x: x + torch.tensor([1.0]), "a constant is made from numbers of Python"),
    "generator": (lambda x: x.bernoulli_(generator=torch.Generator(x.device)), "a new generator"),
    "seed": (lambda x: torch.manual_seed(0), "a generator is seeded"),
}


@pytest.mark.parametrize("name", SEEN)
def test_the_lint_sees(name: str) -> None:
    run, what = SEEN[name]
    with graph_lint() as findings:
        run(torch.rand(3))
    assert what in [one.what for one in findings]


def test_the_lint_lets_pass() -> None:
    weight = torch.rand(3, 3, requires_grad=True)

    def step() -> None:
        y = torch.dropout(torch.rand(3) @ weight, 0.5, True)
        torch.where(y > 0, y, y.new_zeros(())).sum().backward()

    assert findings_of(step) == []
