"""Counts what a rank starts in a process group with some of its ranks only, such as a `send`.

NOTE [What all ranks start]
A process group numbers what a rank starts in it. torch counts a `send` to one rank like a collective of all ranks, and
the first rank of a `monitored_barrier` starts more than the others. A group may be the user's own, and such calls are
right. So where ranks are compared by how many collectives they have started, these do not count, and the count begins
at a place that all ranks have in common. All of torch's functions for them call methods of `ProcessGroup`, which are
replaced while a parallel model exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch._C._distributed_c10d import ProcessGroup

from autotp.attached import attached
from autotp.groups.process_group import process_group, replace_methods
from autotp.torch_internals import OF_SOME_RANKS


@dataclass
class NotCounted:
    """What does not count in a process group.

    Attributes:
        number: number of operations.
        before: in such a call, what the group had started before it: the heartbeat asks meanwhile.
    """

    number: int = 0
    before: int | None = None


def started_collectives(group: str) -> int:
    """Returns the number of collectives that this rank has started in a group, given by name, since `count_from_here`.

    Ranks that made the same calls have the same number. If none called `count_from_here`, it counts from the beginning.
    It is always 0 for a backend that does not number what it starts.
    """
    counted = process_group(group)
    not_counted, started = attached(counted, NotCounted), _started(counted)
    return (started if not_counted.before is None else not_counted.before) - not_counted.number


def count_from_here(group: str) -> None:
    """Sets the number of started collectives to 0: all ranks of the group are at the same collective."""
    counted = process_group(group)
    attached(counted, NotCounted).number = _started(counted)


def install() -> Callable[[], None]:
    """Counts these operations of all process groups; returns the undo."""
    return replace_methods(OF_SOME_RANKS, _counted)


def _started(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # Backends of others need not number what they start.
        return 0


def _counted(method: Any) -> Any:
    @wraps(method)
    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        not_counted, started = attached(group, NotCounted), _started(group)
        not_counted.before = started
        try:
            return method(group, *args, **kwargs)
        finally:
            not_counted.number += _started(group) - started
            not_counted.before = None

    return call
