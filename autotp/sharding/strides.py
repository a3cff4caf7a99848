"""Returns the order of a tensor's dimensions in memory, because dropout draws in this order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Returns the dimensions in their order in memory, outermost first; equal strides keep their order."""
    return _by_strides(x.stride())


def order_at_capture(x: Tensor) -> list[int]:
    """Returns the same for an example value with symbolic sizes, and assumes nothing about other sizes."""
    hints = (n.node.hint if isinstance(n, torch.SymInt) else n for n in x.stride())
    return _by_strides([1 if hint is None else hint for hint in hints])  # A size that depends on values may be any.


def _by_strides(strides: Sequence[int]) -> list[int]:
    order: list[int] = []
    for d in range(len(strides)):  # Not `sorted`: torch.compile cannot trace its key of symbolic strides.
        order.insert(len([outer for outer in order if strides[outer] >= strides[d]]), d)
    return order


def inverse(order: Sequence[int]) -> list[int]:
    """Returns the inverse of a permutation."""
    return sorted(range(len(order)), key=order.__getitem__)


def order_of_dimensions(x: Tensor) -> list[int]:
    """Returns the same, but of a contiguous tensor the dimensions' own order: one position may have any stride."""
    return list(range(x.dim())) if x.is_contiguous() else memory_order(x)


def laid_out(x: Tensor, order: Sequence[int]) -> Tensor:
    """Returns an equal tensor whose dimensions lie in memory in this order, outermost first: `x` itself if they do."""
    if list(order) == list(range(x.dim())):
        return x.contiguous()
    return torch.empty_permuted(x.shape, list(order), dtype=x.dtype, device=x.device).copy_(x)
