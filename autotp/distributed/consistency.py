"""Compares values between ranks, and raises on all ranks the Error that one of them raised.

Ranks that differ would silently compute different models, or wait for each other for ever. Here the error says what
differs, and on which ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from autotp.distributed.mesh import Mesh, gather_ints
from autotp.errors import Error

T = TypeVar("T")
SHOWN = 60
"""The number of characters of a list of settings that an error shows."""
SOURCE = "\t"
"""Separates the compared part of a line from its source location, which may differ between ranks."""


def agree_on_random(mesh: Mesh, states: Sequence[int] | None = None) -> None:
    """Raises Error on every rank if some rank would draw other random numbers.

    Args:
        states: a checksum of each rank's random state, if these are known already.
    """
    rows = [[state] for state in states] if states is not None else gather_ints([random_state(mesh)], mesh)
    expect_as_first(
        rows,
        0,
        mesh,
        "would draw other random numbers than rank 0",
        "torch.manual_seed(seed) with one seed on all ranks",
    )


def agree_on_graph(mesh: Mesh, make: Callable[[], T], text: Callable[[T], str]) -> T:
    """Returns the result of `make()`, once every rank has made it and all are the same.

    Args:
        text: returns the text that must be the same on all ranks, except behind SOURCE in a line.

    Raises:
        Error: on every rank: `make` failed on some rank (this rank raises its own error), or the texts differ.
    """
    made, problem = tried(make)
    lines = text(made[0]).split("\n") if made else []
    rows = gather_ints([text_checksum(lines) if made else -1], mesh)
    if problem is not None:
        raise problem
    failed = [rank for rank, row in enumerate(rows) if row[0] == -1]
    if failed:
        remedy = "read the error of that rank: this rank has none"
        raise Error(f"{mesh.named(failed)} could not build a graph", fix=remedy)
    different_rank = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
    difference = {} if different_rank is None else _first_difference(lines, different_rank, mesh)
    advice = "build the same model and call it alike on all ranks"
    expect_as_first(rows, 0, mesh, "would run another graph than rank 0", advice, **difference)
    return made[0]


def text_checksum(lines: Sequence[str]) -> int:
    """Returns a checksum of a text, without what is behind SOURCE in its lines."""
    return zlib.crc32("\n".join(map(_compared, lines)).encode())


def _compared(line: str) -> str:
    return line.partition(SOURCE)[0]


def _first_difference(lines: Sequence[str], other_rank: int, mesh: Mesh) -> dict[str, str]:
    """Returns the first line that differs between the first rank and another rank, for both ranks."""
    longest = max(row[0] for row in gather_ints([len(lines)], mesh))
    checksums = [zlib.crc32(_compared(line).encode()) for line in lines]
    rows = gather_ints([*checksums, *[-1] * (longest - len(checksums))], mesh)
    index = next(i for i, pair in enumerate(zip(rows[0], rows[other_rank], strict=True)) if pair[0] != pair[1])
    texts = gather_texts(lines[index] if index < len(lines) else "nothing more", mesh)
    pair = texts[0], texts[other_rank]
    if not any(line.startswith("%") for line in pair):  # The text is a list of settings, not of operators.
        pair = _around(*pair)
    return {f"rank {rank}": line.replace(SOURCE, "  at ") for rank, line in zip((0, other_rank), pair, strict=True)}


def _around(first_line: str, second_line: str) -> tuple[str, str]:
    """Returns two lines from their last common word on."""
    common = next((i for i, (a, b) in enumerate(zip(first_line, second_line, strict=False)) if a != b), 0)
    start = first_line.rfind(" ", 0, max(first_line.rfind(" ", 0, common), 0)) + 1
    return tuple(f"... {line[start : start + SHOWN]} ..." for line in (first_line, second_line))  # type: ignore[return-value]


def tried(make: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """Returns the result of `make()` in a list, or its exception: other ranks must know before this rank goes on."""
    try:
        return [make()], None
    except Exception as error:
        return [], _no_memory(error) if _is_of_memory(error) else error


def _is_of_memory(error: Exception) -> bool:
    """True if Python or torch could not allocate memory. (On the CPU, torch raises a RuntimeError.)"""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _no_memory(error: Exception) -> Error:
    lines = str(error).strip().splitlines()
    result = Error(
        f"there is not enough memory{': ' + lines[0] if lines else ''}", fix="free memory, and call it again"
    )
    result.__cause__ = error
    return result


def agree(mesh: Mesh, make: Callable[[], T]) -> T:
    """Returns the result of `make()`, once it has returned on every rank.

    Raises:
        Error: on every rank, if `make` failed on some rank: its own exception, or that of the first failed rank.
    """
    made, problem = tried(make)
    return result_of_all(mesh, made, problem, gather_texts(problem_as_text(problem), mesh))


def on_first_replica(mesh: Mesh, run: Callable[[], None]) -> None:
    """Runs something on the first tensor-parallel ranks that have the model; others wait: a model is written once.

    Others are those of other replicas, and those that have other parts of sequences. So what runs may only communicate
    along the tensor-parallel axis (`mesh.alone()`).

    Raises:
        Error: on every rank, if `run` failed.
    """
    copies = [axis for axis in (mesh.sequence, mesh.replicas) if axis is not None]

    def on_first() -> None:
        if all(axis.rank == 0 for axis in copies):
            run()

    for axis in copies:
        on_first = partial(agree, axis, on_first)
    on_first()


def agreed(problem: Exception | None, mesh: Mesh) -> None:
    """Raises on every rank if some rank has a problem: its own one, else an Error with that of the first such rank."""
    result_of_all(mesh, [None], problem, gather_texts(problem_as_text(problem), mesh))


def problem_as_text(problem: Exception | None) -> str:
    """Returns a problem as text for other ranks; "" if there is none."""
    return "" if problem is None else json.dumps(_spelled(problem))


def result_of_all(mesh: Mesh, made: Sequence[T], problem: Exception | None, texts: Sequence[str]) -> T:
    """Returns the result in `made` if all `texts`, the problems by rank, are empty; else raises as `agree` does."""
    if problem is not None:
        raise problem
    failed = [rank for rank, text in enumerate(texts) if text]
    if failed:
        text, facts = json.loads(texts[failed[0]])
        raise Error(text, **{**facts, "on": facts.get("on", mesh.named(failed))})  # The error may be of an agreement.
    return made[0]


def _spelled(error: Exception) -> tuple[str, dict[str, str]]:
    return (error.problem, error.facts) if isinstance(error, Error) else (f"{type(error).__name__}: {error}", {})


def gather_texts(text: str, mesh: Mesh) -> list[str]:
    """Returns every rank's `text`, by rank."""
    encoded = text.encode()
    words = [
        int.from_bytes(encoded[i : i + 8].ljust(8, b"\0"), "little", signed=True) for i in range(0, len(encoded), 8)
    ]
    rows = gather_ints([len(encoded), *words], mesh)
    packed = [b"".join(word.to_bytes(8, "little", signed=True) for word in row[1:]) for row in rows]
    return [data[: row[0]].decode() for data, row in zip(packed, rows, strict=True)]


