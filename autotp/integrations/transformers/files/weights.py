"""Reads and writes model weights, one tensor at a time: each rank reads its part; the first rank writes all parts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from autotp.checkpoint.files.atomic_folder import new_folder
from autotp.checkpoint.files.checksums import WRITABLE, write_whole
from autotp.checkpoint.files.tensor_pieces import nbytes
from autotp.display.progress import progress
from autotp.distributed.agreement import agree, expect_alike
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.integrations.transformers.files.checksum_file import SIDE_FILE, SummedFile, json_values, side_file
from autotp.integrations.transformers.files.safetensors_files import (
    INDEX,
    ONE_FILE,
    FileShard,
    append_tensor,
    header_of,
    index_of,
    shards_of,
)
from autotp.integrations.transformers.files.tensor_sources import Source, blocks_of_box, read_part, sliceable, whole_box
from autotp.sharding.layout import Layout

NAMED = "|".join(map(re.escape, (ONE_FILE, INDEX, SIDE_FILE)))
WEIGHTS = re.compile(rf"{NAMED}|model-\d{{5}}-of-\d{{5}}\.safetensors")
"""The names of the files of an earlier checkpoint, which a new checkpoint replaces."""


def read_parts(sources: Mapping[str, Source], layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, Tensor]:
    """Reads this rank's part of each tensor onto its device.

    At any time memory has the parts, and one block of a tensor; or one whole tensor, if it cannot be read in parts.

    Raises:
        Error: a tensor cannot be read; names the tensor and the file.
    """
    layout_by_name = {name: layouts.get(name) or Layout(source.shape) for name, source in sources.items()}
    # Allocate all parts first: between blocks, they would fragment the memory.
    parts = {
        name: torch.empty(layout_by_name[name].local_shape(mesh.rank), dtype=source.dtype, device=mesh.device)
        for name, source in sources.items()
    }
    with progress("reading", sum(map(nbytes, parts.values())), "B") as line:
        for name, source in sources.items():
            read_part(parts[name], source, layout_by_name[name], mesh.rank)
            line.count(nbytes(parts[name]))
    return parts


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Source],
    mesh: Mesh,
    largest: int,
    beside: Callable[[Path], None],
    settings: Sequence[str] = (),
) -> None:
    """Writes tensors into `folder`, in one file or in several with an index; the first rank writes, and all send.

    The folder is replaced in one step at the end (`atomic_folder.py`): after a failure it is unchanged.

    Args:
        largest: the most bytes of tensors in a file; a larger tensor has its own file.
        beside: writes the other files of the checkpoint into the given folder.
        settings: the names of JSON files among these, which are kept beside the checksums, too.

    Raises:
        Error: on every rank; the file system fails.
    """
    shards = shards_of(tensors, largest)
    expect_alike(shards, mesh, "would write other files", "the same max_shard_size, and the same model,")

    def on_first(run: Callable[[], Any]) -> Any:
        return agree(mesh, lambda: _or_error(folder, run) if mesh.rank == 0 else None)

    with ExitStack() as stack:
        target = on_first(lambda: stack.enter_context(new_folder(folder, lambda name: bool(WEIGHTS.fullmatch(name)))))
        on_first(lambda: beside(target))  # First: an error comes before the weights are written.
        with progress("writing", sum(map(nbytes, tensors.values())), "B") as line:
            files = [_write_shard(target, shard, tensors, mesh, line.count) for shard in shards]
        on_first(lambda: _write_rest(target, shards, tensors, files, settings))
        # An error before this line leaves through the stack, which removes the new folder.
        on_first(stack.pop_all().close)


def _write_shard(
    target: Path | None, shard: FileShard, tensors: Mapping[str, Source], mesh: Mesh, count: Callable[[int], None]
) -> SummedFile | None:
    """Writes one file; returns it on the first rank, and None on the others."""
    with ExitStack() as stack:

        def begin() -> SummedFile | None:
            if target is None:
                return None
            file = SummedFile(stack.enter_context(_opened(target / shard.file)))
            file.write(header_of(tensors, shard.names))
            return file

        file = agree(mesh, lambda: _or_error(target, begin))
        # It leaves the stack before the file does: all is written when the file is closed.
        writer = stack.enter_context(ThreadPoolExecutor(1, "autotp.save_pretrained"))
        for name in shard.names:
            agree(mesh, lambda name=name: _stream(file, tensors[name], writer))  # type: ignore[misc]
            count(nbytes(tensors[name]))
        agree(mesh, lambda: _or_error(target, stack.close))
    return file


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Opens a file to write. If an exception leaves the block, a second one, of closing it, is not raised."""
    opened = file.open("wb")
    try:
        yield opened
    except BaseException:
        with suppress(OSError):
            opened.close()
        raise
    opened.close()


def _stream(file: SummedFile | None, source: Source, writer: Executor) -> None:
    """Writes a tensor block by block: `writer` writes a block while the next is gathered. `file`: None but on the first

    The other ranks send all blocks, so an error is raised after the last block.
    """
    box = whole_box(source.shape)
    problem: OSError | None = None
    written: Future[None] | None = None
    # A `Computed` tensor would be computed anew for each block.
    for block in blocks_of_box(box, source.dtype.itemsize) if sliceable(source) else [box]:
        part = source.read(block)
        problem = problem or _problem(written)
        if file is not None and problem is None:
            written = writer.submit(append_tensor, file, part)
    problem = problem or _problem(written)
    if problem is not None:
        raise _failed(problem, Path(file.name if file else ""))


def _problem(written: Future[None] | None) -> OSError | None:
    """Waits until a block was written; returns the exception of the file system, if it fails."""
    try:
        return None if written is None else written.result()
    except OSError as error:
        return error


def _write_rest(
    target: Path,
    shards: Sequence[FileShard],
    tensors: Mapping[str, Source],
    files: Sequence[SummedFile | None],
    settings: Sequence[str],
) -> None:
    written = [file for file in files if file is not None]
    if len(shards) > 1:
        with (target / INDEX).open("wb") as opened:
            written.append(SummedFile(opened))
            written[-1].write(index_of(shards, sum(map(nbytes, tensors.values()))).encode())
    sums = {Path(file.name).name: (file.size, file.sums) for file in written}
    write_whole(target / SIDE_FILE, side_file(sums, {name: json_values(target / name) for name in settings}))


def _or_error(path: Path | None, run: Callable[[], Any]) -> Any:
    """Returns what `run` returns; raises Error if the file system fails."""
    try:
        return run()
    except OSError as error:
        raise _failed(error, path or Path()) from error


def _failed(error: Exception, path: Path) -> Error:
    return Error(f"the checkpoint cannot be written: {error}", at=str(path), fix=WRITABLE)


def parse_size(text: int | str) -> int:
    """Returns a number of bytes from a number, or from a text such as "5GB" or "200MiB".

    Raises:
        Error: `text` is neither.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", text.strip(), re.IGNORECASE)
        if isinstance(text, str)
        else None
    )
    if match is None or not float(match[1]):
        raise Error(f"max_shard_size={text!r} is no size", expected='a number of bytes, or a text as "5GB"')
    return math.ceil(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
