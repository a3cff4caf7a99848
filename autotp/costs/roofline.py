"""roofline: the seconds of one operator on a device.

A product is computed in tiles, one on each unit at a time. Its time is the number of waves of tiles, times the time of
a tile; or the time to move its operands, if that is longer. All other operators move memory; on a CPU, whose cores
compute little for the bytes that they move, they also take the time of their arithmetic. Every kernel has a launch: on
a CPU this is the time of the call itself, views included.

Source: Williams et al. 2009, "Roofline"; NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave
quantization).
"""

from __future__ import annotations

import math
from functools import cache

import torch

from autotp.costs.hardware import Hardware
from autotp.costs.operators import Op

SIDES = (64, 96, 128, 160, 192, 224, 256)
TILES = ((64, 64), (256, 64), (64, 256), *((side, 128) for side in SIDES), *((128, side) for side in SIDES))
"""Rows and columns of the tiles among which the library of products takes the fastest: those of cuBLAS's kernels."""


def op_seconds(op: Op, device: Hardware) -> float:
    """Returns the seconds of an operator that computes or moves memory."""
    moved = sum(touch.bytes for touch in (*op.reads, *op.writes))
    moving = moved / (device.memory_bandwidth * device.memory_sustained)
    together = max if device.is_gpu else _in_turn
    if op.kind == "product":
        computing = product_seconds(op.shape, op.dtype.itemsize, _peak(op, device), device)
        return together(computing, moving) + device.launch
    if op.kind == "attention":
        return together(_attention_seconds(op, device), moving) + device.launch
    return max(moving, _arithmetic_seconds(op, device)) + device.launch


def _in_turn(computing: float, moving: float) -> float:
    """Returns the seconds of a product on one core: it copies blocks of operands, multiplies them, and adds results."""
    return computing + moving


def _arithmetic_seconds(op: Op, device: Hardware) -> float:
    """Returns the seconds of what an operator computes for each element of its first result, on a CPU."""
    if device.is_gpu or not op.arithmetic or not op.writes:
        return 0.0
    elements = op.writes[0].bytes / op.dtype.itemsize
    return elements * op.arithmetic / (device.vector_flops * device.matrix_sustained)


def _peak(op: Op, device: Hardware) -> float:
    """Returns the peak for an operator's dtype: registers hold twice as many numbers of half the bits."""
    if op.dtype.itemsize == 1 and op.dtype.is_floating_point:
        return 2 * device.matrix_flops
    if op.dtype == torch.float64:
        return device.vector_flops / 2
    return device.vector_flops if op.dtype == torch.float32 else device.matrix_flops


@cache
def product_seconds(shape: tuple[int, int, int, int], itemsize: int, peak: float, device: Hardware) -> float:
    """Returns the seconds of a product without its launch, with the fastest tile.

    Args:
        shape: batch, rows, columns, summed length.
        itemsize: bytes of an element.
        peak: FLOP/s of the device for this dtype.
    """
    batch, rows, columns, summed = shape
    if not device.is_gpu:  # Its tiles are a few registers.
        return 2.0 * batch * rows * columns * (summed + device.fill) / (peak * device.matrix_sustained)
    return min(_tiled(batch, rows, columns, summed, tile, itemsize, peak, device) for tile in TILES)


def _tiled(
    batch: int,
    rows: int,
    columns: int,
    summed: int,
    tile: tuple[int, int],
    itemsize: int,
    peak: float,
    device: Hardware,
) -> float:
    high, wide = tile
    tiles = batch * math.ceil(rows / high) * math.ceil(columns / wide)
    waves = math.ceil(tiles / device.units)
    computing = 2 * high * wide / (peak * device.matrix_sustained / device.units)
    loading = (high + wide) * itemsize / (device.cache_bandwidth / device.units)
    return waves * (summed + device.fill) * max(computing, loading)


def _attention_seconds(op: Op, device: Hardware) -> float:
    """Returns the seconds of a fused attention: tiles of 128 queries, whose summed length is the width of a head."""
    batch, rows, columns, width = op.shape
    if not device.is_gpu:
        scores = batch * rows * columns * op.share * op.arithmetic
        computing = op.flops * op.share * (width + device.fill) / width
        return computing / (_peak(op, device) * device.matrix_sustained) + scores / device.vector_flops
    tiles = batch * math.ceil(rows / 128)
    # The last wave of tiles does not fill all units, and loads do not run ahead at the ends of a tile.
    full = tiles / (math.ceil(tiles / device.units) * device.units)
    filled = width / (width + device.fill)
    return op.flops * op.share / (_peak(op, device) * device.matrix_sustained * full * filled)
