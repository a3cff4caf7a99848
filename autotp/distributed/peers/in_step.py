"""Compares now and then, beside the training, how far each rank has come, and with which batches.

NOTE [Ranks that come apart]
Ranks pair their collectives by order. If one rank leaves out a backward that the others run (its own code skips a
batch), or makes a call that they do not make, each collective of it pairs with an earlier or a later one of theirs.
Where the sizes agree no library sees that, and all numbers are wrong from then on. So each rank records at every
PERIOD-th call of a model how many collectives its group had started, and a fingerprint of the arguments; and at every
PERIOD-th step of the model's optimizers how many collectives, as nothing is recorded in a call that torch.compile
compiled. About once a second the first rank tells the others its newest record, and the thread of their heartbeat
compares it with their own. If they differ, the next call or the next step raises Error on every rank. Neither waits for
the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import get_process_group_ranks

from autotp.distributed.agreement import Among, Fact, problem_as_text, problem_from_text
from autotp.distributed.fingerprint import Fingerprint, fingerprint, may_be_one_batch
from autotp.distributed.mesh import Mesh, numbered_groups
from autotp.distributed.peers.heartbeat import leave_note, on_each_look, on_news, tell
from autotp.errors import Error
from autotp.groups.point_to_point import started_collectives
from autotp.groups.process_group import process_group

PERIOD = 16
"""Calls, or steps, from one record to the next."""
KEPT = 256
"""The number of records that a rank keeps: the first rank's newest may be older than its own."""
TOLD, APART = "progress", "apart"
"""Topics of news: the first rank's newest record; what was found by another rank."""
CALL, STEP = "call", "step"
"""What is counted on a mesh: calls of models, and steps of their optimizers."""
FIX = (
    "start again from a checkpoint before that. All ranks of one model get the same batches, leave one out by one "
    "decision for all (an all_reduce), and make the same calls: none under `if rank == 0`"
)
OWNER = {CALL: "the model", STEP: "its optimizers"}


@dataclass(frozen=True)
class ProgressRecord:
    """What a rank had started before a call or a step, and what it was called with.

    Attributes:
        started: number of collectives.
        arguments: their fingerprint; an empty one of a step.
    """

    started: int
    arguments: Fingerprint

    def as_plain_data(self) -> list[Any]:
        """Returns the number, and the fingerprint `as_ints`."""
        return [self.started, self.arguments.as_ints()]


@dataclass
class Progress:
    """What one rank of a mesh has started.

    Attributes:
        kind: `CALL` or `STEP`.
        count: number of calls so far that started collectives, or of steps.
        pending: number of the last recorded call, and its record: its fingerprint may not have arrived yet.
        records: number of a call or step -> its record.
        told: the newest of them whose record the first rank has told, or this rank has compared.
        apart: how ranks differ; None if they do not.
    """

    place: Mesh
    kind: str
    count: int = 0
    pending: tuple[int, ProgressRecord] | None = None
    records: dict[int, ProgressRecord] = field(default_factory=dict)
    told: int = 0
    apart: Error | None = None

    @property
    def key(self) -> str:
        """What tells it from others on all ranks."""
        return f"{self.place.number}/{self.kind}"


_progress: dict[tuple[int, str], Progress] = {}
"""Number of a mesh and what is counted -> progress on it."""
_first: dict[str, list[Any]] = {}
"""Key of a progress -> number and record of the first rank's newest call or step."""


def begin_call(mesh: Mesh) -> int:
    """Returns how many collectives this rank has started in the group of `mesh.everyone`, before a call.

    Raises:
        Error: the ranks of the group have come apart.
    """
    place = mesh.everyone
    for counted in (CALL, STEP):
        if progress := _progress.get((place.number, counted)):
            _expect_together(progress)
    return started_collectives(str(place.group))


def end_call(mesh: Mesh, before: int, arguments: Any) -> None:
    """Counts a call that started collectives. (Another one, some ranks may make alone.)

    Args:
        before: what `begin_call` returned.
        arguments: what must be the same on all ranks of `mesh.everyone`.
    """
    place = mesh.everyone
    if started_collectives(str(place.group)) != before:
        _count(CALL, place, before, arguments)


