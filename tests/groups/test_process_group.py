"""process_group: what the name of a group says of its axis, its ranks and its backend."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from ranks import run_ranks

from autotp.groups.process_group import axis_of, backend_of, called, process_group, seat


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
        [called(r, own) for r in range(3)],
        backend_of(own, "cpu"),
    ]


def test_names() -> None:
    """The default group is the axis tp, and torch's names of a mesh's groups have the axis behind `mesh_`."""
    names = [["tp rank 0 (global rank 0)", "tp rank 1 (global rank 1)", "global rank 2"]] * 2
    names.append(["global rank 0", "global rank 1", "tp rank 0 (global rank 2)"])
    seats = [(0, 2), (1, 2), (0, 1)]
    assert run_ranks(described, 3) == [[(rank, 3), "tp", seats[rank], "tp", names[rank], "gloo"] for rank in range(3)]
