"""Multiplies groups of rows, each group by its own matrix, in every dtype (torch's operator has no float64).

The host launches one product a group, so it has to know where groups end. It waits for the device once for all products
of the same groups, forward and backward: the products of a layer read one tensor of ends (`host_values`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.attached import host_values


@torch.library.custom_op("autotp::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns each row times its group's matrix; rows behind the last group are zero.

    Args:
        x: [rows in]
        weight: [groups in out]
        ends: [groups] the end of each group of rows.

    Returns:
        [rows out]
    """
    result = x.new_zeros(x.shape[0], weight.shape[-1])
    for (start, stop), matrix in zip(_groups(ends), weight, strict=True):
        result[start:stop] = x[start:stop] @ matrix
    return result


def _groups(ends: Tensor) -> list[tuple[int, int]]:
    stops = host_values(ends)
    return list(zip([0, *stops], stops, strict=False))


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[-1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.ends = inputs[2]  # Itself: `save_for_backward` would give another object, whose values are not known.


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    (x, weight), ends = ctx.saved_tensors, ctx.ends
    return grouped_mm(grad, weight.mT, ends), grouped_outer(x, grad, ends), None


grouped_mm.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("autotp::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Returns, for each group of rows, the sum of the outer products of its rows: the gradient of its matrix.

    An operator of its own has a fake, on which backward runs where nobody knows the groups.

    Args:
        x: [rows in]
        y: [rows out]
        ends: [groups] the end of each group of rows.

    Returns:
        [groups in out]
    """
    return torch.stack([x[start:stop].mT @ y[start:stop] for start, stop in _groups(ends)])


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[-1], y.shape[-1])


def _backward_of_outer(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    (x, y), ends = ctx.saved_tensors, ctx.ends
    return grouped_mm(y, grad.mT, ends), grouped_mm(x, grad, ends), None


grouped_outer.register_autograd(_backward_of_outer, setup_context=_keep)

OPERATOR = torch.ops.autotp.grouped_mm.default