def count_step(mesh: Mesh) -> None:
    """Counts a step of an optimizer that has parameters of a model on `mesh`."""
    place = mesh.everyone
    if place.group is not None:
        _count(STEP, place, started_collectives(str(place.group)), ())


def _count(counted: str, place: Mesh, started: int, arguments: Any) -> None:
    progress = _progress.get((place.number, counted))
    if progress is None:
        progress = _progress[place.number, counted] = Progress(place, counted)
        on_each_look(_look)
        on_news(TOLD, lambda sender, data: _first.update({data[0]: data[1:]}))
        on_news(APART, _note_apart)
    progress.count += 1
    if progress.count % PERIOD == 0 and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        # The numbers of the last record have arrived from the card by now, if they ever do: else it is dropped.
        _keep(progress)
        progress.pending = progress.count, ProgressRecord(started, fingerprint(arguments))
        if progress.pending[1].arguments.arrived is None:
            _keep(progress)


def _keep(progress: Progress) -> None:
    """Makes the last record one of those that are compared, if its fingerprint has arrived."""
    if progress.pending is None:
        return
    call, record = progress.pending
    progress.pending = None
    arrived = record.arguments.arrived
    if arrived is None or arrived.query():
        progress.records[call] = record
    if len(progress.records) > KEPT:
        del progress.records[next(iter(progress.records))]


def are_apart() -> bool:
    """Returns whether ranks have come apart in some group."""
    return any(progress.apart is not None for progress in _progress.values())


def expect_together() -> None:
    """Raises Error if the ranks of a group that is still in use have come apart."""
    for progress in _progress.values():
        if progress.place.group in numbered_groups():
            _expect_together(progress)


def _expect_together(progress: Progress) -> None:
    if progress.apart is not None:
        error = Error(progress.apart.problem, **progress.apart.facts)  # A new one, as each call names itself in it.
        leave_note(error)  # The others may wait for this rank already.
        raise error


def _look() -> None:
    """Tells the others the first rank's newest record; on the others, compares it with their own."""
    alive = numbered_groups()
    for place, progress in list(_progress.items()):
        key, records = progress.key, dict(progress.records)
        if progress.place.group not in alive:
            del _progress[place]
            _first.pop(key, None)
        if not records or progress.apart is not None or progress.place.group not in alive:
            continue
        newest, ranks = max(records), get_process_group_ranks(process_group(str(progress.place.group)))
        if progress.place.rank == 0 and newest > progress.told:
            tell(ranks, TOLD, [key, newest, *records[newest].as_plain_data()])
            progress.told = newest
        elif progress.place.rank > 0 and key in _first:
            # The first rank may be ahead or behind: only a call that this rank has recorded, too, can be compared.
            call, *first = _first[key]
            if call in records and progress.told < call:
                progress.apart = _difference(progress, call, records[call].as_plain_data(), first)
                if progress.apart is not None:
                    tell(ranks, APART, [key, problem_as_text(progress.apart)])
                progress.told = call


def _note_apart(sender: int, data: Sequence[str]) -> None:
    for progress in list(_progress.values()):
        if progress.key == data[0]:
            progress.apart = progress.apart or problem_from_text(data[1])


def _difference(progress: Progress, call: int, record: Sequence[Any], first: Sequence[Any]) -> Error | None:
    """Returns how this rank's record differs from that of the first rank; None if it does not."""
    place, counted = progress.place, progress.kind
    since = f"since {counted} {progress.told}" if progress.told else f"since the first {counted}"
    started = (
        f"ranks had started other numbers of collectives at {counted} {call} of {OWNER[counted]}: at some time "
        f"{since}, a rank left out a forward, a backward or a step, or made one more, and ranks may have got numbers "
        "of other collectives"
    )
    among, batch = Among([[0, place.rank]]), f"got another batch in call {call} of the model"
    facts = (
        Fact("started", None, started, FIX, among, "values"),
        Fact("batch", None, batch, FIX, among, alike=may_be_one_batch, suffix=f": ranks came apart {since}"),
    )
    try:
        for fact, value, of_first in zip(facts, record, first, strict=True):
            fact.expect({0: of_first, place.rank: value}, place)
    except Error as error:
        return error
    return None
