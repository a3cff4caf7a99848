"""links: messages arrive whole; the end of the other side is seen; strangers are not."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from autotp.distributed.peers.links import LONGEST_GREETING, Links, connect, host_of, own_hosts

Event = tuple[int, list[Any] | None, bool]
PARENT, CHILD = 0, 3


@pytest.fixture
def ends() -> Iterator[tuple[Links, Links]]:
    """A parent and its child, connected."""
    parent, child = Links(True, dist.HashStore()), Links(False, dist.HashStore())
    events = beside(parent, lambda: child.add(PARENT, connect(parent.address, CHILD)))
    assert events == [(CHILD, None, True)]
    yield parent, child
    parent.close_here()
    child.close_here()


def beside(links: Links, run: Callable[[], object]) -> list[Event]:
    """Runs a function in a thread; returns what comes meanwhile."""
    thread, events = threading.Thread(target=run), list[Event]()
    thread.start()
    while thread.is_alive() or not events:
        events += links.events(0.01)
    return events


def come(links: Links, count: int) -> list[Event]:
    events = list[Event]()
    while len(events) < count:
        events += links.events(5.0)
    return events


def test_link_delivers_messages_whole(ends: tuple[Links, Links]) -> None:
    parent, child = ends
    long = ["census", ["x" * 3_000_000]]
    sent = beside(child, lambda: [parent.send(CHILD, it) for it in (["beat"], long)])
    while len(sent) < 2:
        list(parent.events(0.0))  # What did not fit into the socket is sent as soon as it does.
        sent += child.events(0.01)
    assert sent == [(PARENT, ["beat"], True), (PARENT, long, True)]
    child.send(PARENT, ["ask"])
    assert come(parent, 1) == [(CHILD, ["ask"], True)]


def test_a_line_that_is_no_message_does_not_take_others_along(ends: tuple[Links, Links]) -> None:
    parent, child = ends
    child.by_rank[PARENT].socket.sendall(b'["beat"]\n{"beat\n\xff\n5\n["ask"]\n')
    assert come(parent, 2) == [(CHILD, ["beat"], True), (CHILD, ["ask"], True)]


def test_the_end_of_the_other_side_is_seen(ends: tuple[Links, Links]) -> None:
    parent, child = ends
    child.close()
    assert come(parent, 1) == [(CHILD, None, False)]
    parent.send(CHILD, ["beat"])  # To nobody.


def test_link_does_not_hear_a_stranger(ends: tuple[Links, Links]) -> None:
    parent, _ = ends
    hosts, port, _ = json.loads(parent.address)
    for greeting in (
        b'["wrong", 1]\n',
        b"GET / HTTP/1.0\n",
        b"5\n",
        b"[" * 50_000 + b"\n",
        b"x" * (LONGEST_GREETING + 1),
    ):
        with socket.create_connection((hosts[-1], port)) as stranger:
            stranger.sendall(greeting)
            while not (closed := _is_closed(stranger)):
                assert not list(parent.events(0.05))
            assert closed
    with pytest.raises(OSError, match="refused"):
        connect(json.dumps([["127.0.0.1"], 1, ""]), CHILD)


def _is_closed(stranger: socket.socket) -> bool:
    stranger.setblocking(False)
    try:
        return not stranger.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_forked_process_does_not_keep_connections_open(ends: tuple[Links, Links]) -> None:
    """A process that loads data lives on for seconds after the one that started it was killed."""
    parent, child = ends
    reads, writes = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.close(writes)
        os.read(reads, 1)  # Until the test is over.
        os._exit(0)
    os.close(reads)
    child.close()
    assert come(parent, 1) == [(CHILD, None, False)]
    os.close(writes)
    os.waitpid(forked, 0)


def test_the_address_in_the_network_of_the_store_comes_first() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    assert own_hosts(dist.PrefixStore("some", store))[0] == "127.0.0.1" == host_of(store)
    assert own_hosts(dist.HashStore())[-1] == "127.0.0.1"


def test_the_host_of_the_store_is_tried_too(ends: tuple[Links, Links]) -> None:
    parent, _ = ends
    _, port, token = json.loads(parent.address)
    known_here_only = json.dumps([["host.invalid"], port, token])
    assert beside(parent, lambda: connect(known_here_only, 5, "127.0.0.1").close())[0] == (5, None, True)


def test_a_call_that_waits_is_woken(ends: tuple[Links, Links]) -> None:
    parent, _ = ends
    parent.wake()
    assert list(parent.events(60.0)) == []
