"""halos: over cp a rank reads the keys and values that its queries see, and no others; the bytes are counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import kernel_packages
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cards.spies import host_waits
from errors import message
from kernel_packages import flash_attn, flash_attn_interface
from ranks import Checks
from small_models import signatures_met
from torch import Tensor, fx, nn
from torch.nn.attention.varlen import varlen_attn

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import compare_calls
from autotp.ops import collectives
from autotp.ops.attention.documents import keys_seen
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.plan.sequence import halos
from autotp.passes.program import sequences
from autotp.sharding.partition import chunk_bounds

checks, on_cards = Checks(), Checks(cards=True)
WIDTH, HEAD, KEYS = 16, 4, 2
"""Of a model: its width, that of a head, and the number of heads of keys and values."""


class Attention(nn.Module):
    """Two layers of attention by a kernel: rows [batch seq width], or packed [tokens width].

    With `after` it is not causal: a query reads so many keys after its own position, all with -1.
    """

    def __init__(self, window: int = -1, kernel: str = "flash", more: str = "", chunk: int = 0, after: int = 0) -> None:
        super().__init__()
        self.window, self.kernel, self.more, self.chunk, self.after = window, kernel, more, chunk, after
        self.q, self.o = (nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)) for _ in range(2))
        self.k, self.v = (nn.ModuleList(nn.Linear(WIDTH, KEYS * HEAD) for _ in range(2)) for _ in range(2))
        self.by_head = nn.Parameter(torch.linspace(0.1, 0.9, WIDTH // HEAD), requires_grad=more != "slopes")

    def forward(self, x: Tensor, *ends: Any) -> Tensor:
        for q, k, v, o in zip(self.q, self.k, self.v, self.o, strict=True):
            x = x + o(self.attended(*(part(x).unflatten(-1, (-1, HEAD)) for part in (q, k, v)), ends).flatten(-2))
        return x

    def attended(self, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Any, ...]) -> Tensor:
        if self.kernel == "varlen":
            cut, longest = ends
            return varlen_attn(
                q, k, v, cut, cut, longest, longest, window_size=(self.window, self.after), enable_gqa=True
            )  # type: ignore[return-value]
        if self.kernel == "masked":
            back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mask = (back >= 0) & (back <= self.window)
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
        named: dict[str, Any] = {"slopes": {"alibi_slopes": self.by_head}, "sinks": {"learnable_sink": self.by_head}}
        named["chunks"] = {"attention_chunk": self.chunk}
        packages: dict[str, Any] = {"sinks": flash_attn.cute, "chunks": flash_attn_interface}
        package = packages.get(self.more, flash_attn)
        settings = {"causal": not self.after, "window_size": (self.window, self.after), **named.get(self.more, {})}
        lengths = [n for n in ends for _ in range(2)]  # Of queries, and of keys.
        function = package.flash_attn_varlen_func if ends else package.flash_attn_func
        result = function(q, k, v, *lengths, **settings)
        return result[0] if isinstance(result, tuple) else result


def rows(seq: int = 13, batch: int = 2, seed: int = 0) -> tuple[Any, ...]:
    return (torch.randn(batch, seq, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),)


def documents(lengths: list[int], seed: int = 0) -> tuple[Any, ...]:
    """Packed tokens, the ends of the documents, and the longest."""
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    return rows(sum(lengths), 1, seed)[0][0], ends, max(lengths)


LENGTHS = [[6, 3, 11], [5, 5, 4, 9], [1, 16], [30], [2] * 9, [1, 1, 1]]
"""Documents that end inside a part, lie on all ranks, or on none; of three tokens four ranks have at most one."""
CASES: dict[str, tuple[Attention, list[tuple[Any, ...]]]] = {
    "window": (Attention(3), [rows(), rows(7), rows(3, 3), rows(24)]),
    "window longer than a part": (Attention(9), [rows(), rows(24), rows(7)]),
    "slopes": (Attention(4, more="slopes"), [rows(), rows(9)]),
    "sinks": (Attention(4, more="sinks"), [rows(), rows(9)]),
    "chunks": (Attention(more="chunks", chunk=4), [rows(), rows(7), rows(3, 3), rows(24)]),
    "chunks longer than a part": (Attention(more="chunks", chunk=10), [rows(), rows(24), rows(7)]),
    "chunks and a window": (Attention(2, more="chunks", chunk=5), [rows(), rows(24)]),
    "packed chunks": (Attention(more="chunks", chunk=4), [documents(lengths) for lengths in LENGTHS]),
    "packed": (Attention(), [documents(lengths) for lengths in LENGTHS]),
    "packed window": (Attention(4), [documents(lengths) for lengths in LENGTHS]),
    "packed slopes": (Attention(more="slopes"), [documents(lengths) for lengths in LENGTHS[:3]]),
    "packed sinks": (Attention(5, more="sinks"), [documents(lengths) for lengths in LENGTHS[:3]]),
    "varlen": (Attention(kernel="varlen"), [documents(lengths) for lengths in LENGTHS]),
    "varlen window": (Attention(4, "varlen"), [documents(lengths) for lengths in LENGTHS]),
    "both sides": (Attention(3, after=2), [rows(), rows(7), rows(3, 3), rows(24)]),
    "both sides, longer than a part": (Attention(2, after=9), [rows(), rows(24), rows(7)]),
    "after": (Attention(0, after=4), [rows(), rows(9)]),
    "slopes on both sides": (Attention(4, more="slopes", after=3), [rows(), rows(9)]),
    "all later keys": (Attention(3, after=-1), [rows(), rows(7), rows(3, 3), rows(24)]),
    "its own and all later keys": (Attention(0, after=-1), [rows(), rows(9)]),
    "all earlier keys and some later ones": (Attention(-1, after=4), [rows(), rows(7), rows(3, 3), rows(24)]),
    "slopes and all later keys": (Attention(3, more="slopes", after=-1), [rows(), rows(9)]),
    "packed, all later keys": (Attention(3, after=-1), [documents(lengths) for lengths in LENGTHS]),
    "packed slopes to both sides": (
        Attention(more="slopes", after=-1),
        [documents(lengths) for lengths in LENGTHS[:3]],
    ),
    "packed, both sides": (Attention(3, after=4), [documents(lengths) for lengths in LENGTHS]),
    "packed sinks on both sides": (
        Attention(4, more="sinks", after=4),
        [documents(lengths) for lengths in LENGTHS[:3]],
    ),
    "whole documents": (Attention(after=-1), [documents(lengths) for lengths in LENGTHS]),
    "varlen, both sides": (Attention(2, "varlen", after=3), [documents(lengths) for lengths in LENGTHS]),
    "varlen, whole documents": (Attention(-1, "varlen", after=-1), [documents(lengths) for lengths in LENGTHS]),
}


def seen_of_others(batch: tuple[Any, ...], window: int, n: int, chunk: int = 0, after: int = 0) -> int:
    """The keys of other ranks that some query of a rank sees, of all ranks together, by looking at each pair.

    Of the chunks of rows a rank reads the whole beginning of its first one, with a window, too; of packed documents
    that of the document.
    """
    tokens = batch[0].shape[-2]
    document = torch.zeros(tokens, dtype=torch.int64)
    if len(batch) > 1:
        document = torch.repeat_interleave(torch.arange(len(batch[1]) - 1), batch[1].diff().long())
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = ((back >= -after) | (after < 0)) & (document[:, None] == document)
    if chunk and len(batch) == 1:
        seen &= torch.arange(tokens)[:, None] // chunk == torch.arange(tokens) // chunk
    seen &= (back <= window) | (window < 0) | (chunk > 0)
    total = 0
    for start, stop in (chunk_bounds(tokens, n, rank) for rank in range(n)):
        keys = seen[start:stop].any(0)
        total += int(keys.sum() - keys[start:stop].sum())
    return total


@contextmanager
def counted() -> Iterator[list[int]]:
    """A region that counts the numbers of an all-to-all that this rank sends to others, in its order."""
    sent, run = list[int](), collectives.communicate

    def communicate(name: str, x: Tensor, *rest: Any) -> Tensor:
        if name == "all_to_all_single":
            sent.append(sum(rest[1]))
        return run(name, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "communicate", communicate)
        yield sent


def of_all_ranks(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


@checks.on(2, 4)
def each_case_equals_one_device_and_sends_the_keys_that_are_seen(rank: int, n: int) -> None:
    """Outputs, gradients, and the bytes of forward and of backward, at the captured sizes and at others."""
    for name, (model, batches) in CASES.items():
        plain = copy.deepcopy(model).double()
        parallel = autotp.parallelize(
            copy.deepcopy(plain), tp=1, cp=n, cp_attention="gather", example_inputs=batches[0]
        )
        optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (plain, parallel)]
        for step, batch in enumerate(batches):
            weights = torch.randn(batch[0].shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            inputs = [batch[0].clone().requires_grad_() for _ in range(2)]
            with counted() as sent:
                outputs = [m(x, *batch[1:]) for m, x in zip((plain, parallel), inputs, strict=True)]
                forward = len(sent)
                for output in outputs:
                    (output * weights).sum().backward()
            message = f"{name} {step}"
            torch.testing.assert_close(
                outputs[1], outputs[0], rtol=1e-10, atol=1e-10, msg=lambda m, at=message: f"{at}: {m}"
            )
            torch.testing.assert_close(
                inputs[1].grad, inputs[0].grad, rtol=1e-10, atol=1e-10, msg=lambda m, at=message: f"{at}: {m}"
            )
            for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
                torch.testing.assert_close(
                    q.grad, p.grad, rtol=1e-10, atol=1e-10, msg=lambda m, at=message: f"{at}: {m}"
                )
            # Two layers, and in each the keys and the values.
            count = (
                2
                * 2
                * seen_of_others(batch, model.window, n, model.chunk, model.after)
                * KEYS
                * HEAD
                * (1 if len(batch) > 1 else len(batch[0]))
            )
            assert [of_all_ranks(sum(sent[:forward])), of_all_ranks(sum(sent[forward:]))] == [count, count], message
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # With the longest document as a number, and then as an input. One token is a graph of its own.
        assert signatures_met(parallel) <= (2 if len(batches[0]) > 1 else 1), name


@checks.on(4)
def tp_and_cp_together_equal_one_device(rank: int, n: int) -> None:
    for name in ("window", "packed", "varlen window"):
        model, batches = CASES[name]
        plain = copy.deepcopy(model).double()
        for layout in ({}, {"sequence_parallel": True, "recompute": "full"}, {"recompute": "selective"}):
            parallel = autotp.parallelize(
                copy.deepcopy(plain), tp=2, cp=2, cp_attention="gather", example_inputs=batches[0], **layout
            )
            for batch in batches[:3]:
                outputs = [m(*batch) for m in (plain, parallel)]
                torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-10)
                for output in outputs:
                    output.square().sum().backward()
                for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
                    if p.requires_grad:
                        torch.testing.assert_close(autotp.gather(q.grad), p.grad, rtol=1e-10, atol=1e-10, msg=name)
                plain.zero_grad()
                parallel.zero_grad()


# ---- the conjugate


def meaning(whole: Tensor, dim: int, keys: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """What each rank gets: its part, and the positions around it that it reads."""
    return [whole.narrow(dim, first, stop - first) for first, stop in keys]


@checks.on(2, 4)
def a_halo_is_what_it_means_and_so_is_its_gradient(rank: int, n: int) -> None:
    """On each dimension, in any order in memory, of parts that are empty or shorter than the halo; also of bytes."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for dim, size, before, ends, after in [
        (0, 12, 2, None, 0), (1, 7, 5, None, 0), (2, 3, 1, None, 0), (-1, 9, 0, None, 0), (1, 2, 1, None, 0),
        (1, 10, 9, [0, 3, 3, 8, 10], 0), (0, 12, 2, None, 1), (1, 7, 5, None, 6), (2, 3, 0, None, 1),
        (1, 10, 9, [0, 3, 3, 8, 10], 9), (1, 10, 1, [0, 3, 3, 8, 10], 3), (1, 2, 1, None, 2),
    ]:  # fmt: skip
        shape = [size if d == dim % 3 else 2 + d for d in range(3)]
        generator = torch.Generator().manual_seed(0)
        cut = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        keys, (start, stop) = keys_seen(size, n, before, ends, after=after), chunk_bounds(size, n, rank)
        for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int16):
            whole = torch.randint(-4, 5, shape, generator=generator).to(dtype)
            part = whole.narrow(dim, start, stop - start).transpose(0, 2).contiguous().transpose(0, 2)
            part.requires_grad_(dtype != torch.int16)
            got = collectives.halo(part, group, dim, size, before, cut, 0, after)
            torch.testing.assert_close(got, meaning(whole, dim, keys)[rank])
            if dtype == torch.int16:
                continue
            weights = [torch.randint(-4, 5, x.shape, generator=generator).to(dtype) for x in meaning(whole, dim, keys)]
            leaf = whole.clone().requires_grad_()
            sum((x * w).sum() for x, w in zip(meaning(leaf, dim, keys), weights, strict=True)).abs().backward()  # type: ignore[union-attr]
            total = torch.autograd.grad(got, part, torch.zeros_like(got))[0]
            assert total.shape == part.shape
            if dtype == torch.float64:
                (gradient,) = torch.autograd.grad(got, part, weights[rank], create_graph=True)
                expected = torch.autograd.grad(meaning(leaf, dim, keys), leaf, weights)[0]
                torch.testing.assert_close(gradient, expected.narrow(dim, start, stop - start))


