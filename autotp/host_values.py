"""host_values: whole numbers on a device that the host has read. It waits for the device once for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class HostValues:
    """Whole numbers that the host knows of tensors on a device; it forgets them with the tensor."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def keep(self, x: Tensor, values: list[int]) -> None:
        """Notes the numbers of a tensor. While code is compiled there are none."""
        if not torch.compiler.is_compiling():
            self._known[x] = _version(x), values

    def of(self, x: Tensor) -> list[int] | None:
        """Returns the numbers of a tensor, or of a part of a known one of one dimension.

        None if they are not known, or if it was written into since then.
        """
        if torch.compiler.is_compiling():
            return None
        version, values = self._known.get(x, (None, None))
        if values is None and x.dim() == 1 and x.is_contiguous() and not x.is_inference() and x._base is not None:
            version, values = self._known.get(x._base, (None, None))
            start = x.storage_offset() - x._base.storage_offset()
            values = values[start : start + len(x)] if values is not None and x._base.dim() == 1 else None
        return values if version == _version(x) else None

    def copied(self, x: Tensor, copy: Tensor) -> None:
        """Notes for a copy of a tensor what is known of the tensor."""
        if (values := self.of(x)) is not None:
            self.keep(copy, values)


def _version(x: Tensor) -> int:
    # A tensor of inference mode has no count of writes, and asking for it raises.
    return 0 if x.is_inference() else x._version


READ = HostValues()
"""The numbers in tensors that the host has read."""


def host_values(x: Tensor) -> list[int]:
    """Returns the numbers in a tensor of one dimension. Waits for the device if the host has not read them yet."""
    values = READ.of(x)
    if values is None:
        values = x.tolist()
        READ.keep(x, values)
    return values


def read_again(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the present numbers of tensors of one dimension; waits for a device once for all that are on it.

    `HostValues` notices no write through `x.data`, so what comes from outside is read in each call.
    """
    distinct = {id(x): x for x in tensors if not x.is_cpu}
    if distinct:
        parts = torch.cat(list(distinct.values())).cpu().split([len(x) for x in distinct.values()])
        for x, part in zip(distinct.values(), parts, strict=True):
            READ.keep(x, part.tolist())
    for x in tensors:
        if x.is_cpu:  # For the copy that goes to a device.
            READ.keep(x, x.tolist())
    return [host_values(x) for x in tensors]
