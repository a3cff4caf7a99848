"""The replicas that all processes form: the ranks of one parallel model, or of several, are one replica.

NOTE [Replicas as processes]
accelerate, transformers.Trainer and TRL take each process for a replica with rows of its own: they divide batches among
processes, average gradients over them, add up what they count, and step a schedule once for each. The ranks of one
tensor-parallel model have the same rows: they are one replica. So while parallel models live, these libraries see the
replicas where they count processes. If all processes hold one model together, this is one process, and a loop runs as
on one device. What must happen once (to print, to write) happens on the first of all ranks. Barriers and broadcasts
stay those of all ranks.

torchmetrics and `autotp.integrations.lightning` ask here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autotp.distributed.agreement import agree
from autotp.distributed.gather import gather
from autotp.distributed.live_models import models
from autotp.distributed.mesh import Mesh
from autotp.runtime.module import ParallelModule
from autotp.runtime.tree import state_of

T = TypeVar("T")
ALONE = Mesh("replica")
"""The axis of one replica."""


def replicas() -> Mesh | None:
    """Returns the axis of the replicas that all processes form; None without parallel models, or in another layout.

    The axis has a process group if there are several replicas: of the ranks with the same part.
    """
    meshes = _meshes()
    axes = [ALONE if mesh.everyone.size == dist.get_world_size() else mesh.replicas for mesh in meshes]
    newest = axes[-1] if axes else None  # An older model may be left from a process group that was destroyed.
    is_same_size = all(axis is not None and newest is not None and axis.size == newest.size for axis in axes)
    return newest if is_same_size else None


def is_one_replica() -> bool:
    """True while all processes hold one parallel model, or several."""
    axis = replicas()
    return axis is not None and axis.size == 1


def of_all(run: Callable[[], T]) -> T:
    """Returns what `run`, an exchange of this replica's ranks, returns; if it fails in a replica, it fails in all."""
    axis = replicas()
    return run() if axis is None or axis.size == 1 else agree(axis, run)


def done_by_all(run: Callable[[], T]) -> T:
    """Returns what `run` returns, once it has returned on every rank: so what the first rank writes is there.

    Raises:
        Error: on every rank, if `run` failed on some rank: its own exception, or that of the first failed rank.
    """
    return of_all(lambda: agree(own_ranks(), run))


def whole_for_file(state: Any, mesh: Mesh) -> Any:
    """Returns a state with the wholes of its cut tensors, plain and on the CPU; on other ranks than the first, None.

    All ranks of `mesh` call this, and the first writes. What is one tensor under several names stays one.
    """
    gathered: dict[int, Any] = {}

    def whole(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in gathered:
            made = x.full_tensor() if isinstance(x, DTensor) else gather(x)
            # What is not cut stays the object that it is: ties and views of it are seen by what writes the file.
            gathered[id(x)] = x if made is x else None if mesh.rank else made.cpu()
        return gathered[id(x)]

    with torch.no_grad():
        return pytree.tree_map(whole, state)


def whole_state(module: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a module with parallel models, whole; the other ranks lack what is cut."""
    mesh = parallel_models(module)[0][1].mesh.everyone
    state = whole_for_file(dict(module.state_dict(keep_vars=True)), mesh)
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in state.items() if x is not None}


def parallel_models(module: Any) -> list[tuple[str, ParallelModule]]:
    """Returns the parallel models of several ranks in a module, with their names there."""
    modules = module.named_modules() if isinstance(module, nn.Module) else ()
    return [(name, m) for name, m in modules if isinstance(m, ParallelModule) and m.mesh.everyone.size > 1]


def own_ranks() -> Mesh:
    """Returns all ranks of this replica; there must be a parallel model."""
    return _meshes()[-1].everyone


def first_rank_of(replica: int) -> int:
    """Returns the global rank that is the first of a replica."""
    return replica * own_ranks().size


def _meshes() -> list[Mesh]:
    """Returns the mesh of each model of several ranks; a model that was changed since is not looked at.

    A model may outlive `destroy_process_group()`: then there are no ranks.
    """
    if not dist.is_initialized():
        return []
    states = [state_of(model) for model in models() if isinstance(model, ParallelModule)]
    meshes = [state.tree.mesh for state in states if state is not None]
    return [mesh for mesh in meshes if mesh.everyone.size > 1]
