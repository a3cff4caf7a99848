"""Raises Error where accelerate would take the ranks of one model for replicas, in layouts that it cannot be shown.

These are meshes of the user's. In other layouts accelerate sees the replicas (`replicas.py`).

NOTE [What accelerate counts]
accelerate takes each process for a replica with rows of its own: a prepared schedule goes on by one step for each
process, and `gather` and `reduce` join what the processes have. The ranks of one tensor-parallel model have the same
rows. So a learning rate would fall too fast, and rows would count several times.

This module does not import accelerate before the user's program does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from autotp.distributed.live_models import models, sorted_by_model
from autotp.errors import Error
from autotp.hf.loops.replicas import replicas
from autotp.runtime.module import ParallelModule
from autotp.source_location import calling_frame

JOINS = ("gather", "gather_for_metrics", "reduce")
"""Methods of `Accelerator` that join tensors of all processes."""
_watched: set[type] = set()


def watch_accelerate() -> None:
    """Has methods of accelerate, if it is imported, raise Error while a parallel model of several ranks exists."""
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    schedule = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
    if accelerator is not None and accelerator not in _watched:
        _watched.add(accelerator)
        for name in JOINS:
            setattr(accelerator, name, _checked(getattr(accelerator, name), _expect_no_join))
    if schedule is not None and schedule not in _watched:
        _watched.add(schedule)
        schedule.step = _checked(schedule.step, _expect_single_steps)


def _checked(method: Callable[..., Any], check: Callable[[Any, str, str], None]) -> Any:
    @wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, method.__name__, str(calling_frame().f_globals.get("__name__")))
        return method(self, *args, **kwargs)

    return called


def _expect_no_join(accelerator: Any, name: str, caller: str) -> None:
    """Raises Error, unless accelerate itself calls the method: its flags of processes are right."""
    if _is_unknown(models()) and accelerator.num_processes > 1 and not caller.startswith("accelerate."):
        raise Error(
            f"Accelerator.{name} joins tensors of all processes, and the ranks of a parallel model have the same rows",
            fix="autotp.parallelize(model, tp=...), without mesh: then accelerate sees the replicas",
            alternative="the tensor itself, which is the same on these ranks; autotp.gather(tensor), for parts",
        )


def _expect_single_steps(schedule: Any, name: str, caller: str) -> None:
    """Raises Error if a step of the schedule counts as many steps as there are processes."""
    parameters = [p for optimizer in schedule.optimizers for group in optimizer.param_groups for p in group["params"]]
    steps_for_all = schedule.step_with_optimizer and not schedule.split_batches and _processes() > 1
    by_model, _ = sorted_by_model(parameters) if steps_for_all else ({}, [])
    if _is_unknown(by_model):
        raise Error(
            "a schedule that accelerate prepared steps once for each process, and the ranks of a parallel model are "
            "processes of one model",
            fix="autotp.parallelize(model, tp=...), without mesh: then accelerate sees the replicas",
            alternative="the schedule itself, without accelerator.prepare, stepped where the optimizer steps",
        )


def _is_unknown(live: Iterable[Any]) -> bool:
    """True if one of these models is spread over several ranks, and accelerate does not see its replicas."""
    return replicas() is None and any(
        model.mesh.everyone.size > 1 for model in live if isinstance(model, ParallelModule)
    )


def _processes() -> int:
    count: int = sys.modules["accelerate.state"].AcceleratorState().num_processes
    return count
