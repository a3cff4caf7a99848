"""Packs a state into blocks with one scale each: in 8 bits, or in bfloat16; and opens it again.

NOTE [Packing what was opened gives the same]
The largest element of a block is its scale exactly, and the code of every other element is the nearest one to what it
stands for. So a state that is opened and packed again keeps all bits. Checkpoints therefore have the opened state, in
the shape of the parameter and the dtype of torch's own optimizer, and any layout, any `states`, and torch's own class
read it.

NOTE [bfloat16 with a scale]
A second moment that decays by 0.1 % in a step would never decay in bfloat16, whose neighbours are 0.4 % apart. With a
scale in float32 the block decays as a whole, and the codes are what elements are relative to their largest one.

The 256 codes of 8 bits are the dynamic map of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
section 1.3: decades from 1e-7 to 1, and in each one twice as many values as in the one below.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from autotp.training.low_memory.blocks import SIZE, Blocks

DECADES = 7


def dynamic_map(signed: bool) -> Tensor:
    """Returns the values of the codes, sorted: from -1 or 0 to 1. [256]

    Args:
        signed: whether half of the values are negative.
    """
    values = list[Tensor]()
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        values.append(10.0 ** (decade - DECADES + 1) * (edges[:-1] + edges[1:]) / 2)
    positive = torch.cat(values).sort().values
    # In place of the largest negative value, so that a largest element that is negative is its scale exactly, too.
    negative = [torch.tensor([-1.0]).double(), -positive[:-1].flip(0)] if signed else []
    return torch.cat([*negative, torch.zeros(1).double(), positive, torch.ones(1).double()]).float()


@cache
def _borders(signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the values of the codes, and the border above each. [256] each"""
    values = dynamic_map(signed).to(device, dtype)
    return values, torch.cat([(values[1:] + values[:-1]) / 2, values.new_tensor([torch.inf])])


@cache
def _first_codes(signed: bool, device: torch.device) -> Tensor:
    """Returns the code of the least number with each value of the upper 16 bits of a float32. [65536]

    Numbers with the same upper bits are so near that there is one border between them at most. A search among all
    borders takes ten times as long.
    """
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
    codes = torch.bucketize(least, _borders(signed, torch.float32, torch.device("cpu"))[1][:-1], out_int32=True)
    return codes.masked_fill(least.isnan(), 255).to(device)


def _nearest(ratios: Tensor, signed: bool) -> Tensor:
    """Returns the code of the nearest value to each number; 255 for NaN."""
    upper = (ratios.float().view(torch.int32) >> 16).flatten() + 2**15
    first = _first_codes(signed, ratios.device).index_select(0, upper)
    border = _borders(signed, ratios.dtype, ratios.device)[1].index_select(0, first)
    return (first + (ratios.flatten() > border)).view(ratios.shape)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which states of a dtype are packed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _padded(x: Tensor, blocks: Blocks) -> Tensor:
    """Returns a part with whole blocks in its rows. x: [lead... row...] -> [lead... blocks SIZE]"""
    lead = x.shape[: blocks.lead]
    if blocks.are_whole:
        return x.reshape(*lead, blocks.count, SIZE)
    padded = x.new_zeros(*lead, blocks.count * SIZE)
    padded.index_copy_(-1, blocks.places, x.reshape(*lead, len(blocks.places)))
    return padded.view(*lead, blocks.count, SIZE)


def largest_by_block(x: Tensor, blocks: Blocks) -> Tensor:
    """Returns the largest absolute element of each block, of those on this rank. x: part -> [lead... blocks]"""
    return _padded(x.to(wide(x.dtype)), blocks).abs().amax(-1).float()


def pack(x: Tensor, scales: Tensor, blocks: Blocks, codes: torch.dtype, signed: bool) -> Tensor:
    """Returns the codes of a part, in its shape.

    Args:
        x: this rank's part of a state, or some rows of it.
        scales: the largest absolute element of each block, of those on all ranks. [lead... blocks]
        codes: their dtype, torch.uint8 or torch.bfloat16.
        signed: whether the state may be negative.
    """
    wide_x = x.to(wide(x.dtype))
    # A block of zeros has the scale 0.
    ratios = _by_scale(torch.div, wide_x, torch.where(scales == 0, 1.0, scales), blocks)
    if codes != torch.uint8:
        return ratios.to(codes)
    numbers = _nearest(ratios, signed)
    if not signed:
        # A second moment divides: one that is not 0 must not become 0.
        numbers = torch.maximum(numbers, (wide_x > 0).int())
    return numbers.to(codes)


def opened(codes: Tensor, scales: Tensor, blocks: Blocks, dtype: torch.dtype, signed: bool) -> Tensor:
    """Returns the part that was packed, in a dtype."""
    if codes.dtype == torch.uint8:
        values = _borders(signed, wide(dtype), codes.device)[0]
        ratios = values.index_select(0, codes.flatten().int()).view(codes.shape)
    else:
        ratios = codes.to(wide(dtype))
    return _by_scale(torch.mul, ratios, scales, blocks).to(dtype)


def _by_scale(operator: Callable[[Tensor, Tensor], Tensor], x: Tensor, scales: Tensor, blocks: Blocks) -> Tensor:
    """Returns the result of an operator of each element and its block's scale. x: part, scales: [lead... blocks]"""
    scales = scales.to(x.dtype)
    if blocks.are_whole:
        return operator(x.reshape(*scales.shape, SIZE), scales.unsqueeze(-1)).view(x.shape)
    return operator(x, scales.index_select(-1, blocks.places // SIZE).view(x.shape))
