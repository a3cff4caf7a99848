"""process_group: what the name of a group says of its axis, its ranks and its backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from errors import message
from ranks import run_ranks
from trainers import batch, started

import autotp
from autotp.groups.process_group import (
    axis_of,
    backend_of,
    process_group,
    rank_name,
    replace_methods,
    seat,
)
from autotp.torch_internals import OF_SOME_RANKS


def described(rank: int, n: int) -> list[Any]:
    world = str(dist.group.WORLD.group_name)
    pairs = [dist.new_group(ranks, group_desc="mesh_tp") for ranks in ([0, 1], [2])]
    own = str(pairs[rank // 2].group_name)
    assert process_group(own) is pairs[rank // 2]
    return [
        seat(world),
        axis_of(world),
        seat(own),
        axis_of(own),
        [rank_name(r, own) for r in range(3)],
        backend_of(own, "cpu"),
    ]


def test_process_group_describes_its_axis_ranks_and_backend() -> None:
    """The default group is the axis tp, and torch's names of a mesh's groups have the axis behind `mesh_`."""
    names = [["tp rank 0 (global rank 0)", "tp rank 1 (global rank 1)", "global rank 2"]] * 2
    names.append(["global rank 0", "global rank 1", "tp rank 0 (global rank 2)"])
    seats = [(0, 2), (1, 2), (0, 1)]
    assert run_ranks(described, 3) == [[(rank, 3), "tp", seats[rank], "tp", names[rank], "gloo"] for rank in range(3)]


def destroyed(rank: int, n: int) -> list[str]:
    """What calls of a model, a trainer and a file say, after torch.distributed was shut down."""
    trainer, optimizer = started((2, 1, 1))
    model: Any = autotp.parallelize(torch.nn.Linear(4, 6), 2, example_inputs=torch.ones(2, 4))
    dist.destroy_process_group()
    calls: list[Callable[[], Any]] = [
        lambda: model(torch.ones(2, 4)),
        lambda: autotp.full_state_dict(model),
        lambda: trainer.step(**batch(0)),
        lambda: autotp.save_checkpoint("nowhere", trainer, optimizer, 1),
    ]
    found = []
    for call in calls:
        found.append(message(call).split("\n")[0].rpartition(": ")[0])
    return found


def test_calls_after_destroy_process_group_are_an_error() -> None:
    told = "the process groups of the model were destroyed"
    for found in run_ranks(destroyed, 2, timeout=100, alone=True):
        assert all(it.endswith(told) for it in found), found


def test_methods_of_process_groups_of_python_are_replaced_too() -> None:
    """Those that a class defines."""
    calls = []

    class Group(dist.ProcessGroup):
        def send(self, tensors: Any, dst: int, tag: int) -> None:  # type: ignore[override]
            calls.append("own")

    def wrapped(method: Any) -> Any:
        return lambda group, *args: (calls.append("watched"), method(group, *args))

    group: Any = Group(0, 1)
    undo = replace_methods(OF_SOME_RANKS, wrapped)
    try:
        group.send([], 0, 0)
    finally:
        undo()
    group.send([], 0, 0)
    assert calls == ["watched", "own", "own"]
