"""never_ending: ends a wait for a collective that never ends, as those of NCCL do not if a peer is lost.

NOTE [Collectives that do not fail]
A failed collective of gloo raises an error. One of NCCL never does: its `wait` returns at once, the work on the card
stops there, and the host blocks at its next read of a result, or once too much work is queued. So the thread of the
heartbeat looks once a second whether this process still moves: whether the main thread is at another instruction, and
whether collectives were started. Only if it does not move, it looks whether a thread is inside of a collective, and
another thread waits for the card, to know whether that is busy. A process that reads data for an hour, compiles, or is
in a debugger waits for nobody. While a process moves, no other thread touches its card; while it captures a CUDA graph
neither: a capture in torch's mode "global" fails if any thread waits for the card.

- A peer was lost, and the process has waited for GRACE since: it ends.
- The process has waited nearly for the group's timeout: it asks all ranks what they do, and ends. (After the timeout
  torch's watchdog would abort it, with a message that names no rank.)

To end means: the blocked thread gets the Error that names the rank; so does whoever starts a collective from now on;
the communicators are aborted, so that the card comes back. If the thread has not got the Error after LAST, the Error
is printed, written into torchrun's file, and the process ends with status 1.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autotp.attached import attached
from autotp.distributed.peers import heartbeat
from autotp.distributed.peers.heartbeat import lost_ranks, on_each_look, reason, say_what_waits
from autotp.error_file import write_error
from autotp.errors import Error, calls_in_progress, threads_in_calls
from autotp.groups.failures import Fatal, lost_error, make_fatal
from autotp.groups.one_thread import waiting_threads
from autotp.groups.point_to_point import started_collectives
from autotp.groups.process_group import axis_of, rank_name

GRACE = 3.0
"""Seconds that a process waits after a peer was lost: the collective may have ended before."""
STILL = 2.0
"""Seconds without a move after which the card is looked at."""
AGAIN = 10.0
"""Seconds between two such looks."""
EARLY = 30.0
"""Seconds before a group's timeout at which a process asks, but at most a quarter of the timeout."""
LAST = 5.0
"""Seconds that the blocked thread has to raise the Error, once the communicators are aborted."""
CUDA = torch.device("cuda")
COMMUNICATE = ("autotp.ops.", "autotp.groups.", "autotp.distributed.", "torch.distributed")
"""Beginnings of the names of modules whose functions wait for other ranks."""


@dataclass
class Watch:
    """How this process moves; it belongs to the default group.

    Attributes:
        card: that of this process: each thread has a current one of its own. None on a CPU.
        moves: what tells whether it has moved: collectives started by group, and the place of the main thread.
        group: name of the group in which it last started a collective.
        since: the time since which it has not moved, or the card was last known to have nothing to do.
        looking: since when a thread waits for the card; None: none does.
        looked: when such a thread last came back.
        lost: when this process heard that a peer is lost; None: none is.
        ending: whether the Error is under way.
    """

    card: torch.device | None = None
    moves: tuple[Any, ...] = ()
    group: str = ""
    since: float = field(default_factory=time.monotonic)
    looking: float | None = None
    looked: float = 0.0
    lost: float | None = None
    ending: bool = False


_captures = weakref.WeakSet[torch.cuda.CUDAGraph]()
"""The CUDA graphs that are captured now; one that failed and was dropped is not."""
_card_is_free = threading.Lock()
"""Held while another thread waits for the card, and while a capture begins."""


def begin_watching(device: torch.device) -> None:
    """Starts the heartbeat of this process, and has it watch for collectives that never end on its device."""
    heartbeat.begin()
    if device.type == "cuda":
        _watch().card = device
        _know_of_captures()
    on_each_look(_look)
    say_what_waits(_waits_for_the_card, _started)


def _know_of_captures() -> None:
    """Has `torch.cuda.CUDAGraph` note each capture: torch tells a thread only of captures on its own stream."""
    start, stop = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
    if start.__module__ == __name__:
        return

    # Without `__module__`, by which the line above sees that the method is replaced.
    @functools.wraps(start, assigned=("__doc__", "__name__", "__qualname__"))
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        with _card_is_free:  # A thread that waits for the card comes first; torch.cuda.graph has waited for it, too.
            start(graph, *args, **kwargs)
            _captures.add(graph)

    @functools.wraps(stop, assigned=("__doc__", "__name__", "__qualname__"))
    def capture_end(graph: Any) -> None:
        try:
            stop(graph)
        finally:
            _captures.discard(graph)

    graphs: Any = torch.cuda.CUDAGraph
    graphs.capture_begin, graphs.capture_end = capture_begin, capture_end


def _device_groups() -> dict[str, Any]:
    """Returns the process groups of several ranks that use cards, by name."""
    if not dist.is_initialized() or _watch().card is None:
        return {}
    groups = list(dist.distributed_c10d._world.pg_map)
    return {str(group.group_name): group for group in groups if group.size() > 1 and _backend(group) is not None}


def _backend(group: Any) -> Any:
    """Returns the group's backend for cards; None if it has none, or one that raises errors."""
    with suppress(RuntimeError):
        backend = group._get_backend(CUDA)
        return None if backend.name() == "gloo" else backend
    return None


def _started() -> Mapping[str, int]:
    """Returns axis -> number of collectives that this rank has started along it."""
    counts = dict[str, int]()
    for name in _device_groups():
        with suppress(RuntimeError, Error):
            counts[axis_of(name)] = counts.get(axis_of(name), 0) + started_collectives(name)
    return counts


