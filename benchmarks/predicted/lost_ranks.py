"""How many messages do ranks send each other to know who is lost, on 2 to 8,192 ranks? One process simulates them all.

    python benchmarks/predicted/lost_ranks.py [--ranks 64 512 2048 8192]

The simulated ranks run the code of `autotp/distributed/peers/roll_call.py`; only the connections are replaced. A rank
is killed (its connections close) or stopped (it is silent), and then all others ask who is lost.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from autotp.distributed.peers.roll_call import SILENCE, Census, Node, State, lost_of
from autotp.distributed.peers.tree import children_of

HOST = 8
"""Ranks of a machine."""
BEATS = 5
"""Seconds that are counted while nothing happens."""


class Network:
    """Simulated ranks with connections along the tree, and a clock that `pass_a_second` moves.

    Attributes:
        received: rank -> number of messages that reached it.
        told: rank -> the ranks that its roll calls named as lost.
    """

    def __init__(self, size: int) -> None:
        self.now, self.queue = 0.0, deque[tuple[int, int, list[Any]]]()
        self.received, self.told = Counter[int](), dict[int, list[int]]()
        self.stopped = set[int]()
        self.nodes = {rank: self._node(rank, size) for rank in range(size)}
        for rank, node in self.nodes.items():
            for child in children_of(rank, size):
                node.linked(child)
                self.nodes[child].linked(rank)
        self.deliver()

    def _node(self, rank: int, size: int) -> Node:
        def send(target: int, message: list[Any]) -> None:
            self.queue.append((rank, target, message))

        return Node(rank, size, send, lambda: State("Trainer.step"), lambda: self.now)

    def deliver(self) -> None:
        """Delivers all messages, and those that they lead to."""
        while self.queue:
            sender, target, message = self.queue.popleft()
            if target in self.nodes and target not in self.stopped:
                self.received[target] += 1
                self.nodes[target].received(sender, message)

    def pass_a_second(self) -> None:
        """All ranks beat, but those that are stopped."""
        self.now += 1.0
        for rank, node in self.nodes.items():
            if rank not in self.stopped:
                node.beat()
        self.deliver()

    def kill(self, rank: int) -> None:
        """Ends a process: its connections close."""
        lost = self.nodes.pop(rank)
        for neighbour in [*lost.children, lost.parent]:
            if neighbour in self.nodes:
                self.nodes[neighbour].unlinked(rank)
        self.deliver()

    def stop(self, rank: int) -> None:
        """Stops a process: its connections stay."""
        self.stopped.add(rank)
        for _ in range(int(SILENCE) + 1):
            self.pass_a_second()

    def ask_all(self) -> None:
        """Every rank that lives asks who is lost."""
        for rank in [rank for rank in self.nodes if rank not in self.stopped]:
            self.nodes[rank].ask(lambda census, rank=rank: self._answer(rank, census))
        self.deliver()
        for _ in range(int(SILENCE) + 1):
            self.pass_a_second()

    def _answer(self, rank: int, census: Census) -> None:
        self.told[rank] = lost_of(census)

    def busiest_host(self) -> int:
        """Returns the messages that reached the ranks of one machine, of that which got the most."""
        hosts = Counter[int]()
        for rank, count in self.received.items():
            hosts[rank // HOST] += count
        return max(hosts.values(), default=0)


@dataclass(frozen=True)
class Row:
    """What was counted of a number of ranks.

    Attributes:
        beats: messages a second that reach the busiest machine.
        news: messages of all ranks after a rank was killed, until all know it.
        roll: messages of all ranks for roll calls, where all ask, without beats.
        wrong: ranks that named another rank than the lost one, or none.
    """

    ranks: int
    beats: float
    news: int
    roll: int
    wrong: int


def counted(size: int) -> Row:
    """Returns the row of a number of ranks; the lost rank is one with children, then one without, then rank 0."""
    network = Network(size)
    network.received.clear()
    for _ in range(BEATS):
        network.pass_a_second()
    beats, wrong, news, roll = network.busiest_host() / BEATS, 0, 0, 0
    for lost in sorted({size // 2 // HOST * HOST, size - 1, 0}):
        network = Network(size)
        network.received.clear()
        network.kill(lost)
        news = max(news, network.received.total())
        wrong += sum(list(node.lost) != [lost] for node in network.nodes.values())
        network = Network(size)
        network.stop(lost)
        network.received.clear()
        network.ask_all()
        roll = max(roll, network.received.total() - (int(SILENCE) + 1) * beats_of(size, lost))
        wrong += sum(network.told.get(rank) != [lost] for rank in network.nodes if rank != lost)
    return Row(size, beats, news, roll, wrong)


def beats_of(size: int, stopped: int) -> int:
    """Returns the beats of one second, without those of and to a stopped rank."""
    links = [(rank, child) for rank in range(size) for child in children_of(rank, size)]
    return 2 * sum(stopped not in link for link in links)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 512, 2048, 8192])
    print("| ranks | beats a second, busiest machine | messages after a kill | of roll calls, all ask | wrong names |")
    print("|---|---|---|---|---|")
    for size in parser.parse_args().ranks:
        row = counted(size)
        print(f"| {row.ranks:,} | {row.beats:.0f} | {row.news:,} | {row.roll:,} | {row.wrong} |", flush=True)


if __name__ == "__main__":
    main()
