"""error_bars: how far estimates were from published and measured numbers, and the error bars that follow from it.

NOTE [Where the error bars come from]
A bar is twice the root mean square of the errors of all rows that test this kind of number: if the next row is like
these, about 19 of 20 lie within. The rows are those of `benchmarks/estimates.py`, which a test compares with the tables
here, and of `benchmarks/predicted/measured.py`. Those to which constants are fitted (one layer of 22B) do not count.
The eight rows of the V100 share one error, the software of 2019, so they are one observation. It is the only kind of
GPU that was predicted without any measurement of its own. So its error itself is its bar, and that of all such kinds.
No table tests a row of "where the time goes" by itself. Its bar is twice that of the step: errors of rows cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotp.costs.hardware import Hardware

ERRORS: Mapping[str, tuple[float, ...]] = {
    # Seconds or TFLOP/s of a step: Korthikanti 2022, table 5; Narayanan 2021, table 1, and PTD-P of table 2.
    "step a100": (
        0.5, -2.0, -1.0, -3.2, 1.9, -1.6, 5.1, 4.2,
        2.3, 0.2, -4.0, -2.5, 3.0, 5.6, 5.7, 3.7, 1.9, 2.7,
        2.3, 3.2, 5.6, 1.3, 2.3, 4.4,
    ),
    # The same table 2: ZeRO-3.
    "step zero 3": (-1.9, -2.1, -15.9, 12.1, 8.1, 10.1),
    # Shoeybi 2019: TFLOP/s of a V100, of the published 39 times the published percentage.
    "step v100": (28.5, 33.3, 32.0, 50.1, 36.3, 40.9, 31.2, 35.5),
    # Korthikanti 2022, figure 1: parameters and optimizer, and activations, of the first rank.
    "memory state": (0.1, 0.0, 0.0, 0.0),
    "memory activations": (0.7, 2.4, 0.8, 1.4, 2.9, 3.8, 2.6, 2.4),
    # benchmarks/predicted/measured.py: processor time of the thread that trains, and the allocator's most bytes.
    "step cpu-gloo": (
        -7.2, -9.9, -9.6, -5.0, -5.4, -3.2, -5.6, -8.5, -12.6, -10.8,
        -3.0, -0.5, -5.3, -6.0, -5.5, -9.7, -5.5, 1.9, 0.7, -3.1,
        -3.1, -14.4, -18.3, -16.9, -10.2, -12.6, -10.1, -13.1, -11.0, -14.6,
        -13.6, -5.4, -8.2, -7.4, -10.9,
    ),
    "memory cpu-gloo": (
        -4.7, -1.8, -2.3, 0.0, 0.0, 0.0, 0.0, -0.4, -9.8, -0.6,
        -1.2, -1.6, -0.3, -0.3, 0.1, -1.3, 0.1, -1.3, -1.8, 0.1,
        0.0, -1.6, -1.7, -1.0, -1.4, 0.0, 0.1, 0.1, 0.0, -8.0,
        -5.0, -3.2, -4.3, 0.0, 0.8,
    ),
}  # fmt: skip
"""Kind of number -> errors of the rows that test it, in percent."""
FULLEST = 0.72
"""The part by which the rows of the fullest expert exceed the mean, under a balancing loss: `MaxVio` of the model of 1B
parameters in Wang et al. 2024 (arXiv 2408.15664), table 2, cited from memory. A step waits for the rank with the most
rows."""
STATE = ("weights", "copies", "gradients", "optimizer")
"""The kinds of memory that stay from step to step."""
TESTED = {"a100-80gb": "step a100", "a100-40gb": "step a100"}
"""Name of a kind of GPU -> what tests its steps; other kinds have the bar of the V100."""


def root_mean_square(category: str) -> float:
    """Returns the root mean square of the relative errors of a kind of number."""
    errors = ERRORS[category]
    return math.sqrt(sum(error * error for error in errors) / len(errors)) / 100


def step_bar(device: Hardware, zero: int = 0) -> float:
    """Returns the relative error bar of a step's seconds; with ZeRO 3 at least that of its own rows."""
    row = TESTED.get(device.name) if device.is_gpu else "step cpu-gloo"
    bar = 2 * root_mean_square(row) if row else root_mean_square("step v100")
    return max(bar, 2 * root_mean_square("step zero 3")) if zero == 3 else bar


def why_zero_3() -> str:
    """Returns why the error bar of ZeRO 3 is wider than that of other layouts."""
    rows = ERRORS["step zero 3"]
    return f"published steps took from {-min(rows):.0f} % less to {max(rows):.0f} % more time than predicted"


def row_bar(device: Hardware, zero: int = 0) -> float:
    """Returns the relative error bar of a row of where the time goes."""
    return min(1.0, 2 * step_bar(device, zero))


def memory_bar(category: str, is_gpu: bool = True) -> float:
    """Returns the relative error bar of the bytes of one kind, an attribute of `RankMemory`.

    On a CPU the rows test the sum of all kinds.
    """
    if not is_gpu:
        return 2 * root_mean_square("memory cpu-gloo")
    return 2 * root_mean_square("memory state" if category in STATE else "memory activations")
