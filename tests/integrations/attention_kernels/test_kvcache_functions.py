"""kvcache_functions: decoding with flash_attn_with_kvcache on ranks beside one device."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from errors import message
from kernel_packages import flash_attn, flash_attn_interface
from ranks import Checks
from torch import Tensor, nn

import autotp
from autotp.diagnostics.verify import compare_calls
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.options import Options

checks, on_cards = Checks(), Checks(cards=True)
WIDTH, HEAD, BATCH, PLACES, PAGE = 32, 8, 2, 12, 4


class Decoding(nn.Module):
    """Attention with a cache of its own: [batch new width] and how many tokens each row had -> [batch new width].

    Args:
        keeps: "attribute", "buffer", or "argument", where the caches are.
        by_head: arguments that are tensors, by head.
    """

    def __init__(
        self, keeps: str = "attribute", *, heads: int = 4, groups: int = 2, package: Any = flash_attn,
        paged: str = "", by_head: Any = None, lse: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.keeps, self.paged, self.by_head = keeps, paged, by_head or {}
        self.function = package.flash_attn_with_kvcache
        self.settings = {"causal": True, **settings, **({"return_softmax_lse": True} if lse else {})}
        self.q, self.o = nn.Linear(WIDTH, heads * HEAD, bias=False), nn.Linear(heads * HEAD, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, groups * HEAD, bias=False) for _ in range(2))
        for name in ("keys", "values"):
            if keeps == "buffer":
                self.register_buffer(name, caches(groups, paged)[0])
            elif keeps == "attribute":
                setattr(self, name, caches(groups, paged)[0])

    def forward(self, x: Tensor, lengths: Any, *others: Tensor) -> Any:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v))
        keys, values = others[-2:] if self.keeps == "argument" else (self.keys, self.values)
        pages = {self.paged: others[0]} if self.paged else {}
        result = self.function(q, keys, values, k, v, cache_seqlens=lengths, **pages, **self.settings, **self.by_head)
        output, *lse = result if isinstance(result, tuple) else (result,)
        output = self.o(output.flatten(-2))
        return (output, *lse) if lse else output


def caches(groups: int = 2, paged: str = "") -> tuple[Tensor, Tensor]:
    shape = (BATCH * PLACES // PAGE, PAGE) if paged else (BATCH, PLACES)
    made = torch.zeros(2, *shape, groups, HEAD, dtype=torch.float64)
    return made[0].clone(), made[1].clone()


def tokens(new: int, seed: int = 0) -> Tensor:
    return torch.randn(BATCH, new, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LENGTHS = torch.tensor([2, 5], dtype=torch.int32)
PAGES = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
SLOPES = torch.linspace(0.1, 0.9, 4)
CALLS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "attribute": (Decoding(), (tokens(3), LENGTHS)),
    "buffer": (Decoding("buffer"), (tokens(3), LENGTHS)),
    "argument": (Decoding("argument"), (tokens(3), LENGTHS, *caches())),
    "one token": (Decoding(), (tokens(1), LENGTHS)),
    "one length for all": (Decoding(), (tokens(3), 4)),
    "uneven heads": (Decoding(heads=6, groups=3), (tokens(3), LENGTHS)),
    "window and cap": (Decoding(window_size=(2, 0), softcap=2.0, softmax_scale=0.3), (tokens(3), LENGTHS)),
    "slopes": (Decoding(by_head={"alibi_slopes": SLOPES}), (tokens(3), LENGTHS)),
    "slopes by row": (Decoding(by_head={"alibi_slopes": torch.stack([SLOPES, 1 - SLOPES])}), (tokens(3), LENGTHS)),
    "log-sum-exp": (Decoding(lse=True), (tokens(3), LENGTHS)),
    "pages": (Decoding(paged="block_table"), (tokens(3), LENGTHS, PAGES)),
    "version 3": (Decoding(package=flash_attn_interface), (tokens(3), LENGTHS)),
    "version 3 with pages": (
        Decoding(package=flash_attn_interface, paged="page_table"), (tokens(3), LENGTHS, PAGES),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_cut_by_heads(name: str, tp: int) -> None:
    """With tp=3 and two groups a rank has no heads."""
    model, inputs = CALLS[name]
    report = compare_calls(copy.deepcopy(model).double().eval(), (copy.deepcopy(inputs), {}), tp, Options())
    assert report.ok, report
    assert "no rule" not in str(report.plan) and ("@tp" in str(report.plan) or name == "argument")


@checks.on(2, 3)
def steps_with_a_cache_equal_one_device(rank: int, n: int) -> None:
    """A prompt, then tokens one by one; and the caches of an attribute have this rank's heads alone."""
    for name in ("attribute", "buffer", "argument", "pages", "version 3 with pages"):
        model, (_, _, *others) = CALLS[name]
        plain = copy.deepcopy(model).double().eval()
        example = (tokens(3), LENGTHS, *copy.deepcopy(others))
        parallel = autotp.parallelize(copy.deepcopy(plain), tp=n, example_inputs=example)
        here, there = copy.deepcopy(others), copy.deepcopy(others)
        lengths = torch.zeros(BATCH, dtype=torch.int32)
        for step, new in enumerate((4, 1, 1, 3, 1)):
            expected = plain(tokens(new, step), lengths, *here)
            computed = parallel(tokens(new, step), lengths, *there)
            torch.testing.assert_close(computed, expected, rtol=1e-10, atol=1e-10)
            lengths = lengths + torch.tensor([new, new], dtype=torch.int32)
        if name == "attribute":
            assert isinstance(parallel.keys, Sharded) and parallel.keys.part.shape[2] == (rank < 2) * 2 // min(n, 2)
            torch.testing.assert_close(autotp.gather(parallel.keys), plain.keys, rtol=1e-10, atol=1e-10)
        for first, second in zip(here, there, strict=True):
            torch.testing.assert_close(second, first, rtol=1e-10, atol=1e-10)


