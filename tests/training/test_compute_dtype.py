"""compute_dtype: what is cast and what is not, gradients in the parameter's dtype, products of two dtypes."""

from __future__ import annotations

import pytest
import torch
from errors import line_of, message
from torch import Tensor, nn

from autotp.compiler import analyse
from autotp.passes.capture.skeleton import skeleton_of
from autotp.training.compute_dtype import cast_arguments, expect_products_of_one_dtype, parameter_reader

HALF = torch.bfloat16


def test_arguments() -> None:
    x, index = torch.ones(3), torch.arange(3)
    found = cast_arguments(((x, index), {"mask": x > 0, "n": 2, "inside": [x.double()]}), HALF)
    assert [t.dtype for t in found[0]] == [HALF, torch.int64]
    assert (found[1]["mask"].dtype, found[1]["n"], found[1]["inside"][0].dtype) == (torch.bool, 2, HALF)
    assert cast_arguments((x, index), None) == (x, index)
    assert type(cast_arguments((x.shape, [x.shape]), HALF)[1][0]) is torch.Size


def test_parameters() -> None:
    """The parameter learns in its own dtype; buffers and integers are read as they are."""
    module = nn.BatchNorm1d(3)
    read = parameter_reader(HALF)
    value = read((module, "weight"))
    assert value.dtype == HALF
    value.sum().backward()
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32
    assert read((module, "running_mean")).dtype == torch.float32
    assert parameter_reader(None)((module, "weight")) is module.weight


class Turned(nn.Module):
    """Multiplies by a buffer. On meta torch does not see that a product has two dtypes."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.cast = cast
        self.up = nn.Linear(4, 4)
        self.register_buffer("turn", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn.to(x.dtype) if self.cast else self.turn
        return self.up(x * turn)


@pytest.mark.parametrize("cast", [True, False])
def test_a_product_of_two_dtypes(cast: bool) -> None:
    """Parameters and inputs are cast, buffers are not."""
    model = skeleton_of(Turned(cast))
    model.up.to(HALF)
    program = analyse(model, (torch.ones(3, 4, dtype=HALF),), {}, 2)
    if cast:
        expect_products_of_one_dtype(program)
        return
    at = line_of(__file__, "return self.up(x * turn)")
    assert message(lambda: expect_products_of_one_dtype(program)) == (
        f"compute_dtype: a product of bfloat16 and float32\n  at       {at}\n"
        "  try      `buffer.to(x.dtype)` there: buffers are not cast"
    )
