"""Files of torch.save: their tensors, and nothing that runs."""

from __future__ import annotations

import os
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import autotp
from autotp.tools.conversion.torch_files import Unread, read_torch_file, state_dict_in

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}


class Own:
    """A class that no reader knows."""


@pytest.mark.parametrize("key", [None, "model", "state_dict"])
def test_state_dict_is_found_at_the_top_or_under_a_key(tmp_path: Path, key: str | None) -> None:
    torch.save(STATE if key is None else {key: STATE, "epoch": 3}, tmp_path / "m.pt")
    found = state_dict_in(tmp_path / "m.pt")
    assert found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_objects_in_a_torch_file_are_left_unread(tmp_path: Path) -> None:
    torch.save({"args": Namespace(n=3), "own": Own(), "dtype": torch.bfloat16}, tmp_path / "m.pt")
    content = read_torch_file(tmp_path / "m.pt")
    assert (type(content["args"]), type(content["own"]), content["dtype"]) == (Unread, Unread, torch.bfloat16)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"a": 3}, "`a` is a int, and no tensor"),
        ([STATE], "has no state dict"),
        ({1: STATE["n"]}, "has no state dict"),
        (Evil(), "cannot be read without running code|no file that can be read"),
    ],
    ids=["number", "list", "keys", "code"],
)
def test_torch_files_without_a_state_dict_are_refused(tmp_path: Path, content: Any, told: str) -> None:
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(autotp.Error, match=told):
        state_dict_in(tmp_path / "m.pt")


@pytest.mark.parametrize("content", [None, b"", b"no zip", b"PK\x03\x04 cut"], ids=["none", "empty", "text", "cut"])
def test_unreadable_torch_files_are_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(autotp.Error, match=r"m\.pt"):
        read_torch_file(tmp_path / "m.pt")


def test_compressed_torch_files_are_refused(tmp_path: Path) -> None:
    """A file of a few bytes would be unpacked to more than the memory has; torch compresses nothing."""
    torch.save({"a": torch.zeros(10**6)}, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as source,
        zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in source.namelist():
            packed.writestr(name, source.read(name) + b"]" * 10**6 * name.endswith("data.pkl"))
    assert (tmp_path / "m.pt").stat().st_size < 20_000
    with pytest.raises(autotp.Error, match=r"m\.pt is compressed: .*data"):
        read_torch_file(tmp_path / "m.pt")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(2**20, 2**20), torch.zeros(3).as_strided((2, 3), (0, 1)), torch.empty(9, device="meta"),
        torch.eye(3).to_sparse(),
    ],
    ids=["expanded", "strided", "meta", "sparse"],
)  # fmt: skip
def test_tensors_larger_than_their_torch_file_are_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    torch.save({"a": tensor}, tmp_path / "m.pt")
    with pytest.raises(autotp.Error, match=r"`a` has elements that are not in the file|no file that can be read"):
        state_dict_in(tmp_path / "m.pt")


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_torch_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.pt")
    with pytest.raises(autotp.Error, match=r"m\.pt cannot be read: it is not a regular file"):
        read_torch_file(tmp_path / "m.pt")
