"""Makes the process groups of a mesh; every rank makes every group, as torch requires."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autotp.distributed.mesh import Mesh, new_group, with_number
from autotp.passes.pipeline.stages import Stage


def mesh_of(sizes: Mapping[str, int], device: torch.device, timeout: timedelta) -> DeviceMesh:
    """The processes by axis, the last one the innermost; each group of them waits no longer than `timeout`."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = [
        group(ranks.movedim(dim, -1).reshape(-1, size), timeout, axis) for dim, (axis, size) in enumerate(sizes.items())
    ]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=tuple(sizes))


def group(rows: torch.Tensor, timeout: timedelta, axis: str | None = None) -> Any:
    """This rank's group of those that each row makes; None if it is in no row. Errors name its axis."""
    made = {tuple(row): new_group(row, timeout, group_desc=axis) for row in rows.tolist()}
    return next((group for row, group in made.items() if dist.get_rank() in row), None)


def world(place: Mesh, timeout: timedelta) -> Mesh:
    """All ranks, in a group that waits no longer than `timeout`, whatever the default one does."""
    every = new_group(None, timeout, group_desc="global")
    return replace(place, axis="global", size=every.size(), rank=every.rank(), group=every.group_name)


def along(place: Mesh, group: Any, axis: str) -> Mesh:
    """This rank's place in a group along another axis than `place` is of."""
    size, rank = group.size(), group.rank()
    return with_number(replace(place, axis=axis, size=size, rank=rank, group=group.group_name, runs=()))


def holders(
    stages: Sequence[Stage], names: Mapping[str, str], ranks: int, stages_of: Callable[[int], list[int]]
) -> dict[str, tuple[int, ...]]:
    """The parameters that several ranks of the pipeline hold, each with these: the same on every rank."""
    home = {i: rank for rank in range(ranks) for i in stages_of(rank)}
    found: dict[str, set[int]] = {}
    for i, stage in enumerate(stages):
        for node in stage.graph.nodes:
            if node.op == "placeholder" and node.name in names:
                found.setdefault(names[node.name], set()).add(home[i])
    return {name: tuple(sorted(some)) for name, some in found.items() if len(some) > 1}


def shared(
    holders: Mapping[str, tuple[int, ...]], mesh: DeviceMesh, timeout: timedelta
) -> dict[str, tuple[list[int], Any]]:
    """Of these parameters those of this rank, each with the ranks of the pipeline that hold it, and their group."""
    groups = {some: group(mesh.mesh[list(some)].flatten(1).T, timeout) for some in dict.fromkeys(holders.values())}
    return {name: (list(some), groups[some]) for name, some in holders.items() if groups[some] is not None}
