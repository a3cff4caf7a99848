"""documents: where documents end that lie one after another in one row of tokens, and where in parts of them.

    documents of 3, 2 and 4 tokens:      [a a a b b c|c c c]      ends [0, 3, 5, 9]
    what the second of two ranks reads   its queries are tokens 6 to 8, and read the keys from 5 on

    documents of 3, 2, 4 and 1 tokens:   [a a a b b|c c c c d]    ends [0, 3, 5, 9, 10]
    ends in each of two microbatches     [0, 3, 5, 5, 5], [0, 0, 0, 4, 5]

Each microbatch has all documents, so one graph serves all: those that lie in another have no tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from autotp.attached import READ, host_values
from autotp.errors import Error
from autotp.ops.eager_mode import is_computed, runs_at_once, unseen
from autotp.sharding.partition import chunk_bounds


def documents_in(ends: Tensor, tokens: int) -> list[int]:
    """Returns the ends of documents in this number of tokens, read on the host.

    Raises:
        Error: they are others, or not of int32, the dtype that kernels read.
    """
    fix = "F.pad(lengths.cumsum(0), (1, 0)).int() for the lengths of the documents"
    if ends.dtype != torch.int32:
        raise Error(f"the ends of packed documents are of {ends.dtype}", expected="torch.int32", fix=fix)
    numbers = ends.tolist() if ends.is_cpu else host_values(ends)
    if numbers[:1] != [0] or numbers[-1] != tokens or numbers != sorted(numbers):
        raise Error(
            f"the ends of {len(numbers) - 1} packed documents are {numbers[:8]}{' ...' * (len(numbers) > 8)}",
            expected=f"numbers that ascend from 0 to the number of tokens, {tokens}",
            fix=fix,
        )
    return numbers


def known_documents(ends: Tensor | None, tokens: int) -> list[int] | None:
    """Returns the ends of documents where the host has them; None on a device, if the host has not read them.

    Raises:
        Error: as `documents_in`.
    """
    return None if ends is None or not _is_known(ends) else documents_in(ends, tokens)


def read_documents(ends: Tensor | None, tokens: int) -> list[int] | None:
    """Returns the ends of documents; the host waits for those on a device, once for all that read them.

    None in code that is compiled and in CUDA graphs, where the host can read nothing.

    Raises:
        Error: as `documents_in`.
    """
    if ends is None or ends.is_cpu or not runs_at_once(ends):
        return known_documents(ends, tokens)
    with unseen():  # NOTE [What is no operator of the model]
        return documents_in(ends, tokens)


def _is_known(ends: Tensor) -> bool:
    if torch.compiler.is_compiling() or not is_computed(ends):
        return False
    return ends.is_cpu or (runs_at_once(ends) and READ.of(ends) is not None)


def expect_no_longer(ends: Tensor | None, longest: int | None, is_part: bool = False) -> None:
    """Raises Error for a document that is longer than is said, where the host has the ends.

    Kernels compute no more of it, and over cp a rank reads no more keys before its part. In compiled code and in CUDA
    graphs, of which the host reads no ends, a call of a part (`is_part`) stops the program: it would lack keys.
    """
    if ends is None or longest is None or ends.dim() != 1:
        return
    if not _is_known(ends):
        if is_part and not ends.is_meta and (torch.compiler.is_compiling() or is_computed(ends)):
            torch._assert_async((ends.diff() <= longest).all(), TOO_LONG)
        return
    lengths = [stop - start for start, stop in pairwise(ends.tolist() if ends.is_cpu else host_values(ends))]
    if lengths and min(lengths) >= 0 and max(lengths) > longest:
        raise Error(
            f"a packed document has {max(lengths)} tokens, and the longest is said to have {longest}",
            fix="max_length_q and max_length_k (max_seqlen, max_q) that no document exceeds: int(ends.diff().max())",
        )


TOO_LONG = "over cp, a packed document has more tokens than max_length_q (max_seqlen, max_q) says"


def keys_seen(
    size: int, parts: int, before: int, ends: Sequence[int] | None, chunk: int = 0, after: int = 0
) -> tuple[tuple[int, int], ...]:
    """Returns for each rank the bounds of the keys that its queries read, which have those of its own part in them.

    Args:
        size: the number of positions, cut over `parts` ranks.
        before, after: how many keys before and after its own position a query reads at most.
        ends: where documents begin and end; a query reads no other document. None if that is not known.
        chunk: the length of the chunks of a row, of which a query reads its own; 0 for none.
    """
    keys = []
    for start, stop in (chunk_bounds(size, parts, rank) for rank in range(parts)):
        begin = start // chunk * chunk if chunk else 0
        begin = begin if ends is None else ends[bisect_right(ends, start) - 1]
        first = min(max(begin, start - before), start)
        keys.append((first, stop_of_keys(size, stop, after, ends)) if stop > start else (start, stop))
    return tuple(keys)


def stop_of_keys(size: int, stop: int, after: int, ends: Sequence[int] | None) -> int:
    """Returns where the keys end that queries before `stop` read; arguments as those of `keys_seen`."""
    end = size if ends is None else ends[bisect_left(ends, stop)]
    return torch.sym_min(end, stop + after)


def ends_of_numbers(numbers: Tensor, dim: int, tokens: int) -> Tensor:
    """Returns where documents begin and end whose tokens have numbers: a query reads the keys of its own number only.

    A document ends before a position if in no row a number is on both sides of it. The result has for each position
    where its document begins, so that no size depends on values: numbers [4 4 7 7 7] give [0 0 2 2 2 5].

    Args:
        numbers: of each token, [... tokens ...]; others may come after them.
        dim: the dimension of the tokens.
        tokens: how many there are.

    Returns:
        [tokens + 1], int32.
    """
    places = torch.arange(tokens + 1, device=numbers.device)
    # No `narrow`, for which a symbolic length would be assumed to be `tokens`.
    rows = numbers.index_select(dim, places[:-1]).movedim(dim, -1).unsqueeze(0).flatten(0, -2)
    by_number, order = rows.sort(dim=-1, stable=True)
    run = (by_number != by_number.roll(1, -1)).cumsum(-1)  # The number of a run of equal numbers.
    run = run - run[:, :1]
    last_of_run = torch.zeros_like(order).scatter_reduce(-1, run, order, "amax")
    last = torch.zeros_like(order).scatter(-1, order, last_of_run.gather(-1, run))
    reach = last.amax(0).cummax(0).values  # The last position that has a number of this position, or of one before.
    begins = torch.cat([places[:1], places[1:] * (reach == places[:-1])])  # Behind the last position, too.
    return begins.cummax(0).values.int()


def documents_in_parts(ends: Tensor, tokens: int, parts: int) -> Tensor:
    """Returns the ends of documents in each part of the tokens, one part after another: [parts * (documents + 1)]."""
    size = tokens // parts
    starts = torch.arange(parts, dtype=ends.dtype, device=ends.device) * size
    # No view, of which `HostValues` would not know the parts.
    in_parts = (ends.repeat(parts) - starts.repeat_interleave(len(ends), output_size=parts * len(ends))).clamp(0, size)
    if not ends.is_cpu and (numbers := READ.of(ends)) is not None:
        READ.keep(in_parts, [min(max(n - part * size, 0), size) for part in range(parts) for n in numbers])
    return in_parts


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
