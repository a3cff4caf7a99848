"""links: connections of this process to its neighbours in the tree of ranks.

The end of a process closes its connections, whatever ended it; so the other side knows at once. A child connects to its
parent, whose addresses and token it reads from the store in which the processes met. Messages are lines of JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch.distributed as dist

PATIENCE = 2.0
"""Seconds to wait for the answer of one address."""
WELCOME = b"autotp\n"
ELSEWHERE = "192.0.2.1"
"""An address that no machine has: whatever is sent there leaves this machine the usual way."""
LONGEST_GREETING = 1000
"""Bytes. Whoever has not said the token may not fill memory."""
LARGEST = 2**26
"""Bytes that wait to be sent to one neighbour at most; a stopped process reads nothing."""


class Link:
    """A connection. `rank` is None until the other side has said who it is."""

    def __init__(self, connection: socket.socket, rank: int | None) -> None:
        # One thread serves all connections, so it may wait in `select` only.
        connection.setblocking(False)
        with suppress(OSError):
            # Beats are a few bytes, which Nagle's algorithm would hold back.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.rank = connection, rank
        self.read, self.unsent = bytearray(), bytearray()


class Links:
    """The connections of a process, used from one thread (`wake` from any).

    Attributes:
        address: what others connect to, as text; "" if this process does not listen.
    """

    def __init__(self, listens: bool, store: Any) -> None:
        self.selector = selectors.DefaultSelector()
        self.by_rank = dict[int, Link]()
        self.server = _server() if listens else None
        self.token, self.address = secrets.token_hex(16), ""
        self.waking, self.woken = socket.socketpair()
        for end in (self.waking, self.woken):
            end.setblocking(False)
        self.selector.register(self.woken, selectors.EVENT_READ)
        if self.server is not None:
            self.selector.register(self.server, selectors.EVENT_READ)
            self.address = json.dumps([own_hosts(store), self.server.getsockname()[1], self.token])
        _leave_to_parent_process()
        _open.add(self)

    def wake(self) -> None:
        """Ends a call of `events` that waits in another thread."""
        with suppress(OSError):  # Closed, or full: it will end anyway.
            self.waking.send(b"\0")

    def add(self, rank: int, connection: socket.socket) -> None:
        """Adds the connection to the parent."""
        self._register(Link(connection, rank))

    def send(self, rank: int, message: list[Any]) -> None:
        """Sends a message to a neighbour, if there is a connection and it reads."""
        link = self.by_rank.get(rank)
        if link is not None and len(link.unsent) < LARGEST:
            link.unsent += json.dumps(message).encode() + b"\n"
            self._flush(link)

    def events(self, timeout: float) -> Iterator[tuple[int, list[Any] | None, bool]]:
        """Yields what has come within `timeout` seconds: rank, message (None: none), whether the link is open."""
        for key, mask in self.selector.select(timeout):
            if key.fileobj is self.woken:
                with suppress(BlockingIOError):
                    self.woken.recv(4096)
            elif key.fileobj is self.server:
                with suppress(OSError):
                    self._register(Link(self.server.accept()[0], None))
            else:
                if mask & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if mask & selectors.EVENT_READ:
                    yield from self._received(key.data)

    def close(self) -> None:
        """Closes all connections, after what was sent."""
        for link in list(self.by_rank.values()):
            with suppress(OSError):
                # A stopped process reads nothing: one second is enough for the others.
                link.socket.settimeout(1.0)
                link.socket.sendall(link.unsent)
        self.close_here()

    def close_here(self) -> None:
        """Closes them in this process only, where a process was forked."""
        every = [key.fileobj for key in self.selector.get_map().values()] if self.selector.get_map() else []
        for end in (*every, self.waking):
            with suppress(OSError):
                end.close()  # type: ignore[union-attr]
        self.selector.close()

    def _register(self, link: Link) -> None:
        self.selector.register(link.socket, selectors.EVENT_READ, link)
        if link.rank is not None:
            self.by_rank[link.rank] = link

    def _received(self, link: Link) -> Iterator[tuple[int, list[Any] | None, bool]]:
        try:
            while data := link.socket.recv(2**16):
                link.read += data
        except BlockingIOError:
            # Not empty, which would mean that the other side has closed: there is only nothing to read now.
            data = b"\0"
        except OSError:
            data = b""
        *lines, rest = bytes(link.read).split(b"\n")
        link.read = bytearray(rest)
        if link.rank is None and len(rest) > LONGEST_GREETING:
            data = b""
        for line in lines:
            if link.rank is None:
                if self._greeted(link, line):
                    yield link.rank, None, True  # type: ignore[misc]
                else:
                    data = b""
                    break
            elif isinstance(message := _message(line), list):
                yield link.rank, message, True
        if not data and self._closed(link):
            yield link.rank, None, False  # type: ignore[misc]

    def _greeted(self, link: Link, line: bytes) -> bool:
        """Takes the first line of a child: the token and its rank."""
        match _message(line):
            case [self.token, int(rank)]:
                link.rank = rank
            case _:
                return False
        self.by_rank[rank] = link
        link.unsent += WELCOME
        self._flush(link)
        return True

    def _flush(self, link: Link) -> None:
        with suppress(BlockingIOError, OSError):  # Its end is read soon.
            while link.unsent:
                del link.unsent[: link.socket.send(link.unsent)]
        write = selectors.EVENT_WRITE if link.unsent else 0
        with suppress(KeyError, ValueError):
            self.selector.modify(link.socket, selectors.EVENT_READ | write, link)

    def _closed(self, link: Link) -> bool:
        """Removes a connection; returns whether it was the one to a neighbour."""
        self.selector.unregister(link.socket)
        link.socket.close()
        # A child that has connected anew has a newer link, which stays.
        if link.rank is None or self.by_rank.get(link.rank) is not link:
            return False
        del self.by_rank[link.rank]
        return True


def _message(line: bytes) -> Any:
    """Returns what a line says; None if it is no JSON: the lines behind it may be right."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


