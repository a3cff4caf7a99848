"""Agreement between ranks: they must be called with the same inputs, draw the same numbers, and run the same graph.

Ranks that do not would drift apart without a word; here each says what differs, and on which ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, fx

from autotp.errors import Error
from autotp.mesh import Mesh, gather_ints
from autotp.transform import Analysis

CheckInputs = Literal["always", "first", "never"]
RANDOM = ("dropout", "attention", "rand", "bernoulli", "multinomial", "normal", "exponential")


def agree_on_inputs(mesh: Mesh, check: CheckInputs, first: bool, tensors: Sequence[Tensor], random: bool) -> None:
    """Raises Error on every rank if some rank was called with other tensors, or would draw other random numbers.

    Args:
        first: True on the first calls of a graph.
        random: True if the graph draws random numbers.
    """
    if mesh.size == 1 or check == "never" or (check == "first" and not first) or _transformed(tensors):
        return
    sums = [checksum(t) for t in tensors]
    combined = zlib.crc32(repr((sums, [tuple(t.shape) for t in tensors])).encode())
    rows = gather_ints([combined, _random_state(mesh) if random else 0], mesh)
    _compare(rows, 0, mesh, "were called with other inputs", "give every rank of the axis the same batch")
    _compare(rows, 1, mesh, "have another random state", "torch.manual_seed(seed) with one seed on all ranks")


def agree_on_graph(mesh: Mesh, analysis: Analysis) -> None:
    """Raises Error on every rank if the ranks captured different graphs or decided on different cuts."""
    if mesh.size == 1:
        return
    rows = gather_ints([zlib.crc32(digest(analysis).encode())], mesh)
    _compare(rows, 0, mesh, "would build another graph", "build the same model and call it the same way on all ranks")


def digest(analysis: Analysis) -> str:
    """The graph and the layouts as text, the same on ranks that agree."""
    nodes = [f"{n.op} {_called(n)} {n.args} {n.kwargs}" for n in analysis.graph.nodes]
    return "\n".join([*nodes, *(f"{name} {layout}" for name, layout in analysis.layouts.items())])


def _called(node: fx.Node) -> str:
    return getattr(node.target, "__qualname__", None) or str(node.target)


def draws(graph: fx.Graph) -> bool:
    """True if a graph draws random numbers."""
    for node in graph.nodes:
        name = _called(node)
        if node.op == "call_function" and any(word in name for word in RANDOM):
            return True
    return False


def checksum(tensor: Tensor) -> int:
    """A number that two tensors share if they are bit-equal."""
    data = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(data.view(torch.uint8).numpy().tobytes()) if data.numel() else 0


def _transformed(tensors: Sequence[Tensor]) -> bool:
    """True inside torch.func transforms, where values cannot be looked at."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def _random_state(mesh: Mesh) -> int:
    states = [torch.get_rng_state()]
    if mesh.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(mesh.device))
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))


def _compare(rows: Sequence[Sequence[int]], column: int, mesh: Mesh, what: str, remedy: str) -> None:
    other = [rank for rank, row in enumerate(rows) if row[column] != rows[0][column]]
    if other:
        ranks = ", ".join(map(str, other))
        raise Error(f"{mesh.axis} rank{'s' * (len(other) > 1)} {ranks} {what} than rank 0", **{"try": remedy})
