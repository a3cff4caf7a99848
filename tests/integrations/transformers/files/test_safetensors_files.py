"""safetensors_files: what is written in the format opens with safetensors; what is wrong with a file is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from errors import message
from safetensors.torch import load_file, save_file
from torch import Tensor

from autotp.checkpoint.files import checksums
from autotp.checkpoint.files.checksums import EARLIER
from autotp.integrations.transformers.files import safetensors_files
from autotp.integrations.transformers.files.safetensors_files import (
    STORED_DTYPES,
    Stored,
    append_tensor,
    header_of,
    index_of,
    shards_of,
    stored_tensors,
)


def written(folder: Path, tensors: dict[str, Tensor], largest: int = 10**9) -> Path:
    shards = shards_of(tensors, largest)
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(header_of(tensors, shard.names))
            for name in shard.names:
                append_tensor(file, tensors[name])
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(index_of(shards, 0))
    return folder


def every_dtype() -> dict[str, Tensor]:
    """Sizes that leave nothing aligned by itself; a scalar, an empty one, one that is not contiguous."""
    found = {name: (torch.arange(15).view(3, 5) % 2).to(dtype) for name, dtype in STORED_DTYPES.items()}
    return found | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "turned": torch.randn(4, 3).t()}


# ---- what is written


def test_files_open_with_safetensors(tmp_path: Path) -> None:
    tensors = every_dtype()
    found = load_file(written(tmp_path, tensors) / "model.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (found[name], tensor))), name


def test_tensors_are_split_over_files_with_an_index(tmp_path: Path) -> None:
    tensors = {name: torch.full((n,), float(n)) for name, n in (("a", 3), ("b", 3), ("c", 9), ("d", 1), ("e", 6))}
    written(tmp_path, tensors, largest=28)
    files = {"model-00001-of-00003.safetensors": "ab", "model-00002-of-00003.safetensors": "c"}
    files["model-00003-of-00003.safetensors"] = "de"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 0}, "weight_map": {n: f for f, names in files.items() for n in names}}
    assert {file: "".join(sorted(load_file(tmp_path / file))) for file in files} == files


def test_shards_put_tensors_of_wide_elements_first() -> None:
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1), "c": torch.ones(1, dtype=torch.float16)}
    assert [shard.names for shard in shards_of(tensors, 100)] == [("b", "c", "a")]


def test_header_refuses_a_dtype_that_safetensors_lacks() -> None:
    tensors = {"a": torch.ones(1, dtype=torch.complex128)}
    found = message(lambda: header_of(tensors, ["a"]))
    assert found.startswith("`a` is of dtype torch.complex128, which safetensors does not have\n  try      model.to(")


# ---- what is read


@pytest.mark.parametrize("largest", [10**9, 60], ids=["one", "several"])
def test_stored_tensors_read_any_box_of_any_dtype(tmp_path: Path, largest: int) -> None:
    tensors = every_dtype()
    found = stored_tensors(written(tmp_path, tensors, largest))
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        box = tuple((n // 3, n) for n in tensor.shape)
        part = tensor[tuple(slice(a, b) for a, b in box)]
        assert torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (found[name].read(box), part))), name


def test_reader_opens_a_file_anew_after_each_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotp.integrations.transformers.files.safetensors_files.BLOCK", 100)
    found = stored_tensors(written(tmp_path, {name: torch.ones(9) for name in "abc"}))
    handles = []
    for name in "abcabc":  # 36 bytes each
        assert torch.equal(found[name].read(((0, 9),)), torch.ones(9))
        handles.append(found[name].reader.opened)
    assert len({id(handle) for handle in handles}) == 2 and handles[0] is handles[2] and handles[3] is handles[5]


def test_folders_without_safetensors_are_refused(tmp_path: Path) -> None:
    assert message(lambda: stored_tensors(tmp_path / "no")) == (
        f"no such folder\n  at       {tmp_path / 'no'}\n  try      "
        "the path of a local folder that holds a checkpoint: nothing is fetched from a hub"
    )
    assert message(lambda: stored_tensors(tmp_path)) == (
        f"no checkpoint: neither model.safetensors nor model.safetensors.index.json is there\n  at       {tmp_path}\n"
        "  try      the folder that save_pretrained wrote"
    )
    (tmp_path / "pytorch_model.bin").touch()
    assert message(lambda: stored_tensors(tmp_path)) == (
        f"only safetensors are read, and here is pytorch_model.bin\n  at       {tmp_path}\n"
        "  try      load it once with transformers and write it with model.save_pretrained(folder), "
        "which is safetensors"
    )


def test_truncated_or_corrupt_safetensors_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, {"a": torch.ones(9), "b": torch.ones(9), "c": torch.ones(9)}) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    assert message(lambda: stored_tensors(tmp_path)) == (
        f"`b` is cut off: the file is shorter than its header says\n  at       {file}\n  try      {EARLIER}"
    )
    senseless = b'{"a":1}'
    for rest in (
        len(senseless).to_bytes(8, "little") + senseless,
        b"",
        whole[:5],
        whole[:20],
        b"\xff" * 100,
        whole + b"more",
    ):
        file.write_bytes(rest)
        assert message(lambda: stored_tensors(tmp_path)).startswith("the file is corrupt (")
        assert message(lambda: stored_tensors(tmp_path)).endswith(f"\n  at       {file}\n  try      {EARLIER}")


def test_a_dtype_that_torch_lacks_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, {"a": torch.ones(2, dtype=torch.uint8)}) / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"U8"', b'"F8"'))
    assert message(lambda: stored_tensors(tmp_path)).startswith("the file is corrupt (SafetensorError: ")


def test_an_index_that_names_missing_files_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    for text in ("", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x"}}'):
        index.write_text(text)
        assert message(lambda: stored_tensors(tmp_path)) == (
            f'the index is corrupt\n  expected JSON with a "weight_map": tensor name -> file name\n  at       {index}'
        )
    index.write_text('{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}')
    assert message(lambda: stored_tensors(tmp_path)) == (
        f"`b` is listed in y.safetensors, which is not there\n  at       {index}\n  try      {EARLIER}"
    )
    index.write_text('{"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}')
    assert message(lambda: stored_tensors(tmp_path)) == (
        f"`b` is listed in x.safetensors, which has no such tensor\n  at       {index}\n  try      {EARLIER}"
    )


def test_a_file_removed_before_its_read_is_named(tmp_path: Path) -> None:
    gone = Stored(tmp_path / "x.safetensors", "a", (2,), torch.float32)
    assert message(lambda: gone.read(((0, 1),))).startswith("`a` cannot be read: ")
    assert f"\n  at       {gone.file}\n" in message(lambda: gone.read(((0, 1),)))


def test_a_tensor_in_two_files_needs_the_index(tmp_path: Path) -> None:
    """The index says which; where it does not, nobody knows."""
    index = tmp_path / "model.safetensors.index.json"
    for name in "ab":
        save_file({"x": torch.ones(2), name: torch.ones(1)}, tmp_path / name)
    index.write_text(json.dumps({"weight_map": {"a": "a", "b": "b", "x": "a"}}))
    assert stored_tensors(tmp_path)["x"].file.name == "a"
    index.write_text(json.dumps({"weight_map": {"a": "a", "b": "b"}}))
    assert message(lambda: stored_tensors(tmp_path)) == (
        f"`x` is in a and in b, and the index does not say which\n  at       {index}\n  try      {EARLIER}"
    )


def test_an_index_of_nested_or_impossible_names_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for text in (
        '{"weight_map":' + "[" * 100000,
        '{"weight_map": {"a": "a\\u0000"}}',
        json.dumps({"weight_map": {"a": "a" * 999}}),
    ):
        index.write_text(text)
        assert message(lambda: stored_tensors(tmp_path)).startswith("the index is corrupt")


def test_oversized_headers_and_indexes_are_refused_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header or an index with holes is not read into the memory."""
    monkeypatch.setattr(safetensors_files, "MOST_JSON", 1000)
    monkeypatch.setattr(checksums.read_regular, "__defaults__", (1000,))
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    file.write_bytes((2000).to_bytes(8, "little") + b"{}" + b" " * 1998)
    assert message(lambda: stored_tensors(tmp_path)).startswith(
        "the file is corrupt (ValueError: a header of 2000 bytes is longer than 1000)"
    )
    file.rename(tmp_path / "x")
    index.write_text('{"weight_map": {}}' + " " * 2000)
    assert message(lambda: stored_tensors(tmp_path)).startswith("the index is corrupt")
