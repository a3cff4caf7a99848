"""What is known of a process group after a failure: lost ranks, and exceptions that left a graph on this rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from autotp.attached import Marks, all_attached, attach, attached, attached_if_any
from autotp.errors import Error
from autotp.groups.process_group import axis_of, process_group, rank_name, seat

Informed = Callable[[Callable[[int], str], Sequence[int]], str]
"""A function that returns why other ranks do not answer, or "".

Its arguments: a function that returns the name of a global rank; and the global ranks that made the call together.
"""
_informed: list[Informed] = []
uncompared: dict[str, weakref.ref[ProcessGroup]] = {}
"""Name of a group whose ranks may be at different collectives, after an exception here -> that group."""
LOST = "a rank was lost"
"""The mark of a process group whose collectives fail by themselves."""
Compare = Callable[[str], None]
"""A function that raises Error if the ranks of a group, given by name, are at different collectives."""
_comparing: list[Compare] = []


class RanksApart(RuntimeError):
    """What a process group of Python raises if its ranks are at different collectives."""


@dataclass
class Fatal:
    """The Error with which this process has to end, as some rank is lost and its communicators are aborted.

    Attributes:
        error: it.
        raised: set once a thread has raised it.
        cancel: keeps the thread that is to raise it from doing so, as another has done it.
    """

    error: Error
    raised: Event = field(default_factory=Event)
    cancel: Callable[[], object] = lambda: None


def make_fatal(error: Error, groups: Iterable[ProcessGroup]) -> Fatal:
    """Has the next collective in each of these groups raise an error; returns what is known of that."""
    fatal = Fatal(error)
    for group in groups:
        attach(group, fatal)
        # `one_thread` asks for a fatal Error only where something is noted here.
        uncompared[str(group.group_name)] = weakref.ref(group)
    return fatal


def fatal_error(group: str) -> Error | None:
    """Returns the Error with which this process has to end, if there is one; its caller raises it."""
    fatal = attached_if_any(process_group(group), Fatal) if all_attached(Fatal) else None
    if fatal is None:
        return None
    # The Error is raised here, so no other thread has to raise it.
    fatal.cancel()
    fatal.raised.set()
    return fatal.error


def note_interrupted(group: str) -> None:
    """Notes that an exception left a graph or a backward: the group's ranks are compared before its next collective."""
    if not is_lost(group):
        uncompared[group] = weakref.ref(process_group(group))


def compare_after_exceptions(compare: Compare) -> None:
    """Makes `compare` be called before the first collective of each group after an exception."""
    if compare not in _comparing:
        _comparing.append(compare)


def compare_if_interrupted(group: str) -> None:
    """Raises Error if the ranks of the group are at different collectives, if an exception was noted before."""
    if error := fatal_error(group):
        raise error
    noted = uncompared.get(group)
    if noted is not None and noted() is process_group(group):  # Else it was another group of this name.
        for compare in _comparing:
            compare(group)
    uncompared.pop(group, None)


def ask_of_lost_peers(informed: Informed) -> None:
    """Makes errors of collectives include what `informed` knows about ranks that do not answer."""
    if informed not in _informed:
        _informed.append(informed)


def is_lost(group: str) -> bool:
    """Returns whether a rank of the group was lost."""
    return LOST in attached(process_group(group), Marks)


def note_lost(group: str) -> None:
    """Notes that a rank of the group was lost."""
    attached(process_group(group), Marks).add(LOST)


def peer_error(operation: str, group: str, error: RuntimeError, mesh: Any = None) -> Error | None:
    """Returns an Error that names the axis and the lost rank; None if `error` has another cause.

    Args:
        mesh: an object whose method `named` returns names of ranks; None: ranks are named by numbers.
    """
    text = str(error).lower()
    if isinstance(error, RanksApart):
        reason = str(error)
    elif "timed out" in text or "timeout" in text:
        reason = "a peer did not answer within the group's timeout"
    # gloo raises plain RuntimeErrors: only their texts tell what has happened.
    elif any(sign in text for sign in ("connection", "peer", "gloo/transport", "nccl", "socket", "broken pipe")):
        reason = "a peer closed its connection"
    else:
        return None

    def named(rank: int) -> str:
        return rank_name(rank, group) if mesh is None else mesh.named([rank])

    ranks = dist.get_process_group_ranks(process_group(group))
    return lost_error(operation, group, next((answer for ask in _informed if (answer := ask(named, ranks))), reason))


def lost_error(operation: str, group: str, why: str) -> Error:
    """Returns the Error of a collective, or of a call, that fails since other ranks do not come."""
    rank, size = seat(group)
    return Error(
        f"{operation} over axis `{axis_of(group)}` failed on rank {rank} of {size} "
        f"(global rank {dist.get_rank()}): {why}",
        fix="every call is made by all ranks (none under `if rank == 0`); read the logs of the others",
        alternative="if it was only slow: timeout= of autotp.parallelize, or of init_process_group",
    )
