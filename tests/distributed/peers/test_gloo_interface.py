"""gloo_interface: the interface is one that others reach, and only where gloo's own choice is not."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from errors import message
from ranks import run_ranks

from autotp.distributed.launch import GLOO_INTERFACE, TORCHRUN
from autotp.distributed.mesh import gather_ints, make_mesh
from autotp.distributed.peers import gloo_interface
from autotp.distributed.peers.gloo_interface import choose_interface
from autotp.distributed.peers.links import own_hosts

ITSELF, LOOPBACK = "127.0.1.1", "lo"


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves the variable set."""
    monkeypatch.setenv(GLOO_INTERFACE, "before")
    monkeypatch.delenv(GLOO_INTERFACE)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine as Debian makes it, whose only interface is reached by others; the interface's name."""
    monkeypatch.setattr(gloo_interface, "_is_loopback", lambda address: address == ITSELF)
    monkeypatch.setattr(gloo_interface, "own_hosts", lambda store: [ITSELF, "127.0.0.1"])
    monkeypatch.setattr(gloo_interface, "addresses_of", lambda name: [ITSELF])
    return LOOPBACK


def chosen(several_machines: bool = True) -> str | None:
    choose_interface(dist.HashStore(), several_machines)
    return os.environ.get(GLOO_INTERFACE)


def test_interface_is_one_that_others_reach(reached: str) -> None:
    assert chosen() == reached


def test_interface_is_chosen_where_the_name_leads_nowhere(reached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_interface, "addresses_of", lambda name: [])
    assert chosen() == reached


def test_what_gloo_or_the_user_chooses_stays(reached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(several_machines=False) is None
    with monkeypatch.context() as here:
        here.setattr(gloo_interface, "addresses_of", lambda name: ["10.0.0.7", ITSELF])
        assert chosen() is None
    monkeypatch.setenv(GLOO_INTERFACE, "ib0")
    assert chosen() == "ib0"


def test_interface_is_none_where_none_has_the_address(reached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_interface, "own_hosts", lambda store: [ITSELF, "fd00::2", "198.51.100.1"])
    assert chosen() is None


def test_interface_is_never_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is no way to others."""
    monkeypatch.setattr(gloo_interface, "own_hosts", lambda store: [ITSELF, "127.0.0.1"])
    monkeypatch.setattr(gloo_interface, "addresses_of", lambda name: [ITSELF])
    assert chosen() is None


def test_the_names_of_interfaces_are_the_systems() -> None:
    hosts = [host for host in own_hosts(dist.HashStore()) if "." in host and not host.startswith("127.")]
    names = [name for _, name in socket.if_nameindex()]
    assert gloo_interface._interface_of("127.0.0.1") in names
    assert all(gloo_interface._interface_of(host) in names for host in hosts)


def starts_on_several_machines(rank: int, n: int, port: int) -> tuple[str | None, list[int]]:
    """Each rank believes that it is alone on its machine, whose name leads to the machine itself. port: 0: it meets."""
    os.environ.pop(GLOO_INTERFACE, None)
    gloo_interface.addresses_of = lambda name: [ITSELF]
    gloo_interface.own_hosts = lambda store: ["127.0.0.1"]
    gloo_interface._is_loopback = lambda address: address == ITSELF
    if port:
        dist.destroy_process_group()
    os.environ.update(zip(TORCHRUN, (str(rank), str(n), "127.0.0.1", str(port)), strict=True))
    os.environ.update(LOCAL_WORLD_SIZE="1", TORCHELASTIC_USE_AGENT_STORE="True")
    mesh = make_mesh(n, timeout=timedelta(seconds=30))
    return os.environ.get(GLOO_INTERFACE), [row[0] for row in gather_ints([rank], mesh)]


@pytest.mark.parametrize("started", [True, False], ids=["by-autotp", "by-the-user"])
def test_ranks_start_with_the_chosen_interface(started: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for found in run_ranks(starts_on_several_machines, 2, store.port if started else 0):
        assert found == (LOOPBACK, [0, 1])


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in zip(TORCHRUN, ("0", "1", "127.0.0.1", str(store.port)), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv(GLOO_INTERFACE, "none0")
    dist.destroy_process_group() if dist.is_initialized() else None
    told = message(make_mesh).splitlines()
    assert "could not meet" in told[0] and told[0].endswith("Unable to find address for: none0")
    assert told[1:] == [
        "  try      GLOO_SOCKET_IFNAME=<the network interface that the other machines reach>, on each machine",
        "  or       timeout= of autotp.parallelize, if they start at other times",
    ]
