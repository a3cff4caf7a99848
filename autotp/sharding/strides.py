"""Returns the order of a tensor's dimensions in memory, because dropout draws in this order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Returns the dimensions in their order in memory, outermost first."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: (-strides[d], d))


def inverse(order: Sequence[int]) -> list[int]:
    """Returns the inverse of a permutation."""
    return sorted(range(len(order)), key=order.__getitem__)
