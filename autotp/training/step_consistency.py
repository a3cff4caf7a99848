"""Compares the batch and the mode of a step between the ranks of a trainer, in one exchange.

If one rank raised an error alone, the other ranks' collectives would wait for it. So if one rank cannot take its batch,
or the ranks of a replica have different batches, all ranks raise the same error, in any step. Structure, shapes and
dtypes are compared in each step. All values, which have to be copied to the CPU, are compared in the first steps only;
later a fingerprint of them is, and of a batch on a GPU that of the step before, which has arrived.

The exchange is a sum over all ranks: NOTE [Ranks agree if a sum is 0] in `mesh.py`. If it says that all agree, as in
almost every step, no rank looks at what another one has. Otherwise all ranks gather all states, and find the
difference that the error names.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autotp.compiler import expect_one_order
from autotp.distributed.consistency import agreed, checksum, compared, random_state
from autotp.distributed.mesh import Mesh, agreement_weight, gather_ints, sum_ints
from autotp.distributed.peers.fingerprint import may_be_one_batch, rounded
from autotp.errors import Error
from autotp.passes.capture.pytree import flatten
from autotp.runtime.call_consistency import shown
from autotp.runtime.torch_hooks.optimizer_steps import NEVER
from autotp.training.step_facts import SHOWN

NOW = 0
"""In place of the number of a step: the one that begins."""
NOTHING: Mapping[int, Sequence[int]] = {}
COUNT = 2**20
"""More than there are ranks: an integer has three counts of ranks."""


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


@dataclass(frozen=True)
class Weights:
    """This rank's weights in the sums by which ranks agree: those among all ranks, and among parts of them.

    Attributes:
        every: among all ranks.
        stage: among the ranks of one stage.
        replica: among the ranks of one replica, which have the same batch.
        draws: among the ranks that draw the same random numbers.
        tied: the ranks of the pipeline that share parameters -> among all ranks there.
    """

    every: int
    stage: int
    replica: int
    draws: int
    tied: Mapping[tuple[int, ...], int]


def weights_of(rank: int, grid: DeviceMesh, tied: Iterable[tuple[int, ...]] = ()) -> Weights:
    """Returns the weights of a rank.

    Args:
        grid: all ranks, by "pp", "dp", perhaps "cp", and "tp".
        tied: the ranks of the pipeline that share parameters.
    """
    # grid: [pp dp (cp) tp]
    pp, dp = (grid.mesh == rank).nonzero()[0].tolist()[:2]

    def weight(ranks: Tensor) -> int:
        return agreement_weight(rank, ranks.flatten().tolist())

    return Weights(
        every=weight(grid.mesh),
        stage=weight(grid.mesh[pp]),
        replica=weight(grid.mesh[:, dp]),
        draws=weight(grid.mesh[pp, dp]),
        tied={ranks: weight(grid.mesh[list(ranks)]) for ranks in tied},
    )


@dataclass(frozen=True)
class Agreed:
    """What a rank knows of all ranks before a step that they run together.

    Attributes:
        captures: whether some rank has no graph for its batch yet.
        idle: whether some rank trains parameters and never stepped one, where others step.
        arrived: the number of steps, from the oldest on, whose facts have arrived on all ranks.
        lengths: whether all ranks have rows of the same lengths.
        rows: the states of all ranks, where they were gathered; else empty.
    """

    captures: bool
    idle: bool
    arrived: int
    lengths: bool
    rows: Sequence[StepState] = ()


def agree_on_step(
    mesh: Mesh,
    grid: DeviceMesh,
    state: StepState,
    tied: Mapping[tuple[int, ...], int],
    problem: Exception | None,
    prints: Mapping[int, Sequence[int]] = NOTHING,
    arrived: int = 0,
    weights: Weights | None = None,
    gathers: bool = False,
    names_idle: bool = False,
) -> Agreed:
    """Returns what a rank knows of all ranks, if they can run the step together.

    Args:
        mesh: all ranks.
        grid: all ranks, by "pp", "dp", perhaps "cp", and "tp".
        state: the state of this rank.
        tied: as `frozen_checksums` returns it.
        problem: the error of this rank's batch, if it has one.
        prints: number of a step, or `NOW` -> a fingerprint of its batch, `as_ints`.
        arrived: the number of steps, from the oldest on, whose facts have arrived here.
        weights: as `weights_of` returns them, if they are known.
        gathers: whether the states of all ranks are gathered though they agree. All ranks say the same.
        names_idle: whether they are where a rank is idle. All ranks say the same.

    Raises:
        Error: on every rank, if one rank cannot take its batch, or if the ranks of a replica have different batches.
    """
    weights = weights or weights_of(mesh.rank, grid, tied)
    # A rank without a number of steps adds nothing to the sums.
    steps = max(state.steps, 0)
    differ, lengths, failed, captures, never, stepping, total, squares, arrival_counts = sum_ints(
        [
            _weighted(weights, state, tied, prints),
            weights.every * state.lengths,
            state.failed,
            state.captures,
            state.steps == NEVER,
            state.steps >= 0,
            steps,
            steps * steps,
            # Each 20 bits of this integer count the ranks on which one more step has arrived.
            sum(COUNT**i for i in range(arrived)),
        ],
        mesh,
    )
    agree = not differ and not failed and stepping * squares == total * total  # NOTE [Equal numbers of steps]
    idle = never > 0 and total > 0
    looks = not agree or gathers or (idle and names_idle)
    rows = _compared_states(mesh, grid, state, tied, problem, prints) if looks else ()
    everywhere = sum(arrival_counts // COUNT**i % COUNT == mesh.size for i in range(SHOWN))
    return Agreed(captures > 0, idle, everywhere, not lengths, rows)


def _weighted(
    weights: Weights, state: StepState, tied: Mapping[tuple[int, ...], int], prints: Mapping[int, Sequence[int]]
) -> int:
    """Returns this rank's part of the sum that is 0 if all ranks agree.

    NOTE [Equal numbers of steps]
    Ranks that have no number of steps do not count, so these numbers have no such sum. n numbers are equal if n times
    the sum of their squares is the square of their sum (Cauchy-Schwarz).
    """
    of_batches = [(step, rounded(batch)) for step, batch in prints.items()]
    return (
        weights.every * _digest(state.mode)
        + weights.stage * _digest(state.frozen)
        + weights.replica * _digest(state.structure, state.values, of_batches)
        + weights.draws * _digest(state.random)
        + sum(weights.tied[ranks] * _digest(number) for ranks, number in tied.items())
    )


def _digest(*values: Any) -> int:
    """Returns a number of 64 bits that other values have with a probability of 2**-64."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "little")


