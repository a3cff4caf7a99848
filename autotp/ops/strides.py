"""How a tensor lies in memory. Dropout draws in that order, so what moves a tensor keeps it as one device has it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """The dimensions as they lie in memory, outermost first."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: (-strides[d], d))


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes one."""
    return sorted(range(len(order)), key=order.__getitem__)
