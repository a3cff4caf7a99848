"""Agreement between ranks: they must be called with the same inputs, draw the same numbers, and run the same graph.

Ranks that do not would drift apart without a word, or wait for each other for ever; here each says what differs, and
on which ranks.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy
import torch
from torch import Tensor, fx

from autotp.errors import Error
from autotp.keys import plain
from autotp.mesh import Mesh, gather_ints
from autotp.sharded import Sharded
from autotp.transform import Analysis

CheckInputs = Literal["always", "first", "never"]
T = TypeVar("T")


def agree_on_call(mesh: Mesh, leaves: Sequence[Any], mode: Any, random: bool) -> None:
    """Raises Error on every rank if some rank was called otherwise, or would draw other random numbers.

    Inside a torch.func transform values cannot be looked at, and nothing is compared.

    Args:
        leaves: the flattened arguments.
        mode: what else decides which graph runs: train or eval, dtypes, autocast.
        random: True if the call draws random numbers.
    """
    if mesh.size == 1 or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    called = _printed(leaves)
    state = random_state(mesh) if random else 0
    rows = gather_ints([called, zlib.crc32(repr(mode).encode()), state], mesh)
    _compare(rows, 0, mesh, "got other inputs than rank 0", "give every rank of the axis the same batch")
    alike = "model.train(), model.eval(), .to(dtype) and autocast on all ranks alike"
    _compare(rows, 1, mesh, "was called in another mode than rank 0", alike)
    agree_on_random(mesh, [row[2] for row in rows])


def agree_on_random(mesh: Mesh, states: Sequence[int] | None = None) -> None:
    """Raises Error on every rank if some rank would draw other random numbers.

    Args:
        states: what stands for each rank's random state, if that is known already.
    """
    rows = [[state] for state in states] if states is not None else gather_ints([random_state(mesh)], mesh)
    _compare(
        rows,
        0,
        mesh,
        "would draw other random numbers than rank 0",
        "torch.manual_seed(seed) with one seed on all ranks",
    )


def _printed(leaves: Sequence[Any]) -> int:
    return zlib.crc32(repr([_print(leaf) for leaf in leaves]).encode())


def agree_on_graph(mesh: Mesh, make: Callable[[], T], text: Callable[[T], str]) -> T:
    """What `make()` returns, made on every rank before any goes on.

    Args:
        text: what must be the same on all ranks.

    Raises:
        Error: on every rank; where `make` failed its own, elsewhere that it failed there; on all that they differ.
    """
    made, problem = tried(make)
    rows = gather_ints([zlib.crc32(text(made[0]).encode()) if made else -1], mesh)
    if problem is not None:
        raise problem
    failed = [rank for rank, row in enumerate(rows) if row[0] == -1]
    if failed:
        raise Error(f"{mesh.named(failed)} could not build a graph", **{"try": "read the error there: here is none"})
    _compare(
        rows, 0, mesh, "would run another graph than rank 0", "build the same model and call it alike on all ranks"
    )
    return made[0]


def tried(make: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """What `make()` returns, in a list, or what it raises: the other ranks are told before this one goes on."""
    try:
        return [make()], None
    except Exception as error:
        return [], error


def agree(mesh: Mesh, make: Callable[[], T]) -> T:
    """What `make()` returns, once it has returned on every rank.

    Raises:
        Error: on every rank: where `make` failed its own, elsewhere that of the first rank where it did.
    """
    made, problem = tried(make)
    return settled(mesh, made, problem, _told(spelled(problem), mesh))


def agreed(problem: Exception | None, mesh: Mesh) -> None:
    """Raises, on every rank, what some have: there their own, elsewhere an Error that says what the first has."""
    settled(mesh, [None], problem, _told(spelled(problem), mesh))


def spelled(problem: Exception | None) -> str:
    """What other ranks are told of a problem; nothing if all is well."""
    return "" if problem is None else json.dumps(_spelled(problem))


def settled(mesh: Mesh, made: Sequence[T], problem: Exception | None, texts: Sequence[str]) -> T:
    """What `make()` returned, if it did on every rank. texts: what each was told, by rank"""
    if problem is not None:
        raise problem
    failed = [rank for rank, text in enumerate(texts) if text]
    if failed:
        said, facts = json.loads(texts[failed[0]])
        raise Error(said, **facts, on=mesh.named(failed))
    return made[0]


def _spelled(error: Exception) -> tuple[str, dict[str, str]]:
    return (error.problem, error.facts) if isinstance(error, Error) else (f"{type(error).__name__}: {error}", {})


def _told(text: str, mesh: Mesh) -> list[str]:
    """Every rank's `text`, by rank."""
    mine = text.encode()
    lengths = [row[0] for row in gather_ints([len(mine)], mesh)]
    if not any(lengths):
        return [""] * mesh.size
    rows = gather_ints([*mine, *[0] * (max(lengths) - len(mine))], mesh)
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def digest(analysis: Analysis) -> str:
    """The graph, its constants and the layouts as text, the same on ranks that agree."""
    nodes = [f"{n.op} {_called(n)} {n.args} {n.kwargs}" for n in analysis.graph.nodes]
    text = re.sub(r"cuda:\d+", "cuda", "\n".join(nodes))  # Each rank names its own device.
    constants = [checksum(tensor) for tensor in analysis.captured.constants.values()]
    return "\n".join([text, str(constants), *(f"{name} {layout}" for name, layout in analysis.layouts.items())])


def _called(node: fx.Node) -> str:
    return getattr(node.target, "__qualname__", None) or str(node.target)


def checksum(tensor: Tensor) -> int:
    """A number that two tensors share if they are bit-equal."""
    data = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(data.view(torch.uint8).numpy().tobytes()) if data.numel() else 0


def shown(leaf: Any) -> Any:
    """What is compared of an argument but a tensor's values: its shape and dtype; a plain value; an object's class."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    if isinstance(leaf, numpy.ndarray):
        return plain(leaf)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__qualname__


def _print(leaf: Any) -> Any:
    """The same with values; of a `Sharded` each rank has other ones."""
    return (*shown(leaf), checksum(leaf)) if isinstance(leaf, Tensor) and not isinstance(leaf, Sharded) else shown(leaf)


def random_state(mesh: Mesh) -> int:
    """A number that two ranks share if they would draw the same numbers."""
    states = [torch.get_rng_state()]
    if mesh.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(mesh.device))
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))


def _compare(rows: Sequence[Sequence[int]], column: int, mesh: Mesh, what: str, remedy: str) -> None:
    other = [rank for rank, row in enumerate(rows) if row[column] != rows[0][column]]
    if other:
        raise Error(f"{mesh.named(other)} {what}", **{"try": remedy})


def compared(
    rows: Sequence[Sequence[int]], column: int, mesh: Mesh, ranks: Sequence[int], what: str, remedy: str
) -> None:
    """Raises Error if some of these ranks said other than the first of them."""
    other = [rank for rank in ranks if rows[rank][column] != rows[ranks[0]][column]]
    if other:
        raise Error(f"{mesh.named(other)} {what} than {mesh.named(ranks[:1])}", **{"try": remedy})
