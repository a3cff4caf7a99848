"""tensor_pieces: every dtype and shape, written by several ranks, comes back bit for bit in any box."""

from __future__ import annotations

import json
import os
import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autotp
from autotp.checkpoint.files.checksums import bytes_of
from autotp.checkpoint.files.tensor_pieces import Piece, StoredPieces, read_piece, tiled, write_pieces
from autotp.checkpoint.manifest import read_manifest

DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
PLAIN = [x for x in DTYPES if not str(x).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))]


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bytes as a tensor; of bools, zeros and ones."""
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 4)], ids=str)
def test_pieces_of_every_dtype_come_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = bits(shape, dtype)
    (piece,) = write_pieces(tmp_path, 0, [((0,) * len(shape), tensor)])
    piece = Piece.of(json.loads(json.dumps(piece.row())))
    found = read_piece(tmp_path, "x", piece, dtype)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bytes(bytes_of(found)) == bytes(bytes_of(tensor))


def test_stored_pieces_read_any_box(tmp_path: Path) -> None:
    """Cut at random into boxes over two files, and read in other boxes."""
    draw, whole = random.Random(0), torch.arange(12 * 10).view(12, 10)
    cuts = [0, 5, 8, 12], [0, 3, 10]
    boxes = [((a, c), (b, d)) for a, b in pairwise(cuts[0]) for c, d in pairwise(cuts[1])]
    pieces: list[Piece] = []
    for rank in (0, 1):
        mine = [(low, whole[low[0] : high[0], low[1] : high[1]]) for low, high in boxes[rank::2]]
        pieces += write_pieces(tmp_path, rank, mine)
    tensor = StoredPieces(whole.dtype, (12, 10), tuple(pieces))
    assert torch.equal(tensor.whole(tmp_path, "x"), whole)
    for _ in range(50):
        a, c = draw.randrange(12), draw.randrange(10)
        b, d = draw.randrange(a, 12) + 1, draw.randrange(c, 10) + 1
        into = torch.zeros(b - a, d - c, dtype=whole.dtype)
        tensor.read(tmp_path, "x", (a, c), into)
        assert torch.equal(into, whole[a:b, c:d])
    with pytest.raises(autotp.Error, match="does not have all of `x`"):
        StoredPieces(whole.dtype, (12, 10), tuple(pieces[1:])).whole(tmp_path, "x")


def test_tiled_refuses_boxes_that_overlap_or_leave_gaps() -> None:
    """As many elements as there are, and yet one twice, or one outside."""
    boxes = {
        True: [[((0,), (4,)), ((4,), (4,))], [((0, 0), (2, 3)), ((0, 3), (2, 1)), ((2, 0), (1, 4))], [((), ())]],
        False: [
            [((0,), (4,)), ((0,), (4,))], [((0,), (4,)), ((2,), (4,))], [((1,), (8,))], [((0,), (4,))], [],
            [((0, 0), (2, 3)), ((0, 2), (2, 1)), ((2, 0), (1, 4))], [((), ()), ((), ())],
        ],
    }  # fmt: skip
    shapes = {1: (8,), 2: (3, 4), 0: ()}
    for same, cases in boxes.items():
        for case in cases:
            pieces = [Piece(at, sizes, 0, 0, 0) for at, sizes in case]
            assert tiled(shapes[len(case[0][0]) if case else 1], pieces) == same, case


def test_pieces_of_strided_and_lazy_tensors_come_back(tmp_path: Path) -> None:
    strange = [torch.randn(4, 3).t(), torch.randn(3, dtype=torch.complex64).conj(), torch.ones(2, 2).expand(3, 2, 2)]
    strange.append(torch.randn(3, dtype=torch.complex64).conj().imag)  # Negated lazily.
    pieces = write_pieces(tmp_path, 0, [((0,) * x.dim(), x) for x in strange])
    for piece, x in zip(pieces, strange, strict=True):
        assert torch.equal(read_piece(tmp_path, "x", piece, x.dtype), x)


@pytest.mark.timeout(20)
def test_pipes_and_devices_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    """Nobody waits for a pipe or reads a device."""
    os.mkfifo(tmp_path / "manifest.json")
    (tmp_path / "rank-00000.tensors").symlink_to("/dev/zero")
    with pytest.raises(autotp.Error, match=r"manifest\.json cannot be read: it is not a regular file"):
        read_manifest(tmp_path)
    with pytest.raises(autotp.Error, match="cannot be read: it is not a regular file"):
        read_piece(tmp_path, "x", Piece((0,), (4,), 0, 0, zlib.crc32(bytes(4))), torch.uint8)


def test_deeply_nested_sealed_json_is_refused(tmp_path: Path) -> None:
    """Lists in lists without end, in a file whose checksum is right."""
    for inner in (b"[" * 100000 + b"]" * 100000, b"1" * 5000):
        text = b'{"a":' + inner + b',\n"crc32": '
        (tmp_path / "manifest.json").write_bytes(text + f'"{zlib.crc32(text):08x}"}}\n'.encode())
        with pytest.raises(autotp.Error, match=r"manifest\.json is not valid"):
            read_manifest(tmp_path)
