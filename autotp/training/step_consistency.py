"""What the ranks of a trainer must have alike in a step: the batch, the mode, random numbers and steps of optimizers.

If one rank raised an error alone, the other ranks' collectives would wait for it. So if one rank cannot take its batch,
or the ranks of a replica have different batches, all ranks raise the same error, in any step. Structure, shapes and
dtypes are compared in each step. All values, which have to be copied to the CPU, are compared in the first steps only;
later a fingerprint of them is, and of a batch on a GPU that of the step before, which has arrived.

All of this is one sum over all ranks: NOTE [Now: one sum, and texts where it is not 0] in `agreement.py`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autotp.attached import READ
from autotp.distributed.agreement import Among, Fact, compare
from autotp.distributed.fingerprint import checksum, may_be_one_batch, random_state, rounded
from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.passes.capture.pytree import flatten
from autotp.runtime.calls.call_consistency import EACH_ITS_OWN, compared_part
from autotp.runtime.calls.graph_digest import same_order
from autotp.runtime.torch_hooks.optimizer_steps import NEVER
from autotp.training.step_facts import SHOWN

NOW = 0
"""In place of the number of a step: the one that begins."""
COUNT = 2**20
"""More than there are ranks: an integer has three counts of ranks."""
Prints = Mapping[int, Sequence[int] | None]
"""Number of a step, or `NOW` -> a fingerprint of its batch, `as_ints`; None if it has not arrived."""


class StepState(NamedTuple):
    """The state of a rank before a step, as numbers that the ranks exchange.

    Attributes:
        captures: whether the rank has no graph for its batch yet.
        mode: whether the rank is in training mode.
        frozen: a checksum of the names of frozen parameters.
        steps: number of steps of an optimizer since the last call; negative if there can be none.
        structure: a checksum of the arguments, without the values of tensors.
        values: a checksum of the values of tensors; 0 if they are not compared.
        random: the state of the random numbers; 0 if it is not compared.
        lengths: a checksum of the shapes of the rows.
        read: a checksum of the parameters that the rank's graph gathers or sums gradients of; 0 if it has none yet.
        room: for how many blocks the rank has room.
    """

    captures: bool
    mode: bool
    frozen: int
    steps: int
    structure: int
    values: int
    random: int
    lengths: int
    read: int = 0
    room: int = 0


def step_state(
    training: bool,
    frozen: Sequence[str],
    batch: Any,
    place: Mesh,
    values: bool,
    steps: int = NEVER,
    by_rows: bool = False,
) -> StepState:
    """Returns this rank's state before a step.

    Args:
        frozen: the names of frozen parameters.
        batch: the arguments; None if the rank cannot take them.
        values: whether values and random numbers are compared.
        steps: number of steps of an optimizer since the last call.
        by_rows: whether the number of rows counts among their lengths.
    """
    if batch is None:
        return StepState(False, training, 0, steps, 0, 0, 0, 0)
    leaves, spec = flatten(batch)
    # The ends of packed documents that the host has read: they say how much ranks send over cp.
    ends = [READ.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    structure = zlib.crc32(repr([str(spec), *(compared_part(leaf) for leaf in leaves), ends]).encode())
    checksums = zlib.crc32(repr([checksum(x) for x in leaves if isinstance(x, Tensor)]).encode()) if values else 0
    frozen_names = zlib.crc32(repr(frozen).encode())
    random = random_state(place) if values else 0
    lengths = zlib.crc32(repr([tuple(x.shape[not by_rows :]) for x in leaves if isinstance(x, Tensor)]).encode())
    return StepState(False, training, frozen_names, steps, structure, checksums, random, lengths)


def with_rank_names(everyone: Mesh, grid: DeviceMesh) -> Mesh:
    """Returns `everyone`, where each rank's name is its place on the axes with more than one rank."""
    names = [""] * everyone.size
    axes = [(dim, axis) for dim, axis in enumerate(grid.mesh_dim_names or ()) if grid.mesh.shape[dim] > 1]
    places = itertools.product(*map(range, grid.mesh.shape))
    for rank, place in zip(grid.mesh.flatten().tolist(), places, strict=True):
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


