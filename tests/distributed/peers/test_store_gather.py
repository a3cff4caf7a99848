"""store_gather: each rank gets all ranks' texts in their order; a rank that does not come is named."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import Checks
from torch.distributed.distributed_c10d import _get_default_store

import autotp
from autotp.distributed.mesh import make_mesh
from autotp.distributed.peers.store_gather import _names, store_gather

checks = Checks()


@checks.on(2)
@checks.on(3, rare=True)
def texts_by_rank(rank: int, n: int) -> None:
    """Of any length, again and again; two meshes do not mix; nothing of an earlier exchange stays in the store."""
    first, second = make_mesh(), make_mesh()
    for call in range(1, 4):
        texts = [f"{call} {'x' * i * 1000}" for i in range(n)]
        assert store_gather(texts[rank], first) == texts
        assert store_gather(f"other {rank}", second) == [f"other {i}" for i in range(n)]
    dist.barrier()
    store = _get_default_store()
    assert not any(store.check([name]) for name in _names(first, 1))
    assert store.check(_names(first, 3))


@checks.on(2)
def a_rank_that_does_not_come(rank: int, n: int) -> None:
    mesh = make_mesh(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(autotp.Error, match=r"^tp rank 1 did not make this call within the group's timeout"):
            store_gather("here", mesh)
    dist.barrier()


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
