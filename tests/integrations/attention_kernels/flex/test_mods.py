"""mods: score and mask functions as a text: by which positions they read tensors, and what the text computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.nn.attention import flex_attention as torchs

import autotp
from autotp.integrations.attention_kernels.flex import flex_attention as ours
from autotp.integrations.attention_kernels.flex.mods import Mods, mods_of, recorded_mods

QUERY, KEY, VALUE = torch.randn(3, 2, 4, 6, 8, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
SLOPES, MANY, DOCUMENTS = torch.rand(4), torch.rand(9), torch.randint(2, (2, 6))
TABLE, NOTHING = torch.randn(4, 6, 6), torch.zeros((), dtype=torch.bool)


def everywhere(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return b >= 0


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


CASES: dict[str, tuple[Any, Any, tuple[str, ...], str]] = {
    "none": (lambda score, b, h, q, k: score, None, (), ""),
    "everywhere": (lambda score, b, h, q, k: score, everywhere, (), "b"),
    "captured mask": (lambda score, b, h, q, k: score, lambda b, h, q, k: NOTHING, ("",), ""),
    "causal": (lambda score, b, h, q, k: score, causal, (), "qk"),
    "alibi": (lambda score, b, h, q, k: score + SLOPES[h] * (k - q), causal, ("h",), "qk"),
    "more slopes than heads": (lambda score, b, h, q, k: score + MANY[h], causal, ("-",), "hqk"),
    "documents": (
        lambda score, b, h, q, k: score,
        lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
        ("b-",),
        "qk",
    ),
    "table": (lambda score, b, h, q, k: score + TABLE[h][q][k], causal, ("h--",), "qk"),
    "whole table": (lambda score, b, h, q, k: score + TABLE[h, q, k], causal, ("hq-",), "qk"),
    "other read": (lambda score, b, h, q, k: score + SLOPES[h] - SLOPES.sum(), causal, ("-",), "hqk"),
    "neighbour": (lambda score, b, h, q, k: score + SLOPES[(h + 1) % 4], causal, ("-",), "hqk"),
    "constant": (
        lambda score, b, h, q, k: torch.where(h == 1, torch.tensor(0.5), torch.full_like(score, 2.0)) * score,
        causal, ("",), "hqk",
    ),
    "cap": (lambda score, b, h, q, k: 2 * torch.tanh(score / 2), causal, (), "qk"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_text_says_by_which_positions_tensors_are_read(name: str) -> None:
    score_mod, mask_mod, dims, reads = CASES[name]
    text, captured = recorded_mods(score_mod, mask_mod, QUERY)
    mods = mods_of(text)
    assert (mods.dims, mods.reads, len(captured)) == (dims, reads, len(dims))


@pytest.mark.parametrize("name", CASES)
def test_products_and_torch_s_kernel_compute_a_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's flex_attention with the functions themselves; for a whole, and for a part of it."""
    score_mod, mask_mod, *_ = CASES[name]
    monkeypatch.setattr(ours, "_compiled", lambda function, _: function)  # A CPU has no compiled kernel.
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    text, captured = recorded_mods(score_mod, mask_mod, QUERY)
    mask = torchs.create_block_mask(mask_mod, 2, 4, 6, 6, device="cpu") if mask_mod else None
    wanted = torchs.AuxRequest(lse=True)
    with torch.no_grad():
        out, aux = torchs.flex_attention(QUERY, KEY, VALUE, score_mod, mask, return_aux=wanted)
        expected = out, aux.lse
        for heads, queries in ((slice(0, 4), slice(0, 6)), (slice(2, 4), slice(3, 6))):
            mods, part = part_of(text, captured, heads, queries)
            tensors = QUERY[:, heads, queries], KEY[:, heads], VALUE[:, heads]
            arguments: Any = (*tensors, part, mods, None, (0, heads.start, queries.start, 0))
            for got in (ours.by_products(ours.FlexCall(*arguments)), ours.by_kernel(ours.FlexCall(*arguments))):
                for x, y in zip(got, expected, strict=False):
                    torch.testing.assert_close(x, y[:, heads, queries])


