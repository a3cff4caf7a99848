"""Returns the order of a tensor's dimensions in memory, because dropout draws in this order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Returns the dimensions in their order in memory, outermost first; equal strides keep their order."""
    strides = x.stride()
    order: list[int] = []
    for d in range(x.dim()):  # Not `sorted`: torch.compile cannot trace its key of symbolic strides.
        order.insert(len([other for other in order if strides[other] >= strides[d]]), d)
    return order


def inverse(order: Sequence[int]) -> list[int]:
    """Returns the inverse of a permutation."""
    return sorted(range(len(order)), key=order.__getitem__)
