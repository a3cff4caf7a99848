"""varlen_attn: torch's function for packed documents on ranks beside one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from errors import message
from kernel_packages.dense_attention import attend
from ranks import run_ranks
from small_models import signatures_met
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import compare_calls
from autotp.integrations.attention_kernels.kernel_operator import KERNEL
from autotp.integrations.attention_kernels.packed import ScoreSettings, packed_attention_backward
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2}, {"tp": 3}, {"tp": 8}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "recompute": "full"},
]  # fmt: skip
DOCUMENTS = [[6, 3, 11], [5, 5, 4, 9], [1, 16], [7, 7, 7, 7]]


class Packed(nn.Module):
    """A block of a decoder on one packed row: [tokens] -> [tokens vocab]."""

    def __init__(self, window: tuple[int, int] = (-1, 0), width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.window, self.head = window, width // heads
        self.embed = nn.Embedding(48, width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * self.head, bias=False) for _ in range(2))
        self.norm, self.head_out = nn.RMSNorm(width), nn.Linear(width, 48, bias=False)

    def forward(self, tokens: Tensor, ends: Tensor, longest: int) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.head)) for part in (self.q, self.k, self.v))
        attended: Any = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=self.window, enable_gqa=True)
        return self.head_out(x + self.o(attended.flatten(-2)))


def batch(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, int]:
    """Tokens of documents of these lengths, the ends of the documents, and the longest."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.randint(48, (sum(lengths),), generator=generator), ends, max(lengths)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_varlen_attn_is_cut_by_heads(layout: dict[str, Any]) -> None:
    report = autotp.verify(Packed(), example_inputs=batch(DOCUMENTS[0]), **layout)
    assert report.ok, report
    assert "QKV -> attention" in str(report.plan) and "no rule" not in str(report.plan)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0), (2, 1), (-1, 1), (2, -1)], ids=str)
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 3), (1, 16)])
def test_varlen_attn_over_cp_equals_one_device(window: tuple[int, int], tp: int, cp: int) -> None:
    """A document ends inside a part, one lies on three ranks and more, and of 16 ranks the last ones are empty."""
    report = autotp.verify(Packed(window), tp, cp=cp, example_inputs=batch(DOCUMENTS[0]))
    assert report.ok, report
    assert "it needs whole sequences" not in str(report.plan)


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (2, 1)], ids=str)
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (1, 4)])
def test_varlen_attn_by_heads_reads_whole_documents(window: tuple[int, int], tp: int, cp: int) -> None:
    """So a window needs no form for a part of the queries; 20 tokens, and 23, which cp does not divide."""
    model = Packed(window, heads=8, groups=4)
    for lengths in DOCUMENTS[:2]:
        inputs = batch(lengths)
        report = autotp.verify(model, tp, cp=cp, cp_attention="heads", example_inputs=inputs)
        assert report.ok, report
        assert "it needs whole sequences" not in str(report.plan)
        assert report.plan.traffic.over("cp").forward.get("all-to-all") == 4


class WithTotals(Packed):
    """Returns the log-sum-exp of each head, too."""

    def forward(self, tokens: Tensor, ends: Tensor, longest: int) -> Tensor:
        q = self.q(self.embed(tokens)).unflatten(-1, (-1, self.head))
        wanted = AuxRequest(lse=True)
        out, totals = varlen_attn(q, q, q, ends, ends, longest, longest, return_aux=wanted)
        return self.head_out(self.o(out.flatten(-2))) + totals.sum()


def test_the_log_sum_exp_is_cut_by_heads() -> None:
    """Backward gives it no gradient, as on one device."""
    model, inputs = WithTotals(), batch(DOCUMENTS[0])
    report = compare_calls(model, (inputs, {}), 2, Options())
    assert report.ok, report


def test_packed_rows_of_32k_tokens_have_no_value_of_tokens_times_tokens() -> None:
    with torch.device("meta"):
        model, tokens = Packed(), torch.empty(32768, dtype=torch.int64)
        ends = torch.empty(9, dtype=torch.int32)
    for cp in (1, 4):
        graph = analyse(skeleton_of(model), (tokens, ends, 4096), {}, 2, Options(cp=cp)).graph
        values = [node.meta.get("val") for node in graph.nodes]
        largest = max(int(x.numel()) for x in values if isinstance(x, Tensor))
        assert largest <= 32768 * 48


