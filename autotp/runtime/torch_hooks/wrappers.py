"""Lets DistributedDataParallel and similar wrappers wrap replicas, and raises Error for other uses.

NOTE [When a wrapper is seen]
torch calls a hook when a module becomes a submodule. At this time a wrapper knows its process group, and has not
communicated yet.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from autotp.distributed.live_models import Undo, models
from autotp.distributed.replica_check import expect_apart
from autotp.errors import Error
from autotp.runtime.holdings import holdings_of


def install() -> Undo:
    """Checks every module that becomes a submodule; returns the undo."""
    return register_module_module_registration_hook(_put).remove


def _put(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raises Error if `wrapper` has a process group over ranks that hold a model in `module` together."""
    group = wrapper.__dict__.get("process_group")
    if isinstance(group, dist.ProcessGroup) and module is not None:
        inside, ranks = set(module.modules()), dist.get_process_group_ranks(group)
        for model in (model for model in models() if model in inside):
            expect_apart(type(wrapper).__name__, ranks, holdings_of(model, "").everyone)


AROUND = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)


def expect_unwrapped(model: nn.Module) -> None:
    """Raises Error if a model is wrapped, sharded or compiled already; this must follow `parallelize`."""
    for path, module in model.named_modules():
        subject = f"`{path}`, a {type(module).__name__}," if path else f"the {type(module).__name__}"
        if isinstance(module, AROUND):
            raise Error(
                f"{subject} is a wrapper around a model",
                fix="parallelize the model itself; the ranks of one model need no wrapper, replicas mesh=",
            )
        if isinstance(module, FSDPModule) or any(isinstance(p, DTensor) for p in module._parameters.values()):
            raise Error(
                f"{subject} is sharded already, by fully_shard or as DTensors",
                fix="parallelize the original model; fully_shard(model, mesh=mesh['dp']) after that",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise Error(f"{subject} is compiled by torch.jit", fix="parallelize the Python module")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise Error(
            "the model is compiled already, and the parallel model would not be",
            fix="torch.compile(autotp.parallelize(model, ...)), or model.compile_blocks()",
        )
