"""Compares the inputs, the mode and the random state of a call between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from autotp.attached import Counts, attached, read_again
from autotp.distributed.agreement import Among, Fact, compare
from autotp.distributed.cut_tensors.cut_parameter import tell_user
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.distributed.fingerprint import checksum
from autotp.distributed.mesh import Mesh, group_of
from autotp.distributed.peers.store_gather import texts_so_far, write_text
from autotp.errors import Error
from autotp.passes.capture.python_state.freeze import freeze_argument
from autotp.passes.capture.pytree import is_dense
from autotp.runtime.calls.graph_digest import same_draws
from autotp.sharding.boxes import local_of
from autotp.sharding.layout import Layout
from autotp.source_location import calling_frame

SAME_BATCH = "the same batch for all ranks of one model: no DistributedSampler, one seed for shuffling"
SAME_MODE = "model.train(), model.eval(), .to(dtype) and autocast on all ranks alike"
SAME_ROWS = (
    "all {} replicas were given the same rows, and each learns from them: give each its part, as `autotp.Sampler` does"
)
COMPARED_ROWS = 2
"""The number of training calls whose inputs are compared between replicas."""
EACH_ITS_OWN = Among(())
"""Ranks need not have it alike."""
COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
"""The dtypes that operators compute in, and that have a zero of either sign."""


def agree_on_call(mesh: Mesh, leaves: Sequence[Any], mode: Any, random: bool, parts: int = 0) -> None:
    """Raises Error on every rank if some rank has other inputs or another mode, or would draw other random numbers.

    Inside a torch.func transform values cannot be read, and nothing is compared.

    Args:
        leaves: the flattened arguments.
        mode: the other facts that select a graph: train or eval, dtypes, autocast.
        random: whether the call draws random numbers.
        parts: a checksum of the parts that this rank loaded; 0 for none.
    """
    if mesh.everyone.size == 1 or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    facts = [
        Fact("inputs", _printed(leaves), "got other inputs", SAME_BATCH),
        Fact("mode", repr(mode), "was called in another mode", SAME_MODE),
        # The random states of ranks may differ as long as no call draws from them.
        *([same_draws(mesh)] if random else []),
        Fact("parts", parts, among=EACH_ITS_OWN),
    ]
    _, rows = compare(mesh, facts, counts=[parts != 0], differ=any)
    _expect_own_parts(mesh, [row["parts"] for row in rows])


def agree_on_values(mesh: Mesh, graph: int) -> None:
    """Raises Error on every rank if what Python reads of values selects another graph on some rank.

    Args:
        graph: the number of this rank's graph, or -1 if it has none yet.
    """
    if mesh.everyone.size > 1 and torch._C._functorch.peek_interpreter_stack() is None:
        compare(mesh, [Fact("graph", graph, "reads other values of tensors", SAME_BATCH)])


def agree_on_documents(mesh: Mesh, ends: Sequence[Tensor], leaves: Sequence[Any], mode: Any, compares: bool) -> None:
    """Reads where packed documents end, which says how much ranks send over cp.

    The host waits once for all ends on a GPU. (Where NCCL is the only backend, it waits for the comparison, too.)

    Args:
        ends: those arguments of a call.
        leaves: all of them: a number says how long a document is at most.
        mode: as for `agree_on_call`: another rank may be there, for a new graph.

    Raises:
        Error: on every rank, if they differ.
    """
    if torch._C._functorch.peek_interpreter_stack() is None:
        numbers = read_again(ends)
        lengths = [compared_part(leaf) for leaf in leaves if not isinstance(leaf, Tensor) or not leaf.numel()]
        if compares:
            agree_on_call(mesh, [repr([numbers, lengths])], mode, False)


def warn_of_equal_rows(mesh: Mesh, leaves: Sequence[Any]) -> None:
    """Warns if all replicas that autotp arranged have the same inputs in each of the first training calls.

    A replica may never make this call, so no rank waits: the first rank of each replica writes a checksum of its inputs
    so far, and the one that writes last reads those of all.

    Args:
        leaves: the flattened arguments of a training call.
    """
    axis = mesh.replicas
    if axis is None or mesh.everyone.rank or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    counts = attached(group_of(axis), Counts)
    if counts["training calls"] == COMPARED_ROWS or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return
    counts["training calls"] += 1
    counts["rows"] = zlib.crc32(str(_printed(leaves)).encode(), counts["rows"])
    if counts["training calls"] == COMPARED_ROWS:
        names, text = [f"rows/{axis.number}/{rank}" for rank in range(axis.size)], str(counts["rows"])
        write_text(names[axis.rank], text)
        if texts_so_far(names) == [text] * axis.size:
            tell_user(SAME_ROWS.format(axis.size), calling_frame())


def checksum_of_parts(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> int:
    """Returns a number that two ranks share if they hold the same parts; 0 if parts may well be the same.

    Args:
        tensors: name -> what this rank holds of a parameter.
        layouts: name -> how it is held.
    """
    sums = []
    for name, layout in layouts.items():
        part = local_of(tensors[name].detach())
        # Several ranks may have the same heads, and initial values may be the same everywhere.
        if layout.dim is not None and not layout.repeated and part.numel() and bool((part != part.flatten()[0]).any()):
            sums.append(checksum(part))
    return zlib.crc32(repr(sums).encode()) if sums else 0


def _expect_own_parts(mesh: Mesh, sums: Sequence[int]) -> None:
    """Raises Error on every rank if some tensor-parallel ranks loaded the same parts."""
    # Ranks along tp are neighbours. Only they have different parts: ranks along cp hold the same ones.
    rows = [sums[start : start + mesh.size] for start in range(0, len(sums), mesh.size)]
    duplicates = [
        start + rank
        for start, row in zip(range(0, len(sums), mesh.size), rows, strict=True)
        for rank, value in enumerate(row)
        if value and row.count(value) > 1
    ]
    if duplicates:
        raise Error(
            f"{mesh.named(duplicates)} loaded the same state_dict, which is of one rank's parts",
            fix="a file for each rank: save and load model.state_dict() on every rank",
            alternative="autotp.full_state_dict and autotp.load_full_state_dict, for one file of the whole model",
        )


def _printed(leaves: Sequence[Any]) -> int:
    return zlib.crc32(repr([_print(leaf) for leaf in leaves]).encode())


def compared_part(leaf: Any) -> Any:
    """Returns the compared part of an argument, without a tensor's values: shape and dtype, plain value, or class."""
    if isinstance(leaf, Tensor) and not is_dense(leaf):
        return str(leaf.layout), str(leaf.dtype)
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    if isinstance(leaf, numpy.ndarray):
        return freeze_argument(leaf)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__qualname__


def _print(leaf: Any) -> Any:
    """Returns the same with a tensor's values, except for `Sharded` tensors, whose parts differ between ranks.

    Values are compared as numbers: zeros of either sign are equal. Each rank computes the whole keys in its cache by
    itself, and the sign of a zero among them may differ.
    """
    if not isinstance(leaf, Tensor) or not is_dense(leaf) or isinstance(leaf, Sharded):
        return compared_part(leaf)
    return *compared_part(leaf), checksum(leaf.detach() + 0 if leaf.dtype in COMPUTED else leaf)