def test_the_kernel_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[dict[str, Any]]()

    def kernel(query: Tensor, *_: Any, **settings: Any) -> Any:
        calls.append(settings)
        return query, torchs.AuxOutput(lse=query)

    monkeypatch.setattr(ours, "_compiled", lambda function, _: kernel)
    for options in ({"BLOCK_M": 64, "BACKEND": "TRITON"}, None):
        text, captured = recorded_mods(lambda score, *_: score, None, QUERY, options)
        ours.by_kernel(ours.FlexCall(QUERY, KEY, VALUE, captured, mods_of(text), None, (0, 0, 0, 0)))
        assert calls[-1]["kernel_options"] == options


def test_texts_name_no_device() -> None:
    """Ranks compare what they run, and each has a card of its own."""
    text = recorded_mods(*CASES["none"][:2], QUERY).text
    assert "device = device()" in text and "device(type" not in text


@pytest.fixture
def by_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """CPUs run what GPUs do, with torch's kernel not compiled; notes the settings of the blocks that are made."""
    made = list[dict[str, Any]]()

    def noted(mask_mod: Any, *sizes: Any, **settings: Any) -> Any:
        made.append(settings)
        return torchs.create_block_mask(mask_mod, *sizes, **settings)

    monkeypatch.setattr(ours, "_compiled", lambda function, _: noted if "block" in function.__name__ else function)
    monkeypatch.setattr(ours, "by_products", ours.by_kernel)
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    ours.forget_blocks()
    return made


PRODUCTS = ours.by_products


def call_of(mask_mod: Any, score_mod: Any = None, blocks: Any = None) -> ours.FlexCall:
    text, captured = recorded_mods(score_mod or (lambda score, *_: score), mask_mod, QUERY, None, blocks)
    return ours.FlexCall(QUERY, KEY, VALUE, captured, mods_of(text), None, (0, 0, 0, 0))


def test_layers_with_one_mask_share_its_blocks(by_torchs_kernel: list[Any]) -> None:
    """Also where their scores read other tensors. What changes in between makes other blocks."""
    documents, other = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int64)

    def mask_of(x: Tensor) -> Any:
        return lambda b, h, q, k: x[b, q] == x[b, k]

    first = ours.by_kernel(call_of(mask_of(documents)))[0]
    torch.testing.assert_close(ours.by_kernel(call_of(mask_of(documents)))[0], first, rtol=0, atol=0)
    ours.by_kernel(call_of(mask_of(documents), lambda score, b, h, q, k: score + SLOPES[h] * k))
    assert len(by_torchs_kernel) == 1
    documents[:, 3:] = 1
    call = call_of(mask_of(documents))
    torch.testing.assert_close(ours.by_kernel(call)[0], PRODUCTS(call)[0])
    ours.by_kernel(call_of(mask_of(other)))
    ours.by_kernel(call_of(causal))
    ours.by_kernel(call_of(mask_of(other), blocks={"BLOCK_SIZE": (64, 64)}))
    assert len(by_torchs_kernel) == 5
    ours.forget_blocks()
    ours.by_kernel(call_of(causal))
    assert len(by_torchs_kernel) == 6


class Layers(nn.Module):
    """Three layers that read one mask. x: [batch heads seq width]"""

    def __init__(self, **blocks: Any) -> None:
        super().__init__()
        self.out, self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), blocks

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        n = x.shape[2]
        for out in self.out:  # As models do whose layers are written by themselves.
            mask = torchs.create_block_mask(
                lambda b, h, q, k: documents[b, q] == documents[b, k], len(x), None, n, n, x.device, **self.blocks
            )
            x = out(torchs.flex_attention(x, x, x, block_mask=mask, kernel_options={"BLOCK_M": 16}))
        return x


