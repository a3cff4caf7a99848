"""Lets Lightning train a LightningModule that holds a parallel model: its strategies see one device.

NOTE [One device for Lightning]
A strategy of Lightning takes each process for a replica with rows of its own (DDPStrategy, ModelParallelStrategy), or
knows of no other process (SingleDeviceStrategy). The ranks of one tensor-parallel model have the same rows, and only
one of them writes. So while all processes hold the model of a LightningModule together, each of these strategies does
what is right for one device on several processes: no wrapper, no sampler, no sum over processes; the first rank
writes, and all wait for it. A checkpoint is gathered before, so it is one device's: any strategy and any number of
ranks goes on from it.

This module does not import Lightning before the user's program does, under either of its names.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.checkpoint.whole_optimizer import whole_state_dict
from autotp.distributed.consistency import agree, checksum
from autotp.distributed.mesh import Mesh, broadcast_from_first, gather_ints
from autotp.errors import Error
from autotp.hf.loops.replicas import is_one_replica, own_ranks, parallel_models, whole_for_file, whole_state
from autotp.runtime.module import ParallelModule, Submodule

NAMES = ("lightning.pytorch", "pytorch_lightning")
"""The two names of the package; a program may import both."""
WATCHED = tuple(f"{name}.trainer.trainer" for name in NAMES)
"""The modules that, once imported, have imported all that is changed here."""
Method = Callable[..., Any]
_changed: set[str] = set()


def watch_lightning() -> None:
    """Changes Lightning's strategies, once they are imported: see NOTE [One device for Lightning]."""
    for name in (name for name in NAMES if f"{name}.trainer.trainer" in sys.modules and name not in _changed):
        _changed.add(name)
        strategies: Any = sys.modules[f"{name}.strategies"]
        for kind in (strategies.Strategy, strategies.ParallelStrategy, strategies.DDPStrategy):
            change(kind, OF_ALL, parallel_in)
        change(strategies.SingleDeviceStrategy, OF_ALL | OF_SINGLE_DEVICE, parallel_in)
        change(strategies.ModelParallelStrategy, OF_ALL | _of_model_parallel(strategies.Strategy), parallel_in)
        for kind in (strategies.FSDPStrategy, strategies.DeepSpeedStrategy):
            change(kind, {"setup": _refuse}, parallel_in)
        _watch_functions(name)
        _watch_summary(sys.modules[f"{name}.utilities.model_summary.model_summary"])


def change(kind: type, table: dict[str, Method], holds: Callable[[Any], Any]) -> None:
    """Changes those methods and properties of a strategy that it defines itself: see NOTE [One device for Lightning].

    Args:
        table: name -> `ours(strategy, theirs, ...)`.
        holds: takes a strategy; ours stand for theirs where it returns something that is true.
    """
    for name, ours in table.items():
        theirs = vars(kind).get(name)
        if isinstance(theirs, property):
            setattr(kind, name, property(_for_ours(theirs.fget, ours, holds)))
        elif theirs is not None:
            setattr(kind, name, _for_ours(theirs, ours, holds))


