"""`torch.distributed` as a library sees it that takes the replicas for processes.

accelerate and transformers call torch.distributed without a group, and ask it for the number of processes. In their
modules this stands for it while there are several replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.distributed.mesh import Mesh, group_of
from autotp.integrations.loops.replicas import first_rank_of, replicas


class ReplicaCollectives:
    """torch.distributed, whose processes are the replicas. Everything else, such as barriers, is torch's own."""

    def __getattr__(self, name: str) -> Any:
        collective, axis = COLLECTIVES.get(name), replicas()
        if collective is None or axis is None:
            return getattr(dist, name)
        return lambda *args, **kwargs: collective(axis, *args, **kwargs)


class TorchOfReplicas:
    """The module `torch`, with `ReplicaCollectives` for torch.distributed."""

    distributed = ReplicaCollectives()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _gathered(axis: Mesh, outputs: list[Tensor], tensor: Tensor) -> None:
    # One replica has no process group: `replicas.ALONE`.
    if axis.size == 1:
        outputs[0].copy_(tensor)
    else:
        dist.all_gather(outputs, tensor, group=group_of(axis))


def _gathered_into(axis: Mesh, output: Tensor, tensor: Tensor) -> None:
    if axis.size == 1:
        output.copy_(tensor.view_as(output))
    else:
        dist.all_gather_into_tensor(output, tensor, group=group_of(axis))


def _objects_gathered(axis: Mesh, outputs: list[Any], value: Any) -> None:
    if axis.size == 1:
        outputs[0] = value
    else:
        dist.all_gather_object(outputs, value, group=group_of(axis))


def _reduced(axis: Mesh, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    if axis.size > 1:
        dist.all_reduce(tensor, op, group=group_of(axis))


def _broadcast(axis: Mesh, tensor: Tensor, src: int = 0) -> None:
    """To all ranks, so that those of a replica have the same."""
    dist.broadcast(tensor, first_rank_of(src))


def _objects_broadcast(axis: Mesh, values: list[Any], src: int = 0) -> None:
    dist.broadcast_object_list(values, first_rank_of(src))


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "get_world_size": lambda axis: axis.size,
    "get_rank": lambda axis: axis.rank,
    "all_gather": _gathered,
    "all_gather_into_tensor": _gathered_into,
    "all_gather_object": _objects_gathered,
    "all_reduce": _reduced,
    "broadcast": _broadcast,
    "broadcast_object_list": _objects_broadcast,
}
"""Functions of torch.distributed, and what stands for them."""