@on_cards.on(2)
def on_a_card_a_rank_calls_the_function_with_its_heads(rank: int, n: int) -> None:
    """And without new keys, which are in the cache already."""
    module, calls = flash_attn.flash_attn_interface, list[Any]()
    attend_with_cache = module.attend_with_cache

    def noting(q: Tensor, keys: Tensor, values: Tensor, k: Any, v: Any, *rest: Any, **how: Any) -> Any:
        calls.append((q.device.type, q.shape[2], keys.shape[2], k, how["causal"], how["softmax_scale"]))
        return attend_with_cache(q, keys, values, k, v, *rest, **how)

    plain = Decoding("buffer", softmax_scale=0.3).bfloat16().eval()
    parallel = autotp.parallelize(copy.deepcopy(plain), tp=n, example_inputs=(tokens(3).bfloat16(), LENGTHS))
    inputs = tokens(4, 1).bfloat16(), LENGTHS
    with patch.object(module, "attend_with_cache", noting):
        computed = parallel(*(x.cuda() for x in inputs))
    assert calls == [("cuda", 2, 1, None, True, 0.3)]
    torch.testing.assert_close(computed.cpu().float(), plain(*inputs).float(), rtol=0.02, atol=0.02)


def refused(model: nn.Module, lengths: Any = LENGTHS, *others: Tensor) -> str:
    return message(autotp.explain, model.double().eval(), tp=2, example_inputs=(tokens(3), lengths, *others))


def test_what_has_no_rule_is_refused() -> None:
    text = refused(Decoding(by_head={"rotary_cos": torch.ones(12, 4), "rotary_sin": torch.ones(12, 4)}))
    assert "flash_attn_with_kvcache gets `rotary_cos`, for which autotp has no rule" in text, text
    text = refused(Decoding(by_head={"cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32)}))
    assert "flash_attn_with_kvcache gets `cache_batch_idx`, for which autotp has no rule" in text, text


def test_a_call_that_the_function_refuses_is_refused() -> None:
    assert "flash_attn_with_kvcache gets no cache_seqlens" in refused(Decoding(), None)
    text = refused(Decoding("argument"), LENGTHS, *caches(groups=1))
    assert (
        "[2, 3, 4, 8], [2, 12, 1, 8], [2, 12, 1, 8], [2, 3, 2, 8], [2, 3, 2, 8], whose heads or widths do not fit"
        in text
    ), text


@pytest.mark.parametrize(("n", "name"), on_cards.cases())
def test_kvcache_functions_on_cards(n: int, name: str) -> None:
    on_cards.expect(n, name)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_kvcache_functions_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