@checks.on(2)
def ranks_without_heads_have_halos(rank: int, n: int) -> None:
    """With more tensor-parallel ranks than heads a rank has none, and all along `cp` send nothing."""
    x = torch.ones(3, 0, 4, requires_grad=True)
    got = collectives.halo(x, dist.group.WORLD.group_name, 0, 6, 2)  # type: ignore[union-attr]
    got.sum().backward()
    assert got.shape == (5 if rank else 3, 0, 4) and x.grad is not None and x.grad.shape == x.shape


@checks.on(2, rare=True)
def a_compiled_model_equals_one_device(rank: int, n: int) -> None:
    """There the ends of documents are not read on the host, as on a GPU."""
    for name in ("window", "packed window"):
        model, batches = CASES[name]
        plain, parallel = (copy.deepcopy(model).double() for _ in range(2))
        parallel = autotp.parallelize(parallel, tp=1, cp=n, cp_attention="gather", example_inputs=batches[0])
        parallel(*batches[0])
        outputs = [m(*batches[0]) for m in (plain, torch.compile(parallel, backend="aot_eager"))]
        for output in outputs:
            output.square().sum().backward()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-10)
        for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)


@checks.on(2)
def a_window_of_transformers_is_a_halo(rank: int, n: int) -> None:
    """Mistral with flash-attn: packed texts as the collator sends them, and rows. Its norms compute in float32."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, sliding_window=5, use_cache=False, pad_token_id=0,
        attn_implementation="flash_attention_2",
    )  # fmt: skip
    torch.manual_seed(0)
    with kernel_packages.usable_in_transformers():
        plain = transformers.MistralForCausalLM(config).double()
    tokens = torch.arange(2 * 18).view(2, 18) % 96
    calls: list[list[tuple[dict[str, Any], tuple[Tensor, ...]]]] = [[({"input_ids": tokens, "labels": tokens}, ())]]
    for options in ({"return_flash_attn_kwargs": True}, {}):  # Without, transformers reads where positions start again.
        collator = transformers.DataCollatorWithFlattening(**options)
        texts = [[{"input_ids": [i + 3] * i} for i in lengths] for lengths in LENGTHS[:3]]
        calls.append([(dict(collator(t)), documents(n)[1:2]) for t, n in zip(texts, LENGTHS, strict=False)])
    for batches in calls:
        first = batches[0][0]
        model = autotp.parallelize(copy.deepcopy(plain), tp=1, cp=n, cp_attention="gather", example_inputs=first)
        for batch, ends in batches:
            with counted() as sent:
                losses = [m(**batch).loss for m in (plain, model)]
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
            for loss in losses:
                loss.backward()
            seen = seen_of_others(
                (batch["input_ids"].mT, *ends), 4, n
            )  # transformers' window of 5 has the query's own.
            assert of_all_ranks(sum(sent)) == 2 * 2 * seen * 2 * 8 * batch["input_ids"].shape[0]
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-6)
        plain.zero_grad()


@checks.on(2)
def other_documents_of_keys_are_an_error_on_each_rank(rank: int, n: int) -> None:
    """As many documents in as many tokens: the graph cannot tell them from the same ones in two tensors."""

    class TwoEnds(Attention):
        def attended(self, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Any, ...]) -> Tensor:
            result: Tensor = flash_attn.flash_attn_varlen_func(q, k, v, *ends, ends[2], causal=True)
            return result

    x, ends, longest = documents([6, 3, 11])
    model = autotp.parallelize(
        TwoEnds().double(), tp=1, cp=n, cp_attention="gather", example_inputs=(x, ends, ends.clone(), longest)
    )
    assert torch.isfinite(model(x, ends, ends.clone(), longest)).all()
    text = message(model, x, ends, torch.tensor([0, 5, 9, 20], dtype=torch.int32), longest)
    assert "queries and keys of packed attention have other documents" in text
    assert "[0, 6, 9, 20]" in text and "[0, 5, 9, 20]" in text and 'cp_attention="heads"' in text


@checks.on(2, 4)
def documents_of_one_rank_are_one_error_on_each(rank: int, n: int) -> None:
    """Also late, where ranks no longer compare other inputs; then all go on."""
    batch, layout = documents([6, 3, 11]), {"tp": n // 2, "cp": 2}
    model = autotp.parallelize(Attention().double(), cp_attention="gather", example_inputs=batch, **layout)
    for _ in range(3):
        model(*batch).sum().backward()
    for ends, longest in [
        ([0, 6, 9, 19], 11),
        ([0, 9, 6, 20], 11),
        ([0, 1, 10, 20], 11),
        ([0, 6, 20], 11),
        ([0, 6, 9, 20], 14),
    ]:
        wrong = batch[0], torch.tensor(ends, dtype=torch.int32), longest
        assert "got other inputs than rank 0" in message(model, *(wrong if rank == n - 1 else batch))
        model(*batch).sum().backward()
    model(*documents([20])).sum().backward()


@checks.on(2)
def a_longest_document_that_is_longer_is_an_error(rank: int, n: int) -> None:
    """A rank would read too few keys, and a kernel would compute too few rows: as a number, and as an input."""
    x, ends, longest = documents([6, 3, 11])
    model = autotp.parallelize(
        Attention().double(), tp=1, cp=n, cp_attention="gather", example_inputs=(x, ends, longest)
    )
    for said in (10, 1):
        text = message(model, x, ends, said)
        assert f"a packed document has 11 tokens, and the longest is said to have {said}" in text
        assert "that no document exceeds: int(ends.diff().max())" in text
    assert model(x, ends, 12).isfinite().all() and model(x, ends, 11).isfinite().all()


@on_cards.on(2)
def on_a_card_each_call_sends_what_is_seen_and_the_host_waits_once(rank: int, n: int) -> None:
    """For ends on the card; for those that the loop has on the CPU it does not wait. Two layers, forward and backward.

    A new graph compares its inputs in some calls, and the stand-in for a kernel waits itself.
    """
    device, plain = f"cuda:{rank}", Attention().bfloat16()
    first = documents([6, 3, 11])
    parallel = autotp.parallelize(
        copy.deepcopy(plain), tp=1, cp=n, cp_attention="gather", example_inputs=(first[0].bfloat16(), *first[1:])
    )
    for lengths in LENGTHS[:5] * 2:
        x, ends, longest = documents(lengths)
        for place, waits in ((device, 1), ("cpu", 0)):
            given = x.bfloat16().to(device).requires_grad_(), ends.to(place), longest
            with counted() as sent, host_waits() as seen:
                output = parallel(*given)
                output.sum().backward()
            count = 2 * 2 * 2 * seen_of_others((x, ends), -1, n) * KEYS * HEAD
            assert of_all_ranks(sum(sent)) == count, (lengths, place)
            of_ends = {
                at: times
                for (_, at), times in seen.own_waits.items()
                if "kernel_operator" not in at and "fingerprint" not in at
            }
            assert sum(of_ends.values()) == waits, (lengths, place, of_ends)
        expected = plain(x.bfloat16(), ends, longest)
        torch.testing.assert_close(output.cpu(), expected, rtol=0.05, atol=0.05)


@on_cards.on(2)
def on_a_card_windows_to_both_sides_and_whole_documents_equal_one_device(rank: int, n: int) -> None:
    """Outputs and gradients by the stand-in for the kernel, and what is sent."""
    for plain in (Attention(3, after=4).bfloat16(), Attention(after=-1).bfloat16()):
        x, *rest = documents(LENGTHS[0])
        parallel = autotp.parallelize(
            copy.deepcopy(plain), tp=1, cp=n, cp_attention="gather", example_inputs=(x.bfloat16(), *rest)
        )
        for lengths in LENGTHS[:4]:
            x, ends, longest = documents(lengths)
            with counted() as sent:
                output = parallel(x.bfloat16().cuda(), ends.cuda(), longest)
            keys = seen_of_others((x, ends), plain.window, n, 0, plain.after)
            assert of_all_ranks(sum(sent)) == 2 * 2 * keys * KEYS * HEAD, lengths
            expected = plain(x.bfloat16(), ends, longest)
            torch.testing.assert_close(output.cpu(), expected, rtol=0.05, atol=0.05)
            for result in (output, expected):
                result.float().sum().backward()
        for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
            if p.requires_grad and p.grad is not None:
                # Sums over all tokens, of 8 bits each; the bias of keys has no gradient but what is rounded.
                atol = max(0.05, float(0.05 * p.grad.float().abs().max()))
                torch.testing.assert_close(q.grad.cpu().float(), p.grad.float(), rtol=0.05, atol=atol)


@on_cards.on(2)
def on_a_card_documents_of_one_rank_are_one_error_on_each(rank: int, n: int) -> None:
    """Also late, where ranks no longer compare other inputs; then all go on. Sizes that differ would hang NCCL."""
    device = f"cuda:{rank}"
    x, *rest = documents([6, 3, 11])
    batch = (x.bfloat16().to(device), *rest)
    model = autotp.parallelize(Attention().bfloat16(), tp=1, cp=n, cp_attention="gather", example_inputs=batch)
    for _ in range(4):
        model(*batch).sum().backward()
    for place in (device, "cpu"):
        for ends, longest in (([0, 5, 10, 20], 11), ([0, 6, 20], 14), ([0, 6, 9, 20], 14)):
            wrong = batch[0], torch.tensor(ends, dtype=torch.int32).to(place), longest
            assert "got other inputs than rank 0" in message(model, *(wrong if rank == n - 1 else batch))
            model(*batch).sum().backward()
        short = batch[0], batch[1].to(place), 10
        assert "a packed document has 11 tokens" in message(model, *short)


@checks.on(2)
def a_halo_has_derivatives_of_all_kinds(rank: int, n: int) -> None:
    """The backward of backward, a batch of them, and forward mode."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    read = lambda x: collectives.halo(x, group, 0, 6, 2)  # noqa: E731
    x = torch.arange(3.0).add(rank).double().requires_grad_()
    gradient = torch.autograd.grad(read(x).pow(3).sum(), x, create_graph=True)[0]
    again = torch.autograd.grad(gradient.sum(), x)[0]
    # A position that the other rank reads, too, counts twice.
    times = torch.tensor([1.0, 2.0, 2.0] if rank == 0 else [1.0, 1.0, 1.0]).double()
    torch.testing.assert_close(gradient, 3 * times * x.square())
    torch.testing.assert_close(again, 6 * times * x)
    torch.testing.assert_close(torch.func.vmap(read)(torch.stack([x, 2 * x]))[1], read(2 * x))
    torch.testing.assert_close(torch.func.jvp(read, (x,), (2 * x,))[1], read(2 * x))


