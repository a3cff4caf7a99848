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
def _codes(signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the values of the codes [256], and the borders between them [255]."""
    values = dynamic_map(signed).to(device, dtype)
    return values, (values[1:] + values[:-1]) / 2


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which states of a dtype are packed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _padded(x: Tensor, blocks: Blocks) -> Tensor:
    """Returns a part with whole blocks in its rows. x: [lead... row...] -> [lead... blocks SIZE]"""
    lead = x.shape[: blocks.lead]
    padded = x.new_zeros(*lead, blocks.count * SIZE)
    padded.index_copy_(-1, blocks.places, x.reshape(*lead, len(blocks.places)))
    return padded.view(*lead, blocks.count, SIZE)


def largest(x: Tensor, blocks: Blocks) -> Tensor:
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
    ratios = wide_x / _by_element(scales, blocks, wide_x)
    ratios = torch.where(wide_x == 0, 0.0, ratios)  # A block of zeros has the scale 0.
    if codes != torch.uint8:
        return ratios.to(codes)
    numbers = torch.bucketize(ratios, _codes(signed, ratios.dtype, x.device)[1], out_int32=True)
    if not signed:
        # A second moment divides: one that is not 0 must not become 0.
        numbers = torch.where(wide_x > 0, numbers.clamp(min=1), numbers)
    return numbers.to(codes)


def opened(codes: Tensor, scales: Tensor, blocks: Blocks, dtype: torch.dtype, signed: bool) -> Tensor:
    """Returns the part that was packed, in a dtype."""
    if codes.dtype == torch.uint8:
        values = _codes(signed, wide(dtype), codes.device)[0]
        ratios = values.index_select(0, codes.flatten().int()).view(codes.shape)
    else:
        ratios = codes.to(wide(dtype))
    return (ratios * _by_element(scales, blocks, ratios)).to(dtype)


def _by_element(scales: Tensor, blocks: Blocks, like: Tensor) -> Tensor:
    """Returns the scale of each element of a part. scales: [lead... blocks]"""
    return scales.index_select(-1, blocks.places // SIZE).view(like.shape).to(like.dtype)
