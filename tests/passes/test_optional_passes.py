"""Passes that may be left out: each alone and with each other, what is computed stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import PAIRS, PASSES, only
from small_models import gpt
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autotp
from autotp.compiler import analyse, rank_graph
from autotp.ops import collectives
from autotp.ops.async_linear import async_linear
from autotp.ops.coalesced import together
from autotp.ops.losses import cross_entropy
from autotp.options import OPTIONAL, Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.bind import bind
from autotp.passes.emit.kept_values.recompute import recompute

aten = torch.ops.aten


class Layer(nn.Module):
    """Attention and a gated MLP beside each other, of two norms, with an adapter: all passes have something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.out, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [batch seq 16]"""
        q, k, v = (f(self.norms[0](x)).unflatten(-1, (4, 4)).transpose(1, 2) for f in self.qkv)
        weights = (q @ k.mT + mask.log()).softmax(-1)
        heads = F.dropout((weights @ v).transpose(1, 2).flatten(2), 0.1, self.training)
        n = self.norms[1](x)
        wide = F.silu(self.gate(n)) * self.up(n)
        return F.dropout(x + self.out(heads) + self.b(self.a(heads)) + self.down(wide), 0.1, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch seq] -> the loss"""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, torch.ones(tokens.size(1), tokens.size(1)).tril().to(x.dtype))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


def verified(names: tuple[str, ...], tp: int = 2) -> Any:
    """The report on a model with these passes and no others of those that may be left out."""
    torch.manual_seed(0)
    return autotp.verify(Model(), tp, example_inputs=torch.arange(10).view(2, 5), **only(names))


@pytest.mark.parametrize("name", ["none", *PASSES])
def test_alone(name: str) -> None:
    report = verified((name,))
    assert report.ok, report


@pytest.mark.rare
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_in_pairs(pair: tuple[str, str]) -> None:
    report = verified(pair)
    assert report.ok, report


@pytest.mark.rare
def test_all_but_one() -> None:
    for name in PASSES:
        report = verified(tuple(other for other in PASSES if other != name), tp=3)
        assert report.ok, (name, report)


# ---- what is off does nothing


def calls(without: tuple[str, ...], model: nn.Module | None = None, inputs: int = 1) -> list[fx.Node]:
    """What a rank's graph calls."""
    given = (torch.arange(10).view(2, 5),) * inputs
    analysis = analyse(skeleton_of(model or Model()), given, {}, 2, Options(without=without))
    graph = bind(rank_graph(analysis, 0, "exact"), torch.device("cpu"), {}, reuse="in_place" not in without)
    return [node for node in graph.nodes if node.op == "call_function"]


def copied(node: fx.Node) -> bool:
    """True for a conjugate of an activation."""
    return node.target is collectives.copy and node.args[0].op != "placeholder"  # type: ignore[union-attr]


def has_bias(node: fx.Node) -> bool:
    return node.target is aten.linear.default and len(node.args) == 3


@pytest.mark.parametrize(
    ("name", "needs", "counts", "on", "off"),
    [
        # For queries, keys and values the same norm is taken; of two layers.
        pytest.param("cse", (), lambda n: n.target is aten.layer_norm.default, 2 * 2, 2 * 4, id="cse"),
        pytest.param(
            "defer_reductions", (), lambda n: n.target is collectives.reduce, 2 * 1, 2 * 3, id="defer_reductions"
        ),
        # Two norms of one value.
        pytest.param("hoist", ("cse",), copied, 2 * 1, 2 * 2, id="hoist"),
        pytest.param("fuse_bias", (), has_bias, 2 * 5, 0, id="fuse_bias"),
        pytest.param("bucket", ("hoist",), lambda n: n.target is together, 2, 0, id="bucket"),
        pytest.param("overlap", ("cse",), lambda n: n.target is async_linear, 2 * 2, 0, id="overlap"),
        # The sums of attention, MLP and adapter, and of the gradients of what products read.
        pytest.param("in_place", ("cse",), lambda n: bool(n.kwargs.get("fresh")), 2 * 6, 0, id="in_place"),
    ],
)
def test_a_pass_that_is_off(name: str, needs: tuple[str, ...], counts: Any, on: int, off: int) -> None:
    """The others are off, too, but those that make it work: nothing but this pass is between the two graphs."""
    others = tuple(other for other in OPTIONAL if other not in (name, *needs))
    found = [sum(map(counts, calls(without))) for without in (others, (*others, name))]
    assert found == [on, off]


def test_together_they_leave_the_loss_in_the_memory_of_the_logits() -> None:
    """Which the operator that the head's product is part of has just made."""
    model = gpt(block_size=5, vocab_size=96, n_layer=1, n_head=2, n_embd=8, dropout=0.1)
    for without in ((), ("overlap",)):
        found = [node.kwargs for node in calls(without, model, 2) if node.target is cross_entropy.class_terms]
        assert found == [{"fresh": True}], without


def test_outline_off() -> None:
    analysis = analyse(skeleton_of(Model()), (torch.arange(10).view(2, 5),), {}, 2)
    graph = rank_graph(analysis, 0, "fast")
    assert [name for name, _ in recompute(graph, "none").named_children()] == ["block"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("colums", "without=['colums']: there is no such pass"),
        (("overlap", "defar"), "without=['defar']: there is no such pass"),
        (None, "without=[None]: there is no such pass"),
    ],
)
def test_a_name_that_is_none(given: Any, expected: str) -> None:
    with pytest.raises(autotp.Error) as raised:
        autotp.explain(Model(), 2, example_inputs=torch.arange(10).view(2, 5), without=given)
    assert str(raised.value).splitlines()[0].endswith(expected)


def test_one_name_is_as_good_as_several() -> None:
    assert Options(without="overlap") == Options(without=("overlap", "overlap"))
