"""Which elements of a tensor a rank holds: the partition of one axis, carried through products and concatenations.

One convention everywhere, `torch.chunk`'s (and so DTensor's and DCP's): `n` positions on `tp` ranks are pieces of
`ceil(n / tp)`, the last ones shorter or empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autotp.axis import Axis, find, holds, touches
from autotp.partition import chunk_bounds

Range = tuple[int, int]


def ranges(axis: Axis, leaf: Axis, tp: int, rank: int) -> list[Range]:
    """The positions of `axis` that `rank` holds where `leaf` is cut, as sorted disjoint (start, stop) pairs.

    `heads x head_dim` cut by heads is one range; `q | k | v` cut by the heads inside is three.
    """
    axis, leaf = find(axis), find(leaf)
    if axis is leaf:
        return _nonempty([chunk_bounds(axis.size.number, tp, rank)])
    if axis.kind == "concat":
        starts, at = [], 0
        for part in axis.parts:
            starts += [(at + a, at + b) for a, b in ranges(part, leaf, tp, rank)]
            at += part.size.number
        return _joined(starts)
    if axis.kind == "product" and touches(axis, leaf):
        return _product_ranges(axis, leaf, tp, rank)
    return [(0, axis.size.number)]


def _product_ranges(axis: Axis, leaf: Axis, tp: int, rank: int) -> list[Range]:
    at = next(i for i, part in enumerate(axis.parts) if holds(part, leaf))
    major = minor = 1
    for part in axis.parts[:at]:
        major *= part.size.number
    for part in axis.parts[at + 1 :]:
        minor *= part.size.number
    inner = ranges(axis.parts[at], leaf, tp, rank)
    width = axis.parts[at].size.number
    return _joined([((m * width + a) * minor, (m * width + b) * minor) for m in range(major) for a, b in inner])


def _nonempty(pieces: list[Range]) -> list[Range]:
    return [(a, b) for a, b in pieces if b > a]


def _joined(pieces: list[Range]) -> list[Range]:
    """Neighbouring ranges as one."""
    joined: list[Range] = []
    for a, b in pieces:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        elif b > a:
            joined.append((a, b))
    return joined


@dataclass(frozen=True)
class Layout:
    """How one tensor is held: whole on every rank, or cut along one dimension.

    Attributes:
        shape: the global shape.
        dim: the dimension that is cut, or None.
        pieces: for each rank its ranges of that dimension.
        axis: what the dimension is, printed, as `(q | k | v)`; the name of the cut axis.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[tuple[Range, ...], ...] = ()
    axis: str = ""

    def lengths(self) -> list[int]:
        """The local length of the cut dimension on each rank."""
        return [sum(b - a for a, b in piece) for piece in self.pieces]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.lengths()[rank], *self.shape[self.dim + 1 :])

    def take(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of `full` that `rank` holds, in memory of its own."""
        if self.dim is None:
            return full.clone()
        parts = [full.narrow(self.dim, a, b - a) for a, b in self.pieces[rank]]
        return torch.cat(parts, self.dim) if parts else full.narrow(self.dim, 0, 0).clone()

    def put(self, full: torch.Tensor, local: torch.Tensor, rank: int) -> None:
        """Writes what `rank` holds into its place in `full`; the exact inverse of `take`."""
        if self.dim is None:
            full.copy_(local)
            return
        at = 0
        for a, b in self.pieces[rank]:
            full.narrow(self.dim, a, b - a).copy_(local.narrow(self.dim, at, b - a))
            at += b - a

    def __str__(self) -> str:
        dims = [f"{n}@tp" if d == self.dim else str(n) for d, n in enumerate(self.shape)]
        return f"[{', '.join(dims)}]"


def layout_of(shape: tuple[int, ...], dims: tuple[Axis, ...], leaf: Axis | None, tp: int, name: str) -> Layout:
    """The layout of a tensor whose dimensions are `dims` where `leaf` is cut on `tp` ranks."""
    at = [d for d, axis in enumerate(dims) if leaf is not None and holds(axis, leaf)]
    if leaf is None or len(at) != 1:
        return Layout(shape)
    pieces = tuple(tuple(ranges(dims[at[0]], leaf, tp, rank)) for rank in range(tp))
    return Layout(shape, at[0], pieces, name)
