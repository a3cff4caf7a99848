"""Documents that lie one after another in one row of tokens, and the first key that the queries of each rank read.

documents of 3, 2 and 4 tokens:   tokens [a a a b b c|c c c],   ends [0, 3, 5, 9]
the second of two ranks has tokens 6 to 8, and its queries read the keys from 5 on
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from autotp.errors import Error
from autotp.ops.eager_mode import is_computed
from autotp.sharding.partition import chunk_bounds


def documents_in(ends: Tensor, tokens: int) -> list[int]:
    """Returns the ends of documents in this number of tokens, read on the host.

    Raises:
        Error: they are others, or not of int32, the dtype that kernels read.
    """
    fix = "F.pad(lengths.cumsum(0), (1, 0)).int() for the lengths of the documents"
    if ends.dtype != torch.int32:
        raise Error(f"the ends of packed documents are of {ends.dtype}", expected="torch.int32", fix=fix)
    numbers: list[int] = ends.tolist()
    if numbers[:1] != [0] or numbers[-1] != tokens or numbers != sorted(numbers):
        raise Error(
            f"the ends of {len(numbers) - 1} packed documents are {numbers[:8]}{' ...' * (len(numbers) > 8)}",
            expected=f"numbers that ascend from 0 to the number of tokens, {tokens}",
            fix=fix,
        )
    return numbers


def known_documents(ends: Tensor | None, tokens: int) -> list[int] | None:
    """Returns the ends of documents where the host has them; None on a device, for which the host would have to wait.

    Raises:
        Error: as `documents_in`.
    """
    known = ends is not None and not torch.compiler.is_compiling() and ends.is_cpu and is_computed(ends)
    return documents_in(ends, tokens) if known and ends is not None else None


def first_keys(size: int, parts: int, before: int, ends: Sequence[int] | None) -> tuple[int, ...]:
    """Returns for each rank the first key that one of its queries reads, or where its part begins if none is earlier.

    Args:
        size: the number of positions, cut over `parts` ranks.
        before: how many keys before its own position a query reads at most.
        ends: where documents begin and end; a query reads no other document. None if that is not known.
    """
    keys = []
    for start, stop in (chunk_bounds(size, parts, rank) for rank in range(parts)):
        begin = 0 if ends is None else ends[bisect_right(ends, start) - 1]
        keys.append(min(max(begin, start - before), start) if stop > start else start)
    return tuple(keys)
