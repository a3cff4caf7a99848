"""Lets Lightning Fabric train a parallel model: its strategies see one device.

See NOTE [One device for Lightning] in `lightning_calls.py`. A strategy of Fabric holds no model. So while all processes
hold one parallel model, each strategy does what is right for one device on several processes. `fabric.world_size` and
`fabric.global_rank` stay those of all processes.

This module does not import Lightning before the user's program does, under either of its names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any

from torch import nn

from autotp.distributed.consistency import agree
from autotp.errors import Error
from autotp.hf.loops.lightning_calls import (
    ALONE,
    OF_SINGLE_DEVICE,
    as_base,
    begin,
    change,
    divided,
    expect_no_parts,
    instead,
    itself,
    whole_optimizer_state,
)
from autotp.hf.loops.replicas import is_one_replica, own_ranks, parallel_models, whole_for_file, whole_state

NAMES = ("lightning.fabric", "lightning_fabric")
"""The two names of the package; a program may import both."""
WATCHED = tuple(f"{name}.fabric" for name in NAMES)
"""The modules that, once imported, have imported all that is changed here."""
Method = Callable[..., Any]
_changed: set[str] = set()


def watch_fabric() -> None:
    """Changes Fabric and its strategies, once they are imported."""
    for name in (name for name in NAMES if f"{name}.fabric" in sys.modules and name not in _changed):
        _changed.add(name)
        strategies: Any = sys.modules[f"{name}.strategies"]
        base, single = strategies.Strategy, strategies.SingleDeviceStrategy
        as_others = {each: as_base(vars(base)[each]) for each in ("save_checkpoint", "load_checkpoint")}
        as_others["checkpoint_io"] = as_base(base.checkpoint_io.fget)
        for kind in (base, strategies.ParallelStrategy, strategies.DDPStrategy, single):
            change(kind, OF_ALL | (OF_SINGLE_DEVICE if kind is single else {}), _is_one)
        change(strategies.ModelParallelStrategy, OF_ALL | as_others, _is_one)
        _around(base, "setup_module", _begun)
        _around(strategies.DDPStrategy, "setup_module", _begun)
        _after(strategies.ModelParallelStrategy, "setup_module")
        for kind in (strategies.FSDPStrategy, strategies.DeepSpeedStrategy):
            for each in ("setup_module", "setup_module_and_optimizers"):
                _around(kind, each, _refused)
        _watch_functions(sys.modules[f"{name}.fabric"], sys.modules[f"{name}.strategies.ddp"])


def _is_one(strategy: Any) -> bool:
    return is_one_replica()


# ---- setting up


def _around(kind: type, name: str, ours: Method) -> None:
    """Puts `ours(strategy, module)` in the place of a method that is given a module with parallel models."""
    theirs = vars(kind).get(name)
    if theirs is None:
        return

    @wraps(theirs)
    def called(strategy: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if parallel_models(module):
            return ours(strategy, module)
        return theirs(strategy, module, *args, **kwargs)

    setattr(kind, name, called)


def _after(kind: type, name: str) -> None:
    """Has a method that makes a module parallel begin with the first rank's values of what is not."""
    theirs = vars(kind)[name]

    @wraps(theirs)
    def called(strategy: Any, module: nn.Module) -> Any:
        made = theirs(strategy, module)
        return _begun(strategy, made) if parallel_models(made) else made

    setattr(kind, name, called)


def _begun(strategy: Any, module: nn.Module) -> nn.Module:
    """Returns the module itself, without DistributedDataParallel."""
    begin(strategy, module)
    return module


def _refused(strategy: Any, module: nn.Module) -> Any:
    raise divided(strategy, "Fabric")


# ---- checkpoints


def _saved_by_first(
    strategy: Any, theirs: Method, path: Any, state: Mapping[str, Any], storage_options: Any = None, filter: Any = None
) -> None:
    """Gathers the state; the first rank writes it. If it cannot, all ranks are told."""
    mesh = own_ranks()
    whole = whole_for_file(strategy._convert_stateful_objects_in_state(state, filter=filter or {}), mesh)
    expect_no_parts(whole, mesh)

    def write() -> None:
        if mesh.rank == 0:
            strategy.checkpoint_io.save_checkpoint(checkpoint=whole, path=path, storage_options=storage_options)

    agree(mesh, write)


def _read_by_all(strategy: Any, theirs: Method, path: Any, *args: Any, **kwargs: Any) -> Any:
    """A rank that does not see the file would leave the others waiting."""

    def look() -> None:
        if "://" not in str(path) and not os.path.exists(path):
            raise Error(f"there is no checkpoint {path}", fix="a folder that all machines share, or the same files")

    agree(own_ranks(), look)
    return theirs(strategy, path, *args, **kwargs)


def _module_state(strategy: Any, theirs: Method, module: nn.Module) -> Any:
    return whole_state(module) if parallel_models(module) else theirs(strategy, module)


OF_ALL: dict[str, Method] = ALONE | {
    "all_reduce": itself,
    "get_module_state_dict": _module_state,
    "get_optimizer_state": whole_optimizer_state,
    "save_checkpoint": _saved_by_first,
    "load_checkpoint": _read_by_all,
}
"""Methods and properties of strategies, and what stands for them."""


def _watch_functions(fabric: Any, ddp: Any) -> None:
    """Changes what Fabric does beside its strategies: samplers, workers, and regions of accumulation."""
    instead(
        fabric.Fabric,
        "_requires_distributed_sampler",
        lambda theirs, it, rows: not is_one_replica() and theirs(it, rows),
    )
    instead(
        fabric, "_auto_add_worker_init_fn", lambda theirs, rows, rank: theirs(rows, 0 if is_one_replica() else rank)
    )
    instead(
        ddp._DDPBackwardSyncControl,
        "no_backward_sync",
        lambda theirs, it, module, enabled: nullcontext() if parallel_models(module) else theirs(it, module, enabled),
    )
