"""heartbeat: finds the lost rank when a collective fails.

A failed collective reports a timeout or a closed connection, but not whose. After a process is killed, processes that
waited for it end, then others that waited for these; a stopped process closes no connection. So each process has a
thread that runs while a collective waits, and answers calls through the store in which the processes met. After a
failure the ranks are called; those that do not answer are lost. The first rank that finds this writes it into the store
for the others, because it may soon end itself. An answer tells the public call that the process is in: if nobody is
lost, the error names the rank that is elsewhere.

If the store does not answer, the process that keeps it is lost; all ranks know which process that is.

The cost is two small requests to the store each second. Nothing is written for this until a rank calls, because a
store in a file would grow.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import torch.distributed as dist

from autotp.errors import Error, calls_in_progress, listen
from autotp.groups.failures import ask_of_lost_peers
from autotp.groups.one_thread import is_waiting

T = TypeVar("T")
INTERVAL = 1.0
"""Seconds between two looks for a call."""
FIRST_LOOKS = 20
"""Looks in the first interval: who keeps the store has to be known before the store is gone."""
SILENCE = 4 * INTERVAL
"""Seconds without an answer after which a process, or the keeper of the store, counts as lost."""
LEAVING = 10 * INTERVAL
"""Seconds that a process waits at its end for an answer of the store."""
PREFIX = "autotp/heartbeat"
"""Of all keys here."""
JOINED, CALLED, HERE = "joined", "called", "here"
"""Prefixes of keys: `joined/rank`: the rank answers calls; `called/call`: a call; `here/call/rank`: an answer.

The answer is the public call that the rank is in, or "".
"""
VERDICT, KEEPER = "lost", "keeper"
IN_A_GRAPH = "forward or backward"
"""The answer of a process that waits for others in a graph, which is in no public call."""
NOTE = "failed"
"""Prefix of a key `failed/rank`: what a rank did while the others went on, such as an exception that it raised."""

Look = Callable[[Any], None]
"""A function of the store that is called at each look."""
_looks: list[Look] = []
_hearts: weakref.WeakKeyDictionary[Any, Heart] = weakref.WeakKeyDictionary()


class Heart:
    """Answers calls in a store, until it is stopped or the store is gone.

    Attributes:
        keeper: the global rank that keeps the store, if it is known.
        found: the lost ranks, once they are known.
        note: what this rank has noted for the others; "" for nothing.
        waited: the call in which this rank last waited in vain; "" for none.
    """

    def __init__(self, store: Any, rank: int) -> None:  # A dist.Store, whose `clone` torch's types do not have.
        # Each thread has its own connection. They stay open: torch cannot close a store on a full disk.
        self.rank, self.store, self._listening = rank, store.clone(), store.clone()
        self.stopped, self.note, self.waited, self.calls = Event(), "", "", 0
        self.keeper: int | None = None
        self.found: list[int] | None = None
        if keeps(store):
            self.store.set(KEEPER, str(rank))
        self.store.set(f"{JOINED}/{rank}", "")
        self.thread = Thread(target=self._listen, name="autotp-heartbeat", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        looks = 0
        while not self.stopped.wait(INTERVAL if looks >= FIRST_LOOKS else INTERVAL / FIRST_LOOKS):
            looks += 1
            try:
                self._look()
            except dist.DistNetworkError:  # The process that kept the store has ended.
                return
            except Exception:  # For example a full disk, which may have space again later.
                continue

    def _look(self) -> None:
        store = self._listening
        if self.keeper is None and store.check([KEEPER]):
            self.keeper = int(store.get(KEEPER))
        if store.check([f"{CALLED}/{self.calls}"]):
            store.set(f"{HERE}/{self.calls}/{self.rank}", self.doing())
            self.calls += 1
        if self.calls and store.check([VERDICT]):  # Noted here, because the store may be gone later.
            self.found = list(map(int, json.loads(store.get(VERDICT))))
        for look in _looks:
            look(store)

    def doing(self) -> str:
        """Returns the call that this process is in, or in which it waited in vain; "" if it is elsewhere."""
        return next(iter(calls_in_progress()), IN_A_GRAPH if is_waiting() else self.waited)

    def call(self) -> tuple[list[int], dict[int, str]]:
        """Calls all ranks; returns those that do not answer, or the lost ranks that another rank found before.

        If none is lost, also returns what each of the others is doing.

        Raises:
            RuntimeError: the store is gone.
        """
        store, call, end = self.store, self.calls, time.monotonic() + SILENCE
        if store.check([VERDICT]):
            return list(map(int, json.loads(store.get(VERDICT)))), {}
        others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]
        absent = others = [rank for rank in others if store.check([f"{JOINED}/{rank}"])]
        store.set(f"{CALLED}/{call}", "")
        while absent and time.monotonic() < end:
            time.sleep(INTERVAL / 10)
            absent = [rank for rank in absent if not store.check([f"{HERE}/{call}/{rank}"])]
        if not absent:
            return [], {rank: store.get(f"{HERE}/{call}/{rank}").decode() for rank in others}
        found = list(map(int, json.loads(store.compare_set(VERDICT, "", json.dumps(absent)))))
        if self.keeper == self.rank:  # The store may end with this process; the others must read it first.
            time.sleep(2 * INTERVAL)
        return found, {}

    def stop(self) -> None:
        """Ends the thread. A thread that waits for the store while Python exits would abort the process (SIGABRT)."""
        self.stopped.set()
        gone = self.keeper in (self.found or ())
        self.thread.join(INTERVAL if gone else LEAVING)  # The store may be busy; without its keeper it never answers.


def keeps(store: dist.Store) -> bool:
    """True if this process keeps a store: it listens on the store's port. False if that is not known."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return False
    mine, rows = set[str](), list[list[str]]()
    with suppress(OSError):  # Linux lists its sockets. torchrun's agent, the first rank or another process may listen.
        for file in ("tcp", "tcp6"):
            rows += [line.split() for line in Path("/proc/self/net", file).read_text().splitlines()[1:]]
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            mine.add(os.readlink(descriptor))
    listening = [row for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == store.port]
    return any(f"socket:[{row[9]}]" in mine for row in listening)