# ---- the plan, and its check


def program(
    model: nn.Module, batch: tuple[Any, ...], cp: int = 2, tp: int = 1, cp_rank: int = 0, how: Any = "gather"
) -> Any:
    options = Options(cp=cp, cp_attention=how)
    return analyse(skeleton_of(copy.deepcopy(model).double()), batch, {}, tp, options, cp_rank=cp_rank)


def called(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("tp", "cp"), [(1, 3), (2, 2)])
def test_each_case_reads_halos_and_verify_agrees(name: str, tp: int, cp: int) -> None:
    model, batches = CASES[name]
    report = compare_calls(copy.deepcopy(model).double(), (batches[0], {}), tp, Options(cp=cp, cp_attention="gather"))
    assert report.ok, report
    assert "2 read the keys and values that queries see" in str(report.plan)
    assert (
        report.plan.traffic.over("cp").forward["all-to-all"]
        == 4
        == report.plan.traffic.over("cp").backward["all-to-all"]
    )


def test_a_rank_keeps_its_part_and_the_halo() -> None:
    """Not all keys: the graph has no value of the whole sequence but what the model returns."""
    nodes = called(program(Attention(2), rows(16), 4, cp_rank=3).graph, collectives.halo)
    assert len(nodes) == 4 and all(node.meta["val"].shape[1].node.hint == 6 for node in nodes)


