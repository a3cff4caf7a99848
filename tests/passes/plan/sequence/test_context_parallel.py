"""context_parallel: what a gradient flows through is cut along the sequence; the numbers are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import gpt
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse
from autotp.diagnostics.verify import Report, compare_calls, find_inputs
from autotp.distributed.mesh import Mesh
from autotp.models.bert import BERT, BERTConfig
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.check.types import CONJUGATES
from autotp.runtime.calls.graph_digest import same_order

LAYOUTS = [(1, 2), (1, 3), (2, 2), (1, 4), (2, 3), (4, 2)]
"""(tp, cp)."""


def compared(model: nn.Module, tp: int, cp: int, *given: Any, **settings: Any) -> Report:
    inputs = find_inputs(model, given or None)
    return compare_calls(model, inputs, tp, Options(cp=cp, **settings))


def rank_graph(model: nn.Module, cp: int, *given: Any) -> fx.Graph:
    """The graph of the first of `cp` ranks."""
    args, kwargs = find_inputs(model, given or None)
    return analyse(skeleton_of(model), args, kwargs, 1, Options(cp=cp)).graph


def over_cp(graph: fx.Graph) -> list[str]:
    """The conjugates over `cp`, except the copies of parameters."""
    found = [node for node in graph.nodes if node.target in CONJUGATES and node.args[1] == "cp"]
    return [node.target.__name__ for node in found if node.args[0].op != "placeholder"]  # type: ignore[union-attr]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_gpt_over_cp_equals_one_device(tp: int, cp: int, sequence_parallel: bool) -> None:
    report = compared(gpt(), tp, cp, sequence_parallel=sequence_parallel)
    assert report.ok and report.worst.error < 1e-12, report


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "cp"), [(1, 3), (2, 2)])
def test_dropout_over_cp_draws_the_masks_of_one_device(tp: int, cp: int, sequence_parallel: bool) -> None:
    """Of values that both axes cut, in one dimension or in two, and of the weights of attention."""
    report = compared(gpt(dropout=0.2), tp, cp, sequence_parallel=sequence_parallel)
    assert report.ok and report.worst.error < 1e-12, report


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (1, 3)])
def test_padded_bert_over_cp_equals_one_device(tp: int, cp: int) -> None:
    torch.manual_seed(0)
    model = BERT(BERTConfig(block_size=9, vocab_size=24, n_layer=2, n_head=4, n_embd=12, dropout=0.0))
    tokens = torch.randint(24, (2, 7))
    padded = torch.arange(7)[None] < torch.tensor([[7], [4]])
    report = compared(model, tp, cp, tokens, torch.zeros_like(tokens), padded)
    assert report.ok and report.worst.error < 1e-12, report


class Attention(nn.Module):
    """One attention between linear layers, with a causal mask, a window, or positions of packed documents."""

    def __init__(self, mask: str = "causal") -> None:
        super().__init__()
        self.mask = mask
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        """x: [batch seq 12], documents: int [batch seq]"""
        q, k, v = (t.unflatten(-1, (4, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        places = torch.arange(x.shape[1])
        back = places[:, None] - places[None]
        mask = None
        if self.mask == "window":
            mask = ((back >= 0) & (back < 3))[None, None]
        elif self.mask == "packed":
            mask = ((documents[:, :, None] == documents[:, None]) & (back >= 0))[:, None]
        elif self.mask == "bias":
            mask = -(back.abs() * 0.5).to(x.dtype)[None, None]
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.mask == "causal")
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def documents(length: int) -> Tensor:
    return (torch.arange(length) // 3)[None].repeat(2, 1)


@pytest.mark.parametrize("length", [2, 7, 12])
@pytest.mark.parametrize("mask", ["causal", "full", "window", "packed", "bias"])
def test_any_mask_and_length_over_cp_equals_one_device(mask: str, length: int) -> None:
    """A length that the ranks do not divide; with two positions, one rank has none."""
    torch.manual_seed(0)
    report = compared(Attention(mask), 1, 3, torch.randn(2, length, 12), documents(length))
    assert report.ok and report.worst.error < 1e-12, report


class Heads(nn.Module):
    """Attention whose queries, keys and values are products of their own, for 2 positions, before a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 12), nn.Linear(12, 20)
        self.positions = nn.Parameter(torch.randn(2, 12))
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12, bias=False) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch 2]"""
        x = self.table(tokens) + self.positions
        q, k, v = (w(x).view(*tokens.shape, 4, 3).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = (q @ k.mT).softmax(-1) @ v
        logits = self.head(x + self.out(mixed.transpose(1, 2).reshape(*tokens.shape, 12)))
        return F.cross_entropy(logits.view(-1, 20), tokens.view(-1))


@pytest.mark.parametrize("cp", [3, 4])
def test_cp_ranks_without_positions_equal_one_device(cp: int) -> None:
    """Fewer positions than ranks: those without one are cut over tp as the others, and communicate in their order."""
    torch.manual_seed(0)
    report = compared(Heads(), 2, cp, torch.randint(20, (2, 2)))
    assert report.ok and report.worst.error < 1e-12, report


def test_cp_attention_gathers_keys_and_values_only() -> None:
    """The input is cut where it is read, k and v are gathered, and so is the output: a caller gets whole results."""
    torch.manual_seed(0)
    graph = rank_graph(Attention("window"), 2, torch.randn(2, 8, 12), documents(8))
    assert over_cp(graph) == ["scatter", "all_gather", "all_gather", "gather"]


class Grouped(nn.Module):
    """Causal attention of four heads of queries. x: [rows, seq, 32] -> the same"""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 16 * kv_heads), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2 * self.kv_heads, 8)).transpose(1, 2).chunk(2, 1)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cp_gathers_keys_before_they_are_repeated(kv_heads: int) -> None:
    """The heads of keys and values are gathered before they are repeated for the heads of queries."""
    x = torch.randn(2, 8, 32)
    sends = autotp.explain(Grouped(kv_heads), 1, cp=2, example_inputs=x, outputs="local").traffic.over("cp").sends
    whole = 2 * 8 * 8 * kv_heads * 4  # Bytes of all keys, and of all values.
    sent = [(send.kind, send.bytes) for send in sends if not send.parameter]
    assert [one for one in sent if one[0] == "reduce-scatter"] == [("reduce-scatter", whole)] * 2
    assert sent.count(("all-gather", whole)) == 2 + (kv_heads == 4)  # The result has four heads, and is gathered, too.
    assert compared(Grouped(kv_heads), 1, 2, x).ok


class Predicts(nn.Module):
    """A causal language model with labels that are shifted inside, as transformers' models shift them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention, self.head = nn.Embedding(20, 12), Attention(), nn.Linear(12, 20)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens: [batch seq], labels: [batch seq]"""
        logits = self.head(self.attention(self.table(tokens), tokens))
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), shifted.flatten())