def begin() -> None:
    """Starts the heartbeat of this process, if there are several processes and it has none yet."""
    world: Any = dist.group.WORLD
    if world is None or world.size() == 1 or world in _hearts:
        return
    store = dist.distributed_c10d._get_default_store()
    heart = Heart(dist.PrefixStore(PREFIX, store), world.rank())
    _hearts[world] = heart
    ask_of_lost_peers(reason)
    listen(_note_end)
    weakref.finalize(world, heart.stop)


def on_each_look(look: Look) -> None:
    """Has the thread of the heartbeat call `look` about once a second, with the store."""
    if look not in _looks:
        _looks.append(look)


def answered(run: Callable[[], T], within: float) -> T:
    """Returns the result of `run`, which asks a store. A store whose keeper is stopped ignores its own timeout.

    Args:
        within: seconds to wait.

    Raises:
        TimeoutError: there is no answer.
        RuntimeError: the store's own error.
    """
    done, found, problem = Event(), list[T](), list[Exception]()

    def ask() -> None:
        try:
            found.append(run())
        except Exception as error:
            problem.append(error)
        done.set()

    Thread(target=ask, name="autotp-store", daemon=True).start()
    if not done.wait(within):
        raise TimeoutError(f"the store in which the processes met did not answer within {within:.0f} s")
    if problem:
        raise problem[0]
    return found[0]


def reason(named: Callable[[int], str], ranks: Sequence[int] = ()) -> str:
    """Returns why other ranks do not answer: what they raised, which of them are lost or elsewhere; "" if unknown.

    Args:
        named: returns the name of a global rank.
        ranks: the global ranks that make the call together; with none, nobody is said to be elsewhere.
    """
    heart = _heart()
    if heart is None:
        return ""
    heart.waited = heart.doing()
    notes, doing = dict[int, str](), dict[int, str]()
    try:
        notes = answered(lambda: _notes(heart), SILENCE)
        if said := [f"{named(rank)} {text}" for rank, text in notes.items() if text != heart.note]:
            return "; ".join(said)
        (lost, doing), about = answered(heart.call, 3 * SILENCE), ""
    except Exception:  # The store is gone.
        lost, about = heart.found or [], ""
        if not lost and heart.keeper is None:
            return "the store in which the processes met is gone, and with it torchrun or the process that kept it"
        if not lost and heart.keeper != heart.rank:
            assert heart.keeper is not None
            heart.found = lost = [heart.keeper]
            about = ", and with it the store in which the processes met"
    if not lost and heart.note and len(notes) < dist.get_world_size() - 1:
        return f"this rank {heart.note}"
    if not lost:
        outside = {rank: text for rank, text in doing.items() if rank not in ranks} if ranks else {}
        inside = {rank: text for rank, text in doing.items() if rank in ranks}
        return _elsewhere(heart.waited, inside, named) or _elsewhere(heart.waited, outside, named)
    return f"{', '.join(map(named, lost))} {'is' if len(lost) == 1 else 'are'} lost, ended or stopped{about}"


def _elsewhere(here: str, doing: Mapping[int, str], named: Callable[[int], str]) -> str:
    """Returns which ranks are not in the call `here`; "" if all are."""
    said = [f"{named(rank)} called {text}" for rank, text in doing.items() if text not in ("", here)]
    behind = [named(rank) for rank, text in doing.items() if not text]
    if behind:
        said.append(f"{', '.join(behind)} {'is' if len(behind) == 1 else 'are'} alive, but did not come to this call")
    return "; ".join(said)


def _note_end(error: BaseException | None) -> None:
    """Notes an exception that left a public call; deletes the note of an earlier one if all ranks made this call."""
    heart = _heart()
    if error is not None and not isinstance(error, Error):
        leave_note(error)
    elif error is None or (heart is not None and not heart.waited):
        take_note_back()


def leave_note(error: BaseException) -> None:
    """Notes for the other ranks the exception that this rank raises: their collectives will wait for this rank."""
    _note(f"raised {': '.join([type(error).__name__, *str(error).splitlines()[:1]])}"[:300])


def expect_all_to_call(what: str) -> None:
    """Notes, until `take_note_back`, a call that this rank made: a collective fails if other ranks did not make it."""
    _note(f"called {what}, and not all ranks did")


def take_note_back() -> None:
    """Deletes this rank's note: all ranks are at the same call again."""
    heart = _heart()
    if heart is not None:
        heart.waited = ""
        if heart.note:
            _note("")


def _note(text: str) -> None:
    heart = _heart()
    if heart is not None:
        with suppress(Exception):  # The store may be gone, too.
            answered(lambda: heart.store.set(f"{NOTE}/{heart.rank}", text), SILENCE)
            heart.note = text


def _notes(heart: Heart) -> dict[int, str]:
    """Returns the notes of other ranks, by global rank."""
    found = dict[int, str]()
    for rank in (rank for rank in range(dist.get_world_size()) if rank != heart.rank):
        if heart.store.check([f"{NOTE}/{rank}"]) and (said := heart.store.get(f"{NOTE}/{rank}")):
            found[rank] = said.decode()
    return found


def _heart() -> Heart | None:
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else _hearts.get(world)
