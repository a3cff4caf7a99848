"""tied_gradients: a table that a lookup and a head read has one gradient in memory, with the same bits."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import some
from torch import Tensor, fx, nn

import autotp
from autotp.compiler import analyse, emitted_operators, rank_graph
from autotp.ops.lookup import tied_embedding
from autotp.options import Options
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.emit.tied_gradients import tied_gradients

aten = torch.ops.aten
WORDS, WIDTH = 300, 16


class Tied(nn.Module):
    """Lookups in a table, which is the head, too. frozen: whether the head reads it without a gradient"""

    def __init__(self, lookups: int = 1, frozen: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(WORDS, WIDTH, padding_idx), nn.Linear(WIDTH, WIDTH)
        self.lookups, self.frozen = lookups, frozen

    def forward(self, tokens: Tensor) -> Tensor:
        x = sum(self.table(tokens.roll(i, 1)) * (i + 1) for i in range(self.lookups))
        weight = self.table.weight.detach() if self.frozen else self.table.weight
        return F.cross_entropy(F.linear(self.layer(x), weight).flatten(0, 1), tokens.flatten())


TOKENS = torch.arange(24).view(2, 12) ** 2 % WORDS


def lookups(model: nn.Module, without: tuple[str, ...] = ()) -> list[str]:
    """The names of the lookups in the graph that runs."""
    program = analyse(skeleton_of(model), (TOKENS,), {}, 1, Options(without=without))
    device = torch.device("cpu")
    graph = emitted_operators(rank_graph(program, 0, "fast"), program, program.options, device, {}).graph
    names = [getattr(node.target, "__name__", "") for node in graph.nodes]
    return [name for name in names if "embedding" in name]


@pytest.mark.parametrize("more", [{}, {"lookups": 2}, {"padding_idx": 4}], ids=str)
def test_gradients_have_the_same_bits(more: dict[str, int]) -> None:
    grads = []
    for without, name in (("in_place",), "embedding.default"), ((), "tied_embedding"):
        assert lookups(Tied(**more), without) == [name] * more.get("lookups", 1)
        model = autotp.parallelize(Tied(**more), 1, example_inputs=(TOKENS,), without=without)
        model(TOKENS).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_a_head_without_a_gradient_stays() -> None:
    assert lookups(Tied(frozen=True)) == ["embedding.default"]


def test_readers_with_gradients_of_others_keep_the_table() -> None:
    """The gradient of a sum is expanded, and no memory of its own: it is added to as before."""
    graph = fx.Graph()
    w, i, x = (graph.placeholder(name) for name in "wix")
    w.meta["val"], i.meta["val"], x.meta["val"] = some(7, 3), torch.arange(4), some(4, 3)
    rows = graph.call_function(aten.embedding.default, (w, i))
    early, total = (graph.call_function(t, (w,)) for t in (aten.exp.default, aten.sum.default))
    head = graph.call_function(aten.linear.default, (x, w))
    graph.output((rows, early, total, head))
    tied = tied_gradients(fx.GraphModule(nn.Module(), graph)).graph
    (lookup,) = tied.find_nodes(op="call_function", target=tied_embedding)
    assert lookup.args == (w, i, 0, 7, -1)
    rows, alias = (user for user in lookup.users if user.target is operator.getitem)
    assert list(alias.users) == [head] and set(w.users) == {lookup, early, total}
