"""heartbeat: finds the lost rank when a collective fails or never ends.

A failed collective reports a timeout or a closed connection, but not whose. After a process is killed, processes that
waited for it end, then others that waited for these; a stopped process closes no connection. So each process has a
thread that runs while a collective waits, with connections to its neighbours in a tree of all ranks. Each neighbour
sends a beat once a second; NOTE [Who is lost]. After a failure a rank asks for a roll call. An answer tells the public
call that the process is in: if nobody is lost, the error names the rank that is elsewhere.

The store in which the processes met has the addresses, and is asked for nothing once the connections are there. The
busiest rank of 8,192 has 29 neighbours. `benchmarks/lost_ranks.py` counts the messages.
"""

from __future__ import annotations

import multiprocessing.util
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any, TypeVar

import torch.distributed as dist

from autotp.attached import attach, attached_if_any
from autotp.distributed.peers.links import Links, connect, host_of
from autotp.distributed.peers.roll_call import SILENCE, Census, Node, State, lost_of, notes_of
from autotp.errors import Error, calls_in_progress, listen
from autotp.groups.failures import ask_of_lost_peers
from autotp.groups.one_thread import is_waiting

T = TypeVar("T")
INTERVAL = 1.0
"""Seconds between two beats."""
SOON = 0.02
"""Seconds between the first two looks into the store for a neighbour's address; then ever longer."""
SELDOM = 60.0
"""Seconds between two such looks at most: some neighbours may never use autotp."""
UNREACHED = 30.0
"""Seconds after which a rank gives up to connect to a neighbour that is there."""
LEAVING = 10.0
"""Seconds that a process waits at its end for an answer of the store."""
PREFIX = "autotp/heartbeat"
"""Of all keys here: `joined/rank`: the rank's address, or `ALONE`."""
JOINED, ALONE = "joined", "alone"
IN_A_GRAPH = "forward or backward"
"""The answer of a process that waits for others in a graph, which is in no public call."""
NAMED = 8
"""The number of ranks that a message names of each kind at most."""

Look = Callable[[], None]
"""A function that is called once a second, in the thread of the heartbeat."""
_looks: list[Look] = []
_topics: dict[str, Callable[[int, Any], None]] = {}
_waits: list[Callable[[], bool]] = [is_waiting]
_counts: list[Callable[[], Mapping[str, int]]] = []