EVERY, STAGE, REPLICA, DRAWS = "every", "stage", "replica", "draws"
"""Ranks that must have facts of a step alike: all; those of each stage; those of each replica, which have the same
batch; and those that draw the same random numbers."""
Groups = Mapping[str | tuple[int, ...], Among]
"""One of these names, or the ranks of the pipeline that share parameters -> the groups of ranks."""


def groups_of(rank: int, grid: DeviceMesh, tied: Iterable[tuple[int, ...]] = ()) -> Groups:
    """Returns the groups, with the weights of a rank.

    Args:
        grid: all ranks, by "pp", "dp", perhaps "cp", and "tp".
        tied: the ranks of the pipeline that share parameters.
    """
    ranks = grid.mesh  # [pp dp (cp) tp]
    tensors: dict[str | tuple[int, ...], Tensor] = {holders: ranks[None, list(holders)] for holders in tied}
    tensors |= {EVERY: ranks[None], STAGE: ranks, REPLICA: ranks.transpose(0, 1), DRAWS: ranks.flatten(0, 1)}
    return {name: Among.of(rank, groups.flatten(1).tolist()) for name, groups in tensors.items()}


@dataclass(frozen=True)
class Agreed:
    """What a rank knows of all ranks before a step that they run together.

    Attributes:
        captures: whether some rank has no graph for its batch yet.
        idle: whether some rank trains parameters and never stepped one, where others step.
        arrived: the number of steps, from the oldest on, whose facts have arrived on all ranks.
        lengths: whether all ranks have rows of the same lengths.
        room: whether the ranks of each stage have room for as many blocks.
        rows: the states of all ranks, where they were gathered; else empty.
    """

    captures: bool
    idle: bool
    arrived: int
    lengths: bool
    room: bool
    rows: Sequence[StepState] = ()


