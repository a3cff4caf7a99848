"""Pointwise operators that are one kernel."""

from dataclasses import replace

import torch
from graphs import recorded_run as run

from autotp.costs.operators import Op
from autotp.tools.estimation.counts.kernels import fused, narrowed

aten = torch.ops.aten


def test_a_chain_is_one_kernel_that_writes_what_others_read() -> None:
    found = run(lambda x, b: aten.linear(aten.gelu(aten.mul(aten.add(x, b), 2.0)), b), (64, 64), (64, 64))
    made = fused(found)
    forward = [op for op in made.ops if op.phase == "forward"]
    assert [op.name for op in forward] == ["add+mul+gelu", "mm"]
    size = 64 * 64 * 4
    # It reads x and b; it writes the result, and the input of gelu, which backward reads.
    assert [t.bytes for t in forward[0].reads] == [size] * 2 and [t.bytes for t in forward[0].writes] == [size] * 2


def test_a_softmax_ends_a_kernel() -> None:
    found = fused(run(lambda x: aten.mul(aten._softmax(aten.mul(x, 2.0), -1, False), 3.0), (8, 8)))
    assert [op.name for op in found.ops if op.phase == "forward"] == ["mul+_softmax", "mul"]


def test_flops_and_what_is_kept_stay() -> None:
    found = run(lambda x, w: aten.relu(aten.linear(aten.relu(x), w)), (8, 8), (8, 8))
    assert fused(found).kept == found.kept
    assert sum(op.flops for op in fused(found).ops) == sum(op.flops for op in found.ops)


def test_narrow_numbers_are_those_of_16_bit_products_and_of_rows_that_travel() -> None:
    op = Op(name="mm", kind="product", phase="forward", dtype=torch.bfloat16)
    rows = replace(op, name="all-to-all", kind="collective", axis="ep", size=1000)
    ops = (op, replace(op, dtype=torch.float32), replace(op, kind="attention"), rows, replace(rows, dtype=torch.int64))
    record = replace(run(lambda x: aten.relu(x), (8, 8)), ops=(*ops, replace(rows, axis="tp")))
    made = narrowed(record, torch.float8_e4m3fn, 0.25).ops
    assert [op.dtype.itemsize for op in made] == [1, 4, 2, 2, 8, 2]
    assert [op.size for op in made[3:]] == [250, 1000, 1000]
    assert narrowed(record, None, 1.0) is record
