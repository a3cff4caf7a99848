"""Small files that end in their checksum, which shows whether a file has changed since it was written.

The checksum is zlib's CRC-32: it detects every change of up to 32 consecutive bits, and misses one in 2**32 other
changes. It is fast (2.4 GB/s on one core, where blake2b has 1.1). It is not a signature: a program that can change a
file can also change its checksum.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from autotp.errors import Error

INVALID_CONTENT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RuntimeError)
"""The exceptions that content of an unexpected form raises: also nested lists without end, and huge numbers."""

EARLIER = "an earlier checkpoint, or this one copied again from where it is whole"
READABLE = "a file that this process may read, on a disk that works"
WRITABLE = "a folder that this process may write, on a disk with free space"
"""The `fix` for files that cannot be used."""
SEAL = re.compile(rb'(.*,\n"crc32": )"([0-9a-f]{8})"\}\n', re.DOTALL)


def bytes_of(tensor: Tensor) -> Any:
    """Returns the bytes of a tensor; without a copy, if it is contiguous and on the CPU."""
    # torch negates and conjugates by a flag, and the bytes in memory are those before.
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def sealed(content: dict[str, Any]) -> bytes:
    """Returns a JSON object as the content of a file that ends in the checksum of all bytes before."""
    # Without the last brace, which follows the checksum.
    text = json.dumps(content, separators=(",", ":"))[:-1].encode() + b',\n"crc32": '
    return text + f'"{zlib.crc32(text):08x}"}}\n'.encode()


def open_regular(file: Path) -> BinaryIO:
    """Opens a regular file to read; a pipe may never have data, and a device may never end.

    Raises:
        OSError: it is not a regular file, or the file system fails.
    """
    # O_NONBLOCK: to open a pipe would wait for its writer.
    number = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(number, "rb")


MOST_SEALED = 2**32
"""The most bytes of a file that `sealed` made."""
MOST_JSON = 10**8
"""The most bytes of another file that is read as a whole: a configuration, an index, the header of tensors."""


def read_regular(file: Path, limit: int = MOST_JSON) -> bytes:
    """Returns the content of a regular file. A file with holes has many more bytes than it has on the disk.

    Raises:
        OSError: the file has more than `limit` bytes, it is not a regular file, or the file system fails.
    """
    with open_regular(file) as source:
        if (size := os.fstat(source.fileno()).st_size) > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {limit:,} are read")
        return source.read()


def unsealed(file: Path) -> dict[str, Any]:
    """Returns the JSON object of a file that `sealed` made.

    Raises:
        Error: the file is missing, truncated, changed, or not a JSON object; names the file.
    """
    try:
        match = SEAL.fullmatch(read_regular(file, MOST_SEALED))
    except OSError as error:
        raise Error(f"{file} cannot be read: {error.strerror}", fix=READABLE) from error
    if match is None or int(match[2], 16) != zlib.crc32(match[1]):
        raise Error(f"{file} is damaged: its checksum does not match", fix=EARLIER)
    try:
        return dict(json.loads(match[0]).items())
    except INVALID_CONTENT as error:
        raise invalid_content(file, error) from error


def invalid_content(file: Path, error: BaseException) -> Error:
    """Returns the Error for a file whose checksum is right and whose content has an unexpected form."""
    return Error(f"{file} is not valid: {type(error).__name__}: {error}", fix=EARLIER)


def write_whole(file: Path, content: bytes) -> None:
    """Writes a small file, and returns once it is on the disk."""
    with file.open("xb") as target:
        target.write(content)
        sync_file(target)


def sync_file(opened: BinaryIO) -> None:
    """Returns once all that was written to an open file is on the disk."""
    opened.flush()
    os.fsync(opened.fileno())