_open: weakref.WeakSet[Links] = weakref.WeakSet()


@cache
def _leave_to_parent_process() -> None:
    """A forked process, such as one that loads data, closes what it inherits: else no end of this one would be seen."""

    def close() -> None:
        for links in _open:
            links.close_here()

    os.register_at_fork(after_in_child=close)


def connect(address: str, rank: int, also: str = "") -> socket.socket:
    """Returns a connection to the process of this address; says that this is `rank`.

    Args:
        also: another host that is tried, as the process may be there.

    Raises:
        OSError: none of its hosts answers.
    """
    hosts, port, token = json.loads(address)
    problem = OSError("it has no address")
    for host in [*hosts, also] if also else hosts:
        try:
            connection = socket.create_connection((host, port), PATIENCE)
        except OSError as error:
            problem = error
            continue
        try:
            connection.settimeout(PATIENCE)
            connection.sendall(json.dumps([token, rank]).encode() + b"\n")
            # Only the right process knows this answer: another one may listen at this port by now.
            if connection.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME:
                return connection
        except OSError as error:
            problem = error
        connection.close()
    raise problem


def host_of(store: Any) -> str:
    """Returns the host of a store; "" if it has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else ""


def own_hosts(store: Any) -> list[str]:
    """Returns the addresses of this machine, that in the network of the store first.

    The machine that keeps the store may know itself by an address that others cannot reach, such as 127.0.1.1.
    """
    hosts = list[str]()
    for host in filter(None, (host_of(store), ELSEWHERE)):
        for family, socket_type, _, _, address in _looked_up(host):
            with suppress(OSError), socket.socket(family, socket_type) as probe:
                probe.connect(address)  # Sends nothing.
                hosts.append(probe.getsockname()[0])
    hosts += addresses_of(socket.gethostname())
    return list(dict.fromkeys([*hosts, "127.0.0.1"]))


def addresses_of(host: str) -> list[str]:
    """Returns the addresses to which a name leads on this machine, in the order in which programs try them."""
    return [str(address[0]) for _, _, _, _, address in _looked_up(host)]


def _looked_up(host: str) -> list[Any]:
    try:
        return socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return _listening(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return _listening(("", 0))


def _listening(address: tuple[str, int], **how: Any) -> socket.socket:
    server = socket.create_server(address, backlog=128, **how)
    server.setblocking(False)
    return server
