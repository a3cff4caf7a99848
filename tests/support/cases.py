"""What test_check breaks: models, how they are called, and how they are cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from grouped import Grouped
from mixture import Mixture
from torch import Tensor, nn

from autotp.compiler import Program, analyse
from autotp.options import OPTIONAL, Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.local_sizes import Target
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds

# ---- models


class Decoder(nn.Module):
    """A GPT of one layer: fused q | k | v, dropout, the head tied to the embedding, cross-entropy."""

    def __init__(self, heads: int = 4, dropout: float = 0.2, vocab: int = 131) -> None:
        super().__init__()
        self.heads, self.p, hidden = heads, dropout, 8 * heads
        self.tokens, self.places = nn.Embedding(vocab, hidden), nn.Embedding(8, hidden)
        self.norm_1, self.norm_2, self.norm = (nn.LayerNorm(hidden) for _ in range(3))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 10), nn.Linear(10, hidden)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        """tokens, labels: [batch seq]"""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        x = F.dropout(x, self.p, self.training)
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)  # [batch seq hidden] each
        q, k, v = (y.view(*y.shape[:2], self.heads, 8).transpose(1, 2) for y in (q, k, v))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), self.p, self.training)
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits if labels is None else (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Encoder(nn.Module):
    """A BERT of one layer: separate q, k, v, attention and loss written out, dropout on weights, norms after."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(61, 12), nn.Embedding(2, 12)
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 12)
        self.norm_1, self.norm_2, self.head = nn.LayerNorm(12), nn.LayerNorm(12), nn.Linear(12, 61)

    def forward(self, tokens: Tensor, kinds: Tensor, padding: Tensor, labels: Tensor) -> Tensor:
        """All: [batch seq]"""
        x = self.tokens(tokens) + self.kinds(kinds)
        q, k, v = (f(x).unflatten(-1, (6, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))  # [batch heads seq 2]
        scores = q @ k.transpose(-1, -2) / math.sqrt(2) + (1 - padding[:, None, None].to(x.dtype)) * -1e4
        weights = F.dropout(scores.softmax(-1), 0.2, self.training)  # [batch heads seq seq]
        x = self.norm_1(x + self.out((weights @ v).transpose(1, 2).flatten(2)))
        x = self.norm_2(x + self.down(torch.relu(self.up(x))))
        losses = F.nll_loss(self.head(x).log_softmax(-1).transpose(1, 2), labels, reduction="none")
        return (losses * padding).sum() / padding.sum()


class Moving(nn.Module):
    """Values that are cut along one axis and read along another: every conjugate is somewhere in here."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """`names`: the layers in the order in which their axes are cut."""
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 72), nn.Linear(24, 12)
        sizes = {"first": (12, 10), "middle": (10, 14), "last": (14, 5)}
        for name in names:
            self.add_module(name, nn.Linear(*sizes[name]))
        self.register_buffer("slopes", torch.linspace(0.1, 0.9, 6))

    slopes: Tensor

    def forward(self, x: Tensor) -> Any:
        """x: [batch seq 12]"""
        fused = self.qkv(x)
        q, k, v = (y.unflatten(-1, (6, 4)).transpose(1, 2) for y in fused.split(24, -1))  # [batch heads seq 4]
        apart = torch.arange(x.size(1), device=x.device) - torch.arange(x.size(1), device=x.device)[:, None]
        weights = (q @ k.mT + self.slopes.view(1, 6, 1, 1).to(x.dtype) * apart).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return self.last(torch.tanh(self.middle(F.gelu(self.first(x))))), fused, weights.transpose(1, 2).flatten(2, 3)


# ---- cases


@dataclass(frozen=True)
class Case:
    """A model, how it is called, and how it is cut."""

    model: nn.Module
    inputs: dict[str, Tensor]
    tp: int = 2
    outputs: Any = "auto"
    randomness: Any = "exact"
    layouts: Any = None
    experts: Any = "width"
    sequence_parallel: bool = False
    without: tuple[str, ...] = ()

    def analysed(self) -> Program:
        choices = Options(self.outputs, self.experts, self.sequence_parallel, self.without)
        return analyse(skeleton_of(self.model), (), self.inputs, self.tp, choices, self.layouts)

    def target(self, analysis: Program, rank: int) -> Target:
        return Target("tp", self.tp, rank, self.randomness, frozenset(analysis.local_outputs))


def parts(shape: tuple[int, ...], dim: int, tp: int, times: int = 1, block: int = 1) -> Layout:
    """`times` parts of a dimension side by side, each cut in whole blocks."""
    n = shape[dim] // times
    bounds = [chunk_bounds(n // block, tp, rank) for rank in range(tp)]
    pieces = [tuple((i * n + a * block, i * n + b * block) for i in range(times) if b > a) for a, b in bounds]
    return Layout(shape, dim, tuple(pieces))


def moving(tp: int, cuts: dict[str, int]) -> Case:
    """`Moving`, its heads cut, and of other weights the dimensions `cuts`."""
    model = made(Moving(tuple(dict.fromkeys(name.split(".")[0] for name in cuts))))
    given: dict[str, tuple[int, ...]] = {"qkv.weight": (0, 3, 4), "qkv.bias": (0, 3, 4), "out.weight": (1, 1, 4)}
    given |= {name: (dim,) for name, dim in cuts.items()}
    layouts = {name: Layout(tuple(p.shape)) for name, p in model.named_parameters()}
    for name, (dim, *how) in given.items():
        layouts[name] = parts(layouts[name].shape, dim, tp, *how)
    return Case(model, {"x": torch.randn(2, 3, 12, dtype=torch.float64)}, tp, "full", layouts=layouts)


def made(model: nn.Module, train: bool = True) -> nn.Module:
    """The model in float64, every parameter random: a bias of 0 would hide a bug."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model.double().train(train)


def tokens(vocab: int, step: int = 5) -> Tensor:
    return torch.arange(6).mul(step).add(1).remainder(vocab).view(2, 3)


def decoder(tp: int, train: bool = True, outputs: str = "auto", randomness: str = "exact", heads: int = 4) -> Case:
    inputs = {"tokens": tokens(131)} | ({"labels": tokens(131, 4)} if train else {})
    return Case(made(Decoder(heads), train), inputs, tp, outputs, randomness)


def encoder(tp: int, train: bool = True, randomness: str = "exact") -> Case:
    padding = torch.tensor([[1, 1, 1], [1, 1, 0]])
    inputs = {"tokens": tokens(61), "kinds": tokens(2), "padding": padding, "labels": tokens(61, 3)}
    return Case(made(Encoder(), train), inputs, tp, randomness=randomness)


def grouped(layout: str, outputs: str) -> Case:
    """Two key/value heads on four ranks: each is on two of them, its weights too."""
    plain, model = (made(Grouped(2, 3, layout, cache)) for cache in (False, True))
    inputs = {"x": torch.randn(2, 3, 12, dtype=torch.float64)}
    layouts = Case(plain, inputs, 4).analysed().layouts  # As trained; where its keys are returned, too, it is cut so.
    return Case(model, inputs, 4, outputs, layouts=layouts)


@cache
def case(name: str) -> tuple[Case, Program]:
    found = CASES[name]()
    return found, found.analysed()


CASES: dict[str, Callable[[], Case]] = {
    "decoder": lambda: decoder(2),
    "decoder-fast": lambda: decoder(2, randomness="fast"),
    "sequence": lambda: replace(decoder(2), sequence_parallel=True),
    "sequence-fast": lambda: replace(encoder(3, randomness="fast"), sequence_parallel=True),
    "decoder-bare": lambda: replace(decoder(2), without=OPTIONAL),
    "sequence-bare": lambda: replace(decoder(2), sequence_parallel=True, without=OPTIONAL),
    "decoder-eval": lambda: decoder(3, train=False),
    "encoder": lambda: encoder(2),
    "grouped": lambda: grouped("separate", "full"),
    "grouped-local": lambda: grouped("separate", "local"),
    "grouped-fused": lambda: grouped("per-group", "full"),
    "experts": lambda: Case(made(Mixture()), {"x": torch.randn(5, 8, dtype=torch.float64)}, experts="expert"),
    "gathering": lambda: moving(
        2, {"last.weight": 1, "middle.weight": 0, "middle.bias": 0, "first.weight": 0, "first.bias": 0}
    ),
    "scattering": lambda: moving(
        2, {"first.weight": 0, "first.bias": 0, "middle.weight": 1, "middle.bias": 0, "last.weight": 1}
    ),
}
