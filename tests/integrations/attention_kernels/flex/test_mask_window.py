"""mask_window: a mask of flex_attention that bounds the distance of keys is a halo over cp, and others are gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Checks
from torch import Tensor, fx, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import compare_calls
from autotp.integrations.attention_kernels.flex.flex_attention import FLEX
from autotp.integrations.attention_kernels.flex.mods import mods_of, recorded_mods
from autotp.integrations.attention_kernels.flex.recorded import flex_without_kernels
from autotp.ops import collectives
from autotp.ops.attention.documents import documents_in, ends_of_numbers
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.runtime.module import executable_of
from autotp.sharding.partition import chunk_bounds

checks = Checks()
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def within(before: int, after: int) -> Mask:
    return lambda b, h, q, k: (q - k <= before) & (k <= q + after)


def of_one_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[0, q] == DOCUMENTS[0, k]


MASKS: dict[str, tuple[Mask, tuple[int, int] | None]] = {
    "both sides": (within(3, 2), (3, 2)),
    "absolute": (lambda b, h, q, k: (q - k).abs() <= 4, (4, 4)),
    "absolute, smaller": (lambda b, h, q, k: (k - q).abs() < 4, (3, 3)),
    "causal window": (and_masks(causal, lambda b, h, q, k: q - k < 3), (2, 0)),
    "window of numbers alone": (lambda b, h, q, k: (q - k <= 2) & (q - k > -1), (2, 0)),
    "positions with an offset": (lambda b, h, q, k: ((q + 5) - k <= 7) & (k - 1 < q), (2, 0)),
    "less than a part of a number": (lambda b, h, q, k: (q - k < 2.5) & (k - q < 1.5), (2, 1)),
    "parts of numbers": (lambda b, h, q, k: (q + 0.5 - k < 3) & (k <= q + 1.5), (2, 1)),
    "absolute, part of a number": (lambda b, h, q, k: (q - k).abs() < 2.5, (2, 2)),
    "absolute, at most a part": (lambda b, h, q, k: (q - k).abs() <= 2.5, (2, 2)),
    "more than parts of numbers": (lambda b, h, q, k: (k > q - 2.5) & (q > k - 1), (2, 0)),
    "at most all": (lambda b, h, q, k: (q - k < float("inf")) & (q - k <= 3) & (k <= q), (3, 0)),
    "the same key": (lambda b, h, q, k: q == k, (0, 0)),
    "only later keys": (lambda b, h, q, k: (k - q >= 1) & (k - q <= 3), (0, 3)),
    "documents and a window": (and_masks(same_document, within(2, 1)), (2, 1)),
    "one of two windows": (or_masks(within(1, 3), within(4, 0)), (4, 3)),
    "a window by head": (lambda b, h, q, k: ((q - k).abs() < 3) & ((q - k).abs() < h + 1), (2, 2)),
    "causal": (causal, None),
    "documents": (same_document, (-1, -1)),
    "documents of one row": (of_one_row, (-1, -1)),
    "documents as transformers reads them": (lambda b, h, q, k: same_document(b, h, q + 0, k + 0), (-1, -1)),
    "causal documents": (and_masks(causal, same_document), (-1, 0)),
    "documents and a prefix of them": (and_masks(same_document, or_masks(causal, lambda b, h, q, k: k < 2)), (-1, -1)),
    "a document, or one of two": (or_masks(same_document, and_masks(same_document, causal)), (-1, -1)),
    "a document, or the first keys": (or_masks(same_document, lambda b, h, q, k: k < 2), None),
    "documents of two rows": (lambda b, h, q, k: DOCUMENTS[0, q] == DOCUMENTS[b, k], None),
    "numbers further on": (lambda b, h, q, k: DOCUMENTS[b, q % 8 + 0] == DOCUMENTS[b, k % 8 + 0], None),
    "the number before": (lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k - 1], None),
    "another document": (lambda b, h, q, k: DOCUMENTS[b, q] != DOCUMENTS[b, k], None),
    "a later document": (lambda b, h, q, k: DOCUMENTS[b, q] >= DOCUMENTS[b, k], None),
    "a window or a prefix": (or_masks(within(1, 1), lambda b, h, q, k: k < 2), None),
    "not in a window": (lambda b, h, q, k: ~((q - k).abs() < 3), None),
    "by twos": (lambda b, h, q, k: (2 * q - k).abs() < 3, None),
    "of a remainder": (lambda b, h, q, k: (q % 4 - k % 4).abs() < 3, None),
    "a sum of positions": (lambda b, h, q, k: (q + k < 9) & (q - k < 2), None),
    "positions of one alone": (lambda b, h, q, k: (q < 4) & (k < 4), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_window_of_a_mask(name: str) -> None:
    mask, window = MASKS[name]
    queries = torch.zeros(1, 2, 8, 4)
    mods = mods_of(recorded_mods(lambda score, *_: score, mask, queries).text)
    assert mods.window == window and (mods.numbers is not None) == (window is not None and "document" in name)
    if window is not None:  # Nothing that a query reads is outside.
        places = torch.meshgrid(*(torch.arange(n) for n in (1, 2, 8, 8)), indexing="ij")
        distance = (places[3] - places[2])[mask(*places)]
        assert distance.min() >= -window[0] or window[0] < 0
        assert distance.max() <= window[1] or window[1] < 0
        outside = DOCUMENTS[0, places[2]] != DOCUMENTS[0, places[3]]
        assert mods.numbers is None or (mods.numbers[1] == 1 and not (outside & mask(*places)).any())


class Windowed(nn.Module):
    """Attention of 4 heads, two to a group, with a bias by distance. x: [batch seq 12]"""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.qkv, self.out = mask, nn.Linear(12, 24), nn.Linear(12, 12)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, self.mask)

    def attend(self, x: Tensor, mask_mod: Mask) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in self.qkv(x).split([12, 6, 6], -1))
        mask = create_block_mask(mask_mod, None, None, x.shape[1], x.shape[1], device=x.device)
        bias = lambda score, b, h, q, k: score - self.slopes[h] * (q - k).abs()  # noqa: E731
        return self.out(flex_attention(q, k, v, bias, mask, enable_gqa=True).transpose(1, 2).flatten(2))


def inputs(length: int) -> Tensor:
    return torch.randn(2, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


class InDocuments(Windowed):
    """Causal attention within documents, of whose tokens a loop has the numbers, [batch seq]; or `before` keys back."""

    def __init__(self, before: int | None = None) -> None:
        super().__init__(causal)
        self.before = before

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:  # type: ignore[override]
        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = (documents[b, q] == documents[b, k]) & (q >= k)
            return seen if self.before is None else seen & (q - k <= self.before)

        return self.attend(x, mask)


LENGTHS: dict[str, list[list[int]]] = {
    "thirteen tokens": [[3, 2, 4, 4], [5, 8]],
    "a document on all ranks": [[24], [2, 22]],
    "documents that end with ranks": [[6, 6, 6, 6], [12, 12]],
    "a rank without tokens": [[1, 2], [3]],
    "documents of one token": [[1] * 7, [1] * 7],
}
"""The lengths of the documents of two rows."""


def numbers_of(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


def borders(numbers: Tensor) -> list[int]:
    """The positions before which a document ends: on both sides of none of them is one number."""
    rows = numbers.tolist()
    return [p for p in range(len(rows[0]) + 1) if not any(set(row[:p]) & set(row[p:]) for row in rows)]


SENT = [("both sides", 3, 2), ("absolute", 4, 4), ("causal window", 2, 0), ("only later keys", 0, 3)]


@pytest.mark.parametrize(("tp", "cp"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("name", [name for name, *_ in SENT])
def test_a_window_reads_halos_and_verify_agrees(name: str, tp: int, cp: int) -> None:
    model, options = Windowed(MASKS[name][0]).double(), Options(cp=cp, cp_attention="gather")
    report = compare_calls(copy.deepcopy(model), ((inputs(13),), {}), tp, options)
    assert report.ok, report
    assert "1 read the keys and values that queries see" in str(report.plan), str(report.plan)
    graph: fx.Graph = analyse(skeleton_of(model), (inputs(13),), {}, tp, options).graph
    assert len(list(graph.find_nodes(op="call_function", target=collectives.halo))) == 2
    (node,) = graph.find_nodes(op="call_function", target=FLEX)
    assert node.args[-1] is not None


@pytest.mark.parametrize(("tp", "cp"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("before", [None, 3])
def test_documents_read_halos_and_verify_agrees(before: int | None, tp: int, cp: int) -> None:
    """Layers that read one tensor of numbers share the ends."""
    model, options = InDocuments(before).double(), Options(cp=cp, cp_attention="gather")
    arguments = inputs(13), numbers_of(LENGTHS["thirteen tokens"])
    report = compare_calls(copy.deepcopy(model), (arguments, {}), tp, options)
    assert report.ok, report
    assert "1 read the keys and values that queries see" in str(report.plan), str(report.plan)
    graph: fx.Graph = analyse(skeleton_of(model), arguments, {}, tp, options).graph
    assert len(list(graph.find_nodes(op="call_function", target=collectives.halo))) == 2
    assert len(list(graph.find_nodes(op="call_function", target=ends_of_numbers))) == 1


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-2, 3), min_size=6, max_size=6), min_size=1, max_size=3), st.booleans())
def test_ends_are_where_no_number_is_on_both_sides(rows: list[list[int]], turned: bool) -> None:
    numbers = torch.tensor(rows)
    more = torch.cat([numbers, numbers], 1)
    ends = ends_of_numbers(more.T.contiguous() if turned else more, 0 if turned else 1, 6)
    assert sorted(set(ends.tolist())) == borders(numbers) and ends.dtype == torch.int32 and len(ends) == 7
    assert documents_in(ends, 6) == ends.tolist()


def sent_by(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, int]:
    """What a model returns, and how many numbers all ranks send in the call."""
    sent, run = list[int](), collectives.communicate

    def communicate(kind: str, x: Tensor, *rest: Any) -> Tensor:
        sent.extend([sum(rest[1])] if kind == "all_to_all_single" else [])
        result: Tensor = run(kind, x, *rest)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "communicate", communicate)
        result = model(*inputs)
    total = torch.tensor(sum(sent))
    dist.all_reduce(total)
    return result, int(total)


def expect_same_gradients(plain: nn.Module, parallel: nn.Module, outputs: list[Tensor]) -> None:
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-10)
    for output in outputs:
        output.square().sum().backward()
    for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)
    plain.zero_grad()
    parallel.zero_grad()


@checks.on(2, 4)
def documents_get_the_keys_that_they_see(rank: int, n: int) -> None:
    """One graph for all documents; a number that comes again later joins all that is between."""
    for before in (None, 3):
        plain = InDocuments(before).double()
        parallel = autotp.parallelize(
            copy.deepcopy(plain), tp=1, cp=n, cp_attention="gather",
            example_inputs=(inputs(13), numbers_of(LENGTHS["thirteen tokens"])),
        )  # fmt: skip
        again = numbers_of(LENGTHS["documents that end with ranks"]) % 2
        for numbers in (*map(numbers_of, LENGTHS.values()), again):
            x, length = inputs(numbers.shape[1]), numbers.shape[1]
            with flex_without_kernels():
                expected = plain(x, numbers)
            result, sent = sent_by(parallel, x, numbers)
            expect_same_gradients(plain, parallel, [expected, result])
            keys, ends = 0, borders(numbers)
            for start, stop in (chunk_bounds(length, n, r) for r in range(n)):
                begin = max(p for p in ends if p <= start)
                keys += start - max(begin, 0 if before is None else start - before, 0) if stop > start else 0
            assert sent == 2 * keys * 2 * 6, (before, length)  # Keys and values of 2 rows, of 6 numbers each.
        assert len(executable_of(parallel).graphs.entries) <= 3


class TwoLayers(nn.Module):
    """Two layers within documents, of the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([InDocuments(), InDocuments()])

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        for layer in self.h:
            x = x + layer(x, documents)
        return x


