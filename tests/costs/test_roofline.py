"""The seconds of operators."""

from dataclasses import replace

import pytest
import torch

from autotp.costs.hardware import KINDS
from autotp.costs.operators import Op, Touch
from autotp.costs.roofline import op_seconds, product_seconds

A100 = replace(KINDS["a100-80gb"], launch=0.0)


def seconds(batch: int, rows: int, columns: int, summed: int) -> float:
    return product_seconds((batch, rows, columns, summed), 2, A100.matrix_flops, A100)


def test_a_large_product_takes_its_flops() -> None:
    ideal = 2 * 8192**3 / (A100.matrix_flops * A100.matrix_sustained)
    assert 1.0 < seconds(1, 8192, 8192, 8192) / ideal < 1.15


def test_a_row_more_than_fills_the_tiles_takes_a_wave_more() -> None:
    full, more = seconds(1, 128 * 108, 256, 8192), seconds(1, 128 * 108 + 1, 256, 8192)
    assert more > 1.08 * full
    assert seconds(1, 128 * 108 - 100, 256, 8192) == pytest.approx(full)  # A tile that is not full takes as long.


def test_a_short_sum_is_less_efficient() -> None:
    long, short = seconds(64, 2048, 2048, 1024), seconds(64, 2048, 2048, 64)
    assert short > 1.2 * long / 16


def test_on_a_cpu_arithmetic_counts_and_numbers_of_64_bits_are_half_as_fast() -> None:
    cpu, size = replace(KINDS["cpu-gloo"], launch=0.0), 4 * 10**6
    move = Op(name="neg", kind="pointwise", phase="forward", reads=(Touch(0, size),), writes=(Touch(1, size),))
    compute = replace(move, name="tanh", arithmetic=215.0)
    assert op_seconds(move, cpu) == pytest.approx(2 * size / cpu.memory_bandwidth)
    assert op_seconds(compute, cpu) == pytest.approx(215 * 10**6 / cpu.vector_flops)
    assert op_seconds(compute, A100) == op_seconds(move, A100)
    product = Op(name="mm", kind="product", phase="forward", shape=(1, 256, 300, 512), flops=2.0 * 256 * 300 * 512)
    assert op_seconds(product, cpu) == pytest.approx(product.flops / cpu.vector_flops)  # No tiles to fill.
    assert op_seconds(replace(product, dtype=torch.float64), cpu) == 2 * op_seconds(product, cpu)


def test_products_of_8_bits_have_twice_the_peak() -> None:
    wide = Op(name="mm", kind="product", phase="forward", shape=(1, 8192, 8192, 8192), dtype=torch.bfloat16)
    times = [op_seconds(replace(wide, dtype=dtype), A100) for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
    assert 1.9 < times[0] / times[1] <= 2.01


def test_other_operators_move_memory() -> None:
    op = Op(
        name="add",
        kind="pointwise",
        phase="forward",
        reads=(Touch(0, 10**9), Touch(1, 10**9)),
        writes=(Touch(2, 10**9),),
    )
    assert op_seconds(op, A100) == pytest.approx(3e9 / (A100.memory_bandwidth * A100.memory_sustained))


def test_a_thin_product_moves_memory_too() -> None:
    sizes = (Touch(0, 2 * 12288), Touch(1, 2 * 12288**2), Touch(2, 2 * 12288))
    op = Op(
        name="mm", kind="product", phase="forward", shape=(1, 1, 12288, 12288), flops=2.0 * 12288**2,
        reads=sizes[:2], writes=sizes[2:], dtype=torch.bfloat16,
    )  # fmt: skip
    assert op_seconds(op, A100) >= 2 * 12288**2 / A100.memory_bandwidth
