"""mods: score and mask functions as a text: by which positions they read tensors, and what the text computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

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
    monkeypatch.setattr(ours, "_compiled", lambda function: function)  # A CPU has no compiled kernel.
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
            arguments: Any = (*tensors, part, mods, None, (0, heads.start, queries.start))
            for got in (ours.by_products(*arguments), ours.by_kernel(*arguments, False)):
                for x, y in zip(got, expected, strict=False):
                    torch.testing.assert_close(x, y[:, heads, queries])


def test_the_kernel_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[dict[str, Any]]()

    def kernel(query: Tensor, *_: Any, **settings: Any) -> Any:
        calls.append(settings)
        return query, torchs.AuxOutput(lse=query)

    monkeypatch.setattr(ours, "_compiled", lambda function: kernel)
    for options in ({"BLOCK_M": 64, "BACKEND": "TRITON"}, None):
        text, captured = recorded_mods(lambda score, *_: score, None, QUERY, options)
        ours.by_kernel(QUERY, KEY, VALUE, captured, mods_of(text), None, (0, 0, 0), False)
        assert calls[-1]["kernel_options"] == options


def part_of(text: str, captured: Any, heads: slice, queries: slice) -> tuple[Mods, list[Tensor]]:
    """The functions of a text, and the parts of what they read that a rank with these heads and queries has."""
    mods, places = mods_of(text), {"b": slice(None), "h": heads, "q": queries, "-": slice(None)}
    return mods, [x[tuple(places[d] for d in dims)] for x, dims in zip(captured, mods.dims, strict=True)]


def test_gradients_of_products_are_those_of_autograd() -> None:
    leaves = [x.double().requires_grad_() for x in (QUERY, KEY, VALUE, SLOPES)]

    def attended(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Any:
        score: Callable[..., Any] = lambda score, b, h, q, k: score + slopes[h] * (k - q)  # noqa: E731
        text, captured = recorded_mods(score, causal, query)
        return ours.by_products(query, key, value, captured, mods_of(text), None, (0, 0, 0))[:2]

    assert torch.autograd.gradcheck(attended, leaves, fast_mode=True)


def test_a_query_without_keys_has_zeros_and_no_gradient() -> None:
    query = QUERY.clone().requires_grad_()
    text, captured = recorded_mods(lambda score, *_: score, lambda b, h, q, k: q > k, QUERY)
    out, totals, peaks = ours.by_products(query, KEY, VALUE, captured, mods_of(text), None, (0, 0, 0))
    assert not out[:, :, 0].any() and totals[:, :, 0].isneginf().all() and peaks[:, :, 0].isneginf().all()
    (out.sum() + totals[:, :, 1:].sum()).backward()
    assert query.grad is not None and query.grad.isfinite().all() and not query.grad[:, :, 0].any()


def test_texts_of_equal_functions_are_equal() -> None:
    """So that two layers with one mask have equal operators, and ranks can compare what they run."""

    def text(window: int) -> str:
        return recorded_mods(lambda score, *_: score, lambda b, h, q, k: q - k < window, QUERY).text

    assert text(3) == text(3) != text(4)
