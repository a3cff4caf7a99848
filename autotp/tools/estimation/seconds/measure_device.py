"""measure_device: times products, a copy, an elementwise operator and an operator's call on the device of this process.

On a CPU it counts the processor time of the calling thread, which other programs disturb little; on a GPU the time
between two events. The median of many runs counts.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

LAYER = {"cpu": (1024, 512, 2048), "cuda": (8192, 8192, 8192)}
"""Rows, inputs and outputs of the linear layer whose products are timed."""
COLD = 96 * 2**20
"""Bytes of the operands that a CPU's products read in turn, so that they come from memory as in a model."""
SIDE = 1024
"""Rows and columns of a product whose summed length is SHORT."""
SHORT = 64
"""The summed length of a product that does not keep a device busy: the width of a head."""
COPIED = {"cpu": 2**24, "cuda": 2**30}
"""Bytes of the tensor that is copied: of a CPU more than a core's own caches, and few enough that they are paged in."""
RUNS = 5
"""Runs of which the median is taken, at least."""
CHAIN = 20
"""Calls of an operator that are timed in a row."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of one device.

    Attributes:
        half, single, double: FLOP/s of products in bfloat16, float32 and float64.
        square, short: FLOP/s of products in float32 whose summed length is SIDE, and SHORT.
        copy: bytes/s of a copy, read and written.
        add: bytes/s of the sum of two tensors.
        call: seconds of an operator on a few numbers, forward and backward.
        memory: bytes of the device.
    """

    half: float
    single: float
    double: float
    square: float
    short: float
    copy: float
    add: float
    call: float
    memory: float

    @property
    def fill(self) -> float:
        """The summed length by which a product takes longer than its FLOPs say."""
        ratio = self.square / self.short
        return max(0.0, SHORT * (ratio - 1) / (1 - ratio * SHORT / SIDE))


def measure_device(device: torch.device, seconds: float) -> Measured:
    """Returns what was measured. seconds: for all of it, about"""
    part = seconds / 7
    count = COPIED[device.type] // 4
    x, y, out = (torch.ones(count, device=device) for _ in range(3))
    # An element has four bytes. A copy reads and writes one, a sum reads two and writes one.
    copied = 8 * count / typical(lambda: out.copy_(x), device, part)
    summed = 12 * count / typical(lambda: torch.add(x, y, out=out), device, part)
    half, single, double = (
        _linear(dtype, device, part, copied) for dtype in (torch.bfloat16, torch.float32, torch.float64)
    )
    return Measured(
        half=half, single=single, double=double, square=_square(SIDE, device, part), short=_square(SHORT, device, part),
        copy=copied, add=summed, call=_call(device, part), memory=_memory(device),
    )  # fmt: skip


def _linear(dtype: torch.dtype, device: torch.device, seconds: float, bandwidth: float) -> float:
    """Returns the FLOP/s of the three products of a linear layer: its result, and the gradients of input and weight.

    On a CPU without the time to move operands and results, which roofline.py adds.
    """
    rows, inputs, outputs = LAYER[device.type]
    if device.type == "cuda" and dtype == torch.float64:
        # Many GPUs compute float64 slowly: fewer rows keep the run short.
        rows = rows // 8
    if device.type == "cpu":
        rows = _rows_in_time(dtype, seconds)
    size = dtype.itemsize * (rows * inputs + inputs * outputs + rows * outputs)
    sets = max(1, COLD // size) if device.type == "cpu" else 1
    xs, ws, gs = (
        [torch.randn(n, m, device=device).to(dtype) for _ in range(sets)]
        for n, m in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    turn = itertools.cycle(range(sets))

    def run() -> None:
        i = next(turn)
        torch.mm(xs[i], ws[i].t())
        torch.mm(gs[i], ws[i])
        torch.mm(gs[i].t(), xs[i])

    # The bandwidth was measured apart, with noise: at least half of the time counts as products.
    moving = 3 * size / bandwidth if device.type == "cpu" else 0.0
    took = typical(run, device, seconds)
    return 6 * rows * inputs * outputs / max(took - moving, took / 2)


def _rows_in_time(dtype: torch.dtype, seconds: float) -> int:
    """Returns the layer's rows on a CPU: halved while RUNS runs of its three products would take longer than `seconds`.

    A CPU without instructions for bfloat16 computes it up to a hundred times as slowly as float32. A product of a few
    rows tells.
    """
    rows, inputs, outputs = LAYER["cpu"]
    few = rows // 32
    x, w = torch.ones(few, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    torch.mm(x, w.t())
    row = _on_cpu(lambda: torch.mm(x, w.t())) / few
    while rows > few and 3 * rows * row * RUNS > seconds:
        rows //= 2
    return rows


def _square(summed: int, device: torch.device, seconds: float) -> float:
    """Returns the FLOP/s of a product in float32 of this summed length."""
    x, y = torch.randn(SIDE, summed, device=device), torch.randn(summed, SIDE, device=device)
    return 2 * SIDE * SIDE * summed / typical(lambda: torch.mm(x, y), device, seconds)


def _call(device: torch.device, seconds: float) -> float:
    """Returns the seconds of the call of an operator on a few numbers, noted for backward.

    On a CPU a copy fills the caches with other data before each call, as the operators of a model do: a call whose code
    and data are in the caches is three times as fast. Each call is timed by itself, and the median counts, less that of
    a call of nothing.
    """
    x = torch.ones(4, device=device, requires_grad=True)
    if device.type != "cpu":
        return typical(lambda: [x * 1.0 for _ in range(CHAIN)], device, seconds) / CHAIN
    old, target = (torch.ones(COPIED["cpu"] // 4) for _ in range(2))

    def times(run: Callable[[], object]) -> Iterator[float]:
        for _ in range(CHAIN):
            target.copy_(old)
            yield _on_cpu(run)

    calls, nothing, end = list[float](), list[float](), time.perf_counter() + seconds
    while not calls or time.perf_counter() < end:
        calls += times(lambda: x * 1.0)
        nothing += times(lambda: None)
    return max(1e-7, statistics.median(calls) - statistics.median(nothing))


def _memory(device: torch.device) -> float:
    """Returns the bytes of a device; of a CPU those of a process of this machine, one for each core."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    cores = os.cpu_count() or 1
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(1, cores // torch.get_num_threads())


def typical(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Returns the median seconds of a function's runs: of RUNS, or of as many as `seconds` allow."""
    # The first run allocates memory, and a library may choose its kernel.
    run()
    durations, end = list[float](), time.perf_counter() + seconds
    while len(durations) < RUNS or time.perf_counter() < end:
        durations.append(_on_gpu(run) if device.type == "cuda" else _on_cpu(run))
    return statistics.median(durations)


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
