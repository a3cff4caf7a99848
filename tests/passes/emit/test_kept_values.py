"""kept_values: which operator saves which tensors, and whose memory they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from autotp.passes.emit.kept_values import saved_by_node

aten = torch.ops.aten


def block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """x: [n s 8], w: [8 8], v: [8 8] -> [n s 8]"""
    hidden = aten.gelu(aten.linear(x, w)).flatten(0, 1)
    weights = aten.softmax(aten.dropout(hidden, 0.5, True), -1)
    return aten.linear(weights, v).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("device", ["cpu", "meta", "fake"])
def test_saved_by_node_names_the_maker_of_each_memory(device: str) -> None:
    """Through views; softmax saves its own output, and dropout a mask that is nobody's output."""
    with FakeTensorMode() if device == "fake" else torch.device(device):
        xs = [torch.randn(*shape, requires_grad=True) for shape in ((2, 3, 8), (8, 8), (8, 8))]
        saved = saved_by_node(fx.symbolic_trace(block), xs)
    assert [(x.node, x.origin, x.bytes) for x in saved] == [
        ("linear", "w", 256), ("linear", "x", 192), ("gelu", "linear", 192), ("dropout", None, 192),
        ("softmax", "softmax", 192), ("linear_1", "v", 256), ("linear_1", "softmax", 192),
    ]  # fmt: skip
    assert len({x.memory for x in saved}) == 6 and [x.index for x in saved] == list(range(7))
    assert [x.fate({"dropout": "bits", "softmax": "host"}) for x in saved] == [
        "keep", "keep", "keep", "bits", "host", "keep", "host"
    ]  # fmt: skip
