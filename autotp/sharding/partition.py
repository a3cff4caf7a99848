"""Cuts a length into parts as torch.chunk does, which is also the convention of DTensor and of checkpoints.

50,257 rows on 8 ranks are 7 x 6,283 and 6,276; 12 heads on 8 ranks are 2, 2, 2, 2, 2, 2, 0, 0.
Only trailing parts are shorter, so after joining padded parts only the end has to be removed. The arithmetic holds for
a `torch.SymInt` length, too.
"""

from __future__ import annotations


def chunk_length(n: int, parts: int) -> int:
    """Returns the length of the longest of `parts` chunks of `n`."""
    return (n + parts - 1) // parts


def chunk_bounds(n: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the half-open range [start, stop) of chunk `index` of `parts` chunks of `n`; it may be empty."""
    length = chunk_length(n, parts)
    return min(index * length, n), min((index + 1) * length, n)


def chunk_start(n: int, parts: int, index: int) -> int:
    """Returns the start of chunk `index` of `parts` chunks of `n`."""
    return chunk_bounds(n, parts, index)[0]


def chunk_stop(n: int, parts: int, index: int) -> int:
    """Returns the stop of chunk `index` of `parts` chunks of `n`."""
    return chunk_bounds(n, parts, index)[1]


def chunk_size(n: int, parts: int, index: int) -> int:
    """Returns the length of chunk `index` of `parts` chunks of `n`."""
    start, stop = chunk_bounds(n, parts, index)
    return stop - start


def chunk_sizes(n: int, parts: int) -> list[int]:
    """Returns the length of each of `parts` chunks of `n`, in order; they sum to `n`."""
    bounds = [chunk_bounds(n, parts, index) for index in range(parts)]
    return [stop - start for start, stop in bounds]
