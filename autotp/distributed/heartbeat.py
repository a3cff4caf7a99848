"""heartbeat: finds the rank that was lost, when a collective fails.

A collective says that it waited too long, or that some connection was closed, and not whose. Behind a process that
was killed end those that waited for it, and behind these others; one that was stopped closes nothing. So each process
has a thread that goes on while a collective waits, and that answers when it is called, through the store in which the
processes met. Where a collective has failed the ranks are called, and those that do not answer are lost. The first to
find that out leaves it there for the others, since it may soon be gone itself.

Where the store does not answer, the process that keeps it is lost: all know in time which one that is.

Costs two questions of some bytes to the store each second. Nothing is written until somebody calls: a store in a file
would grow.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import torch.distributed as dist

from autotp.ops.collectives import ask_of_lost_peers

T = TypeVar("T")
INTERVAL = 1.0
"""Seconds after which a process looks whether it is called."""
SILENCE = 4 * INTERVAL
"""Seconds without an answer after which a process is lost, and so is the one that keeps the store."""
LEAVING = 10 * INTERVAL
"""Seconds for which the end of a process waits for an answer of the store."""
JOINED, CALLED, HERE = "joined", "called", "here"
"""Before the number of a rank: it answers calls. Before that of a call: it was made; who answered it, by rank."""
VERDICT, KEEPER = "lost", "keeper"
NOTE = "failed"
"""Before the number of a rank: what it raised while the others went on."""

_hearts: weakref.WeakKeyDictionary[Any, Heart] = weakref.WeakKeyDictionary()


class Heart:
    """Answers calls in a store, until it is stopped or the store is gone.

    Attributes:
        keeper: the global rank that keeps the store, if one does and it is known.
        found: the ranks that are lost, once that is known.
    """

    def __init__(self, store: Any, rank: int) -> None:  # A dist.Store, whose `clone` torch's types do not have.
        # Each thread has a connection of its own. They stay open: torch cannot close a store on a disk that is full.
        self.rank, self.store, self._listening = rank, store.clone(), store.clone()
        self.stopped, self.noted, self.calls = Event(), False, 0
        self.keeper: int | None = None
        self.found: list[int] | None = None
        if keeps(store):
            self.store.set(KEEPER, str(rank))
        self.store.set(f"{JOINED}/{rank}", "")
        self.thread = Thread(target=self._listen, name="autotp-heartbeat", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        while not self.stopped.wait(INTERVAL):
            try:
                self._look()
            except dist.DistNetworkError:  # Whoever kept the store is gone.
                return
            except Exception:  # A disk that is full: it may not stay so.
                continue

    def _look(self) -> None:
        store = self._listening
        if self.keeper is None and store.check([KEEPER]):
            self.keeper = int(store.get(KEEPER))
        if store.check([f"{CALLED}/{self.calls}"]):
            store.set(f"{HERE}/{self.calls}/{self.rank}", "")
            self.calls += 1
        if self.calls and store.check([VERDICT]):  # It is kept here: the store may be gone when it is asked for.
            self.found = list(map(int, json.loads(store.get(VERDICT))))

    def call(self) -> list[int]:
        """The ranks that do not answer, or did not when the first rank called that found some.

        Raises:
            RuntimeError: the store is gone.
        """
        store, call, end = self.store, self.calls, time.monotonic() + SILENCE
        if store.check([VERDICT]):
            return list(map(int, json.loads(store.get(VERDICT))))
        others = (rank for rank in range(dist.get_world_size()) if rank != self.rank)
        absent = [rank for rank in others if store.check([f"{JOINED}/{rank}"])]
        store.set(f"{CALLED}/{call}", "")
        while absent and time.monotonic() < end:
            time.sleep(INTERVAL / 10)
            absent = [rank for rank in absent if not store.check([f"{HERE}/{call}/{rank}"])]
        if not absent:
            return []
        found = list(map(int, json.loads(store.compare_set(VERDICT, "", json.dumps(absent)))))
        if self.keeper == self.rank:  # The others look for it, and with this process the store may end.
            time.sleep(2 * INTERVAL)
        return found

    def stop(self) -> None:
        """Ends the thread. One that is in the store while Python ends would end the process by SIGABRT."""
        self.stopped.set()
        self.thread.join(LEAVING)  # It waits for a store that is busy; one whose keeper is stopped never answers.


def keeps(store: dist.Store) -> bool:
    """Whether this process keeps a store: it listens where the others connect to. False where that is not known."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return False
    mine, rows = set[str](), list[list[str]]()
    with suppress(OSError):  # Linux knows: torchrun's agent keeps the store, or the first rank, or whom a user chose.
        for file in ("tcp", "tcp6"):
            rows += [line.split() for line in Path("/proc/self/net", file).read_text().splitlines()[1:]]
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            mine.add(os.readlink(descriptor))
    listening = [row for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == store.port]
    return any(f"socket:[{row[9]}]" in mine for row in listening)


def begin() -> None:
    """Has this process answer, if it is one of several and does not yet."""
    world: Any = dist.group.WORLD
    if world is None or world.size() == 1 or world in _hearts:
        return
    store = dist.distributed_c10d._get_default_store()
    heart = Heart(dist.PrefixStore("autotp/heartbeat", store), world.rank())
    _hearts[world] = heart
    ask_of_lost_peers(reason)
    weakref.finalize(world, heart.stop)


def answered(run: Callable[[], T], within: float) -> T:
    """What `run` returns, which asks a store. A store whose keeper is stopped answers never, whatever its timeout.

    Args:
        within: in seconds.

    Raises:
        TimeoutError: there is no answer.
        RuntimeError: as the store says.
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


def reason(named: Callable[[int], str]) -> str:
    """Why other ranks do not answer: what they raised alone, or which are lost; nothing where neither is known.

    Args:
        named: what a global rank is called.
    """
    heart = _heart()
    if heart is None:
        return ""
    try:
        if said := answered(lambda: _notes(heart), SILENCE):
            return "; ".join(f"{named(rank)} raised {text}" for rank, text in said.items())
        lost, about = answered(heart.call, 3 * SILENCE), ""
    except Exception:  # The store is gone.
        lost, about = heart.found or [], ""
        if not lost and heart.keeper is None:
            return "the store in which the processes met is gone, and with it torchrun, or whoever kept it"
        if not lost and heart.keeper != heart.rank:
            assert heart.keeper is not None
            lost, about = [heart.keeper], ", and with it the store in which the processes met"
    if not lost:
        return ""
    return f"{', '.join(map(named, lost))} {'is' if len(lost) == 1 else 'are'} lost, ended or stopped{about}"


def leave_note(error: BaseException) -> None:
    """Leaves for the other ranks what this one raises, alone: their collectives will wait for it."""
    _note(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])


def take_note_back() -> None:
    """Says that the ranks are together again, whatever was left."""
    heart = _heart()
    if heart is not None and heart.noted:
        _note("")


def _note(text: str) -> None:
    heart = _heart()
    if heart is not None:
        with suppress(Exception):  # The store may be gone, too.
            answered(lambda: heart.store.set(f"{NOTE}/{heart.rank}", text), SILENCE)
            heart.noted = bool(text)


def _notes(heart: Heart) -> dict[int, str]:
    """What other ranks raised alone, by global rank."""
    found = dict[int, str]()
    for rank in (rank for rank in range(dist.get_world_size()) if rank != heart.rank):
        if heart.store.check([f"{NOTE}/{rank}"]) and (said := heart.store.get(f"{NOTE}/{rank}")):
            found[rank] = said.decode()
    return found


def _heart() -> Heart | None:
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else _hearts.get(world)
