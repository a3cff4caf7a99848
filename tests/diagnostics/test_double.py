"""double: nothing in a region computes in less than float64, and a copied model is moved, not the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autotp
from autotp.diagnostics.double import add_noise, all_double, copied_model, doubled


def test_all_double_makes_casts_float64() -> None:
    x = torch.ones(3)
    with all_double():
        assert torch.ones(2).dtype == torch.float64
        for cast in (
            lambda: x.float(),
            lambda: x.half(),
            lambda: x.to(torch.bfloat16),
            lambda: x.to(dtype=torch.float32),
        ):
            assert cast().dtype == torch.float64
        assert torch.softmax(x.double(), 0, dtype=torch.float32).dtype == torch.float64
        assert x.to(torch.int32).dtype == torch.int32
    assert torch.ones(2).dtype == x.float().dtype == torch.float32


def test_all_double_computes_grouped_products() -> None:
    """torch has none in float64."""
    x, w = torch.randn(4, 3).double(), torch.randn(2, 3, 5).double()
    with all_double():
        found = torch._grouped_mm(x, w, torch.tensor([1, 4], dtype=torch.int32))
    torch.testing.assert_close(found, torch.cat([x[:1] @ w[0], x[1:] @ w[1]]))


def test_moved_leaves_no_zeros_and_ones() -> None:
    """Zeros and ones would hide a wrong cut. Computed tensors, which torch cannot copy, become leaves."""
    model = nn.LayerNorm(4)
    model.table = model.weight * 2
    other = add_noise(copied_model(model).double())
    assert other.weight.is_leaf and other.table.is_leaf and other.table.dtype == torch.float64
    assert (other.bias != 0).all() and (model.bias == 0).all() and (model.weight == 1).all()


def test_doubled_leaves_whole_numbers() -> None:
    assert doubled(torch.ones(2)).dtype == torch.float64 and doubled(torch.ones(2).long()).dtype == torch.int64


def test_moved_converts_modules_in_a_plain_list() -> None:
    """They are converted, so that verify refuses the model by their name, and not for their dtype."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    with pytest.raises(autotp.Error, match=r"`layers\.0` leads to a Linear that is no submodule"):
        autotp.verify(Listed(), 2, example_inputs=torch.ones(2, 4))