def checksum(tensor: Tensor) -> int:
    """Returns a checksum of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(data.view(torch.uint8).numpy().data) if data.numel() else 0


FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio times 2**64: its multiples modulo 2**64 are far apart (Knuth, vol. 3, section 6.4)."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """Returns two numbers of a tensor's bits that change, almost certainly, with any of its elements. [...] -> [2]

    They are computed where the tensor is: as integers of 64 bits, whose sums are exact in any order.
    """
    return bits_of_all([tensor])[0]


def bits_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the numbers of `bits_of` for each tensor of one device. [...] each -> [tensors 2]

    A card runs two operators for each tensor, and a few for all.
    """
    sums = [part for tensor in tensors for part in _sums_of_bits(tensor)]
    ends = list(accumulate(map(len, sums)))
    weights = (torch.arange(1, max(map(len, sums)) + 1, device=sums[0].device) * FACTOR) | 1
    totals = (torch.cat(sums) * torch.cat([weights[: len(part)] for part in sums])).cumsum(0)
    return torch.stack([totals[0] * 0, *(totals[end - 1] for end in ends)]).diff().view(-1, 2)


def _sums_of_bits(tensor: Tensor) -> list[Tensor]:
    """Returns the sums of a tensor's bits along its rows and columns. [...] -> [columns], [rows]"""
    if not tensor.numel():
        return [torch.zeros(1, dtype=torch.int64, device=tensor.device)] * 2
    rows = tensor.contiguous().view(tensor.shape[0] if tensor.dim() else 1, -1)
    bits = rows.view(_INTEGERS[tensor.element_size()])
    return [bits.sum(dim, dtype=torch.int64) for dim in (0, 1)]


def random_state(mesh: Mesh) -> int:
    """Returns a checksum of this rank's random state."""
    states = [torch.get_rng_state()]
    if mesh.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(mesh.device))
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))


def expect_as_first(
    rows: Sequence[Sequence[int]], column: int, mesh: Mesh, problem: str, remedy: str, **facts: str
) -> None:
    """Raises Error if the rows of some ranks differ from the first rank's row in this column."""
    different_ranks = [rank for rank, row in enumerate(rows) if row[column] != rows[0][column]]
    if different_ranks:
        raise Error(f"{mesh.named(different_ranks)} {problem}", **facts, fix=remedy)


def compared(
    rows: Sequence[Sequence[int]], column: int, mesh: Mesh, ranks: Sequence[int], problem: str, remedy: str
) -> None:
    """Raises Error if the rows of some of these ranks differ from that of the first of them in this column."""
    different_ranks = [rank for rank in ranks if rows[rank][column] != rows[ranks[0]][column]]
    if different_ranks:
        raise Error(f"{mesh.named(different_ranks)} {problem} than {mesh.named(ranks[:1])}", fix=remedy)
