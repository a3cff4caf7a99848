"""Makes the process groups of a mesh; every rank makes every group, as torch requires."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autotp.distributed.mesh import Mesh, new_group, with_number
from autotp.groups.process_group import backend_of
from autotp.passes.pipeline.stages import Stage
from autotp.training.pipeline.schedules import parameters_of_stage


def mesh_of(sizes: Mapping[str, int], device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Returns the mesh of all processes, the last axis innermost; its groups wait no longer than `timeout`."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = [
        group(ranks.movedim(dim, -1).reshape(-1, size), timeout, axis) for dim, (axis, size) in enumerate(sizes.items())
    ]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=tuple(sizes))


def group(rows: torch.Tensor, timeout: timedelta, axis: str | None = None) -> Any:
    """Makes one process group per row of ranks, and returns this rank's; None if no row has this rank.

    `axis` is the group's name in errors.
    """
    made = {tuple(row): new_group(row, timeout, group_desc=axis) for row in rows.tolist()}
    return next((group for row, group in made.items() if dist.get_rank() in row), None)


MANY = 64
"""The number of ranks from which on a sum over all is one over each axis in turn: gloo sums along a ring."""


def world_mesh(place: Mesh, mesh: DeviceMesh, timeout: timedelta) -> Mesh:
    """Returns the mesh of all ranks, in a group of its own that waits no longer than `timeout`.

    The group also sends tensors of the CPU: what ranks tell each other in each step does not wait for a GPU.
    """
    nccl = place.device.type == "cuda" and backend_of(dist.group.WORLD.group_name, "cuda") == "nccl"  # type: ignore[union-attr]
    every = new_group(None, timeout, group_desc="global", backend="cpu:gloo,cuda:nccl" if nccl else None)
    axes = [axis for axis in mesh.get_all_groups() if axis.size() > 1]
    several = every.size() >= MANY and all(torch.device("cpu") in axis._device_types for axis in axes)
    return replace(
        place.alone(), axis="global", size=every.size(), rank=every.rank(), group=every.group_name,
        axes=tuple(axis.group_name for axis in axes) if several else (),
    )  # fmt: skip


def with_sequences(place: Mesh, mesh: DeviceMesh) -> Mesh:
    """Returns the tensor-parallel axis with the axis "cp" of the mesh beside it, if there is one."""
    if "cp" not in (mesh.mesh_dim_names or ()):
        return place
    return replace(place, sequence=mesh_along(place, mesh.get_group("cp"), "cp"))


def mesh_along(place: Mesh, group: Any, axis: str) -> Mesh:
    """Returns the mesh of a group along another axis than that of `place`."""
    size, rank = group.size(), group.rank()
    return with_number(replace(place.alone(), axis=axis, size=size, rank=rank, group=group.group_name, runs=()))


def holders(
    stages: Sequence[Stage], names: Mapping[str, str], ranks: int, stages_of: Callable[[int], list[int]]
) -> dict[str, tuple[int, ...]]:
    """Returns parameter -> the ranks of the pipeline that hold it, where several do. The same on every rank."""
    home = {i: rank for rank in range(ranks) for i in stages_of(rank)}
    found: dict[str, set[int]] = {}
    for i, stage in enumerate(stages):
        for name in parameters_of_stage(stage, names):
            found.setdefault(name, set()).add(home[i])
    return {name: tuple(sorted(some)) for name, some in found.items() if len(some) > 1}


def read_by_several_stages(
    stages: Sequence[Stage], names: Mapping[str, str], ranks: int, stages_of: Callable[[int], list[int]]
) -> set[str]:
    """Returns the parameters that several stages of one rank read: ZeRO does not divide these, on any rank."""
    found = set[str]()
    for rank in range(ranks):
        reads = Counter(name for i in stages_of(rank) for name in parameters_of_stage(stages[i], names))
        found |= {name for name, times in reads.items() if times > 1}
    return found


def shared(
    holders: Mapping[str, tuple[int, ...]], mesh: DeviceMesh, timeout: timedelta
) -> dict[str, tuple[list[int], Any]]:
    """Returns parameter -> the ranks of the pipeline that hold it, and their group, for parameters of this rank."""
    groups = {some: group(mesh.mesh[list(some)].flatten(1).T, timeout) for some in dict.fromkeys(holders.values())}
    return {name: (list(some), groups[some]) for name, some in holders.items() if groups[some] is not None}
