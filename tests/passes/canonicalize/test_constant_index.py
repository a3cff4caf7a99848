"""constant_index: places that a model writes as numbers become slices, others stay lookups."""

from __future__ import annotations

import pytest
import torch
from graphs import canonical, ops
from torch import Tensor, nn

import autotp
from autotp.passes.canonicalize.constant_index import constant_index


class Picked(nn.Module):
    """Reads some places of a dimension of six."""

    def __init__(self, places: list[int]) -> None:
        super().__init__()
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch 24]"""
        return x.unflatten(-1, (6, 4))[:, self.places] * 2


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        pytest.param([4], "slice", id="one"),
        pytest.param([-2], "slice", id="from-the-end"),
        pytest.param([-1], "slice", id="the-last"),
        pytest.param([1, 2, 3], "slice", id="a-run"),
        pytest.param([3, 1], "index", id="out-of-order"),
        pytest.param([0, 2], "index", id="apart"),
    ],
)
def test_constant_index_becomes_slices_or_a_lookup(places: list[int], kind: str) -> None:
    model, x = Picked(places), torch.randn(3, 24)
    captured, graph = canonical(model, x)
    assert kind in " ".join(ops(constant_index(graph, captured.constants)))
    report = autotp.verify(model, 2, example_inputs=x)
    assert report.ok, report
