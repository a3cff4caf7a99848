"""Functions of a graph that computes two halves of a batch one after the other (`passes/plan/halves/`)."""

from __future__ import annotations

import torch
from torch import Tensor

from autotp.sharding.partition import chunk_sizes


def halves(x: Tensor, dim: int, block: int = 1) -> tuple[Tensor, Tensor]:
    """Returns the halves of a dimension; the first has the odd block. x: [... n ...] -> [... n/2 ...] each

    Args:
        block: positions that stay together.
    """
    first, second = chunk_sizes(x.shape[dim] // block, 2)
    a, b = x.split_with_sizes([first * block, second * block], dim)
    return a, b


def joined(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Returns two halves as one tensor. [... n/2 ...] each -> [... n ...]"""
    return torch.cat([a, b], dim)
