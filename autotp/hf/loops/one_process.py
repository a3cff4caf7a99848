"""Shows the ranks of one parallel model to accelerate as one process.

NOTE [One process for accelerate]
accelerate takes each process for a replica with rows of its own: it divides batches among processes, puts
DistributedDataParallel around a model, adds up what processes count, and steps a schedule once for each. The ranks of
one tensor-parallel model have the same rows: they are one replica. So while all processes hold one parallel model
together, accelerate sees one process, and a loop that stands on it (transformers.Trainer, TRL, a loop by hand) runs as
on one device. Each rank keeps its `process_index`: the first alone prints and writes. Barriers and broadcasts stay
those of all processes.

This module does not import accelerate before the user's program does.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.checkpoint.state_dict import full_state_dict
from autotp.checkpoint.whole_optimizer import whole_state_dicts
from autotp.distributed.live_models import models
from autotp.distributed.mesh import Mesh, gather_ints
from autotp.errors import Error
from autotp.runtime.module import ParallelModule

BROADCASTS = ("broadcast", "broadcast_object_list")
"""Functions of accelerate.utils.operations that stay those of all processes."""
Method = Callable[..., Any]
_changed: set[type] = set()
_reads_first: ContextVar[bool] = ContextVar("reads_first", default=False)


def is_one_process() -> bool:
    """True while all processes hold one parallel model, or several."""
    meshes = [model.mesh for model in models() if isinstance(model, ParallelModule) and model.mesh.size > 1]
    return bool(meshes) and all(mesh.size == dist.get_world_size() for mesh in meshes)


def show_one_process() -> None:
    """Changes accelerate, once it is imported: from then on it sees one process while `is_one_process()`."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is None or accelerator in _changed:
        return
    _changed.add(accelerator)
    state: Any = sys.modules["accelerate.state"]
    for kind in (state.PartialState, state.AcceleratorState):
        kind.num_processes = _stored("num_processes", lambda value: 1 if is_one_process() else value)
        kind.process_index = _stored("process_index", lambda value: 0 if _reads_first.get() else value)
    # This one tells how many processes there are: it keeps trackers and printing to the first rank.
    state.PartialState.use_distributed = property(lambda it: it.__dict__["num_processes"] > 1)
    operations: Any = sys.modules["accelerate.utils.operations"]
    operations.PartialState = _state_of_operations(state)
    accelerator.dispatch_batches = _unless_one_process(accelerator.dispatch_batches, False)
    for name, around in AROUND.items():
        setattr(accelerator, name, wraps(getattr(accelerator, name))(around(getattr(accelerator, name))))


def _stored(name: str, shown: Callable[[int], int]) -> property:
    """Returns a property whose value is in `__dict__`, where accelerate writes it, and is shown as `shown` says."""

    def read(self: Any) -> int:
        if name not in self.__dict__:
            self.__getattr__(name)  # It raises accelerate's own error.
        return shown(self.__dict__[name])

    def write(self: Any, value: int) -> None:
        self.__dict__[name] = value

    return property(read, write)


def _unless_one_process(theirs: property, value: Any) -> property:
    read = theirs.fget
    assert read is not None
    return property(lambda self: value if is_one_process() else read(self))


def _state_of_operations(state: Any) -> Callable[[], Any]:
    """Returns what stands for `PartialState` where accelerate gathers and reduces: the state of a process alone."""

    def found() -> Any:
        real = state.PartialState()
        if not is_one_process() or sys._getframe(1).f_code.co_name in BROADCASTS:
            return real
        alone = state.DistributedType.NO
        return SimpleNamespace(**real.__dict__ | {"distributed_type": alone, "num_processes": 1, "process_index": 0})

    return found


# ---- methods of `Accelerator`


def _initialized(method: Method) -> Method:
    def __init__(self: Any, *args: Any, parallelism_config: Any = None, **kwargs: Any) -> None:
        if is_one_process() and parallelism_config is not None:
            _expect_tensor_parallel_only(parallelism_config)
            parallelism_config = None  # What it would arrange is arranged.
        method(self, *args, parallelism_config=parallelism_config, **kwargs)

    return __init__


def _expect_tensor_parallel_only(config: Any) -> None:
    sizes = {name: size for name, size in config._sizes.items() if size > 1}
    tp = next(model.mesh.size for model in models() if isinstance(model, ParallelModule))
    if sizes != {"tp": tp}:
        raise Error(
            f"the model is parallel over {tp} ranks, all processes, and ParallelismConfig says {sizes}",
            fix="Accelerator(), without parallelism_config",
        )


def _prepared(method: Method) -> Method:
    def prepare_model(self: Any, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        if isinstance(model, ParallelModule) and is_one_process():
            if self.parallelism_config is not None:
                raise Error(
                    "this Accelerator has a parallelism_config of its own",
                    fix="Accelerator(), without parallelism_config, or after autotp.parallelize",
                )
            evaluation_mode = True  # Only in training would it put DistributedDataParallel around the model.
        return method(self, model, device_placement, evaluation_mode)

    return prepare_model


def _gathering(method: Method) -> Method:
    def get_state_dict(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = self.unwrap_model(model)
        return full_state_dict(inner) if isinstance(inner, ParallelModule) else method(self, model, *args, **kwargs)

    return get_state_dict


def _with_whole_optimizers(method: Method) -> Method:
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_one_process():
            mesh = next(model.mesh for model in models() if isinstance(model, ParallelModule))
            for i, thing in enumerate(self._custom_objects):
                _expect_same_state(i, thing, mesh)
        with whole_state_dicts([it.optimizer for it in self._optimizers]):
            return method(self, *args, **kwargs)

    return save_state


def _expect_same_state(number: int, thing: Any, mesh: Mesh) -> None:
    """Raises Error, on every rank, if an object that the user registered has another state on some rank.

    accelerate writes the first rank's. An average of a parallel model's weights, for example, has parts.
    """
    leaves = pytree.tree_leaves(thing.state_dict())
    said = [(x.dtype, x.shape, _checksum(x)) if isinstance(x, Tensor) else repr(x) for x in leaves]
    rows = gather_ints([zlib.crc32(repr(said).encode())], mesh)
    if any(row != rows[0] for row in rows):
        raise Error(
            f"save_state: object {number} of register_for_checkpointing, a {type(thing).__name__}, has another state "
            "on each rank, as parts of weights have, and accelerate writes the first rank's",
            fix="let each rank save it to a file of its own",
            alternative="autotp.gather(part) in its state_dict(), called on all ranks",
        )


def _checksum(x: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _with_random_states_of_first(method: Method) -> Method:
    """All ranks of a model have equal random states, so each reads those of the first, also with another tp."""

    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _reads_first.set(is_one_process())
        try:
            return method(self, *args, **kwargs)
        finally:
            _reads_first.reset(token)

    return load_state


AROUND: dict[str, Callable[[Method], Method]] = {
    "__init__": _initialized,
    "prepare_model": _prepared,
    "get_state_dict": _gathering,
    "save_state": _with_whole_optimizers,
    "load_state": _with_random_states_of_first,
}
"""Methods of `Accelerator`, and what makes ours of theirs."""
