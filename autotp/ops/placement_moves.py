"""Changes placements without communication, for values that several ranks hold.

`axis` is the mesh axis over which a placement changes. Nothing is computed with it: it tells the moves over one axis
from those over another one, which are operators of a graph like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apart(x: Tensor) -> Tensor:
    """Returns `x`, with separate axes: see `passes/plan/decouple.py`. x: [...]"""
    return x.view_as(x)


def by_heads(x: Tensor, dim: int, parts: int, group: int, separate: tuple[int, ...]) -> Tensor:
    """Returns `x`, whose heads are `(h p g)`, with `parts` positions of p: see `passes/plan/sequence/heads.py`.

    Args:
        x: queries, keys or values of an attention, [... heads ...].
        dim: the dimension of the heads.
        group: the number of neighbouring heads that stay together, because they read the same keys.
        separate: the dimensions that get axes of their own, as in `apart`.
    """
    return x.view_as(x)


def nearby(x: Tensor, dim: int, before: int, ends: Tensor | None, chunk: int = 0, after: int = 0) -> Tensor:
    """Returns `x` with separate axes along `dim`: see `passes/plan/sequence/halos.py`.

    Args:
        x: keys or values, of which a query reads at most `before` positions along `dim` before its own.
        ends: where packed documents begin and end, [documents + 1]: a query reads no other document. None for one.
        chunk: the length of the chunks of which a query reads its own; 0 for none.
        after: how many positions it reads after its own.
    """
    return x.view_as(x)


Ranges = tuple[tuple[int, int], ...]


def take(x: Tensor, axis: str, dim: int, pieces: tuple[Ranges, ...], rank: int) -> Tensor:
    """Returns a rank's positions along `dim` of a value that all ranks have. x: [... n ...] -> [... m ...]"""
    return chosen(x, dim, pieces[rank])


def chosen(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Returns the positions `ranges` along `dim`. x: [... n ...] -> [... m ...]

    NOTE [Ranges, and no index] An index that is made from numbers is copied to the device, and the host waits for the
    copy. So positions are read and written as slices.
    """
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def replaced(x: Tensor, dim: int, ranges: Ranges, values: Tensor) -> Tensor:
    """Returns `x` with `values` [... m ...] at the positions `ranges` along `dim`. x: [... n ...]"""
    pieces, position, offset = [values.narrow(dim, 0, 0)], 0, 0  # With no range, the result depends on the values, too.
    for start, stop in ranges:
        pieces += [x.narrow(dim, position, start - position), values.narrow(dim, offset, stop - start)]
        position, offset = stop, offset + stop - start
    return torch.cat([*pieces, x.narrow(dim, position, x.shape[dim] - position)], dim)


def place(x: Tensor, axis: str, dim: int, ranges: Ranges, places: Ranges, size: int) -> Tensor:
    """Returns a term of the whole tensor: the positions `ranges` of a rank's part at `places`, zero elsewhere.

    Args:
        x: a rank's part, [... m ...].
        ranges: the rank's positions that no earlier rank has.

    Returns:
        [... size ...]
    """
    whole = x.new_zeros([size if d == dim % x.dim() else n for d, n in enumerate(x.shape)])
    return replaced(whole, dim, places, chosen(x, dim, ranges))


def first(x: Tensor, axis: str, dim: int, ranges: Ranges | None) -> Tensor:
    """Returns `x`; a gradient reaches only these positions (None: all), so that it counts once on several ranks.

    Without positions the gradient is zero, and not None: so backward runs the same collectives on all ranks.
    """
    if ranges is None or not (x.is_floating_point() or x.is_complex()):
        return x
    if not ranges:
        return x.detach() + x.flatten()[:0].sum()
    pieces, position = [], 0
    for start, stop in ranges:
        pieces += [x.narrow(dim, position, start - position).detach(), x.narrow(dim, start, stop - start)]
        position = stop
    return torch.cat([*pieces, x.narrow(dim, position, x.shape[dim] - position).detach()], dim)
