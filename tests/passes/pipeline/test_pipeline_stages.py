"""stages: one behind another they compute what the whole graph does, and only what must cross does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import gpt
from torch import Tensor, fx, nn

from autotp.errors import Error
from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.pipeline.cost import Cost
from autotp.passes.pipeline.stages import balanced, blocks_in_order, partition, staged


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=7), data=st.data())
def test_balanced_has_the_cheapest_dearest_run(costs: list[int], data: Any) -> None:
    count = data.draw(st.integers(1, len(costs)))
    runs = balanced(len(costs), count, lambda _, run: sum(costs[i] for i in run))
    assert [i for run in runs for i in run] == list(range(len(costs))) and all(runs)
    ways = ((0, *cuts, len(costs)) for cuts in itertools.combinations(range(1, len(costs)), count - 1))
    least = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(way)) for way in ways)
    assert max(sum(costs[i] for i in run) for run in runs) == least


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [batch seq 8], mask: [batch seq]"""
        x = x + self.linear(x).tanh() * mask.unsqueeze(-1)
        return x if bias is None else x + bias


class Stack(nn.Module):
    """A mask of inputs alone, a bias that the first block's weight makes for all, a table that is read at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(12, 8), nn.Embedding(6, 8)
        self.h = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch seq]"""
        x = self.table(tokens)
        mask = (tokens > 3).to(x.dtype)
        bias = self.places(torch.arange(tokens.size(1)))
        for block in self.h:
            x = block(x, mask, bias)
        return (x @ self.table.weight.T).sum(-1) * mask


TOKENS = torch.arange(10).view(2, 5)


def taken(model: nn.Module, *args: Tensor) -> tuple[fx.Graph, Any]:
    captured = capture(skeleton_of(model), args, {})
    return captured.graph, captured


def chained(stages: list[Any], known: dict[str, Tensor]) -> Any:
    """What the last stage gives, each having what the one before it sent."""
    sent: Any = ()
    for stage in stages:
        names = [node.name for node in stage.graph.nodes if node.op == "placeholder"]
        mine = known | dict(zip(stage.received, sent, strict=True))
        sent = fx.GraphModule(nn.Module(), stage.graph)(*(mine[name] for name in names))
    return sent


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 3), (1, 1, 2), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["stack", "gpt"])
def test_staged_graphs_in_a_chain_compute_the_whole(name: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    sizes_of_gpt = {"block_size": 6, "vocab_size": 12, "n_layer": 4, "n_head": 2, "n_embd": 8}
    model, args = (Stack(), (TOKENS,)) if name == "stack" else (gpt(**sizes_of_gpt), (TOKENS, TOKENS))
    graph, captured = taken(model, *args)
    weights = list(captured.parameters)
    blocks = blocks_in_order(graph, weights)
    assert blocks == [f"h.{i}" for i in range(4)]
    queue = iter(blocks)
    stages = staged(graph, [[next(queue) for _ in range(size)] for size in sizes], weights)
    known = {place: model.get_parameter(first) for place, first in captured.parameters.items()}
    found = chained(stages, known | dict(zip(captured.inputs, args, strict=True)))
    torch.testing.assert_close(found[0], model(*args))
    # The mask is made where it is needed, and the stack's bias with the residual stream sent on.
    assert [len(stage.received) for stage in stages] == [0] + [1 + (name == "stack")] * (len(sizes) - 1)
    mine = [{n.name for n in stage.graph.nodes if n.name in weights} for stage in stages]
    both = [name for name in weights if sum(name in some for some in mine) > 1]
    assert len(both) == (len(sizes) > 1)  # The table.


class Backwards(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch seq]"""
        x = self.table(tokens)
        for i in (1, 0, 1):
            x = self.h[i](x, tokens)
        return x


def test_staged_refuses_a_stage_that_needs_a_later_one() -> None:
    graph, captured = taken(Backwards(), TOKENS)
    with pytest.raises(Error, match="stage 0 would need what stage 1 computes"):
        staged(graph, [["h.1"], ["h.0"]], list(captured.parameters))


def test_division_prints_stages_and_shares() -> None:
    costs = [Cost(2, 1), Cost(1, 1, 2), Cost(1), Cost(1, 1), Cost(3, 1, 4)]
    found = partition([f"h.{i}" for i in range(5)], costs, [0, 1, 0], [3, 2, 1])
    assert str(found) == (
        "5 blocks in 3 stages on 2 pipeline ranks\n"
        "\n"
        "stage  pp rank  blocks      multiplications  memory\n"
        "0      0        h.0 to h.1  37.5%            53.8%\n"
        "1      1        h.2 to h.3  25.0%            15.4%\n"
        "2      0        h.4         37.5%            30.8%"
    )


def test_divided_shares_costless_blocks_evenly() -> None:
    found = partition([f"h.{i}" for i in range(4)], [Cost()] * 4, [0, 1], [2, 1])
    assert [len(some) for some in found.blocks] == [2, 2]


@given(
    costs=st.lists(st.tuples(*[st.integers(0, 3)] * 3).map(lambda it: Cost(*it)), min_size=1, max_size=6),
    data=st.data(),
)
def test_divided_is_fastest_and_then_needs_least_memory(costs: list[Cost], data: Any) -> None:
    count = data.draw(st.integers(1, len(costs)))
    flights = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))

    def needs(cuts: Sequence[int]) -> tuple[float, float]:
        stages = [costs[a:b] for a, b in itertools.pairwise((0, *cuts, len(costs)))]
        work = max(sum(it.multiplications + 1 for it in some) for some in stages)
        kept = [
            sum(4 * it.parameters + n * it.activations for it in some) for n, some in zip(flights, stages, strict=True)
        ]
        return work, max(kept)

    found = partition([str(i) for i in range(len(costs))], costs, range(count), flights)
    best = min(map(needs, itertools.combinations(range(1, len(costs)), count - 1)))
    assert needs([*itertools.accumulate(map(len, found.blocks))][:-1]) == best
    assert max(found.memory) == best[1]


def test_divided_gives_first_stages_fewer_equal_blocks() -> None:
    """They wait for the others' backward, and keep what more microbatches made."""
    found = partition([str(i) for i in range(10)], [Cost(1, 1, 1)] * 10, range(4), [4, 3, 2, 1])
    assert [len(some) for some in found.blocks] == [2, 2, 3, 3]
