"""scipy's assignment becomes an operator of the graph: the losses of object detectors of transformers compute with it.

A loss of DETR's kind gives each target a query by `scipy.optimize.linear_sum_assignment`, which computes in numpy.
While a graph is captured, that function is an operator of torch; where the graph runs, the operator calls scipy. All
ranks have the whole matrix of costs, and so make the same choice. There are as many pairs as the smaller side has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autotp.passes.capture.replacements.everywhere import everywhere

NAME = "autotp::assign"


@torch.library.custom_op(NAME, mutates_args=())
def assign(cost: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    """Returns the rows and the columns of the pairs with the least sum of costs: each int64 [pairs], on the CPU.

    Args:
        cost: [rows columns].
        maximize: whether the sum is the greatest.
    """
    optimize: Any = sys.modules["scipy.optimize"]
    rows, columns = optimize.linear_sum_assignment(cost.detach().cpu().numpy(), maximize)
    return torch.as_tensor(rows), torch.as_tensor(columns)


@assign.register_fake
def _(cost: Tensor, maximize: bool) -> tuple[Tensor, Tensor]:
    pairs = torch.sym_min(*cost.shape)
    return torch.empty(pairs, dtype=torch.int64), torch.empty(pairs, dtype=torch.int64)


def _traced(cost_matrix: Any, maximize: bool = False) -> tuple[Tensor, Tensor]:
    return assign(torch.as_tensor(cost_matrix), maximize)


@contextmanager
def assignments_as_operators() -> Iterator[None]:
    """A region in which scipy's function is an operator, by each of its names."""
    original: Callable[..., Any] | None = getattr(sys.modules.get("scipy.optimize"), "linear_sum_assignment", None)
    with everywhere([] if original is None else [(original, _traced)]):
        yield
