"""measure_device: times products, a copy, an elementwise operator and an operator's call on the device of this process.

On a CPU it counts the processor time of the calling thread, on a GPU the time between two events; of many runs the
fastest counts: whatever else runs on the machine only adds time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = {"cpu": 1024, "cuda": 8192}
"""Rows, columns and summed length of the products."""
SHORT = 64
"""The summed length of a product that does not keep a device busy: the width of a head."""
COPIED = {"cpu": 2**24, "cuda": 2**30}
"""Bytes of the tensor that is copied: of a CPU more than a core's own caches, and few enough that they are paged in."""
CHAIN = 50
"""Operators in a row whose calls are timed."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one device.

    Attributes:
        half, single, double: FLOP/s of products in bfloat16, float32 and float64.
        short: FLOP/s of a product in float32 whose summed length is SHORT.
        copy: bytes/s of a copy, read and written.
        add: bytes/s of the sum of two tensors.
        call: seconds of an operator on a few numbers, forward and backward.
        memory: bytes of the device.
    """

    half: float
    single: float
    double: float
    short: float
    copy: float
    add: float
    call: float
    memory: float

    @property
    def fill(self) -> float:
        """The summed length by which a product takes longer than its FLOPs say."""
        ratio = self.single / self.short
        return max(0.0, SHORT * (ratio - 1) / (1 - ratio * SHORT / SIDE["cpu"]))


def measure_device(device: torch.device, seconds: float) -> Measured:
    """Returns what was measured. seconds: for all of it, about"""
    each, side = seconds / 7, SIDE[device.type]
    rates = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        smaller = side // 4 if device.type == "cuda" and dtype == torch.float64 else side
        rates[dtype] = _product(smaller, smaller, dtype, device, each)
    count = COPIED[device.type] // 4
    x, y, out = (torch.ones(count, device=device) for _ in range(3))
    copied = 8 * count / fastest(lambda: out.copy_(x), device, each)
    summed = 12 * count / fastest(lambda: torch.add(x, y, out=out), device, each)
    return Measured(
        half=rates[torch.bfloat16], single=rates[torch.float32], double=rates[torch.float64],
        short=_product(side, SHORT, torch.float32, device, each), copy=copied, add=summed,
        call=_call(device, each), memory=_memory(device),
    )  # fmt: skip


def _product(side: int, summed: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Returns the FLOP/s of a product."""
    x = torch.randn(side, summed, device=device).to(dtype)
    y = torch.randn(summed, side, device=device).to(dtype)
    out = torch.empty(side, side, device=device, dtype=dtype)
    return 2 * side * side * summed / fastest(lambda: torch.mm(x, y, out=out), device, seconds)


def _call(device: torch.device, seconds: float) -> float:
    """Returns the seconds of an operator's call: half of those of a product with a number, forward and backward."""
    x = torch.ones(4, device=device, requires_grad=True)

    def chain() -> None:
        y: Tensor = x
        for _ in range(CHAIN):
            y = y * 1.0
        torch.autograd.grad(y, x, torch.ones_like(y))

    return fastest(chain, device, seconds) / (2 * CHAIN)


def _memory(device: torch.device) -> float:
    """Returns the bytes of a device; of a CPU those of a process of this machine, one for each core."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    cores = os.cpu_count() or 1
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(1, cores // torch.get_num_threads())


def fastest(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Returns the seconds of the fastest run of a function, of five or of as many as `seconds` allow."""
    run()
    found, end = list[float](), time.perf_counter() + seconds
    while len(found) < 5 or time.perf_counter() < end:
        found.append(_on_gpu(run) if device.type == "cuda" else _on_cpu(run))
    return min(found)


def _on_cpu(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def _on_gpu(run: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3
