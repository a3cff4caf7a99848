"""manifest: what it says is compared with the files, and every other content is an error that names the file."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import message

from autotp.checkpoint.files.checksums import EARLIER, sealed
from autotp.checkpoint.files.tensor_pieces import file_of
from autotp.checkpoint.manifest import FORMAT, MANIFEST, OF_FORMAT_1, Item, manifest_content, read_manifest

ABOUT = {"step": 7, "optimizer": "AdamW", "sizes": {}, "model": {}, "more": {}, "values": {}, "groups": []}


WHOLE = torch.arange(4.0)
PARTS = [WHOLE[:2].numpy().tobytes(), WHOLE[2:].numpy().tobytes()]
"""A tensor of four elements, of which each of two ranks has half."""


def content(change: Callable[[list[Any]], Any] = lambda pieces: None, **about: Any) -> bytes:
    pieces: list[Any] = [[[2 * rank], [2], rank, 0, zlib.crc32(part)] for rank, part in enumerate(PARTS)]
    change(pieces)
    return manifest_content({**ABOUT, **about}, [[8, [[["w", "float32", [4]], piece]]] for piece in pieces])


def written(folder: Path, manifest: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, part in enumerate(PARTS):
        (folder / file_of(rank)).write_bytes(part)
    (folder / MANIFEST).write_bytes(manifest)
    return folder


def test_manifest_reads_what_was_written(tmp_path: Path) -> None:
    found = read_manifest(written(tmp_path, content(step=9)))
    assert found.about["step"] == 9
    assert found.whole("w").equal(WHOLE)
    assert (
        message(lambda: found.pieces("v")) == f"{tmp_path / MANIFEST} is not valid: it has no v\n  try      {EARLIER}"
    )


def moved(pieces: list[Any]) -> None:
    pieces[1][0] = [1]


def too_long(pieces: list[Any]) -> None:
    pieces[1][3] = 4


def of_nobody(pieces: list[Any]) -> None:
    pieces[1][2] = 2


def negative(pieces: list[Any]) -> None:
    pieces[0][0] = [-2]


@pytest.mark.parametrize("change", [moved, too_long, of_nobody, negative])
def test_manifest_refuses_pieces_that_make_up_no_tensor(change: Callable[[list[Any]], Any], tmp_path: Path) -> None:
    """They overlap, end behind their file, or are in a file that is not there."""
    folder = written(tmp_path, content(change))
    assert message(lambda: read_manifest(folder)).startswith(f"{folder / MANIFEST} is not valid")


@pytest.mark.parametrize(
    "about", [{"step": "7"}, {"step": True}, {"groups": {}}, {"groups": [[{}, [["name", "keys"]]]]}]
)
def test_manifest_refuses_step_or_groups_of_wrong_types(about: dict[str, Any], tmp_path: Path) -> None:
    folder = written(tmp_path, content(**about))
    assert message(lambda: read_manifest(folder)).startswith(f"{folder / MANIFEST} is not valid")


def test_manifest_refuses_files_missing_or_of_another_size(tmp_path: Path) -> None:
    folder = written(tmp_path, content())
    file = folder / file_of(1)
    remedy = f"\n  try      remove {folder}: then an older checkpoint is used"
    file.write_bytes(b"1234567")
    assert message(lambda: read_manifest(folder)) == f"{file} has 7 bytes, and had 8 when it was written{remedy}"
    file.unlink()
    assert message(lambda: read_manifest(folder)) == f"{file} is missing{remedy}"
    file.mkdir()
    assert message(lambda: read_manifest(folder)) == f"{file} is not a regular file{remedy}"


def test_manifest_refuses_more_tensor_bytes_than_file_bytes(tmp_path: Path) -> None:
    """Whoever reads all tensors, or all data that names them, needs no more memory than the files have bytes."""
    twice: list[Any] = [["v", "float32", [2, 4]], [[0, 0], [1, 4], 0, 0, zlib.crc32(WHOLE.numpy().tobytes())]]
    rows = [twice, [twice[0], [[1, 0], *twice[1][1:]]]]
    folder = written(tmp_path, manifest_content(ABOUT, [[16, rows]]))
    (folder / file_of(0)).write_bytes(WHOLE.numpy().tobytes())
    assert "is not valid: ValueError: the tensors have more bytes than the files" in message(
        lambda: read_manifest(folder)
    )
    found = read_manifest(written(tmp_path, content()))
    one = {"": "tensor", "of": "w"}
    assert found.value([one])[0].equal(WHOLE)
    assert "is not valid: ValueError: w is there twice" in message(lambda: found.value({"a": one, "b": [one]}))


def test_item_row_and_choice_describe_its_tensor() -> None:
    item = Item("w", (2,), (4,), torch.zeros(2))
    assert item.row() == ["w", "float32", (4,)]
    assert item.choice() == ["w", (2,), 8, ["float32", (4,)]]


def test_manifest_refuses_formats_of_other_versions(tmp_path: Path) -> None:
    old, new = tmp_path / "old", written(tmp_path / "new", sealed({"format": FORMAT + 1}))
    old.mkdir()
    (old / OF_FORMAT_1).touch()
    first = "the autotp that wrote it, and full_state_dict there: reading this format can run code"
    assert f"{old} is of format 1, and this autotp reads {FORMAT}" in message(lambda: read_manifest(old))
    assert first in message(lambda: read_manifest(old))
    assert message(lambda: read_manifest(new)).splitlines()[0] == (
        f"{new} is of format {FORMAT + 1}, and this autotp reads {FORMAT}"
    )
    odd = written(tmp_path / "odd", sealed({"format": "2"}))
    assert f"{odd} is of format 2, and this autotp reads {FORMAT}" in message(lambda: read_manifest(odd))