@checks.on(2)
def compiled_blocks_get_all_keys_that_a_document_may_have(rank: int, n: int) -> None:
    plain = TwoLayers().double()
    first, *others = (numbers_of(LENGTHS[name]) for name in ("thirteen tokens", "documents of one token"))
    parallel = autotp.parallelize(
        copy.deepcopy(plain), tp=1, cp=n, cp_attention="gather", example_inputs=(inputs(13), first)
    )
    assert "each reads the keys that its queries see" in message(parallel.compile_blocks)
    parallel.compile_blocks(backend="aot_eager")
    for numbers in (first, *others):
        x = inputs(numbers.shape[1])
        with flex_without_kernels():
            expected = plain(x, numbers)
        expect_same_gradients(plain, parallel, [expected, parallel(x, numbers)])


@checks.on(2, 4)
def ranks_equal_one_device_and_get_the_keys_that_they_see(rank: int, n: int) -> None:
    """Outputs, gradients, and the numbers that are sent; at the captured length and at others."""
    for name, before, after in SENT:
        plain = Windowed(MASKS[name][0]).double()
        parallel = autotp.parallelize(
            copy.deepcopy(plain), tp=1, cp=n, cp_attention="gather", example_inputs=inputs(13)
        )
        for length in (13, 24, 7, 3):
            x = inputs(length)
            with flex_without_kernels():
                expected = plain(x)
            result, sent = sent_by(parallel, x)
            expect_same_gradients(plain, parallel, [expected, result])
            keys = 0
            for start, stop in (chunk_bounds(length, n, r) for r in range(n)):
                around = max(start - before, 0), min(stop + after, length)
                keys += around[1] - around[0] - (stop - start) if stop > start else 0
            assert sent == 2 * keys * 2 * 6, (name, length)  # Keys and values of 2 rows, of 6 numbers each.


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