@pytest.mark.parametrize("cp", [2, 3])
def test_cp_shifts_labels_before_it_cuts_them(cp: int) -> None:
    """The last position of a rank is compared with the first token of the next one, and an ignored label never."""
    torch.manual_seed(0)
    tokens, labels = torch.randint(20, (2, 7)), torch.randint(20, (2, 7))
    labels[0, :3] = -100
    report = compared(Predicts(), 1, cp, tokens, labels)
    assert report.ok and report.worst.error < 1e-12, report


class Recurs(nn.Module):
    """A convolution along the sequence before attention: what mixes positions in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attention = nn.Conv1d(12, 12, 3, padding=1), Attention()

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        return self.attention(self.conv(x.transpose(1, 2)).transpose(1, 2), x)


def test_cp_computes_a_convolution_whole() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 12)
    report = compared(Recurs(), 1, 2, x)
    assert report.ok and report.worst.error < 1e-12, report
    assert "all_gather" in over_cp(rank_graph(Recurs(), 2, x))


class Relative(nn.Module):
    """Attention with relative positions of both kinds, as DeBERTa has: in one of them keys are rows, not columns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.table = nn.Linear(12, 36), nn.Linear(12, 12), nn.Embedding(17, 12)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        q, k, v = self.qkv(x).chunk(3, -1)
        places = torch.arange(x.shape[1])
        back = (places[:, None] - places[None]).clamp(-8, 8) + 8
        near = back[None].expand(x.shape[0], -1, -1)
        of_query = (q @ self.table.weight.T).gather(-1, near)
        of_key = (k @ self.table.weight.T).gather(-1, near).transpose(-1, -2)
        scores = q @ k.transpose(-1, -2) + of_query + of_key
        return self.out(scores.softmax(-1) @ v)


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 3), (2, 2)])
def test_relative_positions_over_cp_equal_one_device(tp: int, cp: int) -> None:
    torch.manual_seed(0)
    report = compared(Relative(), tp, cp, torch.randn(2, 7, 12))
    assert report.ok and report.worst.error < 1e-12, report
    assert report.plan.in_sequence > 8