def trained(rank: int, n: int, cp: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    plain, model = Packed(), Packed()
    model.load_state_dict(plain.state_dict())
    model = autotp.parallelize(model, tp=n // cp, cp=cp, example_inputs=batch(DOCUMENTS[0]))
    losses: list[list[float]] = []
    for trainee in (plain, model):
        optimizer = torch.optim.AdamW(trainee.parameters(), 0.01)
        losses.append([])
        for step in range(10):
            tokens, ends, longest = batch(DOCUMENTS[step % 4], step)
            loss = F.cross_entropy(trainee(tokens, ends, longest), tokens.roll(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert signatures_met(model) == 2  # The second one has the longest document's length as an input.
    return losses[0], losses[1]


@pytest.mark.parametrize(("ranks", "cp"), [(2, 1), (4, 2)])
def test_packed_training_equals_one_device(ranks: int, cp: int) -> None:
    """In each step another number of documents, other lengths and another longest document."""
    for plain, parallel in run_ranks(trained, ranks, cp):
        assert parallel == pytest.approx(plain, rel=1e-5)


WRONG_ENDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "documents are [0, 6, 9, 19]": lambda ends, rank: torch.cat([ends[:-1], ends[-1:] - 1]),
    "documents are [0, 9, 6, 20]": lambda ends, rank: ends[[0, 2, 1, 3]],
    "documents are [6, 9, 20]": lambda ends, rank: ends[1:],
    "are of torch.int64": lambda ends, rank: ends.long(),
    "got other inputs than rank 0": lambda ends, rank: ends.clone().index_fill_(0, torch.tensor(1), 6 + rank),
}
"""What the error says -> the ends that a rank gives."""


def refused(rank: int, n: int, cp: int) -> list[str]:
    layout: dict[str, Any] = {"tp": n // cp, "cp": cp, "check_inputs": "always"}
    model = autotp.parallelize(Packed(), **layout, example_inputs=batch(DOCUMENTS[0]))
    tokens, ends, longest = batch(DOCUMENTS[0])
    return [message(partial(model, tokens, wrong(ends, rank), longest)) for wrong in WRONG_ENDS.values()]


@pytest.mark.parametrize("cp", [1, 2])
def test_wrong_ends_are_an_error_on_each_rank(cp: int) -> None:
    """Also over cp on the first rank, whose part of the tokens has none of the last document's end."""
    for texts in run_ranks(refused, 2, cp):
        for part, text in zip(WRONG_ENDS, texts, strict=True):
            assert part in text


def test_compiled_code_stops_at_a_document_that_is_longer_than_said() -> None:
    """The host reads no ends there, and a rank would lack keys. A longest document is compiled as a number, then as an
    input: for no other one again."""
    backend = CompileCounterWithBackend("aot_eager")

    def part(query: Tensor, key: Tensor, ends: Tensor, longest: int) -> Tensor:
        """Queries 10 to 19 of 20, and the keys from 8 on."""
        settings = None, -1, 0, 0.0, 0.0, "", "{}", 10, 20
        result: Tensor = KERNEL(query, key, key, ends, ends, None, None, longest, longest, *settings)[0]
        return result

    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(n, 2, 4, generator=generator) for n in (10, 12))
    ends = torch.tensor([0, 6, 8, 20], dtype=torch.int32)
    compiled = torch.compile(part, backend=backend, fullgraph=True)
    for longest in (12, 13, 20):
        torch.testing.assert_close(compiled(query, key, ends, longest), part(query, key, ends, longest))
    assert backend.frame_count == 2
    with pytest.raises(RuntimeError, match="more tokens than max_length_q"):
        compiled(query, key, ends, 11)


def test_a_cache_of_pages_is_refused() -> None:
    class Paged(Packed):
        def forward(self, tokens: Tensor, ends: Tensor, longest: int) -> Tensor:
            q = self.q(self.embed(tokens)).unflatten(-1, (-1, self.head))
            return varlen_attn(q, q, q, ends, ends, longest, longest, seqused_k=ends[1:])

    text = message(autotp.explain, Paged(), tp=2, example_inputs=batch(DOCUMENTS[0]))
    assert "varlen_attn gets `seqused_k`, for which autotp has no rule" in text


def called_kernels(rank: int, n: int, layout: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Returns the device and the shapes of queries and keys of each call of torch's kernels, forward and backward."""
    calls = list[tuple[Any, ...]]()

    def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **settings: Any) -> Any:
        calls.append(("forward", q.device.type, q.shape, k.shape))
        assert arguments[2] >= arguments[0].diff().max() and not arguments[4]  # Longest documents; no dropout.
        window = settings["window_size_left"], settings["window_size_right"]
        return *attend(q, k, v, *arguments[:2], causal=arguments[5], window_size=window), None, None, None

    def backward(*arguments: Any, **settings: Any) -> Any:
        calls.append(("backward", arguments[1].device.type, arguments[1].shape, arguments[2].shape))
        scores = ScoreSettings(window=(settings["window_size_left"], settings["window_size_right"]))
        return packed_attention_backward(*arguments[:8], scores)[:3]

    torch.manual_seed(0)
    plain, model = (Packed((3, 0)).bfloat16() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    parallel = autotp.parallelize(model, **layout, example_inputs=batch(DOCUMENTS[0]))
    tokens, ends, longest = batch(DOCUMENTS[1])
    aten = torch.ops.aten
    with (
        patch.object(aten, "_flash_attention_forward", forward),
        patch.object(aten, "_flash_attention_backward", backward),
    ):
        logits = parallel(tokens.cuda(), ends.cuda(), longest)
        F.cross_entropy(logits, tokens.cuda()).backward()
    expected = plain(tokens, ends, longest)
    F.cross_entropy(expected, tokens).backward()
    torch.testing.assert_close(logits.detach().cpu().float(), expected.detach().float(), rtol=0.02, atol=0.02)
    gradient = autotp.gather(parallel.k.weight.grad).cpu().float()
    torch.testing.assert_close(gradient, plain.k.weight.grad.float(), rtol=0.05, atol=0.005)
    return calls


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        ({"tp": 2}, [((23, 2, 8), (23, 1, 8))] * 2),
        # The document in which the second rank's part begins has two tokens on the first rank.
        ({"tp": 1, "cp": 2, "cp_attention": "gather"}, [((12, 4, 8), (12, 2, 8)), ((11, 4, 8), (13, 2, 8))]),
    ],
    ids=str,
)
def test_a_rank_on_a_card_calls_torchs_kernel_with_its_heads_and_tokens(
    layout: dict[str, Any], shapes: list[tuple[Any, ...]]
) -> None:
    for of_rank, calls in zip(shapes, run_ranks(called_kernels, 2, layout, cards=True), strict=True):
        assert calls == [(way, "cuda", *map(torch.Size, of_rank)) for way in ("forward", "backward")]
