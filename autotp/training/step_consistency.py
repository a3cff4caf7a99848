"""Compares the batch and the mode of a step between the ranks of a trainer, in one exchange.

If one rank raised an error alone, the other ranks' collectives would wait for it. So if one rank cannot take its batch,
or the ranks of a replica have different batches, all ranks raise the same error, in any step. Structure, shapes and
dtypes are compared in each step. All values, which have to be copied to the CPU, are compared in the first steps only;
later a fingerprint of them is, and on a GPU that of the step before, which has arrived.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autotp.compiler import expect_one_order
from autotp.distributed.consistency import agreed, checksum, compared, random_state
from autotp.distributed.mesh import Mesh, gather_ints
from autotp.distributed.peers.fingerprint import may_be_one_batch
from autotp.errors import Error
from autotp.passes.capture.pytree import flatten
from autotp.runtime.call_consistency import shown
from autotp.runtime.torch_hooks.optimizer_steps import NEVER


class StepState(NamedTuple):
    """The state of a rank before a step, as numbers that the ranks exchange.

    Attributes:
        failed: whether the rank cannot take its batch.
        captures: whether the rank has no graph for its batch yet.
        mode: whether the rank is in training mode.
        frozen: a checksum of the names of frozen parameters.
        steps: number of steps of an optimizer since the last call; negative if there can be none.
        structure: a checksum of the arguments, without the values of tensors.
        values: a checksum of the values of tensors; 0 if they are not compared.
        random: the state of the random numbers; 0 if it is not compared.
        lengths: a checksum of the shapes of the rows.
    """

    failed: bool
    captures: bool
    mode: bool
    frozen: int
    steps: int
    structure: int
    values: int
    random: int
    lengths: int


def step_state(
    training: bool, frozen: Sequence[str], batch: Any, place: Mesh, values: bool, steps: int = NEVER
) -> StepState:
    """Returns this rank's state before a step.

    Args:
        frozen: the names of frozen parameters.
        batch: the arguments; None if the rank cannot take them.
        values: whether values and random numbers are compared.
        steps: number of steps of an optimizer since the last call.
    """
    if batch is None:
        return StepState(True, False, training, 0, steps, 0, 0, 0, 0)
    leaves, spec = flatten(batch)
    structure = zlib.crc32(repr([str(spec), *(shown(leaf) for leaf in leaves)]).encode())
    checksums = zlib.crc32(repr([checksum(x) for x in leaves if isinstance(x, Tensor)]).encode()) if values else 0
    frozen_names = zlib.crc32(repr(frozen).encode())
    random = random_state(place) if values else 0
    lengths = zlib.crc32(repr([tuple(x.shape[1:]) for x in leaves if isinstance(x, Tensor)]).encode())
    return StepState(False, False, training, frozen_names, steps, structure, checksums, random, lengths)


def with_rank_names(everyone: Mesh, grid: DeviceMesh) -> Mesh:
    """Returns `everyone`, where each rank's name is its place on the axes with more than one rank."""
    names = [""] * everyone.size
    axes = [(dim, axis) for dim, axis in enumerate(grid.mesh_dim_names or ()) if grid.mesh.shape[dim] > 1]
    for rank in range(everyone.size):
        place = (grid.mesh == rank).nonzero()[0].tolist()
        names[rank] = ", ".join(f"{axis} rank {place[dim]}" for dim, axis in axes)
    return replace(everyone, names=tuple(names))


