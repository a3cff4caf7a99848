"""Checkpoints as tests of them make and compare them."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hf_families
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import autotp
from autotp.checkpoint.files.checksums import sealed, unsealed
from autotp.checkpoint.files.tensor_sources import Box

LAYOUTS = {
    "gpt2": "fused q | k | v, turned weights, a tied head, no head in the file",
    "gpt_neox": "q, k and v interleaved by head",
    "llama": "two key/value heads: uneven on three ranks, empty parts; gated",
    "phi3": "gate and up in one weight",
    "mixtral": "experts apart in the file, stacked and joined in the module",
    "gpt_oss": "experts stacked in the file",
    "bert": "a tied decoder with a bias of its own",
    "t5": "three names of one weight",
    "marian": "positions that are in no file",
}
BATCHED = {"experts_implementation": "batched_mm"}


def family(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A model, inputs, and what else must be said about it."""
    torch.manual_seed(0)
    model, inputs = hf_families.FAMILIES[name]()
    return model, inputs, {"config": BATCHED if name in ("mixtral", "gpt_oss") else None, "example_inputs": inputs}


def shared(rank: int) -> Path:
    """A new folder, the same on all ranks."""
    made = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(made)
    return Path(made[0])


def saved(model: Any, folder: Path, rank: int, **given: Any) -> Path:
    """The folder, with the model in it as transformers saves it."""
    if rank == 0:
        model.save_pretrained(folder, **given)
    dist.barrier()
    return folder


def files_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def expect_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(autotp.Error) as raised:
        call()
    return str(raised.value)


@contextmanager
def changed(file: Path, rank: int, content: bytes | None) -> Iterator[None]:
    """Within, a file has another content, or is gone."""
    before = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.unlink()
        if content is not None:
            file.write_bytes(content)
    dist.barrier()
    yield
    dist.barrier()
    if rank == 0:
        file.write_bytes(before)
    dist.barrier()


def bit_flips(file: Path, draw: random.Random, count: int) -> Iterator[bytes]:
    """The content of a file with one bit changed, so many times."""
    before = file.read_bytes()
    for _ in range(count):
        at = draw.randrange(len(before))
        yield before[:at] + bytes([before[at] ^ 1 << draw.randrange(8)]) + before[at + 1 :]


def torn(file: Path, draw: random.Random, count: int) -> Iterator[bytes | None]:
    """The content of a file that ends too early, is longer, has a page of zeros or of another place, or is gone."""
    before = file.read_bytes()
    yield None
    yield b""
    yield before + b"\0"
    for _ in range(count):
        at, size = draw.randrange(len(before)), draw.randrange(1, 4096)
        yield before[:at]
        yield before[:at] + b"\xff" * len(before[at : at + size]) + before[at + size :]


def edited(step: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes what the manifest says, its checksum included."""
    content = unsealed(step / "manifest.json")
    change(content)
    del content["crc32"]
    (step / "manifest.json").write_bytes(sealed(content))


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor that counts how many elements were read of it."""

    tensor: Tensor
    counts: list[int] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, box: Box) -> Tensor:
        self.counts.append(math.prod(b - a for a, b in box))
        return self.tensor[tuple(slice(a, b) for a, b in box)]
