"""A module that forward converts is captured if that changes nothing, and is refused elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autotp


class Routed(nn.Module):
    """As in Switch Transformers: the router is converted in each call."""

    def __init__(self, dtype: torch.dtype, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.router, self.down = nn.Linear(6, 24), nn.Linear(24, 24), nn.Linear(24, 6)
        self.router.register_buffer("scale", torch.ones(24))
        self.dtype = dtype
        self.router.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        self.router = self.router.to(self.dtype)
        weights = self.router(x.to(self.dtype)) * self.router.scale
        return self.down(x * weights.softmax(-1).to(x.dtype))


@pytest.mark.parametrize("frozen", [False, True])
def test_module_conversions_that_change_nothing_are_captured(frozen: bool) -> None:
    """Neither in the model's own dtype, nor where `verify` computes in float64."""
    report = autotp.verify(Routed(torch.float32, frozen), 2, example_inputs=torch.randn(3, 6))
    assert report.ok and any(cut.name == "up.weight" for cut in report.plan.cuts), report


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_module_conversions_that_change_a_dtype_are_refused(dtype: torch.dtype) -> None:
    model = Routed(dtype)
    with pytest.raises(autotp.Error) as raised:
        autotp.parallelize(model, 1, example_inputs=torch.randn(3, 6))
    name = str(dtype).removeprefix("torch.")
    assert f"forward converts `router.weight` from float32 on cpu to {name} on cpu" in str(raised.value)
    assert "the same conversion of this module once, before autotp.parallelize" in str(raised.value)
    model.router.to(dtype)  # As the error says.
    assert autotp.parallelize(model, 1, example_inputs=torch.randn(3, 6))(torch.randn(3, 6)).dtype == torch.float32