def _watch() -> Watch:
    world = dist.group.WORLD
    return Watch() if world is None else attached(world, Watch)


def _waits_for_the_card() -> bool:
    looking = _watch().looking
    return looking is not None and time.monotonic() - looking >= STILL


def _is_in_a_collective() -> bool:
    """Returns whether the main thread, or one in a graph, is inside of a function that waits for other ranks."""
    frames = sys._current_frames()
    for thread in (threading.main_thread().ident, *waiting_threads()):
        frame = frames.get(thread or 0)
        while frame is not None and frame.f_globals.get("__name__") == "torch._ops":  # Each operator is called there.
            frame = frame.f_back
        if frame is not None and str(frame.f_globals.get("__name__")).startswith(COMMUNICATE):
            return True
    return False


def _look() -> None:
    """Looks whether the process moves. Runs in the thread of the heartbeat, so it waits for nothing."""
    groups = _device_groups()
    if not groups:
        return
    watch, now = _watch(), time.monotonic()
    _note_moves(watch, groups, now)
    if watch.lost is None and lost_ranks():
        watch.lost = now
    still = now - watch.since
    if watch.ending or still < STILL:
        return
    if watch.looking is None and (watch.lost is not None or now - watch.looked >= AGAIN):
        watch.looking = now
        threading.Thread(target=_wait_for_the_card, args=(watch,), name="autotp-card", daemon=True).start()
    if not (_waits_for_the_card() or _is_in_a_collective()):
        return
    group = groups.get(watch.group, next(iter(groups.values())))
    timeout = _backend(group).options._timeout.total_seconds()
    after_loss = watch.lost is not None and now - max(watch.lost, watch.since) >= GRACE
    if after_loss or still >= timeout - min(EARLY, timeout / 4):
        watch.ending = True
        name = str(group.group_name)
        threading.Thread(target=_end, args=(watch, name, groups), name="autotp-end", daemon=True).start()


def _note_moves(watch: Watch, groups: Mapping[str, Any], now: float) -> None:
    counts = {name: group._get_sequence_number_for_group() for name, group in groups.items()}
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    moves = (counts, id(frame), frame.f_lasti if frame is not None else 0)
    if moves != watch.moves:
        before = watch.moves[0] if watch.moves else {}
        watch.group = next((name for name, count in counts.items() if count != before.get(name)), watch.group)
        watch.moves, watch.since = moves, now


def _wait_for_the_card(watch: Watch) -> None:
    began = time.monotonic()
    with suppress(Exception), _card_is_free:  # Whatever is wrong with the card, its user will be told.
        if not _captures:
            torch.cuda.synchronize(watch.card)
    watch.looking, watch.looked = None, time.monotonic()
    # The card is done, and the host is in no collective: the process works on something of its own.
    if not _is_in_a_collective():
        watch.since = max(watch.since, began)


def _end(watch: Watch, group: str, groups: Mapping[str, Any]) -> None:
    """Ends the wait of this process, and the process if it cannot be done otherwise."""
    ranks = dist.get_process_group_ranks(groups[group])
    call = next(iter(calls_in_progress()), "a collective")
    why = reason(lambda rank: rank_name(rank, group), ranks) or "a peer did not answer within the group's timeout"
    if time.monotonic() - watch.since < STILL:  # It has moved meanwhile.
        watch.ending = False
        return
    fatal = make_fatal(lost_error(call, group, why), groups.values())
    thread = _blocked_thread()
    _raise_in(thread, fatal)
    for process_group in groups.values():
        threading.Thread(target=_abort, args=(process_group,), name="autotp-abort", daemon=True).start()
    if fatal.raised.wait(LAST):
        return
    try:
        for line in (f"autotp.Error: {fatal.error}", *_stack_of(thread)):
            print(line, file=sys.stderr)
        sys.stderr.flush()
        write_error(fatal.error, dist.get_rank())
    finally:
        os._exit(1)


def _abort(group: Any) -> None:
    """Aborts a group's communicator; NCCL may block here, too."""
    _backend(group).abort()


def _stack_of(thread: int) -> list[str]:
    """Returns the lines of the thread that did not come back."""
    frame = sys._current_frames().get(thread)
    return ["where this process waits:", *(line.rstrip() for line in traceback.format_stack(frame)[-3:])]


def _blocked_thread() -> int:
    """Returns the thread that uses a model, or else the main thread. Autograd's threads of backward are no such."""
    started_here = [t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]
    users = [thread for thread in (*threads_in_calls(), *waiting_threads()) if thread in started_here]
    return users[0] if users else threading.main_thread().ident or 0


def _raise_in(thread: int, fatal: Fatal) -> None:
    """Has a thread raise the Error at its next instruction of Python, which is behind the read that blocks it."""

    # A class, since `PyThreadState_SetAsyncExc` takes one, and makes the instance in the other thread.
    class Raised(Error):
        def __init__(self) -> None:
            super().__init__(fatal.error.problem)
            self.facts, self.call = fatal.error.facts, fatal.error.call
            fatal.raised.set()

    Raised.__name__ = Raised.__qualname__ = "Error"
    Raised.__module__ = "autotp"
    raise_at_next = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_at_next(ctypes.c_ulong(thread), ctypes.py_object(Raised))
    # None takes back an exception that is still pending, as another place raises the Error.
    fatal.cancel = lambda: raise_at_next(ctypes.c_ulong(thread), None)
