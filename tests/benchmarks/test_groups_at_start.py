"""benchmarks/predicted/groups_at_start.py: counts that do not grow with the world, and a formula that is gloo's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from predicted.groups_at_start import every_group, requests_of_gloo, start_of

from autotp.groups.members_only import MANY


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 4, "tp": 8}, {"pp": 8, "dp": 128, "tp": 8}], ids=["64", "8192"])
def test_a_rank_makes_a_constant_number_of_groups(sizes: dict[str, int]) -> None:
    start = start_of(sizes, 5)
    assert (len(start.calls), start.world_barriers, start.communicators) == (7, 2, 6)
    assert len(start.calls) < every_group(sizes) == (58 if sizes["dp"] == 4 else 2114)


class Counting(dist.Store):
    """A store that counts the requests of one rank."""

    def __init__(self, inside: dist.Store) -> None:
        super().__init__()
        self.inside, self.requests = inside, 0

    def set(self, *args: Any) -> Any:
        self.requests += 1
        return self.inside.set(*args)

    def get(self, *args: Any) -> Any:
        self.requests += 1
        return self.inside.get(*args)

    def wait(self, *args: Any) -> Any:
        self.requests += 1
        return self.inside.wait(*args)


@pytest.mark.parametrize("size", [2, 5])
def test_requests_of_gloo(size: int) -> None:
    inside = dist.HashStore()
    stores = [Counting(inside) for _ in range(size)]

    def make(rank: int) -> Any:
        return dist.ProcessGroupGloo(stores[rank], rank, size, timedelta(seconds=20))

    with ThreadPoolExecutor(size) as threads:
        groups = list(threads.map(make, range(size)))
    assert [store.requests for store in stores] == [requests_of_gloo(size)] * size and groups
    assert requests_of_gloo(MANY) == 2 * MANY + 1 and requests_of_gloo(MANY + 1) == 1
