"""Process groups by their names, which are what graphs have of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

from autotp.errors import Error
from autotp.torch_internals import Replaced, set_until_undone


def process_group(name: str) -> ProcessGroup:
    """Returns torch's object of a group; raises Error if the group was destroyed."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise Error(
            "the process groups of the model were destroyed: its ranks cannot reach each other any more",
            fix="torch.distributed.destroy_process_group() behind the last call, also behind those of atexit",
        ) from error


def seat(group: str) -> tuple[int, int]:
    """Returns this process's rank in the group, and the group's size."""
    try:  # Not through `process_group`: each collective asks, and a call of Python takes time.
        members = _resolve_process_group(group)  # type: ignore[arg-type]
    except RuntimeError:
        members = process_group(group)  # It says what is wrong.
    return members.rank(), members.size()


def replace_methods(rows: Iterable[Replaced], wrapped: Callable[[Any], Any]) -> Callable[[], None]:
    """Replaces methods of all process groups, and returns the undo.

    Classes of Python have them replaced where they define them: torch's own method calls theirs.

    Args:
        wrapped: returns what stands for a method, a function whose first argument is the group.
    """
    undone = []
    for row in rows:
        undone.append(row.put(wrapped(row.original())))
        for group_class in _subclasses(ProcessGroup):
            if method := vars(group_class).get(row.name):
                undone.append(set_until_undone(group_class, row.name, wrapped(method)))

    def undo() -> None:
        for put_back in undone:
            put_back()

    return undo


def _subclasses(group_class: type) -> list[type]:
    subclasses: list[type] = group_class.__subclasses__()
    return [*subclasses, *(deeper for subclass in subclasses for deeper in _subclasses(subclass))]


def axis_of(group: str) -> str:
    """Returns the name of the axis that the group lies along."""
    description = process_group(group).group_desc
    return "tp" if description == "default_pg" else description.removeprefix("mesh_")


def rank_name(rank: int, group: str) -> str:
    """Returns the name of a global rank, with its place in the group if it belongs to it."""
    ranks, world = dist.get_process_group_ranks(process_group(group)), f"global rank {rank}"
    place = f"{axis_of(group)} rank {ranks.index(rank)}" if rank in ranks else world
    return world if place == world else f"{place} ({world})"


def backend_of(group: str, device_type: str) -> str:
    """Returns the name of a process group's backend for devices of this type, such as "nccl"."""
    current = process_group(group)
    cached = _backends.get((group, device_type))
    if cached is None or cached[0]() is not current:  # A later group may have the same name.
        name = current._get_backend(torch.device(device_type)).name()
        cached = _backends[group, device_type] = weakref.ref(current), name
    return cached[1]


_backends: dict[tuple[str, str], tuple[weakref.ref[ProcessGroup], str]] = {}
"""Name of a group and type of device -> the group, and the name of its backend: torch makes an object to tell it."""


# Dynamo calls it while it traces. `torch.compiler.assume_constant_result` does this, but imports Dynamo (1 s).
seat._dynamo_marked_constant = True  # type: ignore[attr-defined]
