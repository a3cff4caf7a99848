"""equal_inputs: inputs of one shape at capture are of one shape in each call of the graph."""

from __future__ import annotations

from collections.abc import Collection

import torch
from graphs import TOKENS, canonical
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autotp.passes.builder import size_assumptions
from autotp.passes.plan.sequence.equal_inputs import equal_inputs
from autotp.sharding.axis import Size


class Predicts(nn.Module):
    """The loss of a linear language model: it compares flattened logits and labels only."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 4), nn.Linear(4, 12)

    def forward(self, tokens: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """tokens: [batch seq], labels: [batch seq], weights: [12]"""
        logits = self.head(self.table(tokens))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weights)


def sizes(graph: fx.Graph, inputs: Collection[str]) -> list[list[Size]]:
    found = [node.meta["val"] for node in graph.nodes if node.op == "placeholder" and node.name in inputs]
    return [[Size.of(n) for n in value.shape] for value in found]


def test_equal_inputs_makes_tokens_and_labels_one_shape() -> None:
    captured, graph = canonical(Predicts(), TOKENS.repeat(2, 1), TOKENS.repeat(2, 1), torch.ones(12))
    tokens, labels, _ = sizes(graph, captured.inputs)
    assert tokens != labels  # The graph alone says only that the products are the same.
    before = len(size_assumptions(graph))
    equal_inputs(graph, captured.inputs)
    tokens, labels, _ = sizes(graph, captured.inputs)
    assert tokens == labels
    assert len(size_assumptions(graph)) > before  # A call with other shapes is captured anew.


def test_equal_inputs_leaves_parameters_alone() -> None:
    _, graph = canonical(Predicts(), TOKENS, TOKENS, torch.ones(12))
    before = len(size_assumptions(graph))
    equal_inputs(graph, [])
    assert len(size_assumptions(graph)) == before
