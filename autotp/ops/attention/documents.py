"""documents: where documents end that lie one after another in rows of tokens, and where in parts of these rows.

    documents of 3, 2, 4 and 1 tokens:   [a a a b b|c c c c d]      ends [0, 3, 5, 9, 10]
    ends in each of two parts            [0, 3, 5, 5, 5], [0, 0, 0, 4, 5]

Each part has all documents, so one graph serves all parts: those that lie in other parts have no tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotp.errors import Error


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
