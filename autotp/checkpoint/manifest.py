"""The manifest of a training checkpoint: the last file that is written, with the required content of all others.

It is JSON and ends in its own checksum; it has the pieces of every tensor and their checksums (`tensor_pieces.py`). A
folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from autotp.checkpoint.files.checksums import EARLIER, INVALID_CONTENT, READABLE, invalid_content, sealed, unsealed
from autotp.checkpoint.files.plain_json import decode, dtype_name, dtype_of
from autotp.checkpoint.files.tensor_pieces import Piece, Shape, StoredPieces, file_of, nbytes, tiled
from autotp.errors import Error

FORMAT = 2
MANIFEST = "manifest.json"
OF_FORMAT_1 = ".metadata"  # A pickle: torch.distributed.checkpoint's.


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        folder: the folder of the checkpoint.
        crc32: the checksum of the manifest.
        about: plain data about the training: its step, model, optimizer and sizes.
        tensors: key -> the pieces of the tensor.
    """

    folder: Path
    crc32: int
    about: Mapping[str, Any]
    tensors: Mapping[str, StoredPieces]

    def pieces(self, key: str) -> StoredPieces:
        """Returns the pieces of a tensor.

        Raises:
            Error: the checkpoint has no tensor of this key.
        """
        if key not in self.tensors:
            raise Error(f"{self.folder / MANIFEST} is not valid: it has no {key}", fix=EARLIER)
        return self.tensors[key]

    def whole(self, key: str) -> Tensor:
        """Reads a whole tensor.

        Raises:
            Error: the checkpoint has no tensor of this key, or it cannot be read.
        """
        return self.pieces(key).whole(self.folder, key)

    def value(self, encoded: Any) -> Any:
        """Decodes plain data of the checkpoint, and reads the tensors in it.

        Raises:
            Error: the data is not valid, or a tensor cannot be read.
        """
        read = set[str]()

        def once(key: str) -> Tensor:  # Else a short list could stand for more than the memory has.
            if key in read:
                raise ValueError(f"{key} is there twice")
            read.add(key)
            return self.whole(key)

        try:
            return decode(encoded, once)
        except Error:
            raise
        except INVALID_CONTENT as error:
            raise invalid_content(self.folder / MANIFEST, error) from error


@dataclass(frozen=True)
class Item:
    """A part of a tensor on a rank.

    Attributes:
        key: the key of the tensor.
        at: the first index of the part in the whole tensor.
        shape: the shape of the whole tensor.
        tensor: the part.
    """

    key: str
    at: Shape
    shape: Shape
    tensor: Tensor

    def row(self) -> list[Any]:
        """Returns the key, the dtype and the whole shape, for the manifest."""
        return [self.key, dtype_name(self.tensor.dtype), self.shape]

    def choice(self) -> list[Any]:
        """Returns [key, first index, bytes, [dtype, whole shape]]: equal key, index and bytes mean the same part."""
        return [self.key, self.at, self.tensor.nbytes, self.row()[1:]]


def manifest_content(about: Mapping[str, Any], ranks: Sequence[Sequence[Any]]) -> bytes:
    """Returns the content of the manifest. ranks: of each rank the bytes of its file, and rows of items and pieces"""
    tensors: dict[str, list[Any]] = {}
    for (key, dtype, shape), piece in (pair for _, rows in ranks for pair in rows):
        tensors.setdefault(key, [dtype, shape, []])[2].append(piece)
    files = [size for size, _ in ranks]
    return sealed({"format": FORMAT, "about": about, "files": files, "tensors": tensors})


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder, and checks that all files exist in their sizes.

    Raises:
        Error: the checkpoint has another format, or is damaged; names the file.
    """
    file = folder / MANIFEST
    if not file.exists() and (folder / OF_FORMAT_1).exists():
        raise _other_format(folder, 1)
    try:
        content = unsealed(file)
        if type(content.get("format")) is not int or content["format"] != FORMAT:
            raise _other_format(folder, content.get("format"))
        files: list[int] = content["files"]
        tensors = {key: _pieces(files, *rows) for key, rows in content["tensors"].items()}
        # Before memory is allocated: a damaged manifest could ask for any amount.
        if sum(map(nbytes, tensors.values())) > sum(files):
            raise ValueError("the tensors have more bytes than the files")
        for rank, size in enumerate(files):
            _expect_size(folder / file_of(rank), size)
        _expect_about(content["about"])
        return Manifest(folder, int(content["crc32"], 16), content["about"], tensors)
    except Error as error:
        older = f"remove {folder}: then an older checkpoint is used"
        remedy = error.facts.get("try", EARLIER)
        raise Error(error.problem, fix=older if remedy in (EARLIER, READABLE) else remedy) from error
    except INVALID_CONTENT as error:
        raise invalid_content(file, error) from error


def _expect_about(about: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError if the manifest's `about` has an unexpected form."""
    kinds = {"step": int, "optimizer": str, "sizes": dict, "model": dict, "more": dict, "values": dict, "groups": list}
    mismatched = [name for name, cls in kinds.items() if type(about[name]) is not cls]
    parameters = [(name, keys) for _, keys_by_name in about["groups"] for name, keys in dict(keys_by_name).items()]
    if mismatched or any(type(name) is not str or type(keys) is not list for name, keys in parameters):
        raise ValueError(f"unexpected values of {', '.join(mismatched) or 'groups'}")


def _pieces(files: Sequence[int], dtype: str, shape: Sequence[int], rows: Sequence[Sequence[Any]]) -> StoredPieces:
    """Returns the pieces of a tensor; raises ValueError if they exceed their files or do not make up the tensor."""
    element, pieces = dtype_of(dtype), tuple(map(Piece.of, rows))
    within = all(piece.start + math.prod(piece.sizes) * element.itemsize <= files[piece.rank] for piece in pieces)
    if not (within and all(type(n) is int and n >= 0 for n in shape) and tiled(shape, pieces)):
        raise ValueError(f"the pieces do not make up a tensor {list(shape)}")
    return StoredPieces(element, tuple(shape), pieces)


def _expect_size(file: Path, size: int) -> None:
    if not file.exists():
        raise Error(f"{file} is missing", fix=EARLIER)
    if not file.is_file():
        raise Error(f"{file} is not a regular file", fix=EARLIER)
    if (actual := file.stat().st_size) != size:
        raise Error(f"{file} has {actual:,} bytes, and had {size:,} when it was written", fix=EARLIER)


def _other_format(folder: Path, number: Any) -> Error:
    if number == 1:
        remedy = "the autotp that wrote it, and full_state_dict there: reading this format can run code"
        return Error(f"{folder} is of format 1, and this autotp reads {FORMAT}", fix=remedy)
    return Error(f"{folder} is of format {number}, and this autotp reads {FORMAT}", fix="a newer autotp")
