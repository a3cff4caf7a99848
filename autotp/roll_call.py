"""What every rank says, by rank, told through the store in which the processes met.

It is for places to which a rank may fail to come. In a process group the others' exchange would then pair with whatever
that rank does next; here they wait for it by name, and say so.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group

from autotp.errors import Error
from autotp.heartbeat import notes
from autotp.mesh import Mesh

_calls: dict[int, int] = {}
"""Number of a mesh -> how often its ranks told each other something."""


def roll_call(text: str, place: Mesh) -> list[str]:
    """Every rank's `text`, by rank.

    Raises:
        Error: some rank did not come within the group's timeout.
    """
    assert place.group is not None
    group = _resolve_process_group(place.group)  # type: ignore[arg-type]
    call = _calls[place.number] = _calls.get(place.number, 0) + 1
    store, names = _get_default_store(), _names(place, call)
    try:
        store.set(names[place.rank], text)
        store.wait(names, group._get_backend(place.device).options._timeout)
        found = [store.get(name).decode() for name in names]
        if call > 1:  # Who is here has read what was told before.
            store.delete_key(_names(place, call - 1)[place.rank])
    except RuntimeError as error:
        raise _missing(names, store, place) from error
    return found


def _names(place: Mesh, call: int) -> list[str]:
    return [f"autotp/{place.number}/{call}/{rank}" for rank in range(place.size)]


def _missing(names: list[str], store: dist.Store, place: Mesh) -> Error:
    try:
        absent = [rank for rank, name in enumerate(names) if not store.check([name])]
    except RuntimeError:  # The process that has the store is gone.
        return Error("the store in which the processes met is gone", **{"try": "read the other ranks' logs"})
    said = {f"global rank {rank} raised": text for rank, text in notes().items()}
    return Error(f"{place.named(absent)} did not come within the group's timeout", **said)
