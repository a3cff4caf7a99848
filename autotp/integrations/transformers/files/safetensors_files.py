"""Reads and writes parts of files in the safetensors format.

A file has three parts: 8 bytes with the length of the header; the header, JSON with each tensor's name, dtype, shape
and place; and the bytes of the tensors (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from autotp.checkpoint.files.checksums import EARLIER, INVALID_CONTENT, MOST_JSON, READABLE, bytes_of, read_regular
from autotp.checkpoint.files.tensor_pieces import nbytes
from autotp.errors import Error
from autotp.integrations.transformers.files.checksum_file import SummedFile
from autotp.integrations.transformers.files.tensor_sources import BLOCK, Box, Shape

STORED_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Reader:
    """Opens files, one at a time, and opens a file again after BLOCK bytes were read from it.

    While a file is open, all bytes that were read from it stay in the process's memory. To open a file of a thousand
    tensors takes 2 ms.
    """

    def __init__(self) -> None:
        self.file: Path | None = None
        self.opened: Any = None
        self.left = 0  # bytes

    def open(self, file: Path, size: int) -> Any:
        """Returns the open file, to read `size` bytes from it."""
        from safetensors import safe_open

        if self.file != file or self.left <= 0:
            # The old file is let go first, so that only one is in memory.
            self.file, self.opened = None, None
            self.opened = safe_open(file, framework="pt", device="cpu")
            self.file, self.left = file, BLOCK
        self.left -= size
        return self.opened


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. A part that is read is memory of the mapped file, released with the part."""

    file: Path
    name: str
    shape: Shape
    dtype: torch.dtype
    reader: Reader = field(default_factory=Reader, compare=False, repr=False)

    def __str__(self) -> str:
        return f"`{self.name}` in {self.file.name}"

    def read(self, box: Box) -> Tensor:
        """Returns the elements in `box`.

        Raises:
            Error: the tensor cannot be read; names the tensor and the file.
        """
        try:
            opened = self.reader.open(self.file, math.prod(b - a for a, b in box) * self.dtype.itemsize)
            # A scalar has no slices.
            if not box:
                scalar: Tensor = opened.get_tensor(self.name)
                return scalar
            part: Tensor = opened.get_slice(self.name)[tuple(slice(a, b) for a, b in box)]
            return part
        except Exception as error:
            raise Error(f"`{self.name}` cannot be read: {error}", at=str(self.file), fix=READABLE) from error


