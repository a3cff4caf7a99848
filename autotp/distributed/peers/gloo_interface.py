"""gloo_interface: has gloo use a network interface that other machines reach.

gloo takes the address to which this machine's own name leads. Debian, among others, leads it to the machine itself
(127.0.1.1), where no other machine reaches it: ranks on several machines would not find each other.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress
from typing import Any

from autotp.distributed.launch import GLOO_INTERFACE
from autotp.distributed.peers.links import addresses_of, own_hosts

SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def choose_interface(store: Any, several_machines: bool) -> None:
    """Sets GLOO_SOCKET_IFNAME if it is not set, and gloo would take an address of this machine alone.

    It stays set, as torch reads it whenever it makes a group. The interface is that of the way to the store, or on the
    machine that keeps the store, that of the default way to others. Where there is none with IPv4, nothing is set.

    Args:
        store: one in which the ranks meet.
        several_machines: whether the ranks are on several machines.
    """
    own_name = addresses_of(socket.gethostname())
    # On one machine the loopback is right, and what the user has set counts.
    if not several_machines or os.environ.get(GLOO_INTERFACE) or (own_name and not _is_loopback(own_name[0])):
        return
    names = (_interface_of(host) for host in own_hosts(store) if not _is_loopback(host))
    if name := next(filter(None, names), None):
        os.environ[GLOO_INTERFACE] = name


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _interface_of(address: str) -> str | None:
    """Returns the name of the interface that has this IPv4 address; None if none has, or not on Linux."""
    try:
        import fcntl
    except ImportError:  # Windows.
        return None
    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            # The answer is a `struct ifreq`: 16 bytes of name, then family and port, then the address.
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
