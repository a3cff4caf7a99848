"""Lets torch's `fully_shard` gather the parameters of a block before the block's graph reads them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from autotp.sharding.boxes import has_dtensors


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


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    zero: int,
    dtype: torch.dtype | None,
    ignored: Collection[nn.Parameter],
) -> None:
    """Shards the parameters of each block, and the other parameters of `root`; gradients are summed.

    Args:
        zero: the ZeRO stage; 3 frees the gathered parameters of a block after forward, too. (Backward begins with the
            parameters of `root`: they stay.)
        dtype: the compute dtype, with sums in float32; None keeps each dtype.
        ignored: parameters that are not sharded.
    """
    # Nothing writes into the output of a block: passes/emit/in_place.py.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDP\w+\) returned a view")
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
    # Blocks before the root: a unit takes all parameters that no unit has taken before.
    for module in (*blocks, root):
        frees = zero == 3 and module is not root
        unit = fully_shard(
            module, mesh=mesh, reshard_after_forward=frees, mp_policy=policy, ignored_params=set(ignored)
        )
        # Gradients of replicas are parts of one sum, not values to average.
        unit.set_gradient_divide_factor(1.0)
        # Else FSDP would ask for PREMUL_SUM, which only NCCL has.
        unit.set_force_sum_reduction_for_comms(True)


def divided(root: nn.Module, names: Collection[str], mesh: DeviceMesh) -> list[nn.Parameter]:
    """Makes these parameters, of which each rank of a mesh holds as many rows, DTensors; returns those."""
    made = []
    for name in names:
        path, _, key = name.rpartition(".")
        parameter = root.get_parameter(name)
        tensor = DTensor.from_local(parameter.data, mesh, [Shard(0)], run_check=False)
        made.append(nn.Parameter(tensor, parameter.requires_grad))
        root.get_submodule(path)._parameters[key] = made[-1]
    return made


def replicate(root: nn.Module, mesh: DeviceMesh) -> None:
    """Makes each parameter that is not sharded a DTensor, too, whole on each rank of the mesh.

    torch's optimizers step lists of parameters, and no list has both kinds.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                if parameter not in made:
                    tensor = DTensor.from_local(parameter.data, mesh, [Replicate()], run_check=False)
                    made[parameter] = nn.Parameter(tensor, parameter.requires_grad)
                module._parameters[name] = made[parameter]


def gather_ahead(units: Sequence[FSDPModule], zero: int) -> None:
    """Makes the next forward gather parameters beside computation that does not need them.

    ZeRO 1 and 2 keep gathered parameters until the step's last backward, so all units are gathered from now on: a stage
    of a pipeline gathers while the stages before it compute. With ZeRO 3, each unit has the next one gathered while it
    computes.

    Args:
        units: the units that the next forward runs, all of them and no other, in order. What is gathered for a unit
            that does not run may be its parameters in the next step.
    """
    for i, unit in enumerate(units):
        if zero < 3:
            unit.unshard(async_op=True)
        else:
            unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 2]))


def pace(root: nn.Module, zero: int, last: bool) -> None:
    """Tells FSDP whether the next microbatch is the last of a step: this decides what is reduced and freed after it."""
    if isinstance(root, FSDPModule):
        root.set_is_last_backward(last)
        # ZeRO 1 keeps whole gradients until the last microbatch; 2 and 3 keep rows, so each microbatch is summed.
        root.set_requires_gradient_sync(last or zero > 1)
        # ZeRO 1 and 2 keep the gathered parameters until the step's last backward.
        root.set_reshard_after_backward(last or zero == 3)
