"""roll_call: what one rank tells its neighbours in the tree, and what it learns: who is lost, and what the others do.

NOTE [Who is lost]
A process that ends closes its connections, and its neighbours in the tree see that at once. If it had not taken leave,
they tell all ranks that it is lost. A stopped process closes nothing; a process that holds Python's lock for long, as
some compilers do, looks the same. So a rank without a beat is lost only for ranks that have waited in vain, until a
group's timeout: these ask for a roll call.

A roll call begins at rank 0, or at the highest rank that can be reached: a rank whose parent is lost or silent begins
its own. It goes down the tree, the answers come up in one message for each link, and the result goes down again. So all
ranks ask and are answered with three messages a link, however many of them ask.

A message is a list: its kind, then data of JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotp.distributed.peers.tree import children_of, next_hop, parent_of

SILENCE = 4.0
"""Seconds without a beat after which a roll call counts a rank as silent."""
BEAT, NOTE, LOST, BYE = "beat", "note", "lost", "bye"
"""Kinds of messages: this rank lives; its note; a rank is lost, with its last note; this rank ends, all is well."""
ASK, ROLL, ANSWER, CENSUS, TO = "ask", "roll", "answer", "census", "to"
"""Please call the roll; answer it; the answers of a subtree; the result for all; news for some ranks."""


@dataclass(frozen=True)
class State:
    """What a rank says of itself.

    Attributes:
        doing: the public call that it is in, or waited in; "" if it waits for nobody.
        note: what it did while the others went on, such as an exception that it raised; "" for nothing.
        started: axis -> number of collectives that it has started along it.
    """

    doing: str = ""
    note: str = ""
    started: tuple[tuple[str, int], ...] = ()


@dataclass
class Census:
    """The result of a roll call.

    Attributes:
        lost: ranks that ended without a farewell -> the last note of each.
        ended: ranks that took leave -> the last note of each.
        silent: ranks that should have answered.
        states: what the others said -> ranges of ranks, [first, last + 1].
    """

    lost: dict[int, str] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    states: dict[State, list[list[int]]] = field(default_factory=dict)

    def add(self, census: Census) -> None:
        """Adds the answers of other ranks."""
        self.lost |= census.lost
        self.ended |= census.ended
        self.silent |= census.silent
        for state, ranges in census.states.items():
            self.states[state] = _joined([*self.states.get(state, []), *ranges])

    def by_rank(self) -> dict[int, State]:
        """Returns what each rank said that answered."""
        return {rank: state for state, ranges in self.states.items() for pair in ranges for rank in range(*pair)}

    def as_data(self) -> list[Any]:
        """Returns the same as data of JSON."""
        states = [[state.doing, state.note, state.started, ranges] for state, ranges in self.states.items()]
        return [list(self.lost.items()), list(self.ended.items()), sorted(self.silent), states]

    @staticmethod
    def of_data(data: Sequence[Any]) -> Census:
        """Returns the census of what `as_data` returned."""
        lost, ended, silent, states = data
        answers = {State(doing, note, tuple(map(tuple, counts))): ranges for doing, note, counts, ranges in states}
        return Census(dict(lost), dict(ended), set(silent), answers)


def _joined(ranges: Iterable[list[int]]) -> list[list[int]]:
    joined = list[list[int]]()
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = [joined[-1][0], stop]
        else:
            joined.append([start, stop])
    return joined


@dataclass
class Roll:
    """A roll call that this rank has not answered yet.

    Attributes:
        number: tells it from others.
        source: the parent that asked; None: this rank began it.
        pending: the children that have not answered.
        census: the answers so far.
    """

    number: str
    source: int | None
    pending: set[int]
    census: Census


class Node:
    """One rank in the tree. It is used from one thread.

    Attributes:
        expected: neighbours that have joined, though there may be no connection yet.
        lost: ranks that ended without a farewell, in the order in which this rank heard of it -> their last notes.
        silent: ranks that were silent in the last roll call.
        note: what this rank has noted for the others; "" for nothing.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Callable[[int, list[Any]], None],
        state: Callable[[], State],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.send, self.state, self.clock = rank, send, state, clock
        self.parent, self.children = parent_of(rank), set(children_of(rank, size))
        self.expected = dict[int, float]()
        self.heard = dict[int, float]()
        self.notes, self.lost, self.ended = dict[int, str](), dict[int, str](), dict[int, str]()
        self.silent = set[int]()
        self.note, self.rolls, self.asked, self.again = "", 0, -SILENCE, False
        self.roll: Roll | None = None
        self.waiting = list[Callable[[Census], None]]()
        self.topics = dict[str, Callable[[int, Any], None]]()

    def neighbours(self) -> set[int]:
        """Returns the ranks to which this one has connections if all is well."""
        return self.children | ({self.parent} if self.parent is not None else set())

    # ---- connections

    def linked(self, neighbour: int) -> None:
        """A connection to a neighbour is there."""
        self.heard[neighbour] = self.clock()
        if self.note:
            self.send(neighbour, [NOTE, self.note])
        # A neighbour that connects late has not heard these.
        for rank, note in self.lost.items():
            self.send(neighbour, [LOST, rank, note])

    def unlinked(self, neighbour: int) -> None:
        """The connection to a neighbour was closed: its process has ended."""
        # A neighbour that has taken leave has ended as it should.
        if self.heard.pop(neighbour, None) is not None and neighbour not in self.ended:
            self._learn(neighbour, self.notes.get(neighbour, ""))
        self._go_on()

    def beat(self) -> None:
        """Tells the neighbours that this rank lives, and goes on with a roll call without those that are silent."""
        for neighbour in self.heard:
            self.send(neighbour, [BEAT])
        self._go_on()

    def resume(self) -> None:
        """Forgives silence: this process itself did not run."""
        self.heard = dict.fromkeys(self.heard, self.clock())

    def leave(self, failed: bool) -> None:
        """Takes leave of the neighbours, or tells them that this process ends by an exception of its own."""
        for neighbour in self.heard:
            self.send(neighbour, [LOST, self.rank, self.note] if failed else [BYE])

    def _is_silent(self, neighbour: int) -> bool:
        last = self.heard.get(neighbour, self.expected.get(neighbour))
        return last is not None and self.clock() - last >= SILENCE

    # ---- news

    def set_note(self, text: str) -> None:
        """Keeps a note, and tells it the neighbours, which know it when this process is gone."""
        self.note = text
        for neighbour in self.heard:
            self.send(neighbour, [NOTE, text])

    def tell(self, ranks: Sequence[int], topic: str, data: Any) -> None:
        """Sends data to these ranks, along the tree; it is lost if a rank on the way is lost."""
        hops = dict[int, list[int]]()
        for rank in ranks:
            hops.setdefault(next_hop(self.rank, rank), []).append(rank)
        for hop, targets in hops.items():
            self.send(hop, [TO, targets, self.rank, topic, data])

    def received(self, neighbour: int, message: Sequence[Any]) -> None:
        """Takes a message of a neighbour."""
        # Any message is a sign of life.
        self.heard[neighbour] = self.clock()
        match message:
            case [str(tag), str(text)] if tag == NOTE:
                self.notes[neighbour] = text
            case [str(tag), int(rank), str(text)] if tag == LOST:
                self._learn(rank, text)
            case [str(tag)] if tag == BYE:
                self.ended[neighbour] = self.notes.get(neighbour, "")
            case [str(tag)] if tag == ASK:
                self._ask()
            case [str(tag), str(number)] if tag == ROLL:
                self._call(number, neighbour)
            case [str(tag), str(number), list(data)] if tag == ANSWER:
                if self.roll is not None and self.roll.number == number:
                    self.roll.pending.discard(neighbour)
                    self.roll.census.add(Census.of_data(data))
                    self._go_on()
            case [str(tag), list(data)] if tag == CENSUS:
                self._publish(Census.of_data(data))
            case [str(tag), list(ranks), int(sender), str(topic), data] if tag == TO:
                self._pass_on(ranks, sender, topic, data)

    def _pass_on(self, ranks: list[int], sender: int, topic: str, data: Any) -> None:
        if self.rank in ranks and topic in self.topics:
            self.topics[topic](sender, data)
        hops = dict[int, list[int]]()
        for rank in ranks:
            if rank != self.rank:
                hops.setdefault(next_hop(self.rank, rank), []).append(rank)
        for hop, targets in hops.items():
            self.send(hop, [TO, targets, sender, topic, data])

    def _learn(self, rank: int, note: str) -> None:
        """Notes that a rank is lost, and tells all others."""
        if rank in self.lost or rank == self.rank:
            return
        self.lost[rank] = note
        for neighbour in self.heard:
            if neighbour != rank:
                self.send(neighbour, [LOST, rank, note])

    # ---- roll calls

    def ask(self, callback: Callable[[Census], None]) -> None:
        """Asks for a roll call; `callback` gets its result."""
        self.waiting.append(callback)
        self._ask()

    def _ask(self) -> None:
        if not self._begins():
            if self.clock() - self.asked >= SILENCE / 8:  # One question is enough for all that ask below this rank.
                self.asked = self.clock()
                assert self.parent is not None
                self.send(self.parent, [ASK])
        elif self.roll is not None and self.roll.source is None:
            # A roll call is under way, and may have passed what is asked for: another one follows it.
            self.again = True
        else:
            self.rolls += 1
            self._call(f"{self.rank}/{self.rolls}", None)

    def _begins(self) -> bool:
        """Returns whether roll calls begin here: no rank above can be reached."""
        return self.parent not in self.heard or self._is_silent(self.parent)

    def _call(self, number: str, source: int | None) -> None:
        parent = self.parent if source is None else None
        # A child that has joined, and is not connected yet, may still answer: it is waited for until it counts as
        # silent.
        pending = {rank for rank in self.children if rank in self.heard or rank in self.expected} - {*self.ended}
        census = Census(dict(self.lost), dict(self.ended), set(), {self.state(): [[self.rank, self.rank + 1]]})
        self.roll = Roll(number, source, pending - {*self.lost}, census)
        if parent is not None and self._is_silent(parent) and parent not in self.lost and parent not in self.ended:
            census.silent.add(parent)
        if parent is not None and parent not in self.heard:  # It may have ended because of those that it found silent.
            census.silent |= self.silent - {*self.heard, *self.ended, self.rank}
        for child in sorted(self.roll.pending & {*self.heard}):
            self.send(child, [ROLL, number])
        self._go_on()

    def _go_on(self) -> None:
        """Answers the roll call if no child is left that may answer; asks anew if the rank that was asked is gone."""
        if self.roll is None:
            if self.waiting and (self._begins() or self.clock() - self.asked >= SILENCE):
                self._ask()
            return
        roll = self.roll
        if roll.source is not None and roll.source not in self.heard:  # It waits for no answer any more.
            self.roll = None
            return self._go_on()
        for child in list(roll.pending):
            if self._is_silent(child) or child in self.lost or child in self.ended:
                roll.pending.discard(child)
                if child not in self.lost and child not in self.ended:
                    roll.census.silent.add(child)
        if roll.pending:
            return None
        self.roll = None
        # Ranks may have been lost while the answers came.
        roll.census.lost |= self.lost
        if roll.source is not None:
            self.send(roll.source, [ANSWER, roll.number, roll.census.as_data()])
            return None
        self._publish(roll.census)
        if self.again:
            self.again = False
            self._ask()
        return None

    def _publish(self, census: Census) -> None:
        """Takes the result of a roll call, and passes it on."""
        self.silent = census.silent
        for rank, note in census.lost.items():
            self.lost.setdefault(rank, note)
        data = census.as_data()
        for child in sorted(self.children & {*self.heard}):
            self.send(child, [CENSUS, data])
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback(census)


def lost_of(census: Census) -> list[int]:
    """Returns the ranks that others wait for in vain: those that are lost or silent, else those that took leave."""
    return sorted({*census.lost, *census.silent} or census.ended)


def notes_of(census: Census) -> Mapping[int, str]:
    """Returns the notes of all ranks that have one, those of lost ranks included."""
    alive = {rank: state.note for rank, state in census.by_rank().items() if state.note}
    return {rank: note for rank, note in sorted({**census.lost, **census.ended, **alive}.items()) if note}
