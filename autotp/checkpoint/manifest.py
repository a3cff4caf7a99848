"""The manifest of a training checkpoint: written last, it lists what every file must contain.

It is JSON and ends in its own checksum; of every tensor it has the pieces and their checksums (`tensor_pieces.py`). A
folder without it is no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from autotp.checkpoint.files.checksums import INVALID_CONTENT, invalid_content, sealed, unsealed
from autotp.checkpoint.files.plain_json import decode, dtype_of, name_of
from autotp.checkpoint.files.tensor_pieces import Piece, Shape, StoredPieces, file_of, tiled
from autotp.errors import Error

FORMAT = 2
MANIFEST = "manifest.json"
OF_FORMAT_1 = ".metadata"  # A pickle: torch.distributed.checkpoint's.


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        folder: where it lies.
        crc32: the checksum of all that it says.
        about: plain data.
        tensors: key -> the pieces.
    """

    folder: Path
    crc32: int
    about: Mapping[str, Any]
    tensors: Mapping[str, StoredPieces]

    def pieces(self, key: str) -> StoredPieces:
        """Those of a tensor.

        Raises:
            Error: there is none of this key.
        """
        if key not in self.tensors:
            raise Error(f"{self.folder / MANIFEST} is not valid: it has no {key}")
        return self.tensors[key]

    def whole(self, key: str) -> Tensor:
        """All of a tensor.

        Raises:
            Error: there is none of this key, or it cannot be read.
        """
        return self.pieces(key).whole(self.folder, key)

    def value(self, encoded: Any) -> Any:
        """What plain data of the checkpoint stands for; tensors in it are read.

        Raises:
            Error: it stands for nothing; a tensor cannot be read.
        """
        try:
            return decode(encoded, self.whole)
        except Error:
            raise
        except INVALID_CONTENT as error:
            raise invalid_content(self.folder / MANIFEST, error) from error


@dataclass(frozen=True)
class Item:
    """A part of a tensor that a rank has: its key, where it begins in the whole, the whole's shape, the part."""

    key: str
    at: Shape
    shape: Shape
    tensor: Tensor

    def row(self) -> list[Any]:
        """Which part of what it is."""
        return [self.key, name_of(self.tensor.dtype), self.shape]

    def choice(self) -> list[Any]:
        """By what ranks see that several have it; bytes; the whole, which is the same on all that have some of it."""
        return [self.key, self.at, self.tensor.nbytes, self.row()[1:]]


def written(about: Mapping[str, Any], ranks: Sequence[Sequence[Any]]) -> bytes:
    """The file. ranks: of each the bytes of its file, and of each item there its row and its piece's"""
    tensors: dict[str, list[Any]] = {}
    for (key, dtype, shape), piece in (pair for _, rows in ranks for pair in rows):
        tensors.setdefault(key, [dtype, shape, []])[2].append(piece)
    files = [size for size, _ in ranks]
    return sealed({"format": FORMAT, "about": about, "files": files, "tensors": tensors})


def read_manifest(folder: Path) -> Manifest:
    """The checkpoint in a folder, all files of which are there.

    Raises:
        Error: it is of another format, or damaged; names the file.
    """
    file = folder / MANIFEST
    if not file.exists() and (folder / OF_FORMAT_1).exists():
        raise _other_format(folder, 1)
    try:
        content = unsealed(file)
        if content.get("format") != FORMAT:
            raise _other_format(folder, content.get("format"))
        files: list[int] = content["files"]
        tensors = {key: _pieces(files, *rows) for key, rows in content["tensors"].items()}
        for rank, size in enumerate(files):
            _expect_size(folder / file_of(rank), size)
        _expect_about(content["about"])
        return Manifest(folder, int(content["crc32"], 16), content["about"], tensors)
    except Error as error:
        raise Error(error.problem, **{"try": f"remove {folder}: an older one is used"} | error.facts) from error
    except INVALID_CONTENT as error:
        raise invalid_content(file, error) from error


def _expect_about(about: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError where a checkpoint is about nothing that we know."""
    kinds = {"step": int, "optimizer": str, "sizes": dict, "model": dict, "more": dict, "values": dict, "groups": list}
    other = [name for name, kind in kinds.items() if type(about[name]) is not kind]
    parameters = [(name, keys) for _, held in about["groups"] for name, keys in dict(held).items()]
    if other or any(type(name) is not str or type(keys) is not list for name, keys in parameters):
        raise ValueError(f"unexpected values of {', '.join(other) or 'groups'}")


def _pieces(files: Sequence[int], dtype: str, shape: Sequence[int], rows: Sequence[Sequence[Any]]) -> StoredPieces:
    """The pieces of a tensor, all of which are within their files, and as large as the tensor together."""
    found, pieces = dtype_of(dtype), tuple(map(Piece.of, rows))
    within = all(piece.start + math.prod(piece.sizes) * found.itemsize <= files[piece.rank] for piece in pieces)
    if not (within and all(type(n) is int and n >= 0 for n in shape) and tiled(shape, pieces)):
        raise ValueError(f"the pieces of {list(shape)} are others")
    return StoredPieces(found, tuple(shape), pieces)


def _expect_size(file: Path, size: int) -> None:
    if not file.exists():
        raise Error(f"{file} is missing")
    if not file.is_file():
        raise Error(f"{file} is not a regular file")
    if (found := file.stat().st_size) != size:
        raise Error(f"{file} has {found:,} bytes, and had {size:,} when it was written")


def _other_format(folder: Path, number: Any) -> Error:
    if number == 1:
        remedy = "the autotp that wrote it, and full_state_dict there: reading this format can run code"
        return Error(f"{folder} is of format 1, and this autotp reads {FORMAT}", fix=remedy)
    return Error(f"{folder} is of format {number}, and this autotp reads {FORMAT}", fix="a newer autotp")
