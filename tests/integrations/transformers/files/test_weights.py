"""weights: sizes as people write them. Whole checkpoints are read and written in `test_pretrained.py`."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from errors import message
from trainers import Given

from autotp.distributed.mesh import Mesh
from autotp.integrations.transformers.files.weights import parse_size, write_checkpoint


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("200KiB", 204_800), ("7B", 7), ("0.5TiB", 2**39)],
)
def test_parse_size_reads_units(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("most", [100, 9_000, 40_000])
def test_write_checkpoint_on_a_full_disk_leaves_the_folder(most: int, tmp_path: Path) -> None:
    """A file that cannot be written cannot be closed either; the folder is what it was."""
    tensors = {name: Given(torch.ones(5000)) for name in "ab"}
    write_checkpoint(tmp_path / "out", tensors, Mesh(), 10**6, lambda new: None)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        text = message(lambda: write_checkpoint(tmp_path / "out", tensors, Mesh(), 10**6, lambda new: None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert text.startswith("the checkpoint cannot be written: [Errno 27] File too large")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
