"""Reads text: files, documents, and bytes in a training part and a held-out part, from which windows are taken.

The windows depend on (seed, step) alone. Every rank of a tensor-parallel model must get the same batch, and so must the
single-process run that it is compared with. So nothing here has a shuffling state, and files are in sorted order.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.1  # The last tenth of the corpus.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """The bytes of a text, divided into two parts.

    Attributes:
        train: [bytes], uint8.
        held_out: [bytes], uint8; no model trains on these.
    """

    train: Tensor
    held_out: Tensor

    def __str__(self) -> str:
        return f"{len(self.train) / 1e6:.1f} MB to train on, {len(self.held_out) / 1e6:.1f} MB held out"


def load(paths: Sequence[str | Path] = ()) -> Corpus:
    """Returns the corpus of these files and of the text files in these folders; by default of Python's source code.

    Raises:
        ValueError: a path does not exist, or there are no bytes to train on.
    """
    text = b"".join(file.read_bytes() for file in files(paths))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(data) - max(1, int(len(data) * HELD_OUT))
    return Corpus(data[:cut], data[cut:])


def files(paths: Sequence[str | Path] = ()) -> list[Path]:
    """Returns these files and the text files in these folders, in order; by default Python's source code.

    Raises:
        ValueError: a path does not exist, or all files together have less than two bytes.
    """
    found = [file for path in paths for file in _files(Path(path))] if paths else standard_library()
    size = sum(file.stat().st_size for file in found)
    if size < 2:
        where = ", ".join(map(str, paths)) or "the standard library's folder"
        raise ValueError(f"no text in {where}: {len(found)} text files, {size} bytes. Try --data FILE")
    return found


def documents(files: Sequence[Path]) -> Iterator[str]:
    """Yields the documents that have text: a file is a document; in a .jsonl file the "text" of each line is one.

    Raises:
        ValueError: a line of a .jsonl file is not an object with a "text".
    """
    for file in files:
        texts = json_texts(file) if file.suffix == ".jsonl" else [file.read_bytes().decode(errors="replace")]
        yield from (text for text in texts if text.strip())


def json_texts(file: Path) -> Iterator[str]:
    """Yields the "text" of each line.

    Raises:
        ValueError: a line is not an object with a "text".
    """
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f'{file}, line {number}: not an object with a "text": {line.strip()[:60]}') from None


def standard_library() -> list[Path]:
    """Returns the Python files of the standard library (about 12 MB), without its tests and the installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in sorted(root.rglob("*.py")) if not NOT_STDLIB & set(file.relative_to(root).parts)]


def windows(data: Tensor, length: int, batch: int, step: int, seed: int = 0) -> Tensor:
    """Returns windows of the data, at places drawn from (seed, step): [batch length], int64.

    Raises:
        ValueError: the data is shorter than a window.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(_room(data, length), (batch,), generator=generator)
    return _cut(data, starts, length)


def spread(data: Tensor, length: int, count: int) -> Tensor:
    """Returns `count` windows, spread evenly from the first byte of the data to the last: [count length], int64.

    Raises:
        ValueError: the data is shorter than a window.
    """
    return _cut(data, torch.linspace(0, _room(data, length) - 1, count, dtype=torch.float64).long(), length)


def _cut(data: Tensor, starts: Tensor, length: int) -> Tensor:
    return data[starts[:, None] + torch.arange(length)].long()


def _room(data: Tensor, length: int) -> int:
    """Returns the number of places at which a window of this length can start."""
    if len(data) < length:
        raise ValueError(f"the text is too short: {len(data)} bytes, a window is {length}. Try a smaller --block")
    return len(data) - length + 1


def _files(path: Path) -> list[Path]:
    """Returns the file itself; for a folder all its text files that are not hidden, in sorted order."""
    if not path.exists():
        raise ValueError(f"--data {path}: no such file or folder")
    if path.is_file():
        return [path]
    found = (file for file in sorted(path.rglob("*")) if file.is_file())
    return [file for file in found if not _hidden(file.relative_to(path)) and _is_text(file)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_text(file: Path) -> bool:
    """Whether the file is text, as git decides it: no zero byte among the first 8,000."""
    with file.open("rb") as opened:
        return b"\0" not in opened.read(8000)
