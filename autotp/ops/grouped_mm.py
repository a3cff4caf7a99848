"""Multiplies groups of rows, each group by its own matrix, in every dtype (torch's operator has no float64)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    found = x.new_zeros(x.shape[0], weight.shape[-1])
    for (start, stop), matrix in zip(_groups(ends), weight, strict=True):
        found[start:stop] = x[start:stop] @ matrix
    return found


def _groups(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[-1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    own = [x[start:stop].mT @ grad[start:stop] for start, stop in _groups(ends)]
    return grouped_mm(grad, weight.mT, ends), torch.stack(own), None


grouped_mm.register_autograd(_backward, setup_context=_keep)

OPERATOR = torch.ops.autotp.grouped_mm.default
