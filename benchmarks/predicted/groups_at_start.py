"""What do the process groups of `distribute` cost at the start, on 64 to 8,192 ranks? One process simulates a rank.

    python benchmarks/predicted/groups_at_start.py [--ranks 64 512 2048 8192] [--gloo 64]

The rank runs autotp's code in a world whose groups send nothing; its calls of `torch.distributed.new_group` are noted.
"every rank makes every group" is torch's rule without `use_local_synchronization`, which autotp followed until
2026-11-28. `--gloo` makes the groups of so many ranks over gloo, each rank in a thread, with a real store on loopback.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotp.distributed import mesh as meshes
from autotp.groups.members_only import MANY, connecting_late
from autotp.training.process_groups import mesh_of, world_mesh

LAYOUTS = {64: (2, 4, 8), 512: (4, 16, 8), 2048: (4, 64, 8), 8192: (8, 128, 8)}
"""Number of ranks -> pp, dp, tp."""
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Start:
    """What a rank does at the start.

    Attributes:
        calls: the ranks of each group that it makes, and whether the group is for files, in order.
        world_barriers: barriers of all ranks, if torch is told to have one for each group.
    """

    calls: list[tuple[tuple[int, ...], bool]]
    world_barriers: int

    @property
    def communicators(self) -> int:
        """The most communicators of NCCL: the groups of several ranks in which models may send."""
        return sum(len(ranks) > 1 and not files for ranks, files in self.calls)


@contextmanager
def rank_of(size: int, rank: int) -> Iterator[None]:
    """A region in which this process is one rank of a world that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with patch.object(meshes, "begin_watching", lambda *_: None):
            yield
    finally:
        dist.destroy_process_group()


def start_of(sizes: dict[str, int], rank: int) -> Start:
    """Returns what this rank of a world of these sizes does at the start."""
    calls, waits, make = list[tuple[tuple[int, ...], bool]](), list[int](), dist.new_group
    world = math.prod(sizes.values())

    def noted(ranks: Any, timeout: Any, backend: Any = None, **how: Any) -> Any:
        calls.append((tuple(ranks), backend == "gloo"))
        return make(ranks, timeout, None, **how)

    with rank_of(world, rank), patch.object(dist, "new_group", noted):
        c10d = dist.distributed_c10d
        with (
            patch.object(c10d, "_is_barrier_after_init", lambda: 1),
            patch.object(c10d, "_store_based_barrier", lambda *args: waits.append(args[3])),
        ):
            mesh = mesh_of(sizes, torch.device("cpu"), TIMEOUT)
            place = meshes.make_mesh(None, mesh["tp"])
            world_mesh(place, mesh, TIMEOUT)
            meshes.new_group(None, TIMEOUT, "files", "gloo")
    return Start(calls, waits.count(world))


def every_group(sizes: dict[str, int]) -> int:
    """Returns the calls of a rank if it makes the groups of all rows, one for all ranks and one for files."""
    world = math.prod(sizes.values())
    return sum(world // size for size in sizes.values()) + 2


def requests_of_gloo(size: int, late: bool = True) -> int:
    """Returns the requests of a rank to the store for one group: for two ranks that connect, one reads the other's."""
    return 1 if late and size > MANY else 2 * size + 1


def row(world: int) -> str:
    """Returns a row of the table."""
    sizes = dict(zip(("pp", "dp", "tp"), LAYOUTS[world], strict=True))
    start = start_of(sizes, world - 3)
    groups = [world, *(len(ranks) for ranks, _ in start.calls)]  # The default group is one more.
    before, now = (world * sum(requests_of_gloo(size, late) for size in groups) for late in (False, True))
    layout = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    return (
        f"| {world:,} ({layout}) | {every_group(sizes):,} | {len(start.calls)} | {start.world_barriers} | "
        f"{start.communicators} | {before:,} | {now:,} |"
    )


def seconds_of_gloo(world: int, late: bool) -> float:
    """Returns the seconds in which all ranks make their groups over gloo, each in a thread of this process."""
    sizes = dict(zip(("pp", "dp", "tp"), LAYOUTS[world], strict=True))
    starts = [start_of(sizes, rank).calls for rank in range(world)]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(world)]

    def make(rank: int) -> list[Any]:
        return [_gloo(stores[rank], number, rank, ranks) for number, (ranks, _) in enumerate(starts[rank])]

    began = time.perf_counter()
    with connecting_late(MANY + 1 if late else 1), ThreadPoolExecutor(world) as threads:
        made = list(threads.map(make, range(world)))
    seconds = time.perf_counter() - began
    del made
    return seconds


def _gloo(store: dist.Store, number: int, rank: int, ranks: Sequence[int]) -> Any:
    inside = dist.PrefixStore(f"{number}/{ranks[0]}", store)
    return dist.ProcessGroupGloo(inside, ranks.index(rank), len(ranks), TIMEOUT)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(LAYOUTS))
    parser.add_argument("--gloo", type=int, default=0)
    arguments = parser.parse_args()
    print(
        "| ranks | calls of a rank: every rank makes every group | its own groups | barriers of the world | "
        "communicators of NCCL | requests to the store, gloo connects at once | connects late above 64 ranks |"
    )
    print("|---|---|---|---|---|---|---|")
    for world in arguments.ranks:
        print(row(world), flush=True)
    if arguments.gloo:
        took = {late: seconds_of_gloo(arguments.gloo, late) for late in (False, True)}
        print(f"{arguments.gloo} ranks over gloo: {took[False]:.2f} s, and {took[True]:.2f} s if all connect late")


if __name__ == "__main__":
    main()
