"""separate_keys: keys, values and what a mask says of them get axes of their own, where they are smallest."""

from __future__ import annotations

from typing import Any

import torch
from graphs import canonical, expect_same, lines, ops, some
from torch import Tensor, nn
from torch.nn import functional as F

from autotp.ops.placement_moves import apart
from autotp.passes.lower.dce import dce
from autotp.passes.plan.sequence.separate_keys import Separated, joined_again, separate_keys


class Attention(nn.Module):
    """Causal attention with key/value heads that are repeated for the query heads; or written as products."""

    def __init__(self, groups: int = 1, written: bool = False) -> None:
        super().__init__()
        self.groups, self.written = groups, written
        self.q, self.k, self.v = nn.Linear(12, 12), nn.Linear(12, 12 // groups), nn.Linear(12, 12 // groups)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        q, k, v = (f(x).unflatten(-1, (-1, 3)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        if not self.written:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        places = torch.arange(x.shape[1])
        scores = (q @ k.transpose(-1, -2)).masked_fill(places[None] > places[:, None], float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def separated(model: nn.Module, *given: Tensor) -> tuple[Any, Separated]:
    torch.manual_seed(0)
    _, graph = canonical(model, *given)
    before = dce(graph)
    return before, separate_keys(before)


def operands(found: Separated) -> list[str]:
    return [str(node.args[0]) for node in found.graph.nodes if node.target is apart]


def test_separate_keys_leaves_one_sequence_dimension_a_value() -> None:
    for written in (False, True):
        _, found = separated(Attention(written=written), some(2, 5, 12))
        (sequence,) = found.sequences
        for node, bound in found.axes.bound.items():
            assert sum(axis is sequence for axis in found.axes.of(node)) < 2, node
            assert bound.cuttable(sequence) is not None or all(f.axis is not sequence for f in bound.factors)


def test_separate_keys_separates_keys_values_and_mask_columns() -> None:
    _, found = separated(Attention(written=True), some(2, 5, 12))
    assert ops(found.graph).count("apart") == 3
    _, found = separated(Attention(), some(2, 5, 12))  # The causal form of attention needs no mask.
    assert ops(found.graph).count("apart") == 2


def test_separate_keys_separates_before_heads_are_repeated() -> None:
    """Only the heads of the keys travel."""
    _, found = separated(Attention(groups=2), some(2, 5, 12))
    sizes = [[*node.meta["val"].shape[1:]] for node in found.graph.nodes if node.target is apart]
    assert len(sizes) == 2 and all(size[0] == 2 or size[-1] == 6 for size in sizes)


def test_joined_again_undoes_separate_keys() -> None:
    before, found = separated(Attention(groups=2, written=True), some(2, 5, 12))
    joined = joined_again(found.graph)
    assert "apart" not in ops(joined)
    assert sorted(lines(dce(joined)))[:3] == sorted(lines(before))[:3]
    shapes = [n.meta["val"].shape for n in before.nodes if n.op == "placeholder"]
    values = [some(*(n if isinstance(n, int) else n.node.hint for n in shape)) for shape in shapes]
    expect_same(before, found.graph, values)
    expect_same(before, joined, values)


class OneValue(nn.Module):
    """Queries, keys and values are one value, in attention and in products."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        x = self.linear(x)
        y = F.scaled_dot_product_attention(x, x, x)
        return torch.einsum("bst,btd->bsd", torch.einsum("bsd,btd->bst", y, y).softmax(-1), y)


def test_separate_keys_leaves_queries_of_the_same_value() -> None:
    before, found = separated(OneValue(), some(2, 5, 12))
    whole = [n for n in found.graph.nodes if n.target is apart]
    assert len(whole) == 2
    (sequence,) = found.sequences
    assert all(found.axes.bound[n].cuttable(sequence) for n in found.axes.bound if n not in whole)
    expect_same(before, found.graph, [some(12, 12), some(2, 5, 12)])


class Pools(nn.Module):
    """A model without attention."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 12]"""
        return x.mean(1)


def test_separate_keys_finds_no_sequence_without_attention() -> None:
    before, found = separated(Pools(), some(2, 5, 12))
    assert found.sequences == () and lines(found.graph) == lines(before)