class Heart:
    """The thread of this process that beats, until it is stopped.

    Attributes:
        node: what this rank knows of the others; it belongs to the thread.
        waited: the call in which this rank last waited in vain; "" for none.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:  # A dist.Store; torch's types have no `clone`.
        self.rank, self.store, self.waited = rank, store.clone(), ""
        self.stopped, self.jobs = Event(), SimpleQueue[Callable[[], object]]()
        self.node = Node(rank, size, self._send, self._state)
        self.node.topics = _topics
        self.links = Links(bool(self.node.children), store)
        self.store.set(f"{JOINED}/{rank}", self.links.address)
        self.meeting = Thread(target=self._meet, name="autotp-meeting", daemon=True)
        self.thread = Thread(target=self._beat, name="autotp-heartbeat", daemon=True)
        self.meeting.start()
        self.thread.start()

    # ---- neighbours

    def _meet(self) -> None:
        """Looks for the neighbours in the store, until all are connected."""
        absent, pause = self.node.neighbours(), SOON
        joined = dict[int, float]()
        while absent and not self.stopped.wait(pause):
            for neighbour in list(absent):
                try:
                    if self._meets(neighbour, joined):
                        absent.discard(neighbour)
                except dist.DistNetworkError:  # The process that kept the store has ended.
                    return
                except Exception:  # For example a full disk, which may have space again later.
                    continue
            # A neighbour that has joined will connect soon; one that has not may never use autotp.
            pause = min(1.3 * pause, 1.0 if joined and absent & {*joined} else SELDOM)

    def _meets(self, neighbour: int, joined: dict[int, float]) -> bool:
        """Returns whether nothing is left to do about a neighbour."""
        if neighbour in self.links.by_rank:
            return True
        if not self.store.check([f"{JOINED}/{neighbour}"]):
            return False
        address = self.store.get(f"{JOINED}/{neighbour}").decode()
        if address == ALONE:
            # In the thread of the heartbeat: `node` belongs to it.
            self._do(lambda: self.node.expected.pop(neighbour, None))
            return True
        if neighbour not in joined:
            joined[neighbour] = since = time.monotonic()
            self._do(lambda: self.node.expected.setdefault(neighbour, since))
        # Children connect to parents only, so a parent waits.
        if neighbour != self.node.parent:
            return False
        try:
            connection = connect(address, self.rank, host_of(self.store))
        except OSError as error:
            if time.monotonic() - joined[neighbour] < UNREACHED:
                return False
            # The parent must not take this rank for lost: it learns that there will be no connection.
            self.store.set(f"{JOINED}/{self.rank}", ALONE)
            self._do(lambda: self.node.expected.pop(neighbour, None))
            warnings.warn(UNREACHABLE.format(neighbour, address.rpartition(",")[0].strip("["), error), stacklevel=1)
            return True
        self._do(lambda: self._linked(neighbour, connection))
        return True

    def _linked(self, neighbour: int, connection: Any) -> None:
        self.links.add(neighbour, connection)
        self.node.linked(neighbour)

    def _send(self, neighbour: int, message: list[Any]) -> None:
        self.links.send(neighbour, message)

    # ---- the thread

    def _beat(self) -> None:
        last = beaten = time.monotonic()
        while not self.stopped.is_set():
            with suppress(Exception):  # The thread must not end by an odd message.
                self._take(max(0.0, beaten + INTERVAL - time.monotonic()))
            now = time.monotonic()
            if now - last > INTERVAL + SILENCE / 2:  # This process was stopped, or another thread held Python's lock.
                self.node.resume()
            last = now
            if now - beaten >= INTERVAL:
                beaten = now
                self.node.beat()
                for look in _looks:
                    with suppress(Exception):
                        look()
        self.links.close()

    def _take(self, seconds: float) -> None:
        """Takes what comes within a time, and does what other threads ask for."""
        for rank, message, is_open in self.links.events(seconds):
            if message is not None:
                self.node.received(rank, message)
            elif is_open:
                self.node.linked(rank)
            else:
                self.node.unlinked(rank)
        while not self.jobs.empty():
            self.jobs.get()()

    def _do(self, job: Callable[[], object]) -> None:
        """Has the thread do something."""
        self.jobs.put(job)
        self.links.wake()

    def _state(self) -> State:
        counts = [item for count in _counts for item in count().items()]
        return State(self.doing(), self.node.note, tuple(sorted(counts)))

    def doing(self) -> str:
        """Returns the call that this process is in, or in which it waited in vain; "" if it is elsewhere."""
        waits = any(waiting() for waiting in _waits)
        return next(iter(calls_in_progress()), IN_A_GRAPH if waits else self.waited)

    def census(self) -> Census | None:
        """Returns the answers of all ranks that can be reached; None if there are none in time."""
        answers = SimpleQueue[Census]()
        self._do(lambda: self.node.ask(answers.put))
        with suppress(Exception):  # queue.Empty
            return answers.get(timeout=3 * SILENCE)
        return None

    def note(self, text: str) -> None:
        """Notes what this rank did while the others went on; "" deletes the note."""
        self.node.note, sent = text, Event()

        def send() -> None:
            self.node.set_note(text)
            sent.set()

        self._do(send)
        sent.wait(INTERVAL)  # The process may end right now.

    def stop(self) -> None:
        """Takes leave, and ends the threads. A thread that waits for the store while Python exits would abort it."""
        if self.stopped.is_set():
            return
        # Python sets `last_value` for an exception that nobody caught.
        raised = getattr(sys, "last_value", None) or sys.exc_info()[1]
        ends_alone = (raised is not None or bool(self.node.note)) and not (self.node.lost or self.node.silent)

        def leave() -> None:
            self.node.leave(ends_alone)
            self.stopped.set()

        self._do(leave)
        if current_thread() is self.thread:  # It held the last reference to the group.
            return leave()
        self.thread.join(LEAVING)
        self.stopped.set()
        self.meeting.join(LEAVING)  # The store may be busy; without the process that keeps it, it never answers.


UNREACHABLE = (
    "autotp: this rank cannot connect to global rank {} ({}: {}), so a rank that is lost is not named here. Let the "
    "machines of a job reach each other's ports"
)


def begin() -> None:
    """Starts the heartbeat of this process, if there are several processes and it has none yet."""
    world: Any = dist.group.WORLD
    if world is None or world.size() == 1 or attached_if_any(world, Heart) is not None:
        return
    store = dist.distributed_c10d._get_default_store()
    heart = attach(world, Heart(dist.PrefixStore(PREFIX, store), world.rank(), world.size()))
    ask_of_lost_peers(reason)
    listen(_note_end)
    weakref.finalize(world, heart.stop)
    multiprocessing.util.Finalize(None, heart.stop, exitpriority=0)  # Its processes end without `atexit`.


def on_each_look(look: Look) -> None:
    """Has the thread of the heartbeat call `look` about once a second."""
    if look not in _looks:
        _looks.append(look)


def on_news(topic: str, receive: Callable[[int, Any], None]) -> None:
    """Has the thread of the heartbeat call `receive(sender, data)` for what other ranks `tell` of a topic."""
    _topics[topic] = receive


def tell(ranks: Sequence[int], topic: str, data: Any) -> None:
    """Sends data of JSON to these global ranks; it does not arrive if there are no connections, or not any more."""
    heart = _heart()
    if heart is not None:
        heart._do(lambda: heart.node.tell([rank for rank in ranks if rank != heart.rank], topic, data))


def say_what_waits(waiting: Callable[[], bool], counts: Callable[[], Mapping[str, int]]) -> None:
    """Has roll calls ask whether this process waits for others, and how many collectives it has started by axis."""
    if waiting not in _waits:
        _waits.append(waiting)
        _counts.append(counts)


def lost_ranks() -> dict[int, str]:
    """Returns the global ranks whose processes ended without a farewell -> the last note of each."""
    heart = _heart()
    return {} if heart is None else dict(heart.node.lost)


def answered(run: Callable[[], T], within: float) -> T:
    """Returns the result of `run`, which asks a store. A store whose keeper is stopped ignores its own timeout.

    Args:
        within: seconds to wait.

    Raises:
        TimeoutError: there is no answer.
        RuntimeError: the store's own error.
    """
    done, results, problem = Event(), list[T](), list[Exception]()

    def ask() -> None:
        try:
            results.append(run())
        except Exception as error:
            problem.append(error)
        done.set()

    Thread(target=ask, name="autotp-store", daemon=True).start()
    if not done.wait(within):
        raise TimeoutError(f"the store in which the processes met did not answer within {within:.0f} s")
    if problem:
        raise problem[0]
    return results[0]


def reason(named: Callable[[int], str], ranks: Sequence[int] = ()) -> str:
    """Returns why other ranks do not answer: what they raised, which of them are lost or elsewhere; "" if unknown.

    Args:
        named: returns the name of a global rank.
        ranks: the global ranks that make the call together; with none, nobody is said to be elsewhere.
    """
    heart = _heart()
    if heart is None:
        return ""
    # It stays after this call has failed: other ranks may ask later what this one waited for.
    heart.waited = heart.doing()
    census = heart.census()
    if census is None:
        return ""
    notes = notes_of(census)
    if raised := [f"{named(rank)} {text}" for rank, text in notes.items() if text != heart.node.note]:
        return "; ".join(raised[:NAMED])
    if lost := lost_of(census):
        return f"{_listed(lost, named)} {'is' if len(lost) == 1 else 'are'} lost, ended or stopped"
    states = census.by_rank()
    states.pop(heart.rank, None)
    if heart.node.note and len(notes) < dist.get_world_size():
        return f"this rank {heart.node.note}"
    outside = {rank: state for rank, state in states.items() if rank not in ranks} if ranks else {}
    inside = {rank: state for rank, state in states.items() if rank in ranks}
    return (
        _elsewhere(heart.waited, inside, named)
        or _elsewhere(heart.waited, outside, named)
        or _apart(heart._state(), inside, named)
    )


def _listed(ranks: Sequence[int], named: Callable[[int], str]) -> str:
    more = [f"{len(ranks) - NAMED} others"] if len(ranks) > NAMED else []
    return ", ".join([*map(named, ranks[:NAMED]), *more])


def _elsewhere(call: str, states: Mapping[int, State], named: Callable[[int], str]) -> str:
    """Returns which ranks are not in `call`; "" if all are."""
    texts = [f"{named(rank)} called {s.doing}" for rank, s in states.items() if s.doing not in ("", call)][:NAMED]
    absent = [rank for rank, state in states.items() if not state.doing]
    if absent:
        are = "is" if len(absent) == 1 else "are"
        texts.append(f"{_listed(absent, named)} {are} alive, but did not come to this call")
    return "; ".join(texts)


def _apart(state: State, states: Mapping[int, State], named: Callable[[int], str]) -> str:
    """Returns which ranks have started another number of collectives; "" if none has."""
    for axis, count in state.started:
        begun = {rank: n for rank, peer in states.items() if (n := dict(peer.started).get(axis, count)) != count}
        if begun:
            first = next(iter(begun))
            return f"{_listed(list(begun), named)} had started {begun[first]} collectives there, and this rank {count}"
    return ""


def _note_end(error: BaseException | None) -> None:
    """Notes an exception that left a public call; deletes the note of an earlier one if all ranks made this call."""
    heart = _heart()
    if error is not None and (not isinstance(error, Error) or error.alone):
        leave_note(error)
    elif error is None or (heart is not None and not heart.waited):
        take_note_back()


def leave_note(error: BaseException) -> None:
    """Notes for the other ranks the exception that this rank raises: their collectives will wait for this rank."""
    _note(f"raised {': '.join([type(error).__name__, *str(error).splitlines()[:1]])}"[:300])


def expect_all_to_call(call: str) -> None:
    """Notes, until `take_note_back`, a call that this rank made: a collective fails if other ranks did not make it."""
    _note(f"called {call}, and not all ranks did")


def take_note_back() -> None:
    """Deletes this rank's note: all ranks are at the same call again."""
    heart = _heart()
    if heart is not None:
        heart.waited = ""
        if heart.node.note:
            _note("")


def _note(text: str) -> None:
    heart = _heart()
    if heart is not None:
        heart.note(text)


def _heart() -> Heart | None:
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else attached_if_any(world, Heart)