# ---- reading


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Returns every tensor of the checkpoint in `folder`: of one file, or of the files in the index. Reads the headers.

    Raises:
        Error: the folder has no checkpoint, a file is missing, truncated or corrupt, or lacks a tensor of the index;
            names the file, and the tensor.
    """
    single, index, reader = folder / ONE_FILE, folder / INDEX, Reader()
    if single.is_file():
        return _opened(single, reader)
    if not index.is_file():
        raise _no_checkpoint(folder)
    places = _index(index)
    tensors: dict[str, Stored] = {}
    for file in sorted(set(places.values())):
        if not (folder / file).is_file():
            name = next(name for name, where in places.items() if where == file)
            raise Error(f"`{name}` is listed in {file}, which is not there", at=str(index), fix=EARLIER)
        file_tensors = _opened(folder / file, reader)
        if twice := [name for name in file_tensors if name in tensors and name not in places]:
            files = f"{tensors[twice[0]].file.name} and in {file}"
            raise Error(f"`{twice[0]}` is in {files}, and the index does not say which", at=str(index), fix=EARLIER)
        # Where two files have a tensor, the index says which counts.
        tensors |= {name: tensor for name, tensor in file_tensors.items() if places.get(name, file) == file}
    for name, file in places.items():
        if name not in tensors:
            raise Error(f"`{name}` is listed in {file}, which has no such tensor", at=str(index), fix=EARLIER)
    return tensors


def tensors_of_file(file: Path) -> dict[str, Stored]:
    """Returns every tensor of one file.

    Raises:
        Error: the file is truncated or corrupt.
    """
    return _opened(file, Reader())


def _no_checkpoint(folder: Path) -> Error:
    if not folder.is_dir():
        remedy = "the path of a local folder that holds a checkpoint: nothing is fetched from a hub"
        return Error("no such folder", at=str(folder), fix=remedy)
    pickled = [file.name for file in sorted(folder.iterdir()) if file.suffix in (".bin", ".pt", ".pth", ".ckpt", ".h5")]
    if pickled:
        convert = "load it once with transformers and write it with model.save_pretrained(folder), which is safetensors"
        return Error(f"only safetensors are read, and here is {pickled[0]}", at=str(folder), fix=convert)
    remedy = "the folder that save_pretrained wrote"
    return Error(f"no checkpoint: neither {ONE_FILE} nor {INDEX} is there", at=str(folder), fix=remedy)


def _index(file: Path) -> dict[str, str]:
    """Returns tensor name -> the name of its file."""
    try:
        places = json.loads(read_regular(file))["weight_map"]
        # Only names: a path in the index must not lead out of the folder.
        if all(isinstance(where, str) and Path(where).name == where and _fits(where) for where in places.values()):
            return dict(places)
    except (*INVALID_CONTENT, OSError):
        pass
    raise Error("the index is corrupt", expected='JSON with a "weight_map": tensor name -> file name', at=str(file))


def _fits(name: str) -> bool:
    """Whether a file can have this name."""
    return "\0" not in name and len(os.fsencode(name)) <= 255


def _opened(file: Path, reader: Reader) -> dict[str, Stored]:
    """Returns the tensors of one file.

    Raises:
        Error: safetensors does not accept the file; names the truncated tensor, if there is one.
    """
    from safetensors import safe_open

    header: dict[str, dict[str, Any]] = {}
    size = 0
    try:
        header, size = _header(file)
        # Opened for its checks only: the library compares the header with the file.
        with safe_open(file, framework="pt", device="cpu"):
            return {
                name: Stored(file, name, tuple(entry["shape"]), STORED_DTYPES[entry["dtype"]], reader)
                for name, entry in header.items()
            }
    except Exception as error:
        beyond = _cut_off(header, size)
        if beyond:
            problem = f"`{beyond}` is cut off: the file is shorter than its header says"
        else:
            problem = f"the file is corrupt ({type(error).__name__}: {error})"
        raise Error(problem, at=str(file), fix=EARLIER) from error


def _cut_off(header: Mapping[str, Any], size: int) -> str:
    """Returns the name of the first tensor that ends after the end of the file, or an empty text."""
    try:
        ends = sorted((entry["data_offsets"][1], name) for name, entry in header.items())
        return next((name for end, name in ends if end > size), "")
    except (LookupError, TypeError):
        return ""


def _header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Returns tensor name -> its entry in the header, and the number of bytes after the header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size - 8 - length
        if size < 0:
            raise ValueError(f"a header of {length} bytes is longer than the file")
        if length > MOST_JSON:  # As in the library of safetensors.
            raise ValueError(f"a header of {length} bytes is longer than {MOST_JSON}")
        header = json.loads(opened.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, size


# ---- writing


@dataclass(frozen=True)
class FileShard:
    """One file to write: its name, and its tensors in the order of their bytes."""

    file: str
    names: tuple[str, ...]


def shards_of(tensors: Mapping[str, Any], largest: int) -> list[FileShard]:
    """Divides tensors among files, in order: a file has at most `largest` bytes, or one tensor.

    Args:
        tensors: name -> tensor or source, with a shape and a dtype.
    """
    groups: list[list[str]] = [[]]
    group_bytes = 0
    for name, tensor in tensors.items():
        size = nbytes(tensor)
        if groups[-1] and group_bytes + size > largest:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += size
    files = (
        [ONE_FILE]
        if len(groups) == 1
        else [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    )
    # The widest dtypes first, so that each tensor begins at a multiple of its element's size.
    return [
        FileShard(file, tuple(sorted(names, key=lambda name: -tensors[name].dtype.itemsize)))
        for file, names in zip(files, groups, strict=True)
    ]


def header_of(tensors: Mapping[str, Any], names: Sequence[str]) -> bytes:
    """Returns the length and the header of a file of these tensors.

    Raises:
        Error: the format does not have the dtype of a tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPE_NAMES:
            problem = f"`{name}` is of dtype {tensor.dtype}, which safetensors does not have"
            raise Error(problem, fix="model.to(torch.bfloat16), or another dtype of safetensors")
        end = start + nbytes(tensor)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, ensure_ascii=False).encode()
    # So that the first tensor begins at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def append_tensor(file: BinaryIO | SummedFile, tensor: Tensor) -> None:
    """Appends the bytes of a tensor."""
    file.write(bytes_of(tensor))


def index_of(shards: Iterable[FileShard], size: int) -> str:
    """Returns the index of several files. size: bytes of all tensors"""
    places = {name: shard.file for shard in shards for name in shard.names}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"