def _compared_states(
    mesh: Mesh,
    grid: DeviceMesh,
    state: StepState,
    tied: Mapping[tuple[int, ...], int],
    problem: Exception | None,
    prints: Mapping[int, Sequence[int]],
) -> list[StepState]:
    """Returns the states of all ranks; raises the Error of `agree_on_step` if they cannot run the step together."""
    fingerprints = [number for step, batch in prints.items() for number in (step, len(batch), *batch)]
    # Fingerprints come last, as their number may differ between ranks.
    every = gather_ints([*map(int, state), *tied.values(), *fingerprints], mesh)
    rows = [StepState._make(row[: len(state)]) for row in every]
    # A rank that failed has no state that could be compared.
    if any(row.failed for row in rows):
        agreed(problem, mesh)
    remedy = "step or evaluate on all ranks alike"
    compared(rows, StepState._fields.index("mode"), mesh, range(mesh.size), "was called in another mode", remedy)
    _expect_same_steps(rows, mesh)
    for stage in grid.mesh.flatten(1).tolist():
        remedy = "requires_grad_ on all ranks alike"
        compared(rows, StepState._fields.index("frozen"), mesh, stage, "has other parameters frozen", remedy)
    for column, ranks in enumerate(tied, len(state)):
        remedy = "requires_grad_ on all ranks that hold a parameter: it is tied over stages of the pipeline"
        holders = grid.mesh[list(ranks)].flatten().tolist()
        compared(every, column, mesh, holders, "has other tied parameters frozen", remedy)
    of_ranks = [_prints_in(row[len(state) + len(tied) :]) for row in every]
    # [pp dp ...] -> [dp, ranks of a replica]
    for replica in grid.mesh.transpose(0, 1).flatten(1).tolist():
        for column in (StepState._fields.index("structure"), StepState._fields.index("values")):
            compared(rows, column, mesh, replica, "got other inputs", SAME_BATCH)
        _expect_one_batch(of_ranks, replica, mesh)
    # [pp dp ...] -> [pp*dp, ranks that draw alike]
    for ranks in grid.mesh.flatten(0, 1).flatten(1).tolist():
        remedy = "torch.manual_seed(seed) with one seed on all of them"
        compared(rows, StepState._fields.index("random"), mesh, ranks, "would draw other random numbers", remedy)
    return rows


def _prints_in(numbers: Sequence[int]) -> dict[int, Sequence[int]]:
    """Returns the fingerprints in a row: each follows its step and its length."""
    prints, start = dict[int, Sequence[int]](), 0
    while start < len(numbers):
        end = start + 2 + numbers[start + 1]
        prints[numbers[start]], start = numbers[start + 2 : end], end
    return prints


def _expect_one_batch(prints: Sequence[Mapping[int, Sequence[int]]], replica: Sequence[int], mesh: Mesh) -> None:
    """Raises Error if the fingerprint of a batch on some rank of a replica is not that of its first rank."""
    for step, first in prints[replica[0]].items():
        if differing := [rank for rank in replica if not may_be_one_batch(prints[rank].get(step, first), first)]:
            when = "now or in the last step" if step == NOW else f"in step {step}"
            problem = f"{mesh.named(differing)} got another batch than {mesh.named(replica[:1])}, {when}"
            raise Error(problem, fix=SAME_BATCH)


def _expect_same_steps(rows: Sequence[StepState], mesh: Mesh) -> None:
    """Raises Error if a rank that trains parameters took another number of optimizer steps than the others."""
    steps = {rank: row.steps for rank, row in enumerate(rows) if row.steps >= 0}
    first = next(iter(steps.values()), 0)
    if differing := [rank for rank, count in steps.items() if count != first]:
        raise Error(
            "ranks took different numbers of optimizer steps since the last call of the trainer",
            expected=f"{first}, as on {mesh.named([next(iter(steps))])}",
            got=f"{steps[differing[0]]} on {mesh.named(differing)}",
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


def _first_of_replicas(grid: DeviceMesh) -> list[int]:
    ranks: list[int] = grid.mesh[0].flatten(1)[:, 0].tolist()
    return ranks


SAME_BATCH = "give every rank of a replica the same batch"
