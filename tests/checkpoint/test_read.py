"""read: a random state that no generator takes is an error, and what it takes is read as it was.

What else is read, and that nothing is changed by a failure, is in test_save and test_damage: it needs trainers.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from errors import message
from torch import Tensor

from autotp.checkpoint.files.tensor_pieces import file_of
from autotp.checkpoint.manifest import MANIFEST, Manifest, manifest_content, read_manifest
from autotp.checkpoint.read import read_random_state

ABOUT = {"step": 7, "optimizer": "AdamW", "sizes": {}, "model": {}, "more": {}, "values": {}, "groups": []}


def written(folder: Path, state: Tensor) -> Manifest:
    """A checkpoint of one rank, with this tensor as `state`."""
    data = state.numpy().tobytes()
    piece = [[0] * state.dim(), list(state.shape), 0, 0, zlib.crc32(data)]
    row = ["state", str(state.dtype).removeprefix("torch."), list(state.shape)]
    (folder / file_of(0)).write_bytes(data)
    (folder / MANIFEST).write_bytes(manifest_content(ABOUT, [[len(data), [[row, piece]]]]))
    return read_manifest(folder)


def test_random_state_is_read_as_written(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = read_random_state(written(tmp_path, state), "state", "cpu")
    assert found.dtype == torch.uint8 and torch.equal(found, state)


@pytest.mark.parametrize(
    "state",
    [torch.get_rng_state()[:-8], torch.zeros(5056, dtype=torch.uint8), torch.zeros(5056)],
    ids=["short", "zeros", "floats"],
)
def test_random_state_that_no_generator_takes_is_refused(state: Tensor, tmp_path: Path) -> None:
    """The checkpoint has these bytes, with their right checksum."""
    before = torch.get_rng_state()
    found = message(lambda: read_random_state(written(tmp_path, state), "state", "cpu"))
    assert found.startswith(f"{tmp_path} has no random state in state: ")
    assert torch.equal(torch.get_rng_state(), before)
