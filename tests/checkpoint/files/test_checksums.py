"""checksums: a file that ends in its checksum is whole, or it is refused."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

import autotp
from autotp.checkpoint.files import checksums
from autotp.checkpoint.files.checksums import sealed, unsealed
from autotp.checkpoint.manifest import read_manifest


def test_unsealed_sees_any_flipped_bit_or_cut(tmp_path: Path) -> None:
    file, text = tmp_path / "x", sealed({"a": [1, "\ud800", float("inf")], "b": {}})
    file.write_bytes(text)
    assert unsealed(file)["a"] == [1, "\ud800", float("inf")]
    for at in range(len(text) * 8):
        data = bytearray(text)
        data[at // 8] ^= 1 << at % 8
        file.write_bytes(data)
        with pytest.raises(autotp.Error, match="is damaged: its checksum does not match"):
            unsealed(file)
    for length in range(len(text)):
        file.write_bytes(text[:length])
        with pytest.raises(autotp.Error, match="is damaged"):
            unsealed(file)


def test_sparse_files_larger_than_allowed_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the disk they take nothing, and in memory all that they seem to have."""
    monkeypatch.setattr(checksums, "MOST_SEALED", 2**20)
    file = tmp_path / "manifest.json"
    text = bytes(2**20) + b',\n"crc32": '
    file.write_bytes(text + f'"{zlib.crc32(text):08x}"}}\n'.encode())
    with pytest.raises(autotp.Error, match=r"manifest\.json cannot be read: it has 1,048,\d\d\d bytes, and at most"):
        read_manifest(tmp_path)
