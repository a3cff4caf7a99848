"""The file of one rank: pieces of tensors, each a box of the whole tensor, one after the other.

The manifest (`manifest.py`) has the place and the checksum of each piece. A rank's file has only the bytes of elements:
reading it interprets no other content.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotp.checkpoint.files.checksums import EARLIER, READABLE, bytes_of, open_regular, sync_file
from autotp.checkpoint.files.staging import copy_into
from autotp.errors import Error

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor in a file.

    Attributes:
        at: the first index of the box in the whole tensor.
        sizes: the sizes of the box.
        rank: the rank whose file has the piece.
        start: the first byte of the piece in that file.
        crc32: the checksum of the piece.
    """

    at: Shape
    sizes: Shape
    rank: int
    start: int
    crc32: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> Piece:
        """Returns the piece of a list that `row` made.

        Raises:
            ValueError, TypeError: `row` did not make this list.
        """
        offsets, sizes, rank, start, crc32 = row
        if not all(isinstance(n, int) and n >= 0 for n in (*offsets, *sizes, rank, start, crc32)):
            raise ValueError(f"no piece: {row}")
        return cls(tuple(offsets), tuple(sizes), rank, start, crc32)

    def row(self) -> list[Any]:
        """Returns the piece as a list, for JSON."""
        return [self.at, self.sizes, self.rank, self.start, self.crc32]


@dataclass(frozen=True)
class StoredPieces:
    """A tensor in files: its dtype, its shape, and its pieces."""

    dtype: torch.dtype
    shape: Shape
    pieces: tuple[Piece, ...]

    def read(self, folder: Path, name: str, offsets: Shape, into: Tensor) -> None:
        """Reads the box of the tensor that begins at `offsets` into `into`.

        Raises:
            Error: a file has changed since it was written, or the pieces do not cover the box; names the path.
        """
        # Pieces do not overlap (`tiled`), so a count of elements tells whether all are there.
        remaining = into.numel()
        for piece in self.pieces:
            low = [max(a, b) for a, b in zip(offsets, piece.at, strict=True)]
            ends = zip(offsets, into.shape, piece.at, piece.sizes, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            # The overlap [low, high), counted from the beginning of the box and from that of the piece.
            into_slices, piece_slices = (
                tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                for origin in (offsets, piece.at)
            )
            copy_into(into[into_slices], read_piece(folder, name, piece, self.dtype, into.is_cuda)[piece_slices])
            remaining -= math.prod(b - a for a, b in zip(low, high, strict=True))
        if remaining:
            raise Error(f"{folder} does not have all of `{name}`", fix=EARLIER)

    def whole(self, folder: Path, name: str) -> Tensor:
        """Returns the whole tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read(folder, name, (0,) * len(self.shape), tensor)
        return tensor


def nbytes(tensor: Any) -> int:
    """Returns the bytes of a tensor or source, from its shape and its dtype."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def tiled(shape: Sequence[int], pieces: Sequence[Piece]) -> bool:
    """Whether the pieces contain each element of a tensor of this shape exactly once."""
    if any(len(n) != len(shape) for piece in pieces for n in (piece.at, piece.sizes)):
        return False
    ends = [(piece.at, [a + n for a, n in zip(piece.at, piece.sizes, strict=True)]) for piece in pieces]
    inside = all(b <= n for _, high in ends for b, n in zip(high, shape, strict=True))
    # As many elements as the tensor has, and none twice (below): then none is missing.
    if not inside or sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        return False
    boxes = [box for box, piece in zip(ends, pieces, strict=True) if math.prod(piece.sizes)]
    # Compare along the dimension with the most cuts: there a box overlaps with few others.
    dim = max(range(len(shape)), key=lambda d: len({low[d] for low, _ in boxes}), default=-1)
    boxes.sort(key=lambda box: box[0][dim:][:1])
    for i, (low, high) in enumerate(boxes):
        for begin, end in islice(boxes, i + 1, None):
            if dim >= 0 and begin[dim] >= high[dim]:
                break
            if all(a < d and c < b for a, b, c, d in zip(low, high, begin, end, strict=True)):
                return False
    return True


def file_of(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}.tensors"


def write_pieces(
    folder: Path, rank: int, tensors: Iterable[tuple[Shape, Tensor]], written: Callable[[], None] = lambda: None
) -> list[Piece]:
    """Writes the file of a rank, and returns its pieces once the file is on the disk.

    Args:
        tensors: pairs (the first index in the whole tensor, the part).
        written: is called after each.

    Raises:
        OSError: the file system fails.
    """
    pieces, start = list[Piece](), 0
    # "x": a file that is there already is not overwritten. The folder belongs to this save alone.
    with (folder / file_of(rank)).open("xb") as target:
        for offsets, tensor in tensors:
            data = bytes_of(tensor)
            target.write(data)
            pieces.append(Piece(offsets, tuple(tensor.shape), rank, start, zlib.crc32(data)))
            start += len(data)
            written()
        sync_file(target)
    return pieces


def read_piece(folder: Path, name: str, piece: Piece, dtype: torch.dtype, pinned: bool = False) -> Tensor:
    """Reads one piece, into pinned memory if a card is to get it.

    Raises:
        Error: the file has changed since it was written; names the file and the tensor.
    """
    file = folder / file_of(piece.rank)
    data = torch.empty(math.prod(piece.sizes) * dtype.itemsize, dtype=torch.uint8, pin_memory=pinned)
    try:
        with open_regular(file) as source:
            source.seek(piece.start)
            count = source.readinto(data.numpy().data) if data.numel() else 0  # type: ignore[attr-defined]
    except OSError as error:
        raise Error(f"{file} cannot be read: {error.strerror}", fix=READABLE) from error
    if count != data.numel() or zlib.crc32(data.numpy().data) != piece.crc32:
        raise Error(
            f"{file} is damaged: `{name}` is not what was written",
            fix=f"remove {folder}",
        )
    return data.view(dtype).view(piece.sizes)
