"""checksum_file: a file of checksums, beside files of formats that have no place for one.

They show whether a file has changed since it was written.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from autotp.checkpoint.files.checksums import (
    INVALID_CONTENT,
    READABLE,
    invalid_content,
    open_regular,
    read_regular,
    sealed,
    unsealed,
)
from autotp.errors import Error

SIDE_FILE = "autotp.checksums.json"
BLOCK_BYTES = 2**20  # The bytes of a block: each block has one checksum.
LARGEST = 2**30  # The most bytes of a block in a file that we read.
STALE = "copy it anew; if another program wrote it, remove {}: nothing is compared then"


class SummedFile:
    """A file that is being written, with a checksum of each block."""

    def __init__(self, opened: BinaryIO) -> None:
        self.opened, self.name, self.size, self.sums = opened, opened.name, 0, list[int]()

    def write(self, data: Any) -> None:
        """Appends bytes."""
        # Python casts no view of size 0.
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self.opened.write(view)
        while len(view):
            offset = self.size % BLOCK_BYTES
            part = view[: BLOCK_BYTES - offset]
            if offset:
                self.sums[-1] = zlib.crc32(part, self.sums[-1])
            else:
                self.sums.append(zlib.crc32(part))
            self.size, view = self.size + len(part), view[len(part) :]


def side_file(files: dict[str, tuple[int, list[int]]], settings: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Returns the content of the file of checksums.

    Args:
        files: name -> its bytes, and the checksums of its blocks.
        settings: name of a JSON file -> its values.
    """
    return sealed({"block": BLOCK_BYTES, "files": files, "settings": dict(settings)})


def json_values(file: Path) -> Any:
    """Returns the values in a JSON file; None if there is no such file.

    Raises:
        OSError: the file system fails.
        ValueError, RecursionError: it is not JSON.
    """
    if not file.is_file():
        return None
    return json.loads(read_regular(file))


def changed_settings(folder: Path, names: Sequence[str]) -> list[str]:
    """Returns a text for each value in JSON files of a folder that differs from what was saved beside the checksums.

    These files are made to be edited, so their bytes are not compared.

    Raises:
        Error: the file of checksums is damaged, or one of the files cannot be read.
    """
    source = folder / SIDE_FILE
    if not source.exists():
        return []
    try:
        saved = unsealed(source).get("settings", {})
        pairs = [(name, dict(saved[name]), dict(json_values(folder / name) or {})) for name in names if saved.get(name)]
    except OSError as error:
        raise Error(f"{folder} cannot be read: {error.strerror}", fix=READABLE) from error
    except INVALID_CONTENT as error:
        raise invalid_content(source, error) from error
    absent = object()
    return [
        f"`{key}` in {name}"
        for name, written, current in pairs
        for key in {**written, **current}
        if written.get(key, absent) != current.get(key, absent)
    ]


def expect_unchanged(folder: Path, rank: int, ranks: int) -> None:
    """Compares the blocks of files with their checksums; rank `rank` compares the blocks `rank`, `rank + ranks`, ...

    So all ranks together read each byte once, whatever parts of the tensors they read afterwards. A folder that another
    program wrote has no checksums, and is not compared.

    Raises:
        Error: a file has changed since it was written; names the file.
    """
    for name, (size, sums, block) in checksums_in(folder).items():
        file = folder / name
        try:
            unchanged = _same_blocks(file, size, sums, block, rank, ranks)
        except OSError as error:
            raise Error(f"{file} cannot be read: {error.strerror}", fix=READABLE) from error
        if not unchanged:
            stale = STALE.format(folder / SIDE_FILE)
            raise Error(f"{name} is not what was written, according to {SIDE_FILE}", at=str(file), fix=stale)


SAMPLES, SAMPLE = 16, 4096
"""The number of samples of each file that are compared between ranks, and the bytes of a sample."""


def folder_fingerprint(folder: Path) -> tuple[int, list[Any]]:
    """Returns a checksum of the model in a folder, and the identities of its files, which change if one is replaced.

    The checksum is of the names, the sizes and some samples of the files; 0 if the folder cannot be read.
    """
    try:
        files = sorted(file for file in folder.iterdir() if file.name == "config.json" or _of_tensors(file.name))
        stats = [file.stat() for file in files]
        identities = [
            (file.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            for file, status in zip(files, stats, strict=True)
        ]
        number = 0
        for file, size in zip(files, (status.st_size for status in stats), strict=True):
            number = zlib.crc32(f"{file.name} {size}".encode(), number)
            with open_regular(file) as source:
                for i in range(SAMPLES):
                    source.seek(i * max(size - SAMPLE, 0) // (SAMPLES - 1))
                    number = zlib.crc32(source.read(SAMPLE), number)
        return number, identities
    except OSError:
        return 0, []


def _of_tensors(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json")) or name == SIDE_FILE


def checksums_in(folder: Path) -> dict[str, tuple[int, list[int], int]]:
    """Returns the files of a folder that have checksums: name -> bytes, checksums of its blocks, bytes of a block.

    Raises:
        Error: the file of checksums is damaged.
    """
    source = folder / SIDE_FILE
    if not source.exists():
        return {}
    content = unsealed(source)
    try:
        # Only names: a path in the file must not lead out of the folder.
        block, files = content["block"], {Path(name).name: row for name, row in content["files"].items()}
        for name, (size, sums) in files.items():
            if "\0" in name or not type(block) is type(size) is int or not 0 < block <= LARGEST:
                raise ValueError(f"the blocks of {name!r} are {size} bytes in {block}")
            if len(sums) != -(-size // block):
                raise ValueError(f"{len(sums)} checksums of {name}")
        return {name: (size, list(sums), block) for name, (size, sums) in files.items()}
    except INVALID_CONTENT as error:
        raise invalid_content(source, error) from error


def _same_blocks(file: Path, size: int, sums: Sequence[int], block: int, rank: int, ranks: int) -> bool:
    with open_regular(file) as source:
        if os.fstat(source.fileno()).st_size != size:
            return False
        for i in range(rank, len(sums), ranks):
            source.seek(i * block)
            if zlib.crc32(source.read(block)) != sums[i]:
                return False
    return True
