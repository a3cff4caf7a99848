"""Has accelerate's `Accelerator` wrap, save and load parallel models, whose replicas it takes for processes.

See NOTE [Replicas as processes] in `replicas.py`. Gradients are averaged over replicas by DistributedDataParallel,
which accelerate puts around a model by itself: here over the ranks that hold the same part. What the first rank writes
is gathered before.

NOTE [What accelerate counts]
accelerate takes each process for a replica with rows of its own: a prepared schedule goes on by one step for each
process, and `gather` and `reduce` join what the processes have. It cannot be shown the replicas of a mesh of the
user's: a learning rate would fall too fast, and rows would count several times. So an `Accelerator` beside such a model
is an error, whichever of the two is made first.

This module does not import accelerate before the user's program does.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.attached import first_time
from autotp.checkpoint.whole_optimizer import whole_state_dicts
from autotp.distributed.agreement import Fact, compare
from autotp.distributed.fingerprint import checksum
from autotp.distributed.live_models import models
from autotp.distributed.mesh import Mesh, group_of
from autotp.errors import Error
from autotp.integrations.loops.accelerate_state import showing
from autotp.integrations.loops.replicas import (
    done_by_all,
    of_all,
    own_ranks,
    parallel_models,
    replicas,
    whole_for_file,
    whole_state,
)
from autotp.runtime.module import ParallelModule, call_through

Method = Callable[..., Any]
WRAPPERS = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Kinds of accelerate's processes that put DistributedDataParallel around a model, or nothing."""


def watch_accelerator() -> None:
    """Changes methods of `Accelerator`, once it is imported."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is None:
        return
    if sys.modules["accelerate.state"].AcceleratorState._shared_state:
        _expect_known_replicas()
    if not first_time(accelerator, "changed"):
        return
    read = accelerator.dispatch_batches.fget
    # Each rank reads the rows itself: what one process reads and sends, all ranks of a replica must get.
    accelerator.dispatch_batches = property(lambda self: False if replicas() is not None else read(self))
    for name, wrapper in AROUND.items():
        setattr(accelerator, name, wraps(getattr(accelerator, name))(wrapper(getattr(accelerator, name))))


def _initialized(method: Method) -> Method:
    def __init__(self: Any, *args: Any, parallelism_config: Any = None, **kwargs: Any) -> None:
        axis = replicas()
        if axis is None:
            _expect_known_replicas()
        elif parallelism_config is not None:
            _expect_layout(parallelism_config, axis)
            parallelism_config = None  # What it would arrange is arranged.
        method(self, *args, parallelism_config=parallelism_config, **kwargs)

    return __init__


def _expect_known_replicas() -> None:
    if replicas() is None and any(isinstance(x, ParallelModule) and x.mesh.everyone.size > 1 for x in models()):
        raise Error(
            "accelerate takes each process for a replica, which ranks of a parallel model with a mesh of yours are not",
            fix="autotp.parallelize(model, tp=...), without mesh: then accelerate sees the replicas",
            alternative="this mesh in a loop without an Accelerator, which transformers.Trainer also makes",
        )


def _expect_layout(config: Any, axis: Mesh) -> None:
    sizes, tp = {name: size for name, size in config._sizes.items() if size > 1}, own_ranks().size
    if sizes not in ({"tp": tp}, {"dp_replicate": axis.size, "tp": tp}):
        ranks = f"{tp} ranks, all processes," if axis.size == 1 else f"{tp} ranks, in {axis.size} replicas,"
        raise Error(
            f"the model is parallel over {ranks} and ParallelismConfig says {sizes}",
            fix="Accelerator(), without parallelism_config",
        )


def _with_wrappers_of_replicas(method: Method) -> Method:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = self.distributed_type.name
        if replicas() is not None and strategy not in WRAPPERS and any(isinstance(x, ParallelModule) for x in args):
            raise Error(
                f"{strategy} divides a model among all processes, and autotp has divided it",
                fix="accelerate without FSDP, DeepSpeed or Megatron-LM",
                alternative="autotp.distribute(model, tp=..., dp=..., zero=...), which shards over replicas",
            )
        return method(self, *args, **kwargs)

    return prepare


def _prepared(method: Method) -> Method:
    def prepare_model(self: Any, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        axis = replicas()
        if not isinstance(model, ParallelModule):
            return method(self, model, device_placement, evaluation_mode)
        if axis is None:  # One process, without ranks.
            with _in_precision(self, model):
                return method(self, model, device_placement, evaluation_mode)
        if self.parallelism_config is not None:
            raise Error(
                "this Accelerator has a parallelism_config of its own",
                fix="Accelerator(), without parallelism_config, or after autotp.parallelize",
            )
        with _in_precision(self, model):
            if axis.size == 1:  # Only in training would it put DistributedDataParallel around the model.
                return method(self, model, device_placement, evaluation_mode=True)
            with _averaging_over(self, group_of(axis)):
                return method(self, model, device_placement, evaluation_mode)

    return prepare_model


@contextmanager
def _in_precision(accelerator: Any, model: ParallelModule) -> Iterator[None]:
    """A region in which accelerate does not set `model.forward` for mixed precision, as that is done here.

    It would make autocast a part of the model's forward, and objects of it cannot be copied for capture. Calls of the
    model go through the same two functions: one turns autocast on, the other returns outputs in float32.
    """
    mixed = accelerator.native_amp
    if mixed:
        modeling, operations = (sys.modules[f"accelerate.utils.{name}"] for name in ("modeling", "operations"))
        context = modeling.get_mixed_precision_context_manager(mixed, accelerator.autocast_handler)
        method: Any = model.forward
        model._original_forward = method.__func__  # `unwrap_model(model, keep_fp32_wrapper=False)` sets it again.
        call_through(model, lambda forward: operations.convert_outputs_to_fp32(context(forward)))
    accelerator.native_amp = False
    try:
        yield
    finally:
        accelerator.native_amp = mixed


class _HandlerOverReplicas:
    """accelerate's settings of DistributedDataParallel, with a process group."""

    def __init__(self, theirs: Any, group: dist.ProcessGroup) -> None:
        self.theirs, self.group = theirs, group

    def to_kwargs(self) -> dict[str, Any]:
        return {**(self.theirs.to_kwargs() if self.theirs is not None else {}), "process_group": self.group}

    def register_comm_hook(self, model: nn.Module) -> None:
        if self.theirs is not None:
            self.theirs.register_comm_hook(model)