def frozen_checksums(frozen: Collection[str], holders: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Returns, for ranks of the pipeline that share parameters, a checksum of the frozen ones among these.

    Args:
        frozen: the frozen parameters of this rank.
        holders: parameter -> the ranks of the pipeline that hold it, where several do.
    """
    some = {ranks: [name for name in holders if holders[name] == ranks] for ranks in holders.values()}
    return {
        ranks: zlib.crc32(repr([name for name in names if name in frozen]).encode()) for ranks, names in some.items()
    }


def agree_on_step(
    mesh: Mesh,
    grid: DeviceMesh,
    mine: StepState,
    tied: Mapping[tuple[int, ...], int],
    problem: Exception | None,
    batch: Sequence[int] = (),
) -> list[StepState]:
    """Returns the states of all ranks, if they can run the step together.

    Args:
        mesh: all ranks.
        grid: all ranks, by "pp", "dp", perhaps "cp", and "tp".
        mine: the state of this rank.
        tied: as `frozen_checksums` returns it.
        problem: the error of this rank's batch, if it has one.
        batch: a fingerprint of this rank's batch, or of that before, `as_ints`.

    Raises:
        Error: on every rank, if one rank cannot take its batch, or if the ranks of a replica have different batches.
    """
    every = gather_ints([*map(int, mine), *tied.values(), *batch], mesh)
    rows = [StepState._make(row[: len(mine)]) for row in every]
    if any(row.failed for row in rows):
        agreed(problem, mesh)
    alike = "step or evaluate on all ranks alike"
    compared(rows, StepState._fields.index("mode"), mesh, range(mesh.size), "was called in another mode", alike)
    _expect_same_steps(rows, mesh)
    for stage in grid.mesh.flatten(1).tolist():
        remedy = "requires_grad_ on all ranks alike"
        compared(rows, StepState._fields.index("frozen"), mesh, stage, "has other parameters frozen", remedy)
    for column, ranks in enumerate(tied, len(mine)):
        remedy = "requires_grad_ on all ranks that hold a parameter: it is tied over stages of the pipeline"
        held = grid.mesh[list(ranks)].flatten().tolist()
        compared(every, column, mesh, held, "has other tied parameters frozen", remedy)
    for replica in grid.mesh.transpose(0, 1).flatten(1).tolist():
        for column, what, remedy in (
            (StepState._fields.index("structure"), "got other inputs", SAME_BATCH),
            (StepState._fields.index("values"), "got other inputs", SAME_BATCH),
        ):
            compared(rows, column, mesh, replica, what, remedy)
        prints = [row[len(mine) + len(tied) :] for row in every]
        if other := [rank for rank in replica if not may_be_one_batch(prints[rank], prints[replica[0]])]:
            first = mesh.named(replica[:1])
            raise Error(f"{mesh.named(other)} got another batch than {first}, now or in the last step", fix=SAME_BATCH)
    for ranks in grid.mesh.flatten(0, 1).flatten(1).tolist():
        remedy = "torch.manual_seed(seed) with one seed on all of them"
        compared(rows, StepState._fields.index("random"), mesh, ranks, "would draw other random numbers", remedy)
    return rows


def _expect_same_steps(rows: Sequence[StepState], mesh: Mesh) -> None:
    """Raises Error if a rank that trains parameters took another number of optimizer steps than the others."""
    steps = {rank: row.steps for rank, row in enumerate(rows) if row.steps >= 0}
    first = next(iter(steps.values()), 0)
    if other := [rank for rank, taken in steps.items() if taken != first]:
        raise Error(
            "ranks took different numbers of optimizer steps since the last call of the trainer",
            expected=f"{first}, as on {mesh.named([next(iter(steps))])}",
            got=f"{steps[other[0]]} on {mesh.named(other)}",
            fix="optimizer.step() on all ranks alike, also on those of other stages",
            alternative="of optimizers that take turns, step all, and zero_grad those whose turn it is not",
        )


def without_optimizer(rows: Sequence[StepState], mesh: Mesh) -> str:
    """Returns the names of ranks that train parameters and never stepped one, where others step; "" if there are none.

    One device may leave parameters out of its optimizer, so this is no error.
    """
    never = [rank for rank, row in enumerate(rows) if row.steps == NEVER]
    return mesh.named(never) if never and any(row.steps > 0 for row in rows) else ""


def agree_on_new_graph(mesh: Mesh, grid: DeviceMesh, graph: int, order: int) -> None:
    """Raises Error on every rank if the ranks of a replica would run other graphs, or communicate in another order.

    Args:
        mesh, grid: as for `agree_on_step`.
        graph: a checksum of the graph before sequences are cut.
        order: a checksum of this rank's collectives in order.
    """
    rows = gather_ints([graph, order], mesh)
    for replica in grid.mesh.transpose(0, 1).flatten(1).tolist():
        compared(rows, 0, mesh, replica, "would run another graph", "the same model and settings on all ranks")
        expect_one_order([rows[rank][1] for rank in replica])


def equal_replicas(rows: Sequence[StepState], grid: DeviceMesh) -> bool:
    """Whether all replicas have the same batch, where each should have rows of its own."""
    firsts = _first_of_replicas(grid)
    return len(firsts) > 1 and len({(rows[rank].structure, rows[rank].values) for rank in firsts}) == 1


def unequal_replicas(rows: Sequence[StepState], grid: DeviceMesh) -> bool:
    """Whether some replicas have rows of other lengths."""
    return len({rows[rank].lengths for rank in _first_of_replicas(grid)}) > 1


def _first_of_replicas(grid: DeviceMesh) -> list[int]:
    found: list[int] = grid.mesh[0].flatten(1)[:, 0].tolist()
    return found


SAME_BATCH = "give every rank of a replica the same batch"