def agree_on_step(
    mesh: Mesh,
    groups: Groups,
    state: StepState,
    tied: Mapping[tuple[int, ...], int],
    problem: Exception | None,
    prints: Prints,
    arrived: int = 0,
    gathers: bool = False,
    names_idle: bool = False,
) -> Agreed:
    """Returns what a rank knows of all ranks, if they can run the step together.

    NOTE [Equal numbers of steps]
    Ranks that have no number of steps do not count, so no weighted sum of these numbers is 0. n numbers are equal if n
    times the sum of their squares is the square of their sum (Cauchy-Schwarz).

    Args:
        mesh: all ranks.
        groups: as `groups_of` returns them.
        state: the state of this rank.
        tied: as `frozen_checksums` returns it.
        problem: the error of this rank's batch, if it has one.
        prints: those of the same steps on all ranks.
        arrived: the number of steps, from the oldest on, whose facts have arrived here.
        gathers: whether the states of all ranks are gathered though they agree. All ranks say the same.
        names_idle: whether they are where a rank is idle. All ranks say the same.

    Raises:
        Error: on every rank, if one rank cannot take its batch, if the ranks of a replica have different batches, or
            if replicas read different parameters.
    """
    # A rank without a number of steps adds nothing to the sums.
    steps = max(state.steps, 0)
    counts = [
        groups[EVERY].weight * state.lengths,
        groups[STAGE].weight * state.read,
        groups[STAGE].weight * state.room,
        state.captures,
        state.steps == NEVER,
        state.steps >= 0,
        steps,
        steps * steps,
        # Each 20 bits of this integer count the ranks on which one more step has arrived.
        sum(COUNT**i for i in range(arrived)),
    ]

    def differ(sums: Sequence[int]) -> bool:
        _, _, _, _, never, stepping, total, squares, _ = sums
        return stepping * squares != total * total or gathers or (names_idle and never > 0 and total > 0)

    sums, gathered = compare(mesh, _facts(groups, state, tied, prints), problem, counts, differ)
    lengths, read, room, captures, never, _, total, _, arrival_counts = sums
    if read and not captures:
        raise Error(f"a replica {OTHER_READ} than another", fix=SAME_FLAGS)
    everywhere = sum(arrival_counts // COUNT**i % COUNT == mesh.size for i in range(SHOWN))
    rows = tuple(StepState._make(row["state"]) for row in gathered)
    return Agreed(captures > 0, never > 0 and total > 0, everywhere, not lengths, not room, rows)


def _facts(groups: Groups, state: StepState, tied: Mapping[tuple[int, ...], int], prints: Prints) -> list[Fact]:
    """Returns what ranks must have alike, in the order in which a difference is an Error."""
    every, stage, replica = groups[EVERY], groups[STAGE], groups[REPLICA]
    steps = state.steps if state.steps >= 0 else None
    return [
        Fact("state", state, among=EACH_ITS_OWN),
        Fact("mode", state.mode, "was called in another mode", "step or evaluate on all ranks alike", every),
        Fact("steps", steps, *OTHER_STEPS, Among(every.groups), "values", details=lambda *ranks: TURNS),
        Fact("frozen", state.frozen, "has other parameters frozen", "requires_grad_ on all ranks alike", stage),
        *(Fact(f"tied {at}", number, *OTHER_TIED, groups[at]) for at, number in tied.items()),
        Fact("structure", state.structure, "got other inputs", SAME_BATCH, replica),
        Fact("values", state.values, "got other inputs", SAME_BATCH, replica),
        *(_batch(step, batch, replica) for step, batch in prints.items()),
        Fact("random", state.random, "would draw other random numbers", SAME_SEED, groups[DRAWS]),
    ]


def _batch(step: int, batch: Sequence[int] | None, replica: Among) -> Fact:
    when = ", now or in the last step" if step == NOW else f", in step {step}"
    return Fact(
        key=f"batch {step}",
        value=batch,
        problem="got another batch",
        fix=SAME_BATCH,
        among=replica,
        digested=None if batch is None else rounded(batch),
        alike=may_be_one_batch,
        suffix=when,
    )


def without_optimizer(rows: Sequence[StepState], mesh: Mesh) -> str:
    """Returns the names of ranks that train parameters and never stepped one, where others step; "" if there are none.

    One device may leave parameters out of its optimizer, so this is no error.
    """
    never = [rank for rank, row in enumerate(rows) if row.steps == NEVER]
    return mesh.named(never) if never and any(row.steps > 0 for row in rows) else ""


def same_new_graph(groups: Groups, graph: int, order: int, read: int = 0) -> list[Fact]:
    """Returns what the ranks of a replica must have alike of a new graph, and the ranks of a stage.

    Args:
        graph: a checksum of the graph before sequences are cut.
        order: a checksum of this rank's collectives in order.
        read: as in `StepState`.
    """
    fix = "the same model and settings on all ranks"
    alike = Fact("graph", graph, "would run another graph", fix, groups[REPLICA])
    return [alike, same_order(order, groups[REPLICA]), Fact("read", read, OTHER_READ, SAME_FLAGS, groups[STAGE])]


def equal_replicas(rows: Sequence[StepState], groups: Groups) -> bool:
    """Whether all replicas have the same batch, where each should have rows of its own."""
    firsts = [rows[first] for first, *_ in groups[REPLICA].groups]
    return len(firsts) > 1 and len({(row.structure, row.values) for row in firsts}) == 1


OTHER_READ = "runs other layers, or trains other parameters,"
SAME_FLAGS = "for all replicas the same arguments that choose layers: a flag that is drawn from one seed, or broadcast"
SAME_BATCH = "give every rank of a replica the same batch"
SAME_SEED = "torch.manual_seed(seed) with one seed on all of them"
OTHER_TIED = (
    "has other tied parameters frozen",
    "requires_grad_ on all ranks that hold a parameter: it is tied over stages of the pipeline",
)
OTHER_STEPS = (
    "ranks took different numbers of optimizer steps since the last call of the trainer",
    "optimizer.step() on all ranks alike, also on those of other stages",
)
TURNS = {"alternative": "of optimizers that take turns, step all, and zero_grad those whose turn it is not"}
