"""Compares the batch and the mode of a step between the ranks of a trainer, in one exchange.

A rank that went on alone would pair its collectives with those of the others' next step. So a batch that one rank
cannot take, or that its replica's other ranks were not given, is one error on all ranks, in any step. Structure, shapes
and dtypes are compared each time; values, which have to be read for it, in the first calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autotp.distributed.consistency import agreed, checksum, compared, random_state
from autotp.distributed.mesh import Mesh, gather_ints
from autotp.passes.capture.pytree import flatten
from autotp.runtime.call_consistency import shown


class Said(NamedTuple):
    """What a rank says before a step, as numbers.

    Attributes:
        failed: whether it cannot take its batch.
        captures: whether it has no graph for it yet.
        mode: training or evaluation.
        frozen: what stands for which parameters want no gradient.
        structure: what stands for its arguments, without tensors' values.
        values: what stands for these; 0 where they are not compared.
        random: what stands for its random numbers; 0 where they are not compared.
    """

    failed: bool
    captures: bool
    mode: bool
    frozen: int
    structure: int
    values: int
    random: int


def said(training: bool, frozen: Sequence[str], batch: Any, place: Mesh, values: bool) -> Said:
    """What this rank says of its batch.

    Args:
        frozen: the parameters that want no gradient.
        batch: arguments; None for what it cannot take.
        values: whether values and random numbers are compared.
    """
    if batch is None:
        return Said(True, False, training, 0, 0, 0, 0)
    leaves, spec = flatten(batch)
    structure = zlib.crc32(repr([str(spec), *(shown(leaf) for leaf in leaves)]).encode())
    printed = zlib.crc32(repr([checksum(x) for x in leaves if isinstance(x, Tensor)]).encode()) if values else 0
    kept = zlib.crc32(repr(frozen).encode())
    return Said(False, False, training, kept, structure, printed, random_state(place) if values else 0)


def over(everyone: Mesh, grid: DeviceMesh) -> Mesh:
    """All ranks, each called by its place on the axes that have more than one."""
    names = [""] * everyone.size
    axes = [(dim, axis) for dim, axis in enumerate(grid.mesh_dim_names or ()) if grid.mesh.shape[dim] > 1]
    for rank in range(everyone.size):
        place = (grid.mesh == rank).nonzero()[0].tolist()
        names[rank] = ", ".join(f"{axis} rank {place[dim]}" for dim, axis in axes)
    return replace(everyone, names=tuple(names))


def frozen_of(frozen: Collection[str], holders: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Ranks of the pipeline that hold parameters together -> what stands for those of them that want no gradient.

    Args:
        frozen: the parameters of this rank that want none.
        holders: every parameter that several ranks of the pipeline hold, with these.
    """
    some = {ranks: [name for name in holders if holders[name] == ranks] for ranks in holders.values()}
    return {
        ranks: zlib.crc32(repr([name for name in names if name in frozen]).encode()) for ranks, names in some.items()
    }


def agree_on_step(
    mesh: Mesh, grid: DeviceMesh, mine: Said, tied: Mapping[tuple[int, ...], int], problem: Exception | None
) -> list[Said]:
    """What all ranks say, once they agree.

    Args:
        mesh: all ranks.
        grid: the same by "pp", "dp" and "tp".
        tied: as of `frozen_of`.
        problem: why this rank cannot take its batch.

    Raises:
        Error: on every rank, where one cannot take its batch or the ranks of a replica were given others.
    """
    every = gather_ints([*map(int, mine), *tied.values()], mesh)
    rows = [Said._make(row[: len(mine)]) for row in every]
    if any(row.failed for row in rows):
        agreed(problem, mesh)
    alike = "step or evaluate on all ranks alike"
    compared(rows, Said._fields.index("mode"), mesh, range(mesh.size), "was called in another mode", alike)
    for stage in grid.mesh.flatten(1).tolist():
        remedy = "requires_grad_ on all ranks alike"
        compared(rows, Said._fields.index("frozen"), mesh, stage, "has other parameters frozen", remedy)
    for column, ranks in enumerate(tied, len(mine)):
        remedy = "requires_grad_ on all ranks that hold a parameter: it is tied over stages of the pipeline"
        held = grid.mesh[list(ranks)].flatten().tolist()
        compared(every, column, mesh, held, "has other tied parameters frozen", remedy)
    for replica in grid.mesh.transpose(0, 1).flatten(1).tolist():
        for column, what, remedy in (
            (Said._fields.index("structure"), "got other inputs", ALIKE),
            (Said._fields.index("values"), "got other inputs", ALIKE),
        ):
            compared(rows, column, mesh, replica, what, remedy)
    for ranks in grid.mesh.flatten(0, 1).tolist():
        remedy = "torch.manual_seed(seed) with one seed on all of them"
        compared(rows, Said._fields.index("random"), mesh, ranks, "would draw other random numbers", remedy)
    return rows


def equal_replicas(rows: Sequence[Said], grid: DeviceMesh) -> bool:
    """True if all replicas, which are to have other rows each, were given the same."""
    firsts = grid.mesh[0, :, 0].tolist()
    return len(firsts) > 1 and len({(rows[rank].structure, rows[rank].values) for rank in firsts}) == 1


ALIKE = "give every rank of a replica the same batch"
