"""checksum_file: folders of transformers that we write have a file beside the weights; transformers does not mind."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import message
from hugging_face import family
from ranks import Checks, shared, silence
from safetensors.torch import save_file
from trainers import bit_flips, changed, torn

import autotp
from autotp.checkpoint.files.checksums import sealed, unsealed
from autotp.integrations.transformers.files import checksum_file
from autotp.integrations.transformers.files.checksum_file import SIDE_FILE, SummedFile, expect_unchanged, side_file

checks = Checks(timeout=480)


def written(folder: Path, data: bytes, steps: Iterator[int]) -> Path:
    """A file that is written in such steps, and its checksums."""
    with (folder / "x").open("wb") as opened:
        file, at = SummedFile(opened), 0
        while at < len(data):
            size = next(steps)
            file.write(data[at : at + size])
            at += size
    assert (folder / "x").read_bytes() == data
    (folder / SIDE_FILE).write_bytes(side_file({"x": (file.size, file.sums)}))
    return folder / "x"


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1234])
def test_ranks_together_see_any_flipped_bit_of_a_file(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the steps in which it is written: the ranks together see any bit, each reading its part."""
    monkeypatch.setattr(checksum_file, "BLOCK_BYTES", 100)
    draw, data = random.Random(size), random.Random(1).randbytes(size)
    file = written(tmp_path, data, iter(lambda: draw.randrange(1, 300), None))
    for at in range(0, size * 8, 7):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        file.write_bytes(flipped)
        seen = []
        for rank in range(3):
            try:
                expect_unchanged(tmp_path, rank, 3)
            except autotp.Error as error:
                seen.append((rank, error.problem))
        assert seen == [(at // 8 // 100 % 3, f"x is not what was written, according to {SIDE_FILE}")]
    file.write_bytes(data)
    for rank in range(3):
        expect_unchanged(tmp_path, rank, 3)


@pytest.mark.parametrize("block", [10**18, 10**30, -5, 0, float("inf"), float("nan"), "a"])
def test_checksums_with_impossible_block_sizes_are_refused(block: Any, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / SIDE_FILE).write_bytes(sealed({"block": block, "files": {"x": [3, [1]]}}))
    with pytest.raises(autotp.Error, match="is not valid"):
        expect_unchanged(tmp_path, 0, 1)


@pytest.mark.timeout(20)
def test_pipe_with_a_checksum_is_refused(tmp_path: Path) -> None:
    """Nobody waits for it."""
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / SIDE_FILE).write_bytes(sealed({"block": 1, "files": {"model.safetensors": [0, []]}}))
    with pytest.raises(autotp.Error, match=r"model\.safetensors cannot be read: it is not a regular file"):
        expect_unchanged(tmp_path, 0, 1)


@checks.on(2)
def from_pretrained_sees_6_damages(rank: int, n: int) -> None:
    damaged(rank, n, 6)


@checks.on(2, rare=True)
def from_pretrained_sees_150_damages(rank: int, n: int) -> None:
    damaged(rank, n, 150)


def damaged(rank: int, n: int, count: int) -> None:
    """Any bit of any file of weights: an error on every rank that names it."""
    root, draw = shared(rank), random.Random(0)
    model, inputs, _ = family("llama")
    kind = type(model)
    folder = root / "a"
    autotp.save_pretrained(autotp.parallelize(model, n, example_inputs=inputs), folder, max_shard_size="80KB")
    files = sorted([*folder.glob("*.safetensors*"), folder / SIDE_FILE])
    assert len(files) > 3
    for file in files[:1] + files[-3:]:
        for content in [*bit_flips(file, draw, count), *torn(file, draw, count // 3)]:
            if (content is None and file.name == SIDE_FILE) or content == file.read_bytes():
                continue
            with changed(file, rank, content):
                text = message(lambda: autotp.from_pretrained(folder, n, example_inputs=inputs))
                assert str(file) in text or file.name in text.splitlines()[0], text
    whole = kind.from_pretrained(folder)
    parallel = autotp.from_pretrained(folder, n, example_inputs=inputs)
    assert all(torch.equal(p, parallel.get_parameter(k)) for k, p in whole.named_parameters())


@checks.on(1)
def weights_overwritten_by_another_program_are_explained(rank: int, n: int) -> None:
    """Without the file nothing is compared; where another program wrote over our weights, the error says what to do."""
    root = shared(rank)
    model, inputs, _ = family("llama")
    kind = type(model)
    parallel = autotp.parallelize(model, n, example_inputs=inputs)
    for name in ("a", "b"):
        autotp.save_pretrained(parallel, root / name)
    (root / "a" / SIDE_FILE).unlink()
    given: dict[str, Any] = {"example_inputs": inputs}
    alone = kind.from_pretrained(root / "a")
    with torch.no_grad():
        alone.model.norm.weight.add_(1)
    autotp.from_pretrained(root / "a", n, **given)
    alone.save_pretrained(root / "b")
    text = message(lambda: autotp.from_pretrained(root / "b", n, **given))
    beside = root / "b" / SIDE_FILE
    assert text.splitlines()[1:] == [
        f"  at       {root / 'b' / 'model.safetensors'}",
        f"  try      copy it anew; if another program wrote it, remove {beside}: nothing is compared then",
    ]
    (root / "b" / "model.safetensors").unlink()
    alone.save_pretrained(root / "c", max_shard_size="80KB")
    shutil.copy(root / "b" / SIDE_FILE, root / "c")
    assert "cannot be read: No such file" in message(lambda: autotp.from_pretrained(root / "c", n, **given))
    (root / "c" / SIDE_FILE).write_bytes(side_file({}))
    autotp.from_pretrained(root / "c", n, **given)
    save_file({}, root / "c" / "model-extra.safetensors")
    (root / "c" / SIDE_FILE).write_bytes(side_file({"model-extra.safetensors": (8 + 2, [0])}))
    assert " is not what was written" in message(lambda: autotp.from_pretrained(root / "c", n, **given))
    for name in ("b", "c"):  # Saved anew by us, all is well.
        autotp.save_pretrained(parallel, root / name)
        autotp.from_pretrained(root / name, n, **given)


@checks.on(2)
def damage_of_one_rank_s_copy_is_seen(rank: int, n: int) -> None:
    """Each rank reads a copy of its own, and one copy is damaged where only the other rank would have looked."""
    root, (model, inputs, _) = shared(rank), family("llama")
    autotp.save_pretrained(autotp.parallelize(model, n, example_inputs=inputs), root / "0")
    mine = root / str(rank)
    if rank:
        shutil.copytree(root / "0", mine)
    autotp.from_pretrained(mine, n, example_inputs=inputs)
    file = mine / "model.safetensors"
    if rank:
        at, size = 10_000, file.stat().st_size
        with file.open("r+b") as opened:
            opened.seek(size - at)
            (byte,) = opened.read(1)
            opened.seek(size - at)
            opened.write(bytes([byte ^ 1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_file, "SAMPLES", 2)
        patch.setattr(checksum_file, "SAMPLE", 16)
        text = message(lambda: autotp.from_pretrained(mine, n, example_inputs=inputs))
    assert f"model.safetensors is not what was written, according to {SIDE_FILE}" in text
    assert str(root / "1" / "model.safetensors") in text


@checks.on(1)
def changed_settings_are_loaded_with_a_warning(rank: int, n: int) -> None:
    """Settings that another hand or a disk changed are loaded, with a warning that names them; one bit of a number."""
    folder, (model, inputs, _) = shared(rank) / "a", family("llama")
    autotp.save_pretrained(autotp.parallelize(model, n, example_inputs=inputs), folder)
    with silence():
        autotp.from_pretrained(folder, n, example_inputs=inputs)
    for name, old, new in (
        ("config.json", '"rms_norm_eps": 1e-0', '"rms_norm_eps": 1e-3'),
        ("generation_config.json", "{", '{"top_k": 3,'),
    ):
        file = folder / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        key = new.split('"')[1]
        with pytest.warns(UserWarning, match=f"`{key}` in {name} is not what `save_pretrained` wrote"):
            autotp.from_pretrained(folder, n, example_inputs=inputs)
        file.write_text(text)
    with silence():
        autotp.from_pretrained(folder, n, example_inputs=inputs, config={"rms_norm_eps": 0.1})
    beside = unsealed(folder / SIDE_FILE)
    del beside["crc32"]
    for settings in (7, [1], {"config.json": 5}, {"config.json": [1]}):
        (folder / SIDE_FILE).write_bytes(sealed({**beside, "settings": settings}))
        assert " is not valid: " in message(lambda: autotp.from_pretrained(folder, n, example_inputs=inputs))


@pytest.mark.system
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
