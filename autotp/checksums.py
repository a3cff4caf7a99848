"""Checksums that show whether a file is as it was written.

zlib's CRC-32: it sees every change of up to 32 bits in a row, and of four thousand million others misses one. It is
fast (2.4 GB/s on the core that this was written on; blake2b 1.1), and no signature: who can write a file can write its
checksum.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from autotp.errors import Error

SEAL = re.compile(rb'(.*,\n"crc32": )"([0-9a-f]{8})"\}\n', re.DOTALL)


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a tensor on the CPU, without a copy where it lies in a row."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def sealed(content: dict[str, Any]) -> bytes:
    """A JSON object as a file, which ends in the checksum of all that is before."""
    text = json.dumps(content, separators=(",", ":"))[:-1].encode() + b',\n"crc32": '
    return text + f'"{zlib.crc32(text):08x}"}}\n'.encode()


def unsealed(file: Path) -> dict[str, Any]:
    """What `sealed` made a file of.

    Raises:
        Error: the file is not there, cut short or changed; names it.
    """
    try:
        found = SEAL.fullmatch(file.read_bytes())
        if found is not None and int(found[2], 16) == zlib.crc32(found[1]):
            content: dict[str, Any] = json.loads(found[0])
            return content
    except OSError as error:
        raise Error(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        pass
    raise Error(f"{file} is damaged: its checksum is another")


def write_whole(file: Path, content: bytes) -> None:
    """Writes a small file, so that it is on the disk."""
    with file.open("xb") as opened:
        opened.write(content)
        sync(opened)


def sync(opened: BinaryIO) -> None:
    """What was written is on the disk."""
    opened.flush()
    os.fsync(opened.fileno())
