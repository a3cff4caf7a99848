"""The class with the greatest logit of each row, in chunks of rows, over classes that may be cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.ops.async_linear import rows_of
from autotp.ops.eager_mode import is_plain
from autotp.ops.losses.chunks import logits_of, row_chunks

PLACES = 2**32


def linear_argmax_key(
    weight: Tensor, x: Tensor, start: int, scale: float = 1.0, cap: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Returns one whole number of each row, the greatest of which over ranks tells the class: see `class_of_key`.

    It is in the order of the logits, and of equal logits the first class has the greater number. There is no gradient.

    Args:
        weight, x, start, scale, cap, bias: as of `linear_class_terms`; logits are in float32.

    Returns:
        [*], int64
    """
    weight, x, bias = weight.detach(), x.detach(), None if bias is None else bias.detach()
    if len(weight) == 0:
        return linear_argmax_key_like(weight, x).fill_(torch.iinfo(torch.int64).min)
    rows = rows_of(x)
    if not is_plain(x) or not isinstance(len(rows), int):
        return _keys(logits_of(rows, weight, bias, scale, cap), start).view(x.shape[:-1])
    keys = [_keys(logits_of(rows[part], weight, bias, scale, cap), start) for part in row_chunks(len(rows), len(weight))]
    return torch.cat(keys).view(x.shape[:-1])


def linear_argmax_key_like(weight: Tensor, x: Tensor, *_: Any) -> Tensor:
    """Returns an example value of `linear_argmax_key`, without an assumption about sizes."""
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


def _keys(z: Tensor, start: int) -> Tensor:
    place = z.argmax(1, keepdim=True)
    # 0 and -0 are equal. The bits of a negative float grow with its size.
    bits = (z.gather(1, place)[:, 0] + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return ordered * PLACES + (PLACES - 1 - start - place[:, 0])


def class_of_key(key: Tensor) -> Tensor:
    """Returns the class of the greatest number over ranks. key: [*] of `linear_argmax_key`"""
    return PLACES - 1 - (key & (PLACES - 1))
