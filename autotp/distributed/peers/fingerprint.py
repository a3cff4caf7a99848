"""Fingerprint: what ranks compare of a call's arguments, without waiting for the device.

Of whole numbers, such as tokens, it is their sum, which must be equal. Numbers that the user's own code computes on
each rank may differ by round-off; of them it is a sum with pseudo-random signs, which may differ by NEAR of their norm.
Two batches of independent numbers differ by about their norm.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.ops.eager_mode import unseen

NEAR = 0.05
"""The largest difference of two sums with signs, relative to the norm, in one batch."""
SAMPLED = 2**16
"""The number of elements of a tensor that such a sum has at most."""


@dataclass(frozen=True)
class Fingerprint:
    """What is compared of a call's arguments.

    Attributes:
        whole: for each tensor of whole numbers their sum; and that of Python's whole numbers. [], on the CPU
        real: for each other tensor its sum with signs, and its norm. [2], on the CPU
        arrived: tells whether these have come from the device; None if they were on the CPU.
    """

    whole: Sequence[Tensor] = ()
    real: Sequence[Tensor] = ()
    arrived: torch.cuda.Event | None = None

    def read(self) -> tuple[list[int], list[float]]:
        """Returns the sums of whole numbers; and, for the other tensors in turn, the sum with signs and the norm."""
        return [int(x) for x in self.whole], [number for x in self.real for number in x.tolist()]

    def as_ints(self) -> list[int]:
        """Returns the same as integers of 64 bits; they have arrived. `may_be_one_batch` compares two such lists."""
        whole, real = self.read()
        return [len(whole), *whole, *(struct.unpack("<q", struct.pack("<d", x))[0] for x in real)]


def fingerprint(arguments: Any) -> Fingerprint:
    """Returns the fingerprint of a call's arguments. Inside a torch.func transform values cannot be read."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return Fingerprint()
    leaves = pytree.tree_leaves(arguments)
    every = [x for x in leaves if isinstance(x, Tensor) and _is_plain(x)]
    numbers = [x for x in leaves if type(x) is int and abs(x) < 2**31]  # A graph has a position as input.
    real = [x for x in every if x.is_floating_point() or x.is_complex()]
    with torch.no_grad(), unseen():
        integer_sums = [x.sum(dtype=torch.int64) for x in every if not any(x is y for y in real)]
        integer_sums += [torch.tensor(numbers).sum()] if numbers else []
        signed = [_signed(x) for x in real]
        if not any(x.is_cuda for x in (*integer_sums, *signed)):
            return Fingerprint([x.cpu() for x in integer_sums], [x.cpu() for x in signed])
        arrived = torch.cuda.Event()
        integer_sums, signed = ([x.to("cpu", non_blocking=True) for x in some] for some in (integer_sums, signed))
        arrived.record()
    return Fingerprint(integer_sums, signed, arrived)


def near(sums: Sequence[float], first: Sequence[float]) -> bool:
    """Returns whether sums with signs, each with its norm, may be of the same numbers. What is not finite may be."""
    pairs = zip(sums[::2], first[::2], sums[1::2], first[1::2], strict=True)
    return not any(abs(a - b) > NEAR * max(norm, first_norm) for a, b, norm, first_norm in pairs)


def may_be_one_batch(ints: Sequence[int], first: Sequence[int]) -> bool:
    """Returns whether two fingerprints, `as_ints`, may be of one batch. Fingerprints of other arguments are not."""
    if len(ints) != len(first) or (ints and ints[: ints[0] + 1] != first[: first[0] + 1]):
        return False
    return near(*([struct.unpack("<d", struct.pack("<q", x))[0] for x in row[row[0] + 1 :]] for row in (ints, first)))


def rounded(ints: Sequence[int]) -> list[int]:
    """Returns a fingerprint, `as_ints`, with its other numbers in wide steps: near ones are equal, almost always."""
    count = ints[0] + 1 if ints else 0
    real = [struct.unpack("<d", struct.pack("<q", x))[0] for x in ints[count:]]
    steps = [_steps(total, norm) for total, norm in zip(real[::2], real[1::2], strict=True)]
    return [*ints[:count], *(step for pair in steps for step in pair)]


def _steps(total: float, norm: float) -> tuple[int, int]:
    if not (math.isfinite(total) and math.isfinite(norm) and norm):
        return 0, 0
    wide = round(math.log(norm) / NEAR)
    return round(total / (NEAR * math.exp(wide * NEAR))), wide


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta and tensor.layout is torch.strided


def _signed(tensor: Tensor) -> Tensor:
    """Returns a sum with pseudo-random signs of some of a tensor's elements, and their norm. [...] -> [2]"""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = flat.detach().flatten()[:: flat.numel() // SAMPLED | 1][:SAMPLED].float()
    return torch.stack([flat @ _signs(flat.device)[: len(flat)], torch.linalg.vector_norm(flat)])


@cache
def _signs(device: torch.device) -> Tensor:
    return ((torch.arange(SAMPLED, device=device) * 2654435761 >> 16) & 1).mul(2).sub(1).float()
