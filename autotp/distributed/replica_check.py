"""Raises Error if torch wraps a parallel model over ranks that are not replicas.

DistributedDataParallel and `fully_shard` expect that every rank of their group has all parameters and different data.
The ranks of a tensor-parallel model have parts of the parameters and the same data. Averaged or sharded over these
ranks, the model would silently train something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from autotp.distributed.mesh import Mesh
from autotp.errors import Error
from autotp.groups.process_group import process_group
from autotp.sharding.boxes import has_dtensors
from autotp.source_location import line_of


def expect_own_ranks(model: nn.Module, mesh: Mesh, tensors: Mapping[str, Tensor]) -> None:
    """Raises Error, in a call of a parallel model, if it is sharded or averaged over its own ranks.

    Args:
        tensors: its present parameters and buffers.
    """
    wrapper = DistributedDataParallel._get_active_ddp_module()  # It may have wrapped the model before `parallelize`.
    if wrapper is not None and any(module is model for module in wrapper.modules()):
        expect_apart("DistributedDataParallel", dist.get_process_group_ranks(wrapper.process_group), mesh)
    # Units of `fully_shard` keep DTensors. Only where there are some, a call looks through all modules.
    if not isinstance(model, FSDPModule) and not has_dtensors(tensors.values()):
        return
    for unit in (unit for unit in model.modules() if isinstance(unit, FSDPModule)):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            expect_apart("fully_shard", group.mesh_info.mesh.mesh.flatten().tolist(), mesh)


SAME_OF_EQUALS = ("max", "min", "avg")
"""Reductions of equal tensors that return the tensor."""


def expect_collectives_of_replicas(graph: fx.Graph, mesh: Mesh) -> None:
    """Raises Error for a collective of forward over several ranks of one model, which all hold the same tensor.

    A sum over them counts each row once a rank, and a gather has each row as often. The largest of equal tensors, or
    the first one, is what one device has.
    """
    for node in graph.nodes:
        name = str(node.target)
        if not name.startswith("_c10d_functional.") or "wait_tensor" in name or "broadcast" in name:
            continue
        # The last text among the arguments is the group's name; of a reduction the first one says which.
        texts = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, str)]
        ranks = common_ranks(dist.get_process_group_ranks(process_group(texts[-1])), mesh.everyone)
        if len(ranks) > 1 and texts[0] not in SAME_OF_EQUALS:
            raise Error(
                f"forward calls {name.split('.')[1]} over ranks {ranks} of one tensor-parallel model, which hold the "
                "same tensor: each row would count once a rank",
                at=line_of(node),
                fix="the group of the replicas: group=mesh['dp'].get_group(), or no collective without replicas",
            )


def expect_apart(wrapper: str, group_ranks: Iterable[int], mesh: Mesh) -> None:
    """Raises Error if the ranks of `wrapper` include several ranks of one model."""
    ranks = common_ranks(group_ranks, mesh.everyone)
    if len(ranks) < 2:
        return
    argument = "process_group=mesh['dp'].get_group()" if wrapper != "fully_shard" else "mesh=mesh['dp']"
    raise Error(
        f"{wrapper} over ranks {ranks} of one tensor-parallel model, which are not replicas",
        fix=f"no {wrapper}: these ranks hold the model together, and autotp has summed their gradients",
        alternative=f"with replicas: parallelize(model, mesh=mesh), and {wrapper}(model, {argument})",
    )


def expect_replicas(collective: str, tensor: str, group_ranks: Iterable[int], mesh: Mesh) -> None:
    """Raises Error for a collective of a cut tensor over ranks that have different parts of it.

    Args:
        collective: its name.
        tensor: names the tensor.
        group_ranks: the global ranks of the collective's group.
        mesh: the ranks that hold the tensor.
    """
    ranks = common_ranks(group_ranks, mesh)
    if len(ranks) > 1:
        raise Error(
            f"{collective} of {tensor} over ranks {ranks}, which have different parts of it",
            fix="no such loop over parameters: autotp has broadcast them, and has summed their gradients",
            alternative="with replicas: parallelize(model, mesh=mesh), and group=mesh['dp'].get_group()",
        )


def common_ranks(group_ranks: Iterable[int], mesh: Mesh) -> list[int]:
    """Returns the global ranks that belong both to the mesh of a model and to a group."""
    return sorted(set(ranks_of(mesh)).intersection(group_ranks))


def ranks_of(mesh: Mesh) -> list[int]:
    """Returns the global ranks of the mesh of a model, in ascending order; none for one process without a group."""
    if mesh.group is None:
        return []
    return sorted(dist.get_process_group_ranks(process_group(mesh.group)))
