"""compute_dtype: what is cast and what is not, gradients in the parameter's dtype, products of two dtypes."""

from __future__ import annotations

import pytest
import torch
from errors import line_of, message
from torch import Tensor, nn

from autotp.compiler import analyse
from autotp.passes.capture.skeleton import skeleton_of
from autotp.training.compute_dtype import ParameterReader, cast_arguments, expect_products_of_one_dtype

HALF = torch.bfloat16


def test_cast_arguments_casts_floating_tensors_only() -> None:
    x, index = torch.ones(3), torch.arange(3)
    found = cast_arguments(((x, index), {"mask": x > 0, "n": 2, "inside": [x.double()]}), HALF)
    assert [t.dtype for t in found[0]] == [HALF, torch.int64]
    assert (found[1]["mask"].dtype, found[1]["n"], found[1]["inside"][0].dtype) == (torch.bool, 2, HALF)
    assert cast_arguments((x, index), None) == (x, index)
    assert type(cast_arguments((x.shape, [x.shape]), HALF)[1][0]) is torch.Size


def test_parameter_reader_casts_parameters_and_no_buffers() -> None:
    """The parameter learns in its own dtype; buffers and integers are read as they are."""
    module = nn.BatchNorm1d(3)
    read = ParameterReader(HALF)
    value = read((module, "weight"))
    assert value.dtype == HALF
    value.sum().backward()
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32
    assert read((module, "running_mean")).dtype == torch.float32
    assert ParameterReader(None)((module, "weight")) is module.weight


def test_parameter_reader_casts_once_a_step_with_exact_gradients() -> None:
    """The gradients are bit for bit those of a copy for each microbatch."""
    module = nn.Linear(64, 64)
    read, inputs = ParameterReader(HALF), torch.randn(5, 8, 64).to(HALF)
    for x in inputs:
        (x @ module.weight.to(HALF)).square().sum().backward()
    expected, module.weight.grad = module.weight.grad, None
    with read.one_step():
        copies = [read((module, "weight")) for _ in inputs]
        assert len({copy.data_ptr() for copy in copies}) == 1
        for x, copy in zip(inputs, copies, strict=True):
            (x @ copy).square().sum().backward()
    assert expected is not None and module.weight.grad is not None and module.weight.grad.dtype == torch.float32
    assert torch.equal(module.weight.grad, expected)


@pytest.mark.parametrize("written", ["in place", "by data", "replaced", "between steps"])
def test_parameter_reader_casts_a_written_parameter_again(written: str) -> None:
    module = nn.Linear(2, 2)
    read = ParameterReader(HALF)
    with read.one_step():
        read((module, "weight"))
        with torch.no_grad():
            if written == "in place":
                module.weight.fill_(7)
            elif written == "by data":
                module.weight.data = torch.full((2, 2), 7.0)
            elif written == "replaced":
                module.weight = nn.Parameter(torch.full((2, 2), 7.0))
        if written != "between steps":
            assert read((module, "weight")).unique().tolist() == [7]
    module.weight.data.fill_(8)  # The version of the parameter does not tell.
    with read.one_step():
        assert read((module, "weight")).unique().tolist() == [8]


def test_parameter_reader_gives_frozen_parameters_no_gradient() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    read = ParameterReader(HALF)
    with read.one_step():
        assert not read((module, "weight")).requires_grad


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
def test_a_product_of_two_dtypes_is_refused_with_its_line(cast: bool) -> None:
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
