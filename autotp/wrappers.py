"""DistributedDataParallel, and wrappers like it, around a parallel model: over its replicas, or an Error.

NOTE [When a wrapper is seen]
torch tells of each module that is put into another. A wrapper knows its process group by then, and has sent nothing.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from autotp.alive import Undo, models
from autotp.own_ranks import expect_apart
from autotp.parts import parts_of


def install() -> Undo:
    """Looks at every module that is put into another; what it returns ends that."""
    return register_module_module_registration_hook(_put).remove


def _put(around: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raises Error if `around` has a process group over ranks that hold a model in `module` together."""
    group = around.__dict__.get("process_group")
    if isinstance(group, dist.ProcessGroup) and module is not None:
        inside, theirs = set(module.modules()), dist.get_process_group_ranks(group)
        for model in (model for model in models() if model in inside):
            expect_apart(type(around).__name__, theirs, parts_of(model, "").everyone)