class Answers(nn.Module):
    """A loss over positions: each is a class, and the answer is one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = Attention("full"), nn.Linear(12, 1)

    def forward(self, x: Tensor, answer: Tensor) -> Tensor:
        """x: [batch seq 12], answer: [batch]"""
        return F.cross_entropy(self.head(self.attention(x, x)).squeeze(-1), answer, label_smoothing=0.1)


@pytest.mark.parametrize("cp", [2, 3])
def test_question_answering_over_cp_equals_one_device(cp: int) -> None:
    torch.manual_seed(0)
    report = compared(Answers(), 1, cp, torch.randn(3, 7, 12), torch.tensor([0, 6, 3]))
    assert report.ok and report.worst.error < 1e-12, report


class Rearranged(nn.Module):
    """Attention, and then causal attention over a dimension that is a product with the sequence."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.first, self.second = order, Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        h, (batch, length, _) = self.first(x, x), x.shape
        if self.order == "pairs":  # Each position twice, one after the other.
            mixed = self.second(torch.stack([h, 2 * h], 2).flatten(1, 2), x)
            return mixed.unflatten(1, (length, 2)).sum(2)
        if self.order == "rows":  # The rows of the batch, one after the other.
            return self.second(h.flatten(0, 1)[None], x).view(batch, length, 12)
        mixed = self.second(h.transpose(0, 1).flatten(0, 1)[None], x)
        return mixed.view(length, batch, 12).transpose(0, 1)


@pytest.mark.parametrize("length", [2, 7])
@pytest.mark.parametrize("order", ["pairs", "rows", "columns"])
def test_causal_attention_over_rearranged_sequences_equals_one_device(order: str, length: int) -> None:
    """A rank's positions begin where its part of the product begins; if they do not follow one another, it has all."""
    torch.manual_seed(0)
    report = compared(Rearranged(order), 1, 2, torch.randn(3, length, 12))
    assert report.ok and report.worst.error < 1e-12, report


class Picks(nn.Module):
    """Some positions, of which indices say which: of the sequence, and of all rows one after the other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.attention, self.head = how, Attention(), nn.Linear(12, 5)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """x: [batch seq 12], places: int [batch 2]"""
        h = self.attention(x, x)
        rows = h.flatten(0, 1)
        if self.how == "gather":
            picked = h.gather(1, places[..., None].expand(-1, -1, 12))
        elif self.how == "gather of rows":
            picked = rows.gather(0, places.flatten()[:, None].expand(-1, 12))
        elif self.how == "embedding":
            picked = F.embedding(places, h[0])
        elif self.how == "embedding of rows":
            picked = F.embedding(places, rows)
        else:
            return F.cross_entropy(self.head(rows).sum(-1)[None], places.flatten()[:1])
        return self.head(picked)


@pytest.mark.parametrize("how", ["gather", "gather of rows", "embedding", "embedding of rows", "class of rows"])
@pytest.mark.parametrize("cp", [2, 3])
def test_lookups_of_positions_over_cp_equal_one_device(how: str, cp: int) -> None:
    """The table of a lookup has positions of all ranks: its size is that of the whole sequence."""
    torch.manual_seed(0)
    report = compared(Picks(how), 1, cp, torch.randn(3, 7, 12), torch.tensor([[0, 6], [3, 3], [5, 1]]))
    assert report.ok and report.worst.error < 1e-12, report


class Recent(nn.Module):
    """Keeps at most 9 keys, and a sink beside them: a window that is longer than the sequence takes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.sink = nn.Linear(12, 36), nn.Linear(12, 12), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = k[:, -9:], v[:, -9:]
        scores = q @ k.transpose(-1, -2)
        sink = self.sink.expand(x.shape[0], scores.shape[1], 1)
        shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return self.out(shares @ v)


