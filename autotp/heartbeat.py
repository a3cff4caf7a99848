"""heartbeat: who is lost, when a collective fails.

A collective says that it waited too long, or that some connection was closed, and not whose. Behind a process that
was killed end those that waited for it, and behind these others; one that was stopped closes nothing. So each process
counts seconds in the store in which they met, from a thread of its own, which goes on while a collective waits. When
one has failed, those that do not count any more are lost. The first to find that out leaves it there for the others,
since it may soon be gone itself.

Costs a message of some bytes to the store each second.
"""

from __future__ import annotations

import json
import time
import weakref
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

INTERVAL = 1.0
"""Seconds between two beats."""
SILENCE = 4 * INTERVAL
"""Seconds without a beat after which a process is lost."""
VERDICT = "lost"
NOTE = "failed"
"""Before the number of a rank: what it raised while the others went on."""

_hearts: weakref.WeakKeyDictionary[Any, Heart] = weakref.WeakKeyDictionary()


class Heart:
    """Counts seconds in a store, until it is stopped or the store is gone."""

    def __init__(self, store: Any, rank: int) -> None:  # A dist.Store, whose `clone` torch's types do not have.
        self.store, self.rank, self.stopped, self.noted = store, rank, Event(), False
        self.store.clone().set(str(rank), "0")
        self.thread = Thread(target=self._beat, args=(store.clone(),), name="autotp-heartbeat", daemon=True)
        self.thread.start()

    def _beat(self, store: Any) -> None:
        beats = 0
        while not self.stopped.wait(INTERVAL):
            beats += 1
            try:
                store.set(str(self.rank), str(beats))
            except Exception:  # Whoever kept the store is gone.
                return

    def stop(self) -> None:
        """Ends the thread, which must not run when Python ends."""
        self.stopped.set()
        self.thread.join(INTERVAL)


def begin() -> None:
    """Has this process count, if it is one of several and does not yet."""
    world: Any = dist.group.WORLD
    if world is None or world.size() == 1 or world in _hearts:
        return
    store = dist.distributed_c10d._get_default_store()
    heart = Heart(dist.PrefixStore("autotp/heartbeat", store), world.rank())
    _hearts[world] = heart
    weakref.finalize(world, heart.stop)


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
            heart.store.clone().set(f"{NOTE}/{heart.rank}", text)
            heart.noted = bool(text)


def notes() -> dict[int, str]:
    """What other ranks raised alone, by global rank."""
    heart, found = _heart(), dict[int, str]()
    if heart is None:
        return found
    with suppress(Exception):  # The store may be gone, too.
        store = heart.store.clone()
        for rank in (rank for rank in range(dist.get_world_size()) if rank != heart.rank):
            if store.check([f"{NOTE}/{rank}"]) and (said := store.get(f"{NOTE}/{rank}")):
                found[rank] = said.decode()
    return found


def _heart() -> Heart | None:
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else _hearts.get(world)


def lost_ranks() -> list[int]:
    """The global ranks that are lost, as the first process to ask found; none where nothing is known."""
    heart = _heart()
    if heart is None:
        return []
    with suppress(Exception):  # The store may be gone, too.
        store = heart.store.clone()
        if store.check([VERDICT]):
            return list(map(int, json.loads(store.get(VERDICT))))
        before = _beats(store, dist.get_world_size())
        time.sleep(SILENCE)
        after = _beats(store, dist.get_world_size())
        found = [rank for rank, beats in before.items() if after[rank] == beats and rank != heart.rank]
        if found:
            said: bytes = store.compare_set(VERDICT, "", json.dumps(found))
            return list(map(int, json.loads(said)))
    return []


def _beats(store: Any, size: int) -> dict[int, bytes]:
    """How often each process that counts has done so."""
    return {rank: store.get(str(rank)) for rank in range(size) if store.check([str(rank)])}
