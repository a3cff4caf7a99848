"""Keeps a tensor's order in memory, because dropout draws in this order."""

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