@pytest.mark.parametrize("length", [5, 9])
def test_sinks_and_windows_of_keys_over_cp_equal_one_device(length: int) -> None:
    torch.manual_seed(0)
    report = compared(Recent(), 1, 2, torch.randn(2, length, 12))
    assert report.ok and report.worst.error < 1e-12, report


class Mixture(nn.Module):
    """Attention, and experts that rows choose: rows of a rank are a part of all."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.router = Attention(), nn.Linear(12, 3)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        h = self.attention(x, x)
        shares = self.router(h).softmax(-1)
        chosen = nn.functional.one_hot(shares.argmax(-1), 3).to(x.dtype)
        load = (chosen.mean((0, 1)) * shares.mean((0, 1))).sum()
        mixed = h
        for i, expert in enumerate(self.experts):
            mixed = mixed + expert(h) * (shares * chosen)[..., i, None]
        return mixed + load


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 3), (2, 2)])
def test_expert_load_over_cp_counts_all_rows(tp: int, cp: int) -> None:
    torch.manual_seed(0)
    report = compared(Mixture(), tp, cp, torch.randn(2, 7, 12))
    assert report.ok and report.worst.error < 1e-12, report


class Rows(nn.Module):
    """Rows of all tokens, as experts read them: a partial sum and something whole, in the shape of tokens again."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        h = self.attention(x, x)
        rows = h.reshape(-1, 12)
        return (self.down(self.up(rows).relu()) + rows.exp()).reshape(*x.shape) + h


def test_flattened_rows_over_tp_and_cp_equal_one_device() -> None:
    torch.manual_seed(0)
    report = compared(Rows(), 2, 2, torch.randn(2, 8, 12))
    assert report.ok and report.worst.error < 1e-12, report


class Frames(nn.Module):
    """A number of positions that is a number in the model's code: 10 on 3 ranks are 4, 4 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attention, self.shift = nn.Conv1d(24, 48, 1), Attention(), nn.Parameter(torch.ones(12))
        self.down = nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch 24 10]"""
        h = F.gelu(self.conv(x)).transpose(1, 2)
        return self.attention(F.gelu(self.down(h.reshape(-1, 10, 48)) + self.shift), x[:, 0])


class Spectrum(nn.Module):
    """As Whisper: the sum over tp ranks of the second convolution, which is whole, has 10 positions, and a part 4 or 2.

    10 is no multiple of 4, and one of 2. A sum must be reduced before its part is taken on all ranks, or behind on all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(24, 48, 3, padding=1), nn.Conv1d(48, 12, 3, padding=1)
        self.attention, self.positions = Attention(), nn.Parameter(torch.randn(10, 12))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch 24 10]"""
        h = F.gelu(self.second(F.gelu(self.first(x)))).transpose(1, 2) + self.positions
        return self.attention(h, x[:, 0])


@pytest.mark.parametrize("kind", [Frames, Spectrum])
@pytest.mark.parametrize(("tp", "cp"), [(1, 3), (2, 3), (2, 2)])
def test_fixed_lengths_over_cp_equal_one_device(kind: type[nn.Module], tp: int, cp: int) -> None:
    torch.manual_seed(0)
    report = compared(kind(), tp, cp, torch.randn(2, 24, 10))
    assert report.ok and report.worst.error < 1e-12, report


def test_expect_one_order_refuses_ranks_that_communicate_otherwise() -> None:
    with pytest.raises(autotp.Error, match="cp ranks would communicate in another order"):
        same_order(0).expect({0: 1, 1: 1, 2: 2}, Mesh(size=3))
    same_order(0).expect({0: 1, 1: 1, 2: 1}, Mesh(size=3))


def test_cp_refuses_a_model_without_a_sequence() -> None:
    with pytest.raises(autotp.Error, match="no sequence that can be cut over cp"):
        compared(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), 1, 2, torch.randn(3, 4))