@contextmanager
def _averaging_over(accelerator: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """A region in which accelerate's DistributedDataParallel averages over this group."""
    handler = accelerator.ddp_handler
    accelerator.ddp_handler = _HandlerOverReplicas(handler, group)
    try:
        yield
    finally:
        accelerator.ddp_handler = handler


def _gathering(method: Method) -> Method:
    def get_state_dict(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = self.unwrap_model(model)
        if not parallel_models(inner):
            return method(self, model, *args, **kwargs)
        return OrderedDict(whole_state(inner))  # In a plain dict accelerate does not look for tied tensors.

    return get_state_dict


def _with_whole_optimizers(method: Method) -> Method:
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        axis = replicas()
        if axis is None:
            return method(self, *args, **kwargs)
        mesh, registered = own_ranks(), self._custom_objects
        # Each process writes its random state. The files of the first rank of each replica come first: they are read.
        whole_states = whole_state_dicts([optimizer.optimizer for optimizer in self._optimizers])
        with whole_states, showing(index=axis.rank + mesh.rank * axis.size):
            self._custom_objects = [of_all(partial(_of_file, i, part)) for i, part in enumerate(registered)]
            try:
                return done_by_all(partial(method, self, *args, **kwargs))
            finally:
                self._custom_objects = registered

    return save_state


def _there_for_all(method: Method) -> Method:
    def save_model(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The first rank writes; when the others go on, they find the files."""
        if replicas() is None or not isinstance(self.unwrap_model(model), ParallelModule):
            return method(self, model, *args, **kwargs)
        return done_by_all(partial(method, self, model, *args, **kwargs))

    return save_model


def _of_file(number: int, value: Any) -> Any:
    """Returns what stands for an object that the user registered while accelerate writes: its state is whole.

    Raises:
        Error: on every rank: it has another state on some rank. accelerate writes the first rank's.
    """
    state, mesh = value.state_dict(), own_ranks()
    whole = whole_for_file(state, mesh)
    leaves = zip(pytree.tree_leaves(state), pytree.tree_leaves(whole), strict=True)
    plain = [x for x, whole_leaf in leaves if x is whole_leaf]
    digests = [(x.dtype, x.shape, checksum(x)) if isinstance(x, Tensor) else repr(x) for x in plain]
    problem = (
        f"save_state: object {number} of register_for_checkpointing, a {type(value).__name__}, has another state "
        "on each rank, as parts of weights have, and accelerate writes the first rank's"
    )
    fix = "let each rank save it to a file of its own"
    alternative = {"alternative": "autotp.gather(tensor), or the cut tensor itself, in place of `tensor.to_local()`"}
    compare(mesh, [Fact("state", repr(digests), problem, fix, wording="alone", details=lambda *ranks: alternative)])
    return SimpleNamespace(state_dict=lambda: whole)


def _into_unwrapped(method: Method) -> Method:
    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A saved state has the names of the model itself, not those of a wrapper around it."""
        if replicas() is None:
            return method(self, *args, **kwargs)
        wrapped = self._models
        self._models = [self.unwrap_model(model) for model in wrapped]
        try:
            return method(self, *args, **kwargs)
        finally:
            self._models = wrapped

    return load_state


def _seen_by_all(method: Method) -> Method:
    def check_trigger(self: Any) -> bool:
        """A flag of one rank is one of its whole replica."""
        if replicas() is not None:
            # All ranks take part in the reduction, also those on which nobody has set the flag.
            if self.flag_tensor is None:
                self.flag_tensor = torch.tensor(0, device=self.device)
            dist.all_reduce(self.flag_tensor, dist.ReduceOp.MAX)
        return bool(method(self))

    return check_trigger


AROUND: dict[str, Callable[[Method], Method]] = {
    "__init__": _initialized,
    "prepare": _with_wrappers_of_replicas,
    "prepare_model": _prepared,
    "get_state_dict": _gathering,
    "save_state": _with_whole_optimizers,
    "save_model": _there_for_all,
    "load_state": _into_unwrapped,
    "check_trigger": _seen_by_all,
}
"""Methods of `Accelerator`, and what makes ours of theirs."""
