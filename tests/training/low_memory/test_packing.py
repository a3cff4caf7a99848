"""Blocks and codes: what was opened packs to the same bits, errors are small, and a layout changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autotp.sharding.layout import Layout
from autotp.training.low_memory.blocks import SIZE, state_blocks
from autotp.training.low_memory.packing import _nearest, dynamic_map, largest_by_block, opened, pack

CPU = torch.device("cpu")
BITS = {"8bit": torch.uint8, "bfloat16": torch.bfloat16}


def drawn(shape: tuple[int, ...], signed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Elements of many sizes, and a row of zeros."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw, dtype=dtype) * 10 ** torch.randn(shape, generator=draw, dtype=dtype)
    x[0] = 0
    return x if signed else x.square()


def packed(x: Tensor, codes: torch.dtype, signed: bool) -> tuple[Tensor, Tensor, Any]:
    blocks = state_blocks(Layout(tuple(x.shape)), 0, CPU)
    assert blocks is not None
    scales = largest_by_block(x, blocks)
    return pack(x, scales, blocks, codes, signed), scales, blocks


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map_has_256_values_and_the_largest_ones_exactly(signed: bool) -> None:
    """The formula of the paper: 2**d values, or twice as many, in the decade d of seven."""
    values = dynamic_map(signed)
    assert values.shape == (256,) and bool((values[1:] > values[:-1]).all())
    assert values[0] == (-1 if signed else 0) and values[-1] == 1 and 0 in values
    top = values[(values > 0.1) & (values < 1)]
    assert len(top) == (64 if signed else 128)
    assert float(values[values > 0].min()) < 1e-6


@pytest.mark.parametrize("codes", BITS)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(20, 1000), (64, 64, 3, 3), (4, 10, 300)], ids=str)
def test_what_was_opened_packs_to_the_same_bits(codes: str, signed: bool, dtype: torch.dtype, shape: Any) -> None:
    x = drawn(shape, signed, dtype)
    numbers, scales, blocks = packed(x, BITS[codes], signed)
    y = opened(numbers, scales, blocks, dtype, signed)
    again, again_scales, _ = packed(y, BITS[codes], signed)
    assert torch.equal(numbers, again) and torch.equal(scales, again_scales)
    assert torch.equal(y, opened(again, again_scales, blocks, dtype, signed))
    by_row = scales.amax(tuple(range(1, scales.dim()))).view(-1, *[1] * (x.dim() - 1)).to(dtype)
    largest_error = float(((y - x).abs() / by_row.clamp(min=1e-30)).max())
    assert largest_error < {"8bit": 0.0075 if signed else 0.004, "bfloat16": 0.002}[codes]


def test_a_second_moment_that_is_not_zero_does_not_become_zero() -> None:
    """Its root divides: the update of such an element would be as large as the gradient divided by epsilon."""
    x = torch.full((16, 256), 1e-12)
    x[:, 0] = 1
    x[:, 1] = 0
    numbers, scales, blocks = packed(x, torch.uint8, False)
    y = opened(numbers, scales, blocks, torch.float32, False)
    assert (y[:, 1] == 0).all() and (y[:, 2:] > 0).all()


def test_a_block_that_is_not_finite_shows() -> None:
    x = torch.ones(16, 512)
    x[3, 5] = torch.nan
    numbers, scales, blocks = packed(x, torch.uint8, True)
    y = opened(numbers, scales, blocks, torch.float32, True)
    assert y[3, :SIZE].isnan().all() and torch.equal(y[3, SIZE:], torch.ones(SIZE)) and not y[2].isnan().any()


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_gets_the_nearest_code(signed: bool) -> None:
    values = dynamic_map(signed)
    borders = (values[1:] + values[:-1]) / 2
    near = torch.cat([borders, torch.nextafter(borders, borders + 1), torch.nextafter(borders, borders - 1)])
    many = 10.0 ** (-8 * torch.rand(100_000, generator=torch.Generator().manual_seed(0)))
    x = torch.cat([values, near, many, -many if signed else many])
    assert torch.equal(_nearest(x, signed), torch.bucketize(x, borders, out_int32=True))


CUTS = {
    "columns": Layout((20, 1000), 1, (((0, 500),), ((500, 1000),))),
    "rows": Layout((20, 1000), 0, (((0, 13),), ((13, 20),))),
    "uneven, and none": Layout((20, 1000), 1, (((0, 334),), ((334, 668),), ((668, 1000),), ())),
    "a concatenation": Layout((20, 1000), 1, (((0, 100), (500, 600)), ((100, 500), (600, 1000)))),
    "repeated": Layout((20, 1000), 1, (((0, 600),), ((400, 1000),))),
    "at blocks": Layout((20, 1024), 1, (((0, 512),), ((512, 1024),))),
    "channels": Layout((64, 64, 3, 3), 1, (((0, 40),), ((40, 64),))),
    "an inner dimension": Layout((4, 10, 30, 30), 2, (((0, 11),), ((11, 30),))),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("codes", BITS)
def test_parts_have_the_codes_of_the_whole(name: str, codes: str) -> None:
    layout = CUTS[name]
    x = drawn(layout.shape, signed=True)
    expected, _, _ = packed(x, BITS[codes], True)
    ranks = range(len(layout.pieces))
    blocks = {rank: state_blocks(layout, rank, CPU) for rank in ranks}
    parts = {rank: layout.take(x, rank) for rank in ranks}
    scales = {rank: largest_by_block(parts[rank], blocks[rank]) for rank in ranks}  # type: ignore[arg-type]
    count = blocks[0].shared_count  # type: ignore[union-attr]
    assert (count > 0) == (name not in ("rows", "at blocks"))
    of_all = torch.zeros(*scales[0].shape[:-1], count) if count else None
    for rank, here in blocks.items() if of_all is not None else ():
        assert here is not None
        of_all[..., here.shared_places] = torch.maximum(of_all[..., here.shared_places], scales[rank][..., here.shared])
    for rank, here in blocks.items():
        assert here is not None
        if of_all is not None:
            scales[rank][..., here.shared] = of_all[..., here.shared_places]
        numbers = pack(parts[rank], scales[rank], here, BITS[codes], True)
        assert torch.equal(numbers, layout.take(expected, rank)), rank


def test_small_tensors_and_vectors_have_no_blocks() -> None:
    assert state_blocks(Layout((5000,)), 0, CPU) is None and state_blocks(Layout((8, 256)), 0, CPU) is None
    assert state_blocks(Layout((16, 256)), 0, CPU) is not None
