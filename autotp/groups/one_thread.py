"""Regions in which one thread uses a process group, and in which failed collectives name the lost rank."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from autotp.attached import Marks, attached
from autotp.errors import Error
from autotp.groups.failures import compare_if_interrupted, fatal_error, note_lost, peer_error, uncompared
from autotp.groups.process_group import axis_of, process_group

_users: dict[str, int] = {}
"""Group -> the thread that uses it, or SHARED. The heartbeat reads it from a thread of its own."""
SHARED = 0
"""Stands for a thread: two threads have used the group at once."""
USED_BY_TWO = "two threads have used it at once"
"""The mark of such a process group: a later one may have the same name."""


def is_waiting() -> bool:
    """Returns whether some thread of this process is in a graph or in a collective."""
    return bool(waiting_threads())


def waiting_threads() -> list[int]:
    """Returns the threads of this process that are in a graph or in a collective."""
    return [thread for thread in list(_users.values()) if thread != SHARED]


class one_thread:
    """A region in which a thread uses a group.

    NOTE [One thread at a time]
    The ranks of a group pair their collectives by order, and threads have none: two threads that call a model would
    get each other's numbers. So a second thread in such a region is an error in both threads. Nobody knows what either
    of them has received since, so it stays an error.

    It is a class, because a step enters many such regions, and entering a generator takes longer.
    """

    __slots__ = ("group", "nested", "operation", "thread")

    def __init__(self, operation: str, group: str) -> None:
        self.operation, self.group = operation, group

    def __enter__(self) -> None:
        self.thread = get_ident()
        user = _users.get(self.group)
        self.nested = user is not None
        if user is None:
            if uncompared:
                compare_if_interrupted(self.group)
            # One step of Python: of two threads that come at once one is the user.
            user = _users.setdefault(self.group, self.thread)
        if user != self.thread:
            self._refuse_or_begin_anew()

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        # Another thread has used the group meanwhile: its numbers may be here.
        if _users.get(self.group) != self.thread:
            if error is None:
                raise _two_threads(self.group).within(self.operation)
        elif not self.nested:
            # Only the outermost region of a thread ends its use.
            del _users[self.group]
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Raises another exception in place of one that leaves the region."""

    def _refuse_or_begin_anew(self) -> None:
        """Raises Error, unless the group that two threads used was another one of this name."""
        group = process_group(self.group)
        if _users.get(self.group) == SHARED and USED_BY_TWO not in attached(group, Marks):
            _users[self.group], self.nested = self.thread, False
            return
        attached(group, Marks).add(USED_BY_TWO)
        _users[self.group] = SHARED
        raise _two_threads(self.group).within(self.operation)


def _two_threads(group: str) -> Error:
    return Error(
        f"two threads use the process group of axis `{axis_of(group)}` at once, and may have got each other's numbers",
        fix="make the process group and the model again; one thread calls it, and takes the others' work from a queue",
        alternative="a model with a process group of its own for each thread",
    )


class in_collective(one_thread):
    """A region of collectives over a group, in which their RuntimeErrors become Errors as `communicate` says."""

    __slots__ = ()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, Error):
            named = fatal_error(self.group) or peer_error(self.operation, self.group, error)
            if named is not None:
                note_lost(self.group)
                raise named from error
