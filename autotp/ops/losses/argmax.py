"""The greatest of cut positions: whole numbers of which the greatest over ranks tells the place.

NOTE [An order that has the place]
A number has the order of the values in its upper half, and in its lower half the place from the last one on: of equal
values the first place has the greater number, as in `torch.argmax`. One maximum over ranks is enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.ops.eager_mode import is_plain
from autotp.ops.losses.chunks import Head, row_chunks

PLACES = 2**32


def argmax_key(x: Tensor, dim: int, start: int) -> Tensor:
    """Returns whole numbers, the greatest of which over ranks tell `argmax` along `dim`: see `place_of_key`.

    Args:
        x: the positions from `start` on, along `dim`, of a tensor of floats of at most 32 bits.
    """
    x = x.detach().float()
    if x.shape[dim] == 0:
        return x.sum(dim).long().fill_(torch.iinfo(torch.int64).min)
    place = x.argmax(dim, keepdim=True)
    # 0 and -0 are equal. The bits of a negative float grow with its size.
    bits = (x.gather(dim, place).squeeze(dim) + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return ordered * PLACES + (PLACES - 1 - start - place.squeeze(dim))


def linear_argmax_key(
    weight: Tensor,
    x: Tensor,
    start: int,
    scale: float = 1.0,
    cap: float = 0.0,
    bias: Tensor | None = None,
    low_weight: Tensor | None = None,
    low_x: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns `argmax_key` of the logits of each row, in chunks of rows.

    Args:
        weight ... dtype: as of `mix_of`.

    Returns:
        [*], int64
    """
    head = Head(weight, x, bias, low_weight, low_x, scale, cap, dtype).of_rows()
    if not is_plain(x) or not isinstance(len(head.x), int):
        return argmax_key(head.logits(), 1, start).view(x.shape[:-1])
    keys = [argmax_key(head.logits(part), 1, start) for part in row_chunks(len(head.x), len(weight))]
    return torch.cat(keys).view(x.shape[:-1])


def linear_argmax_key_like(weight: Tensor, x: Tensor, *_: Any) -> Tensor:
    """Returns an example value of `linear_argmax_key`, without an assumption about sizes."""
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


def place_of_key(key: Tensor) -> Tensor:
    """Returns the place that the greatest number over ranks tells. key: [*] of `argmax_key`"""
    return (key & (PLACES - 1)) ^ (PLACES - 1)
