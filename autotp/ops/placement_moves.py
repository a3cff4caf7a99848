"""Moves of elements that several ranks hold, without communication: a part taken, put in its place, counted once."""

from __future__ import annotations

import torch
from torch import Tensor


def apart(x: Tensor) -> Tensor:
    """`x`, on axes of its own: see `passes/plan/decouple.py`. x: [...]"""
    return x.view_as(x)


Ranges = tuple[tuple[int, int], ...]


def take(x: Tensor, dim: int, pieces: tuple[Ranges, ...], rank: int) -> Tensor:
    """What a rank has of a value that all have: its positions along `dim`. x: [... n ...] -> [... m ...]"""
    return _at(x, dim, pieces[rank])


def _at(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def place(x: Tensor, dim: int, ranges: Ranges, places: Ranges, size: int) -> Tensor:
    """A summand of the whole: the positions `ranges` of a rank's part at `places`, zero elsewhere.

    Args:
        x: a rank's part, [... m ...].
        ranges: of what several ranks have, the first of them alone gives it.

    Returns:
        [... size ...]
    """
    index = [i for start, stop in places for i in range(start, stop)]
    whole = x.new_zeros([size if d == dim % x.dim() else n for d, n in enumerate(x.shape)])
    return whole.index_copy(dim, torch.tensor(index, dtype=torch.int64, device=x.device), _at(x, dim, ranges))


def first(x: Tensor, dim: int, ranges: Ranges | None) -> Tensor:
    """`x`, of which a gradient reaches these positions alone (None: all): several ranks have it, and it counts once.

    Where it reaches none it is zero, and not absent: backward goes the same way on all ranks, and meets there.
    """
    if ranges is None or not (x.is_floating_point() or x.is_complex()):
        return x
    if not ranges:
        return x.detach() + x.flatten()[:0].sum()
    pieces, at = [], 0
    for start, stop in ranges:
        pieces += [x.narrow(dim, at, start - at).detach(), x.narrow(dim, start, stop - start)]
        at = stop
    return torch.cat([*pieces, x.narrow(dim, at, x.shape[dim] - at).detach()], dim)
