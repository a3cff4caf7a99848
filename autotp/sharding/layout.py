"""Layout: which elements of a tensor a rank holds, for one cut axis inside products and concatenations.

The convention is that of `torch.chunk`, and so of DTensor and DCP: `n` positions on `tp` ranks are pieces of
`ceil(n / tp)`, of which the last ones may be shorter or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch

from autotp.sharding.axis import Axis, Size, concat, find, holds, product, unify
from autotp.sharding.grid import Slice, bounds, slices_of

Range = tuple[int, int]


def ranges(axis: Axis, leaf: Axis, tp: int, rank: int) -> list[Range]:
    """Returns the positions of `axis` that `rank` holds if `leaf` is cut, as sorted disjoint (start, stop) pairs.

    `heads x head_dim` cut by heads is one range; `q | k | v` cut by the heads inside is three. A rank holds all
    positions of a part without the leaf.
    """
    return _ranges(find(axis), slices_of(leaf, tp), rank)


def _ranges(axis: Axis, cuts: Sequence[Slice], rank: int) -> list[Range]:
    axis = find(axis)
    for cut in cuts:
        if cut[0] is axis:
            return _nonempty([bounds(cut, rank)])
    if axis.kind == "concat":
        starts, offset = [], 0
        for part in axis.parts:
            starts += [(offset + a, offset + b) for a, b in _ranges(part, cuts, rank)]
            offset += part.size.number
        return _joined(starts)
    if axis.kind == "product":
        return _product_ranges(axis, cuts, rank)
    return _nonempty([(0, axis.size.number)])


def _product_ranges(axis: Axis, cuts: Sequence[Slice], rank: int) -> list[Range]:
    """Combines the ranges of factors, the innermost first: all held inner ranges, at each held outer position."""
    pieces, size = [(0, 1)], 1
    for part in reversed(axis.parts):
        outer_ranges = _ranges(part, cuts, rank)
        # The inner factors are whole, so ranges stay ranges; else each outer position has ranges of its own.
        if pieces == [(0, size)]:
            pieces = [(a * size, b * size) for a, b in outer_ranges]
        else:
            pieces = [
                (i * size + a, i * size + b)
                for start, stop in outer_ranges
                for i in range(start, stop)
                for a, b in pieces
            ]
        size *= part.size.number
    return _joined(pieces)


def _nonempty(pieces: list[Range]) -> list[Range]:
    return [(a, b) for a, b in pieces if b > a]


def _joined(pieces: list[Range]) -> list[Range]:
    """Returns the ranges with neighbouring ones joined."""
    joined: list[Range] = []
    for a, b in pieces:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        elif b > a:
            joined.append((a, b))
    return joined


def _runs(mask: torch.Tensor) -> list[Range]:
    """Returns the ranges where `mask` is true."""
    return _joined([(i, i + 1) for i in mask.nonzero().flatten().tolist()])


@dataclass(frozen=True)
class Layout:
    """The layout of one tensor: whole on every rank, or cut along one dimension.

    Attributes:
        shape: the global shape.
        dim: the dimension that is cut, or None.
        pieces: for each rank its ranges of that dimension.
        axis: the name of the cut axis.
        rows: the positions of dimension 0, which is another one, that this rank holds of its part; None for all. While
            parts are made: after that a DTensor says so.
    """

    DATA = ("shape", "dim", "axis")

    shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[tuple[Range, ...], ...] = ()
    axis: str = ""
    rows: Range | None = None

    def lengths(self) -> list[int]:
        """Returns the local length of the cut dimension on each rank."""
        return [sum(b - a for a, b in piece) for piece in self.pieces]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        shape = self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])
        if self.dim is None:
            return shape
        return (*shape[: self.dim], self.lengths()[rank], *shape[self.dim + 1 :])

    def own_rows(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the rows of `full` that this rank holds, as a view."""
        return full if self.rows is None else full[slice(*self.rows)]

    def take(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns a copy of the part of `full` that `rank` holds."""
        full = self.own_rows(full)
        if self.dim is None:
            return full.clone()
        parts = [full.narrow(self.dim, a, b - a) for a, b in self.pieces[rank]]
        # `cat` copies a single part, too, so the result does not keep the whole tensor in memory.
        return torch.cat(parts, self.dim) if parts else full.narrow(self.dim, 0, 0).clone()

    @property
    def repeated(self) -> bool:
        """True if some positions are on several ranks, as with fewer key/value heads than ranks."""
        return self.dim is not None and sum(self.lengths()) > self.size

    def holders(self) -> set[int]:
        """Returns the numbers of ranks that hold the same position."""
        return set(self._counts().int().tolist())

    def places(self, rank: int, positions: list[Range]) -> list[Range]:
        """Returns the positions in the whole tensor of a rank's local positions."""
        held_positions = self._marked(rank).nonzero().flatten()
        return _joined(
            [(int(held_positions[i]), int(held_positions[i]) + 1) for a, b in positions for i in range(a, b)]
        )

    def shared(self, rank: int) -> list[Range]:
        """Returns the local positions, along the cut dimension, that other ranks hold, too."""
        return _runs(self._counts()[self._marked(rank) > 0] > 1)

    def first(self, rank: int) -> list[Range]:
        """Returns the local positions, along the cut dimension, that no earlier rank holds."""
        before = sum((self._marked(earlier_rank) for earlier_rank in range(rank)), torch.zeros(self.size))
        return _runs(before[self._marked(rank) > 0] == 0)

    @cached_property
    def size(self) -> int:
        """The length of the whole dimension that is cut."""
        return max((stop for piece in self.pieces for _, stop in piece), default=0)

    def _counts(self) -> torch.Tensor:
        """Returns for each position the number of ranks that hold it."""
        return torch.stack([self._marked(rank) for rank in range(len(self.pieces))]).sum(0)

    def _marked(self, rank: int) -> torch.Tensor:
        """Returns 1 for each position that a rank holds, and 0 for the others."""
        marked = torch.zeros(self.size)
        for a, b in self.pieces[rank]:
            marked[a:b] = 1
        return marked

    def put(self, full: torch.Tensor, local: torch.Tensor, rank: int) -> None:
        """Writes the part of `rank` into its place in `full`; the inverse of `take`."""
        if self.dim is None:
            full.copy_(local)
            return
        start = 0
        for a, b in self.pieces[rank]:
            full.narrow(self.dim, a, b - a).copy_(local.narrow(self.dim, start, b - a))
            start += b - a

    def __str__(self) -> str:
        dims = [f"{n}@tp" if d == self.dim else str(n) for d, n in enumerate(self.shape)]
        return f"[{', '.join(dims)}]"


def layout_of(shape: tuple[int, ...], dims: tuple[Axis, ...], leaf: Axis | None, tp: int, name: str) -> Layout:
    """Returns the layout of a tensor with dimensions `dims` if `leaf` is cut on `tp` ranks."""
    # A leaf in two dimensions, as in scores [queries keys], leaves ranks the diagonal blocks only: it stays whole.
    cut_dims = [d for d, axis in enumerate(dims) if leaf is not None and holds(axis, leaf)]
    if leaf is None or len(cut_dims) != 1:
        return Layout(shape)
    pieces = tuple(tuple(ranges(dims[cut_dims[0]], leaf, tp, rank)) for rank in range(tp))
    return Layout(shape, cut_dims[0], pieces, name)


def divided_as(axis: Axis, pieces: Sequence[Sequence[Range]], tp: int) -> Axis | None:
    """Divides an axis that is one leaf, so that the cut of the leaf that it returns gives each rank its pieces.

    NOTE [Axes of a part]
    A layer that is called by itself, as `model.attention.qkv(x)`, sees one axis where the graph of the whole model, by
    which its weight was cut, has `(q: heads x 64 | k: heads x 64 | v: heads x 64)`. The axis becomes a concatenation of
    the runs that all ranks share, each with the leaf.

    Args:
        pieces: for each rank, the sorted positions that it holds, as (start, stop).

    Returns:
        None, and leaves the axis as it is, if no cut of a leaf gives these pieces.
    """
    # Ranks without positions say nothing of the runs. Rows of unlike lengths fail below: no cut gives these pieces.
    axis, runs = find(axis), list(zip(*(row for row in pieces if row), strict=False))
    if axis.kind != "leaf" or axis.tangled or axis.size.symbols:
        return None
    sizes = [run[-1][1] - run[0][0] for run in runs]
    common = gcd(*sizes)
    for count in (n for n in range(common, 1, -1) if common % n == 0):
        # New axes in each trial, so that one that does not fit leaves no trace in `axis`.
        leaf = Axis(Size(count))
        runs_with_leaf = concat([product([leaf, Axis(Size(size // count))]) for size in sizes])
        cut = tuple(tuple(ranges(runs_with_leaf, leaf, tp, rank)) for rank in range(tp))
        if runs_with_leaf.size == axis.size and cut == pieces:
            unify(axis, runs_with_leaf)
            return leaf
    return None
