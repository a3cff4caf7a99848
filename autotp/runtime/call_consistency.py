"""Compares the inputs, the mode and the random state of a call between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from autotp.distributed.consistency import agree_on_random, checksum, expect_as_first, random_state
from autotp.distributed.mesh import Mesh, gather_ints
from autotp.distributed.sharded_tensor import Sharded
from autotp.passes.capture.guards.argument_keys import argument_key


def agree_on_call(mesh: Mesh, leaves: Sequence[Any], mode: Any, random: bool) -> None:
    """Raises Error on every rank if some rank has other inputs or another mode, or would draw other random numbers.

    Inside a torch.func transform values cannot be read, and nothing is compared.

    Args:
        leaves: the flattened arguments.
        mode: the other facts that select a graph: train or eval, dtypes, autocast.
        random: whether the call draws random numbers.
    """
    if mesh.size == 1 or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    called = _printed(leaves)
    state = random_state(mesh) if random else 0
    rows = gather_ints([called, zlib.crc32(repr(mode).encode()), state], mesh)
    expect_as_first(rows, 0, mesh, "got other inputs than rank 0", "give every rank of the axis the same batch")
    alike = "model.train(), model.eval(), .to(dtype) and autocast on all ranks alike"
    expect_as_first(rows, 1, mesh, "was called in another mode than rank 0", alike)
    agree_on_random(mesh, [row[2] for row in rows])


def _printed(leaves: Sequence[Any]) -> int:
    return zlib.crc32(repr([_print(leaf) for leaf in leaves]).encode())


def shown(leaf: Any) -> Any:
    """Returns the compared part of an argument, without a tensor's values: shape and dtype, plain value, or class."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    if isinstance(leaf, numpy.ndarray):
        return argument_key(leaf)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__qualname__


def _print(leaf: Any) -> Any:
    """Returns the same with a tensor's values, except for `Sharded` tensors, whose parts differ between ranks."""
    return (*shown(leaf), checksum(leaf)) if isinstance(leaf, Tensor) and not isinstance(leaf, Sharded) else shown(leaf)