def test_a_call_makes_the_blocks_of_a_mask_once(by_torchs_kernel: list[Any]) -> None:
    """And each call its own: a write into `.data`, which torch does not count, is seen."""
    x, documents = torch.randn(2, 4, 6, 8), DOCUMENTS.clone()
    model = Layers(BLOCK_SIZE=(64, 32), separate_full_blocks=False)
    parallel = autotp.parallelize(copy.deepcopy(model), 1, example_inputs=(x, documents))
    for calls in (1, 2):
        by_torchs_kernel.clear()
        with torch.no_grad():
            got = parallel(x, documents)
            assert by_torchs_kernel == [{"device": x.device, "BLOCK_SIZE": (64, 32), "separate_full_blocks": False}], (
                calls
            )
            torch.testing.assert_close(got, model(x, documents))
        documents.data[:, calls:] = 3


class Reads(nn.Module):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return torchs.flex_attention(x, x, x, block_mask=mask)  # type: ignore[return-value]


def test_blocks_that_the_loop_made_say_how_each_rank_makes_its_own(by_torchs_kernel: list[Any]) -> None:
    mask = torchs.create_block_mask(causal, None, None, 6, 6, device="cpu", BLOCK_SIZE=(32, 64))
    parallel = autotp.parallelize(Reads(), 1, example_inputs=(QUERY, mask))
    by_torchs_kernel.clear()
    with torch.no_grad():
        parallel(QUERY, mask)
    assert [settings["BLOCK_SIZE"] for settings in by_torchs_kernel] == [(32, 64)]


def test_more_masks_than_dynamo_keeps_of_a_function_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo keeps what it compiled eight times for a function, and then runs it as it is: by products."""
    monkeypatch.setattr(ours.torch, "compile", partial(torch.compile, backend="eager"))
    with torch.no_grad(), dynamo_config.patch(fail_on_recompile_limit_hit=True):
        for window in range(12):
            call = call_of(lambda b, h, q, k, window=window: q - k < window)
            torch.testing.assert_close(ours.by_kernel(call)[0], ours.by_products(call)[0])


def part_of(text: str, captured: Any, heads: slice, queries: slice) -> tuple[Mods, list[Tensor]]:
    """The functions of a text, and the parts of what they read that a rank with these heads and queries has."""
    mods, places = mods_of(text), {"b": slice(None), "h": heads, "q": queries, "-": slice(None)}
    return mods, [x[tuple(places[d] for d in dims)] for x, dims in zip(captured, mods.dims, strict=True)]


def test_gradients_of_products_are_those_of_autograd() -> None:
    leaves = [x.double().requires_grad_() for x in (QUERY, KEY, VALUE, SLOPES)]

    def attended(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Any:
        score: Callable[..., Any] = lambda score, b, h, q, k: score + slopes[h] * (k - q)  # noqa: E731
        text, captured = recorded_mods(score, causal, query)
        return ours.by_products(ours.FlexCall(query, key, value, captured, mods_of(text), None, (0, 0, 0, 0)))[:2]

    assert torch.autograd.gradcheck(attended, leaves, fast_mode=True)


def test_a_query_without_keys_has_zeros_and_no_gradient() -> None:
    query = QUERY.clone().requires_grad_()
    text, captured = recorded_mods(lambda score, *_: score, lambda b, h, q, k: q > k, QUERY)
    out, totals, peaks = ours.by_products(ours.FlexCall(query, KEY, VALUE, captured, mods_of(text), None, (0, 0, 0, 0)))
    assert not out[:, :, 0].any() and totals[:, :, 0].isneginf().all() and peaks[:, :, 0].isneginf().all()
    (out.sum() + totals[:, :, 1:].sum()).backward()
    assert query.grad is not None and query.grad.isfinite().all() and not query.grad[:, :, 0].any()


def test_texts_of_equal_functions_are_equal() -> None:
    """So that two layers with one mask have equal operators, and ranks can compare what they run."""

    def text(window: int) -> str:
        return recorded_mods(lambda score, *_: score, lambda b, h, q, k: q - k < window, QUERY).text

    assert text(3) == text(3) != text(4)
