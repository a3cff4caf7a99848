"""Sources of a tensor's parts: files, shards, and operators on the parts of other sources.

Before: Permuted(Joined((a, b), 0), (1, 0)), a and b [4 3], in files
After:  read(((0, 3), (2, 6))) reads rows 2 and 3 of a and 0 and 1 of b, concatenates and transposes them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autotp.checkpoint.files.staging import copy_into
from autotp.sharding.layout import Layout

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""
BLOCK = 2**26  # The most bytes that are read at once.


class Source(Protocol):
    """The origin of a lazy tensor's elements. `read` may return memory that others also use: copy it before writing."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box) -> Tensor:
        """Returns the elements in `box`, in the shape of the box."""
        ...


@dataclass(frozen=True)
class InMemory:
    """A tensor in memory, or in a file that is mapped into memory."""

    tensor: Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, box: Box) -> Tensor:
        return cut(self.tensor, box)


# ---- operators on parts


@dataclass(frozen=True)
class Joined:
    """The concatenation of sources along `dim`."""

    parts: tuple[Source, ...]
    dim: int

    @property
    def shape(self) -> Shape:
        first = self.parts[0].shape
        return *first[: self.dim], sum(p.shape[self.dim] for p in self.parts), *first[self.dim + 1 :]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, box: Box) -> Tensor:
        start, stop = box[self.dim]
        parts: list[Tensor] = []
        offset = 0
        for part in self.parts:
            length = part.shape[self.dim]
            a, b = max(start - offset, 0), min(stop - offset, length)
            if a < b:
                parts.append(part.read((*box[: self.dim], (a, b), *box[self.dim + 1 :])))
            offset += length
        if not parts:
            return torch.empty(_sizes(box), dtype=self.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True)
class Narrowed:
    """The slice of `of` from `start`, of `length` indices, along `dim`."""

    of: Source
    dim: int
    start: int
    length: int

    @property
    def shape(self) -> Shape:
        return *self.of.shape[: self.dim], self.length, *self.of.shape[self.dim + 1 :]

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self, box: Box) -> Tensor:
        a, b = box[self.dim]
        return self.of.read((*box[: self.dim], (a + self.start, b + self.start), *box[self.dim + 1 :]))


@dataclass(frozen=True)
class Permuted:
    """The permutation of `of`: its dimension `d` is dimension `dims[d]` of `of`."""

    of: Source
    dims: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return tuple(self.of.shape[d] for d in self.dims)

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self, box: Box) -> Tensor:
        # Dimension d of `of` is our dimension `dims.index(d)`.
        return self.of.read(tuple(box[self.dims.index(d)] for d in range(len(box)))).permute(self.dims)


@dataclass(frozen=True)
class Squeezed:
    """The elements of `of` in a shape that differs only in dimensions of size 1."""

    of: Source
    shape: Shape

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self, box: Box) -> Tensor:
        rest = iter([piece for piece, n in zip(box, self.shape, strict=True) if n != 1])
        return self.of.read(tuple((0, 1) if n == 1 else next(rest) for n in self.of.shape)).reshape(_sizes(box))


@dataclass(frozen=True)
class Cast:
    """The elements of `of` in another dtype."""

    of: Source
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        return self.of.shape

    def read(self, box: Box) -> Tensor:
        return self.of.read(box).to(self.dtype)


@dataclass(frozen=True)
class Computed:
    """The tensor that `run` returns; a part of it cannot be computed alone."""

    run: Callable[[], Tensor]
    shape: Shape
    dtype: torch.dtype

    def read(self, box: Box) -> Tensor:
        return cut(self.run(), box)


def _sizes(box: Box) -> Shape:
    return tuple(b - a for a, b in box)


def cut(tensor: Tensor, box: Box) -> Tensor:
    """Returns the elements of `tensor` in `box`."""
    return tensor[tuple(slice(a, b) for a, b in box)]


# ---- reading


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the box of all elements of a tensor of this shape."""
    return tuple((0, n) for n in shape)


def read_whole(source: Source) -> Tensor:
    """Returns the whole tensor of a source."""
    return source.read(whole_box(source.shape))


def blocks_of_box(box: Box, itemsize: int, size: int | None = None) -> Iterator[Box]:
    """Yields boxes of at most `size` bytes (default: BLOCK) that make up `box`, in memory order."""
    size = size or BLOCK
    if math.prod(_sizes(box)) * itemsize <= size or not box:
        yield box
        return
    (start, stop), rest = box[0], box[1:]
    row = math.prod(_sizes(rest)) * itemsize
    step = max(size // row, 1)
    for a in range(start, stop, step):
        b = min(a + step, stop)
        if row > size:
            yield from (((a, b), *inner) for inner in blocks_of_box(rest, itemsize, size))
        else:
            yield (a, b), *rest


def sliceable(source: Source) -> bool:
    """Whether a part of a source can be read without a whole `Computed` tensor."""
    match source:
        case Computed():
            return False
        case Joined(parts=parts):
            return all(map(sliceable, parts))
        case Narrowed(of=of) | Permuted(of=of) | Squeezed(of=of) | Cast(of=of):
            return sliceable(of)
    return True


def read_part(part: Tensor, source: Source, layout: Layout, rank: int) -> None:
    """Reads the local part of `rank` into `part`, in blocks. part: has the layout's local shape"""
    # Whole at once: each block would compute all of it again.
    if not sliceable(source):
        copy_into(part, layout.take(read_whole(source), rank))
        return
    if layout.rows is not None:
        source = Narrowed(source, 0, layout.rows[0], layout.rows[1] - layout.rows[0])
    dim = layout.dim or 0
    ranges = whole_box(source.shape)[:1] if layout.dim is None else layout.pieces[rank]
    offset = 0
    for start, stop in ranges:
        box = tuple((start, stop) if d == dim else (0, n) for d, n in enumerate(source.shape))
        for block in blocks_of_box(box, source.dtype.itemsize):
            local_block = tuple(
                (a + offset - start, b + offset - start) if d == dim else (a, b) for d, (a, b) in enumerate(block)
            )
            copy_into(cut(part, local_block), source.read(block))
        # A rank's ranges lie one after the other in its part.
        offset += stop - start
    # Without a dimension there was no range.
    if not source.shape:
        copy_into(part, read_whole(source))
