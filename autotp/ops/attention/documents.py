"""documents: where documents end that lie one after another in one row of tokens, and where in parts of them.

    documents of 3, 2 and 4 tokens:      [a a a b b c|c c c]      ends [0, 3, 5, 9]
    what the second of two ranks reads   its queries are tokens 6 to 8, and read the keys from 5 on

    documents of 3, 2, 4 and 1 tokens:   [a a a b b|c c c c d]    ends [0, 3, 5, 9, 10]
    ends in each of two microbatches     [0, 3, 5, 5, 5], [0, 0, 0, 4, 5]

Each microbatch has all documents, so one graph serves all: those that lie in another have no tokens.
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
    return None if ends is None or not _is_known(ends) else documents_in(ends, tokens)


def _is_known(ends: Tensor) -> bool:
    return not torch.compiler.is_compiling() and ends.is_cpu and is_computed(ends)


def expect_no_longer(ends: Tensor | None, longest: int | None) -> None:
    """Raises Error for a document that is longer than is said, where the host has the ends.

    Kernels compute no more of it, and over cp a rank reads no more keys before its part.
    """
    lengths = None if ends is None or longest is None or ends.dim() != 1 or not _is_known(ends) else ends.diff()
    if lengths is not None and lengths.numel() and lengths.min() >= 0 and lengths.max() > longest:  # type: ignore[operator]
        raise Error(
            f"a packed document has {int(lengths.max())} tokens, and the longest is said to have {longest}",
            fix="max_length_q and max_length_k (max_seqlen, max_q) that no document exceeds: int(ends.diff().max())",
        )


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


def documents_in_parts(ends: Tensor, tokens: int, parts: int) -> Tensor:
    """Returns the ends of documents in each part of the tokens, one part after another: [parts * (documents + 1)]."""
    size = tokens // parts
    starts = torch.arange(parts, dtype=ends.dtype, device=ends.device) * size
    return (ends - starts.unsqueeze(1)).clamp(0, size).flatten()


def expect_whole_documents(ends: Tensor, tokens: int, parts: int) -> None:
    """Raises Error if the ends are wrong, or a document lies in two parts of the tokens. Reads them on the host."""
    numbers, size = documents_in(ends, tokens), tokens // parts
    for border in range(size, tokens, max(size, 1)):
        if border not in numbers:
            last = max(n for n in numbers if n < border)
            raise Error(
                f"the document that begins at token {last} lies in two microbatches, of {size} tokens each",
                fix="rows of equal length, each of whole documents, as many for each microbatch; or microbatches=1",
            )