def test_the_plan_says_what_is_read_and_why_masks_are_gathered() -> None:
    """Of 16 positions in 2 rows, float64: a key and a value have 128 B; 3 of 4 ranks read 3 positions more."""
    texts = [str(autotp.explain(Attention(3, kernel).double(), 1, cp=4, cp_attention="gather", example_inputs=rows(16)))
             for kernel in ("flash", "masked")]  # fmt: skip
    # In 2 layers, forward and backward: 2 rows x 8 numbers x 8 B, twice (keys, values), 3 x 3/4 positions.
    assert (
        "2 read the keys and values that queries see: a rank sends 2.3 KB a step; a gather of all 12.3 KB" in texts[0]
    )
    assert "2 gather keys and values: a rank sends 12.3 KB a step" in texts[1]
    assert "of 2 the mask is a tensor, so which keys are seen is not known" in texts[1]


def test_auto_compares_an_exchange_of_heads_with_the_keys_that_queries_see() -> None:
    """Two heads of keys on two ranks: a short window sends less, and a long one more than the exchange."""
    assert called(program(Attention(1), rows(32), how="auto").graph, collectives.halo)
    longer = program(Attention(40), rows(32), how="auto").graph
    assert bool(called(longer, collectives.halo)) != bool(called(longer, collectives.all_to_all))


