"""Shows the replicas to accelerate as its processes: their number, this one's index, and who is the first.

See NOTE [Replicas as processes] in `replicas.py`.

This module does not import accelerate before the user's program does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from autotp.attached import first_time
from autotp.integrations.loops.replica_collectives import TorchOfReplicas
from autotp.integrations.loops.replicas import is_one_replica, own_ranks, replicas
from autotp.source_location import calling_frame

BROADCASTS = ("broadcast", "broadcast_object_list")
"""Functions of accelerate.utils.operations that stay those of all ranks."""
Method = Callable[..., Any]
_shown: ContextVar[tuple[int | None, int | None]] = ContextVar("shown", default=(None, None))
"""The index of this process, and the number of processes; None means those of the replicas."""


def show_replicas() -> None:
    """Changes accelerate's state, once it is imported: from then on it shows `replicas()`."""
    state = sys.modules.get("accelerate.state")
    # accelerate imports its parts one after the other: with the last one all names are there.
    if state is None or "accelerate.accelerator" not in sys.modules:
        return
    partial: Any = state.PartialState
    if first_time(partial, "changed"):
        _change(state)
    for state_class in (partial, state.AcceleratorState):  # They may have been made before the model was parallel.
        _show_all_ranks(state_class._shared_state, state.DistributedType)


@contextmanager
def showing(index: int | None = None, number: int | None = None) -> Iterator[None]:
    """A region in which accelerate sees this index of the process, or number of processes, instead of the replicas'."""
    token = _shown.set((index, number))
    try:
        yield
    finally:
        _shown.reset(token)


def _change(state: Any) -> None:
    partial = state.PartialState
    for changed_class in (partial, state.AcceleratorState):
        changed_class.num_processes = _stored("num_processes", _number)
        changed_class.process_index = _stored("process_index", _index)
    partial.__init__ = _with_all_ranks(partial.__init__, state.DistributedType)
    # This one tells how many processes there are: it keeps trackers and printing to the first rank.
    partial.use_distributed = property(lambda self: self.__dict__["num_processes"] > 1)
    partial.is_main_process = _of_one_rank(partial.is_main_process, lambda: 0)
    for changed_class in (partial, sys.modules["accelerate.accelerator"].Accelerator):
        changed_class.is_last_process = _of_one_rank(changed_class.is_last_process, lambda: dist.get_world_size() - 1)
    partial.on_process = _on_first_of_replica(partial.on_process)
    operations: Any = sys.modules["accelerate.utils.operations"]
    operations.PartialState = _state_of_operations(state)
    operations.torch = TorchOfReplicas()


def _number(stored: int) -> int:
    axis, (_, number) = replicas(), _shown.get()
    if axis is None:
        return stored
    return axis.size if number is None else number


def _index(stored: int) -> int:
    axis, (index, _) = replicas(), _shown.get()
    if axis is None:
        return stored
    return axis.rank if index is None else index


def _stored(name: str, convert: Callable[[int], int]) -> property:
    """Returns a property whose value is in `__dict__`, where accelerate writes it, and is shown as `convert` says."""

    def read(self: Any) -> int:
        if name not in self.__dict__:
            self.__getattr__(name)  # It raises accelerate's own error.
        return convert(self.__dict__[name])

    def write(self: Any, value: int) -> None:
        self.__dict__[name] = value

    return property(read, write)


def _of_one_rank(original: property, rank: Callable[[], int]) -> property:
    """Returns a property that is True on one rank of all, not on all ranks of one replica."""
    read = original.fget
    assert read is not None
    return property(lambda self: read(self) if replicas() is None else dist.get_rank() == rank())


def _with_all_ranks(init: Method, kinds: Any) -> Method:
    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _show_all_ranks(self.__dict__, kinds)

    return __init__


def _show_all_ranks(state: dict[str, Any], kinds: Any) -> None:
    """Tells a state of accelerate about the other ranks: on a CPU it does not look for any without `cpu=True`.

    Each rank would be the first, and all would write the same files.
    """
    if state.get("distributed_type") is kinds.NO and replicas() is not None:
        distributed_type = kinds.MULTI_GPU if state["device"].type == "cuda" else kinds.MULTI_CPU
        rank = dist.get_rank()
        local = int(os.environ.get("LOCAL_RANK", rank))
        state.update(distributed_type=distributed_type, backend=dist.get_backend(), num_processes=dist.get_world_size())
        state.update(process_index=rank, local_process_index=local)


def _on_first_of_replica(method: Method) -> Method:
    @wraps(method)
    def on_process(self: Any, function: Any = None, process_index: int | None = None) -> Any:
        elsewhere = replicas() is not None and own_ranks().rank > 0
        # No process has the index -1, so accelerate does not run the function here.
        with showing(index=-1 if elsewhere else None):
            return method(self, function, process_index)

    return on_process


def _state_of_operations(state: Any) -> Callable[[], Any]:
    """Returns what stands for `PartialState` where accelerate gathers: of one replica, the state of a process alone.

    (With several processes accelerate makes a number a vector when it gathers it.)
    """

    def found() -> Any:
        real = state.PartialState()
        if not is_one_replica() or calling_frame().f_code.co_name in BROADCASTS:
            return real
        alone = state.DistributedType.NO
        return SimpleNamespace(**real.__dict__ | {"distributed_type": alone, "num_processes": 1, "process_index": 0})

    return found
