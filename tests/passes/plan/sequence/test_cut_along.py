"""cut_along: what a gradient flows through is cut, and what is computed of numbers alone only for cut readers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.plan.infer_axes import infer_axes
from autotp.passes.plan.propagate import needs_grad
from autotp.passes.plan.sequence.cut_along import computed_whole, cut_along
from autotp.sharding.axis import leaves


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 6)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [batch seq 4], t: [batch seq]"""
        mask = t.neg().abs().unsqueeze(-1)  # Read by cut operators only.
        shifted = t.roll(1).sign()  # Read by an output.
        y = self.w(x).relu() * mask
        return y, shifted, y.cumsum(1)


def decided(has_form: Any) -> tuple[set[str], set[str]]:
    """Names of the operators that are cut along the sequence, and of those that need it whole."""
    captured = capture(skeleton_of(Model()), (torch.randn(3, 5, 4), torch.rand(3, 5)), {})
    graph, axes = captured.graph, infer_axes(captured.graph)
    first: fx.Node = next(n for n in graph.nodes if n.name == captured.inputs[0])
    along = [*leaves(axes.of(first)[1])]
    sources = frozenset(n for n in graph.nodes if n.name in {*captured.parameters, *captured.inputs})
    learnt = {n for n in needs_grad(graph, sources) if "roll" not in n.name}
    decision = cut_along(graph, axes, along, learnt, has_form)
    whole = computed_whole(axes, decision, along, learnt)
    return {str(n.target) for n in decision.cuts}, {str(n.target) for n in whole}


def test_cut_along_leaves_cumsum_and_roll_whole() -> None:
    cut, whole = decided(lambda node, factor, leaf: False)
    assert {"aten.linear.default", "aten.relu.default", "aten.mul.Tensor"} <= cut
    assert "aten.cumsum.default" in whole and "aten.roll.default" not in cut