@pytest.mark.parametrize(("window", "after"), [(-1, -1), (-1, 0)], ids=str)
def test_keys_without_a_bound_are_gathered(window: int, after: int) -> None:
    """On both sides, or before queries of which all ranks have equal work."""
    assert not called(program(Attention(window, after=after), rows()).graph, collectives.halo)


def halo_with(graph: fx.Graph, **places: Any) -> None:
    """Gives the first halo other arguments."""
    node, names = (
        called(graph, collectives.halo)[0],
        {"axis": 1, "dim": 2, "size": 3, "before": 4, "ends": 5, "chunk": 6, "after": 7},
    )
    for name, value in places.items():
        node.update_arg(names[name], value)


def read_by(graph: fx.Graph, target: Any) -> None:
    """Puts an operator between a halo and its attention."""
    node = called(graph, collectives.halo)[0]
    with graph.inserting_after(node):
        other = graph.call_function(target, (node,))
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)


FAULTS: dict[str, Callable[[fx.Graph], Any]] = {
    "fewer keys": lambda graph: halo_with(graph, before=3),
    "more keys": lambda graph: halo_with(graph, before=5),
    "another dimension": lambda graph: halo_with(graph, dim=1),
    "another size": lambda graph: halo_with(graph, size=12),
    "another axis": lambda graph: halo_with(graph, axis="dp"),
    "chunks": lambda graph: halo_with(graph, chunk=4),
    "keys after": lambda graph: halo_with(graph, after=1),
    "no documents": lambda graph: halo_with(graph, ends=None),
    "another reader": lambda graph: read_by(graph, torch.ops.aten.neg.default),
    "no halo": lambda graph: called(graph, collectives.halo)[0].replace_all_uses_with(
        called(graph, collectives.halo)[0].args[0]  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_refuses_another_halo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (batch, *_) = CASES["packed window"]
    lower, changed = sequences.lower, list[Any]()

    def lowered(*arguments: Any) -> fx.Graph:
        graph = lower(*arguments)
        changed.append(FAULTS[name](graph))
        return graph

    program(model, batch)
    monkeypatch.setattr(sequences, "lower", lowered)
    with pytest.raises(autotp.Error):
        program(model, batch)
    assert changed


def test_check_refuses_a_plan_that_reads_fewer_keys_than_queries_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan and the rank's graph agree, and attention says that its window is longer."""
    model, (batch, *_) = CASES["packed window"]
    monkeypatch.setattr(halos._Halos, "_around", lambda *_: (3, 0))
    with pytest.raises(autotp.Error, match="reads `halo`"):
        program(model, batch)


def test_a_window_of_another_attention_is_no_reason_to_read_less() -> None:
    """Layers that share keys, with windows of 2 and of 5: each gets the halo that it reads."""

    class Shared(Attention):
        def forward(self, x: Tensor, *ends: Any) -> Tensor:
            q, k, v = (part[0](x).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v))
            kwargs = {"causal": True}
            return sum(  # type: ignore[return-value]
                self.o[i](flash_attn.flash_attn_func(q, k, v, window_size=(w, 0), **kwargs).flatten(-2))
                for i, w in enumerate((2, 5))
            )

    report = compare_calls(Shared().double(), (rows(), {}), 1, Options(cp=3, cp_attention="gather"))
    assert report.ok, report
    assert sorted(n.args[4] for n in called(program(Shared(), rows(), 3).graph, collectives.halo)) == [2, 2, 5, 5]


@pytest.mark.parametrize(("n", "name"), on_cards.cases())
def test_on_cards(n: int, name: str) -> None:
    on_cards.expect(n, name)


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_pairs_of_documents_are_counted_as_by_hand() -> None:
    """The oracle itself: of documents 6 | 3 | 11 two ranks of ten tokens share the last one, whose first token is 9."""
    assert seen_of_others(documents([6, 3, 11]), -1, 2) == 1
    assert seen_of_others(rows(12), 3, 4) == 9 and [b - a for a, b in pairwise([0, 3])] == [3]
