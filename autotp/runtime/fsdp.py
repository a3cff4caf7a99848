"""Parameters that are DTensors over replicas: those of torch's `fully_shard`, and those of a trainer with ZeRO."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from autotp.sharding.boxes import has_dtensors
from autotp.sharding.partition import chunk_bounds


def dtypes(root: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[torch.dtype, ...]:
    """Returns the compute dtype of each parameter and buffer; for a sharded one the policy of its FSDP unit decides."""
    if not has_dtensors(tensors.values()):
        return tuple([tensor.dtype for tensor in tensors.values()])
    units = {name: unit for name, unit in root.named_modules() if isinstance(unit, FSDPModule)}
    result = []
    for name, tensor in tensors.items():
        enclosing = [unit for unit in units if not unit or name.startswith(f"{unit}.")]
        # A parameter belongs to the innermost unit around it: the one with the longest path.
        policy = units[max(enclosing, key=len)]._get_fsdp_state()._mp_policy if enclosing else None
        cast = policy is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        result.append((policy.param_dtype if cast and policy else None) or tensor.dtype)
    return tuple(result)


def rows_as_dtensors(root: nn.Module, names: Collection[str], mesh: DeviceMesh) -> list[nn.Parameter]:
    """Makes these parameters DTensors and returns them: along the first axis of a mesh ranks have as many rows each.

    A second axis of the mesh is that of the ranks with the same rows: it divides them once more.
    """
    made = []
    for name in names:
        path, _, key = name.rpartition(".")
        parameter = root.get_parameter(name)
        rows, strides = parameter.data, parameter.data.stride()
        shape = torch.Size((rows.shape[0] * mesh.size(0), *rows.shape[1:]))
        rows = rows if mesh.ndim == 1 else _own_rows(rows, mesh, 1)
        tensor = DTensor.from_local(rows, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=strides)
        made.append(nn.Parameter(tensor, parameter.requires_grad))
        root.get_submodule(path)._parameters[key] = made[-1]
    return made


def as_dtensors(root: nn.Module, mesh: DeviceMesh, divided: Collection[nn.Parameter] = ()) -> None:
    """Makes each parameter that is not sharded a DTensor over the mesh: some in rows, the others whole on each rank.

    torch's optimizers step lists of parameters, and no list has both plain tensors and DTensors.

    Args:
        divided: the parameters of which each rank keeps rows, as `torch.chunk` divides them.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                if parameter not in made:
                    tensor = _rows(parameter, mesh) if parameter in divided else _replica(parameter, mesh)
                    made[parameter] = nn.Parameter(tensor, parameter.requires_grad)
                module._parameters[name] = made[parameter]


def _replica(parameter: nn.Parameter, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(parameter.data, mesh, [Replicate()], run_check=False)


def _rows(parameter: nn.Parameter, mesh: DeviceMesh) -> DTensor:
    rows = _own_rows(parameter.data, mesh)
    strides = parameter.data.to("meta", memory_format=torch.contiguous_format).stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=strides)


def _own_rows(tensor: Tensor, mesh: DeviceMesh, axis: int = 0) -> Tensor:
    """Returns a copy of a rank's rows, so that the memory of the other rows is free."""
    start, stop = chunk_bounds(tensor.shape[0], mesh.size(axis), mesh.get_local_rank(axis))
    return tensor[start:stop].clone(memory_format=torch.contiguous_format)
