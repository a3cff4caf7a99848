"""cost: what a block computes, reads and keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autotp.compiler import analyse
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.losses import linear_cross_entropy
from autotp.passes.pipeline.cost import Cost, block_costs, multiplications
from autotp.passes.pipeline.stages import partition
from autotp.passes.plan.choose import NOMINAL, elements
from autotp.rules.row import Trait
from autotp.rules.traits import has


def test_cost_of_uneven_blocks_and_a_head() -> None:
    """Of four blocks of which one is four times as wide, and a head that is as dear as two of the others."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 8)) for n in (8, 32, 8, 8))
            self.head = nn.Linear(8, 32)

        def forward(self, x: Tensor) -> Tensor:
            """x: [batch 8]"""
            for block in self.h:
                x = block(x)
            found: Tensor = self.head(x)
            return found

    analysis = analyse(skeleton_of(Uneven()), (torch.zeros(3, 8),), {}, 2)
    blocks = [f"h.{i}" for i in range(4)]
    costs = block_costs(analysis.graph, analysis.axes, blocks, list(analysis.captured.parameters))
    assert [cost.multiplications / costs[0].multiplications for cost in costs] == [1, 4, 1, 3]
    assert [cost.parameters for cost in costs] == [2 * 64 + 16, 2 * 256 + 40, 144, 144 + 256 + 32]
    assert [cost.activations for cost in costs] == [3 * 40, 3 * 112, 3 * 40, 3 * (40 + 64)]  # Products, and with bias.
    assert partition(blocks, costs, [0, 1], [2, 1]).blocks == (("h.0", "h.1"), ("h.2", "h.3"))
    attention = analyse(skeleton_of(Heads()), (torch.zeros(3, 5, 8),), {}, 2)
    (node,) = (n for n in attention.graph.nodes if has(n.target, Trait.ATTENTION))
    assert multiplications(node, attention.axes) == 2 * elements(node) * NOMINAL


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 8]"""
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        found: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return found


def test_costs_add_field_by_field() -> None:
    assert Cost(1.5, 2, 3) + Cost(2, 3, 4) == Cost(3.5, 5, 7)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 37)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), labels)


def test_a_head_with_its_loss_costs_as_much_as_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for least in (38, 37):
        monkeypatch.setattr(linear_cross_entropy, "LEAST", least)
        analysis = analyse(skeleton_of(Head()), (torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)), {}, 2)
        costs.append(sum(multiplications(node, analysis.axes) for node in analysis.graph.nodes))
    assert costs[0] == costs[1] > 0
