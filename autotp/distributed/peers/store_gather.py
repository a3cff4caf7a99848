"""Gathers text from every rank, through the store in which the processes met.

It is for calls that some rank may not reach. In a process group the exchange of the other ranks would then pair with
the next collective of that rank. Here the others wait for the missing rank by name, and the error names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from autotp.attached import Counts, attached
from autotp.distributed.mesh import Mesh, group_of, timeout_of
from autotp.distributed.peers.heartbeat import INTERVAL, SILENCE, answered, lost_ranks, reason
from autotp.errors import Error

LOGS = "read the log of rank 0, which holds the store: it may have ended"
ALL_CALL = "the same calls on all ranks: none under `if rank == 0`; read the logs of these ranks"


def store_gather(text: str, place: Mesh, unless: Callable[[], str] = lambda: "") -> list[str]:
    """Returns every rank's `text`, by rank.

    Args:
        unless: returns why some rank will never make this call; "" if it may. It is asked about once a second.

    Raises:
        Error: some rank did not make this call within the group's timeout, or will not.
    """
    counts, key = attached(group_of(place), Counts), ("exchanges", place.number)
    call = counts[key] = counts[key] + 1
    store, names, timeout = _get_default_store(), _names(place, call), timeout_of(group_of(place))

    def told() -> list[str]:
        store.set(names[place.rank], text)
        _wait(store, names, timeout, unless, dist.get_process_group_ranks(group_of(place)))
        texts = [store.get(name).decode() for name in names]
        if call > 1:  # Every rank has read the texts of the previous call.
            store.delete_key(_names(place, call - 1)[place.rank])
        return texts

    try:
        return answered(told, timeout.total_seconds() + SILENCE)
    except Error:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise _missing(names, store, place) from error


def write_text(name: str, text: str) -> None:
    """Writes a text under a name, for `texts_so_far` of other ranks."""
    _get_default_store().set(f"autotp/texts/{name}", text)


def texts_so_far(names: Sequence[str]) -> list[str]:
    """Returns the texts that were written under these names; none if one is missing. Waits for nobody."""
    store, keys = _get_default_store(), [f"autotp/texts/{name}" for name in names]
    return [store.get(key).decode() for key in keys] if store.check(keys) else []


def _wait(
    store: dist.Store, names: list[str], timeout: timedelta, unless: Callable[[], str], ranks: Sequence[int]
) -> None:
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            # A short wait again and again: in between this rank asks whether it waits in vain.
            return store.wait(names, timedelta(seconds=max(min(INTERVAL, end - time.monotonic()), 0.001)))
        except RuntimeError:
            if why := unless():
                raise Error(why) from None
            if time.monotonic() >= end or any(rank in lost_ranks() for rank in ranks):
                raise


def _names(place: Mesh, call: int) -> list[str]:
    return [f"autotp/{place.number}/{place.group}/{call}/{rank}" for rank in range(place.size)]


def _missing(names: list[str], store: dist.Store, place: Mesh) -> Error:
    why = reason(lambda rank: f"global rank {rank}")
    why = f": {why}" if why else ""
    try:
        absent = answered(lambda: [rank for rank, name in enumerate(names) if not store.check([name])], SILENCE)
    except (RuntimeError, TimeoutError):
        return Error(f"the store in which the processes met does not answer{why}", fix=LOGS)
    return Error(f"{place.named(absent)} did not make this call within the group's timeout{why}", fix=ALL_CALL)
