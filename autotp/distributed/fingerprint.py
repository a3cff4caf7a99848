"""Numbers by which ranks compare tensors: equal for equal tensors, and other ones, almost certainly, for others.

A checksum is of bytes, on the CPU. The bits of tensors on a GPU are summed there. A fingerprint of a call's arguments
makes no rank wait for its device, and bears round-off: of whole numbers, such as tokens, it is their sum, which must be
equal. Numbers that the user's own code computes on each rank may differ by round-off; of them it is a sum with
pseudo-random signs, which may differ by NEAR of their norm. Two batches of independent numbers differ by about their
norm.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.distributed.mesh import Mesh
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

    def as_ints(self) -> list[int]:
        """Returns it, which has arrived, as integers of 64 bits; `may_be_one_batch` compares two such lists.

        They are the number of sums of whole numbers, and these; for the other tensors in turn the sum with signs and
        the norm, bit for bit.
        """
        real = (number for x in self.real for number in x.tolist())
        return [len(self.whole), *map(int, self.whole), *(struct.unpack("<q", struct.pack("<d", x))[0] for x in real)]


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


def may_be_one_batch(ints: Sequence[int], first: Sequence[int]) -> bool:
    """Returns whether two fingerprints, `as_ints`, may be of one batch. Fingerprints of other arguments are not.

    What is not finite may be.
    """
    if len(ints) != len(first) or ints[: ints[0] + 1] != first[: first[0] + 1]:
        return False
    pairs = zip(_signed_sums(ints), _signed_sums(first), strict=True)
    return not any(abs(total - other) > NEAR * max(norm, other_norm) for (total, norm), (other, other_norm) in pairs)


def rounded(ints: Sequence[int]) -> list[int]:
    """Returns a fingerprint, `as_ints`, with its other numbers in wide steps: near ones are equal, almost always."""
    steps = (step for pair in _signed_sums(ints) for step in _steps(*pair))
    return [*ints[: ints[0] + 1], *steps]


def _signed_sums(ints: Sequence[int]) -> list[tuple[float, float]]:
    """Returns the sums with signs, each with its norm, of a fingerprint `as_ints`."""
    real = [struct.unpack("<d", struct.pack("<q", x))[0] for x in ints[ints[0] + 1 :]]
    return list(zip(real[::2], real[1::2], strict=True))


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
    # An odd step: one that divides the width of a matrix would meet the same columns in each row.
    flat = flat.detach().flatten()[:: flat.numel() // SAMPLED | 1][:SAMPLED].float()
    return torch.stack([flat @ _signs(flat.device)[: len(flat)], torch.linalg.vector_norm(flat)])


@cache
def _signs(device: torch.device) -> Tensor:
    return ((torch.arange(SAMPLED, device=device) * 2654435761 >> 16) & 1).mul(2).sub(1).float()


# ---- all bits


def checksum(tensor: Tensor) -> int:
    """Returns a checksum of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(data.view(torch.uint8).numpy().data) if data.numel() else 0


FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio times 2**64: its multiples modulo 2**64 are far apart (Knuth, vol. 3, section 6.4)."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """Returns two numbers of a tensor's bits that change, almost certainly, with any of its elements. [...] -> [2]

    They are computed where the tensor is: as integers of 64 bits, whose sums are exact in any order.
    """
    return bits_of_all([tensor])[0]


def bits_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the numbers of `bits_of` for each tensor of one device. [...] each -> [tensors 2]

    A card runs two operators for each tensor, and a few for all.
    """
    sums = [part for tensor in tensors for part in _sums_of_bits(tensor)]
    ends = list(accumulate(map(len, sums)))
    # Odd weights: modulo 2**64 an odd factor loses no bit of a sum.
    weights = (torch.arange(1, max(map(len, sums)) + 1, device=sums[0].device) * FACTOR) | 1
    totals = (torch.cat(sums) * torch.cat([weights[: len(part)] for part in sums])).cumsum(0)
    return torch.stack([totals[0] * 0, *(totals[end - 1] for end in ends)]).diff().view(-1, 2)


def _sums_of_bits(tensor: Tensor) -> list[Tensor]:
    """Returns the sums of a tensor's bits along its rows and columns. [...] -> [columns], [rows]"""
    if not tensor.numel():
        return [torch.zeros(1, dtype=torch.int64, device=tensor.device)] * 2
    rows = tensor.contiguous().view(tensor.shape[0] if tensor.dim() else 1, -1)
    bits = rows.view(_INTEGERS[tensor.element_size()])
    # Elements that are exchanged change the sum of a row or of a column, though not that of all.
    return [bits.sum(dim, dtype=torch.int64) for dim in (0, 1)]


def random_state(mesh: Mesh) -> int:
    """Returns a checksum of this rank's random state."""
    states = [torch.get_rng_state()]
    if mesh.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(mesh.device))
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))
