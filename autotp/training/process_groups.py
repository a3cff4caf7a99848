"""Makes the process groups of a mesh: each rank makes those that it is in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autotp.distributed.mesh import Mesh, group_of, new_group, with_number
from autotp.groups.process_group import backend_of
from autotp.passes.pipeline.stages import Stage
from autotp.passes.plan.experts.expert_parallel import CP_COPIES, EP
from autotp.training.pipeline.schedules import parameters_of_stage


def mesh_of(sizes: Mapping[str, int], device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Returns the mesh of all processes, the last axis innermost; its groups wait no longer than `timeout`.

    Axes of size 1 have one group, which autotp does not communicate in: torch wants one for each dimension of a mesh.
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups: list[Any] = []
    for dim, axis in enumerate(sizes):
        # [... axis ...] -> [groups axis]
        rows = ranks.movedim(dim, -1).reshape(-1, sizes[axis])
        groups.append(_group(groups, rows, timeout, axis))
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=tuple(sizes))


def _group(groups: Sequence[Any], rows: torch.Tensor, timeout: timedelta, axis: str, backend: str | None = None) -> Any:
    """Returns the group of this rank's row: one of `groups` if it has these ranks, else a new one; None without a row.

    Each communicator of NCCL takes memory of the GPU.

    Args:
        rows: [rows ranks].
        axis: the name of a new group in errors.
        backend: of a new group; None means that of the default group.
    """
    own_rows = rows[(rows == dist.get_rank()).any(1)]
    if not len(own_rows):
        return None
    # torch sorts the ranks of each group.
    ranks = sorted(own_rows[0].tolist())
    matching = (group for group in groups if dist.get_process_group_ranks(group) == ranks)
    return next(matching, None) or new_group(ranks, timeout, axis, backend)


MANY = 64
"""The number of ranks from which on a sum over all is one over each axis in turn: gloo sums along a ring."""


def world_mesh(place: Mesh, mesh: DeviceMesh, timeout: timedelta) -> Mesh:
    """Returns the mesh of all ranks, in a group that waits no longer than `timeout`.

    The group also sends tensors of the CPU: what ranks tell each other in each step does not wait for a GPU.
    """
    axes = [axis for axis in mesh.get_all_groups() if axis.size() > 1]
    on_host = [axis for axis in mesh.get_all_groups() if torch.device("cpu") in axis._device_types]
    nccl = place.device.type == "cuda" and backend_of(mesh.get_all_groups()[0].group_name, "cuda") == "nccl"
    backend = "cpu:gloo,cuda:nccl" if nccl else None
    every = _group(on_host, mesh.mesh.view(1, -1), timeout, "global", backend)
    along_axes = every.size() >= MANY and len(on_host) == len(mesh.get_all_groups())
    return replace(
        place.alone(), axis="global", size=every.size(), rank=every.rank(), group=every.group_name, runs=(),
        axes=tuple(axis.group_name for axis in axes) if along_axes else (),
    )  # fmt: skip


def with_sequences(place: Mesh, mesh: DeviceMesh) -> Mesh:
    """Returns the tensor-parallel axis with the axis "cp" of the mesh beside it, if there is one."""
    if "cp" not in (mesh.mesh_dim_names or ()):
        return place
    return replace(place, sequence=mesh_along(place, mesh.get_group("cp"), "cp"))


def expert_meshes(place: Mesh, mesh: DeviceMesh, ep: int, timeout: timedelta) -> tuple[Mesh, Mesh, Mesh]:
    """Returns the mesh of `ep` ranks that have all experts, and two of ranks with the same: replicas, and along `cp`.

    Their groups are those of the mesh where these have the same ranks.
    """
    dims = [dim for dim, name in enumerate(mesh.mesh_dim_names or ()) if name in ("dp", "cp")]
    # [... dp (cp) ...] -> [... dp cp]
    ranks = mesh.mesh.movedim(dims, [*range(-len(dims), 0)]).reshape(-1, mesh.size(dims[0]), place.cp)

    def along(axis: str, rows: torch.Tensor) -> Mesh:
        return mesh_along(place, _group(mesh.get_all_groups(), rows, timeout, axis), axis)

    ep_mesh, dp_copies, cp_copies = (along(axis, rows) for axis, rows in ranks_of_experts(ranks, ep).items())
    return ep_mesh, dp_copies, cp_copies


def ranks_of_experts(ranks: torch.Tensor, ep: int) -> dict[str, torch.Tensor]:
    """Returns the ranks along each axis that experts know, [groups ranks]: see `expert_meshes`.

    Along `ep` are neighbouring replicas, as many as divide both numbers, times ranks along `cp` for the rest.

    Args:
        ranks: [... dp cp]
    """
    *_, dp, cp = ranks.shape
    of_dp = math.gcd(ep, dp)
    of_cp = ep // of_dp
    parts = ranks.reshape(-1, dp // of_dp, of_dp, of_cp, cp // of_cp)
    return {
        EP: parts.movedim(4, 2).reshape(-1, ep),
        "dp/ep": parts.movedim(1, 4).reshape(-1, dp // of_dp),
        CP_COPIES: parts.reshape(-1, cp // of_cp),
    }


def mesh_of_rows(*axes: Mesh) -> DeviceMesh:
    """Returns the mesh of this rank's groups along one axis or two, each of equally distant ranks."""
    groups = [group_of(axis) for axis in axes]
    ranks = [torch.tensor(dist.get_process_group_ranks(group)) for group in groups]
    mesh = ranks[0] if len(axes) == 1 else ranks[0][:, None] + ranks[1][None] - dist.get_rank()
    names = tuple(axis.axis for axis in axes)
    group_of_axes: Any = groups if len(axes) > 1 else groups[0]
    return DeviceMesh.from_group(group_of_axes, axes[0].device.type, mesh=mesh, mesh_dim_names=names)


