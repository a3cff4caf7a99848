"""Collectives of torch.distributed that forward calls, as operators of the graph.

Before: work = dist.broadcast(self.code, 0, async_op=True); work.wait()      (c10d's operator draws random numbers)
After:  self.code.copy_(broadcast(self.code, 0))                             (a functional collective, already there)

torch has functions for sums and gathers that do so. Whether a group is one that the model may use is known where its
ranks are known: `expect_collectives_of_replicas` in `autotp/distributed/replica_check.py`.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from autotp import torch_internals as internals
from autotp.errors import Error
from autotp.passes.capture.replacements.everywhere import Pairs
from autotp.source_location import calling_frame, is_users, user_line


class _Done:
    """Stands for the handle of a collective whose result is there."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def as_operators() -> Pairs:
    """Returns what stands for collectives of torch.distributed while a model is captured."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    instead: dict[Callable[..., Any], Callable[..., Any]] = {
        row.original(): _refused(row.name) for row in internals.COLLECTIVES_OF_USERS
    }
    instead |= functional.traceable_collective_remaps
    # Last, because torch's table has `all_reduce`, too, and a later entry wins.
    instead |= {dist.all_reduce: _all_reduce, dist.broadcast: _broadcast, dist.barrier: _nothing}
    return [(real, _for_users(real, operator)) for real, operator in instead.items()]


def _for_users(real: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is the operator for the model's code, and the real one for torch and autotp."""
    signature = inspect.signature(real)

    @wraps(real)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if not is_users(calling_frame()):
            return real(*args, **kwargs)
        # By name: users give the group and the operation by place, and by name.
        arguments = signature.bind(*args, **kwargs).arguments
        runs_ahead = arguments.pop("async_op", False)
        operator(**arguments)
        return _Done() if runs_ahead else None

    return collective


def _all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    # The functional collective takes the operation by its name, such as "sum".
    name = str(op).rpartition(".")[2].lower()
    over: Any = group or dist.group.WORLD
    tensor.copy_(functional.all_reduce(tensor, name, over))


def _broadcast(tensor: Tensor, src: int | None = None, group: Any = None, group_src: int | None = None) -> None:
    group = group or dist.group.WORLD
    first = dist.get_global_rank(group, group_src or 0) if src is None else src
    tensor.copy_(functional.broadcast(tensor, first, group))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a barrier, which computes nothing."""


def _refused(name: str) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> NoReturn:
        raise Error(
            f"forward calls torch.distributed.{name}, which a graph does not have",
            at=user_line(traceback.extract_stack()),
            fix="all_reduce, all_gather or broadcast; or the collective in the training loop",
        )

    return collective