def _for_ours(theirs: Any, ours: Method, holds: Callable[[Any], Any]) -> Any:
    @wraps(theirs)
    def called(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        if holds(strategy):
            return ours(strategy, theirs, *args, **kwargs)
        return theirs(strategy, *args, **kwargs)

    return called


def parallel_in(strategy: Any) -> list[tuple[str, ParallelModule]]:
    """Returns the parallel models of several ranks in a strategy's LightningModule, with their names there."""
    return parallel_models(strategy.lightning_module)


def _mesh(strategy: Any) -> Mesh:
    return parallel_in(strategy)[0][1].mesh.everyone


# ---- setting up


def _setup(strategy: Any, theirs: Method, trainer: Any) -> Any:
    """Sets a strategy up; only the first rank prints and logs, and what is not parallel has its values."""
    begin(strategy, strategy.lightning_module)
    return theirs(strategy, trainer)


def begin(strategy: Any, module: nn.Module) -> None:
    """Prepares a module with parallel models: only the first rank prints, and what is not parallel has its values.

    Raises:
        Error: the ranks of these models are not all processes.
    """
    models = parallel_models(module)
    mesh = models[0][1].mesh.everyone
    if not is_one_replica():
        raise Error(
            f"{type(strategy).__name__} with tp={mesh.size} of {dist.get_world_size()} processes: "
            "Lightning takes the other ranks of each model for replicas",
            fix="autotp.parallelize over all processes",
            alternative="autotp.distribute(model, tp=..., dp=...), in a loop of your own",
        )
    sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = dist.get_rank()
    held = {id(x) for _, model in models for x in (*model.parameters(), *model.buffers())}
    for tensor in (x for x in (*module.parameters(), *module.buffers()) if id(x) not in held):
        tensor.data = broadcast_from_first(tensor.data.to(mesh.device), mesh)


def _refuse(strategy: Any, theirs: Method, trainer: Any) -> Any:
    raise divided(strategy, "Trainer")


def divided(strategy: Any, caller: str) -> Error:
    """Returns the Error for a strategy that divides a model."""
    return Error(
        f"{type(strategy).__name__} divides a model among replicas, and these are the ranks of one parallel model",
        fix=f'{caller}(strategy="auto"), or strategy=ModelParallelStrategy()',
    )


# ---- one device on several processes


def _decided_by_first(strategy: Any, theirs: Method, decision: bool, all: bool = True) -> bool:
    return bool(_broadcast(strategy, theirs, bool(decision)))


def _barrier(strategy: Any, theirs: Method, *args: Any, **kwargs: Any) -> None:
    dist.barrier()


def _broadcast(strategy: Any, theirs: Method, obj: Any, src: int = 0) -> Any:
    held = [obj]
    dist.broadcast_object_list(held, src)
    return held[0]


def itself(strategy: Any, theirs: Method, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the argument."""
    return tensor


def _gathered(strategy: Any, theirs: Method, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
    everyone = group is None or group is dist.group.WORLD
    gathered: Tensor = tensor if everyone else theirs(strategy, tensor, group=group, sync_grads=sync_grads)
    return gathered


# ---- checkpoints


def _whole_state(strategy: Any, theirs: Method) -> Any:
    return whole_state(strategy.lightning_module)


def whole_optimizer_state(strategy: Any, theirs: Method, optimizer: Any) -> Any:
    """Returns the whole state of an optimizer, on the first rank."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    whole = whole_state_dict(optimizer)
    return optimizer.state_dict() if whole is None else whole


def _saved_by_first(strategy: Any, theirs: Method, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """The first rank writes; if it cannot, all ranks are told."""
    mesh = _mesh(strategy)
    whole = whole_for_file(checkpoint, mesh)
    expect_no_parts(whole, mesh)
    agree(mesh, lambda: theirs(strategy, whole, *args, **kwargs))


def expect_no_parts(checkpoint: dict[str, Any], mesh: Mesh) -> None:
    """Raises Error, on every rank, if some rank has a tensor that the first rank has not: parts differ."""
    leaves = pytree.tree_leaves_with_path(checkpoint)
    said = {pytree.keystr(path): x for path, x in leaves if isinstance(x, Tensor) and x.dim()}
    mine = {zlib.crc32(f"{name} {x.dtype} {checksum(x)}".encode()): name for name, x in said.items()}
    first = set(gather_ints(list(mine), mesh)[0])
    parts = [name for number, name in mine.items() if number not in first]

    def expect_same() -> None:
        if parts:
            raise Error(
                f"checkpoint{parts[0]} is another tensor on each rank, as parts of weights are, and Lightning writes "
                "the first rank's",
                fix="autotp.gather(tensor), on all ranks, or the cut tensor itself, in place of `tensor.to_local()`",
            )

    agree(mesh, expect_same)


def _read_by_all(strategy: Any, theirs: Method, *args: Any, **kwargs: Any) -> Any:
    """A rank that does not see the file would leave the others waiting."""
    return agree(_mesh(strategy), lambda: theirs(strategy, *args, **kwargs))


# ---- what is changed


def _constant(value: Any) -> Method:
    return lambda strategy, theirs, *args, **kwargs: value


ALONE: dict[str, Method] = {
    "distributed_sampler_kwargs": _constant({"num_replicas": 1, "rank": 0}),
    "all_gather": _gathered,
    "reduce_boolean_decision": _decided_by_first,
}
"""Methods and properties of strategies of Trainer and of Fabric, and what stands for them."""
OF_ALL: dict[str, Method] = ALONE | {
    "setup": _setup,
    "configure_ddp": _constant(None),
    "reduce": itself,
    "lightning_module_state_dict": _whole_state,
    "optimizer_state": whole_optimizer_state,
    "save_checkpoint": _saved_by_first,
    "load_checkpoint": _read_by_all,
}
"""Those of Trainer's."""
OF_SINGLE_DEVICE: dict[str, Method] = {
    "is_global_zero": lambda strategy, theirs: dist.get_rank() == 0,
    "root_device": lambda strategy, theirs: own_ranks().device,
    "barrier": _barrier,
    "broadcast": _broadcast,
}


def _of_model_parallel(base: Any) -> dict[str, Method]:
    """ModelParallelStrategy would write each rank's parts under one name: it saves as other strategies do."""
    names = ("save_checkpoint", "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")
    as_others = {name: as_base(getattr(base, name)) for name in names}
    return as_others | {"lightning_restore_optimizer": _constant(True)}


def as_base(method: Method) -> Method:
    """Returns what stands for a method of a strategy: that of its base class."""
    return lambda strategy, theirs, *args, **kwargs: method(strategy, *args, **kwargs)


def _watch_functions(name: str) -> None:
    """Changes the functions that Lightning calls beside its strategies: for samplers, workers and warnings."""
    ddp, data = sys.modules[f"{name}.strategies.ddp"], sys.modules[f"{name}.trainer.connectors.data_connector"]
    result = sys.modules[f"{name}.trainer.connectors.logger_connector.result"]
    found: Any = (ddp, data, result)
    instead(found[0], "_sync_module_states", lambda theirs, module: None if _has_parallel(module) else theirs(module))
    instead(
        found[1], "_auto_add_worker_init_fn", lambda theirs, rows, rank: theirs(rows, 0 if is_one_replica() else rank)
    )
    instead(found[2], "_distributed_is_initialized", lambda theirs: theirs() and not is_one_replica())
    instead(
        found[1]._DataConnector,
        "_requires_distributed_sampler",
        lambda theirs, it, rows: not parallel_in(it.trainer.strategy) and theirs(it, rows),
    )


def instead(holder: Any, name: str, ours: Method) -> None:
    """Replaces a function by `ours(theirs, ...)`."""
    theirs = getattr(holder, name)
    setattr(holder, name, wraps(theirs)(lambda *args, **kwargs: ours(theirs, *args, **kwargs)))


def _has_parallel(module: nn.Module) -> bool:
    return any(isinstance(it, ParallelModule) for it in module.modules())


def _watch_summary(module: Any) -> None:
    """Has the table of layers put no hooks on parts of a parallel model."""
    instead(
        module.LayerSummary,
        "_register_hook",
        lambda theirs, it: None if isinstance(it._module, Submodule) else theirs(it),
    )