def mesh_along(place: Mesh, group: Any, axis: str) -> Mesh:
    """Returns the mesh of a group along another axis than that of `place`."""
    size, rank = group.size(), group.rank()
    return with_number(replace(place.alone(), axis=axis, size=size, rank=rank, group=group.group_name, runs=()))


def holders(
    stages: Sequence[Stage], names: Mapping[str, str], ranks: int, stages_of: Callable[[int], list[int]]
) -> dict[str, tuple[int, ...]]:
    """Returns parameter -> the ranks of the pipeline that hold it, where several do. The same on every rank."""
    home = {i: rank for rank in range(ranks) for i in stages_of(rank)}
    ranks_by_name: dict[str, set[int]] = {}
    for i, stage in enumerate(stages):
        for name in parameters_of_stage(stage, names):
            ranks_by_name.setdefault(name, set()).add(home[i])
    return {name: tuple(sorted(some)) for name, some in ranks_by_name.items() if len(some) > 1}


def read_by_several_stages(
    stages: Sequence[Stage], names: Mapping[str, str], ranks: int, stages_of: Callable[[int], list[int]]
) -> set[str]:
    """Returns the parameters that several stages of one rank read: ZeRO does not divide these, on any rank."""
    repeated = set[str]()
    for rank in range(ranks):
        reads = Counter(name for i in stages_of(rank) for name in parameters_of_stage(stages[i], names))
        repeated |= {name for name, times in reads.items() if times > 1}
    return repeated


def shared(
    holders: Mapping[str, tuple[int, ...]], mesh: DeviceMesh, timeout: timedelta
) -> dict[str, tuple[list[int], Any]]:
    """Returns parameter -> the ranks of the pipeline that hold it, and their group, for parameters of this rank."""
    groups = {
        # [holders dp ... tp] -> [dp*...*tp holders]: one group for each place within a stage.
        some: _group(mesh.get_all_groups(), mesh.mesh[list(some)].flatten(1).T, timeout, "pp")
        for some in dict.fromkeys(holders.values())
    }
    return {name: (list(some), groups[some]) for name, some in holders.items() if groups[some] is not None}
