"""`Checks`: what failed is told, whatever the other ranks do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import RUNNING, Checks

broken = Checks(timeout=30)


@broken.on(2)
def before(rank: int, n: int) -> None:
    dist.barrier()


@broken.on(2)
def fails_on_the_last(rank: int, n: int) -> None:
    """The first rank is in a collective of another size than any that `Checks` could start."""
    assert rank == 0, "no such row"
    dist.all_reduce(torch.zeros(1000))


@broken.on(2)
def after(rank: int, n: int) -> None:
    dist.barrier()


def test_a_check_that_fails_on_one_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [fn.__name__ for functions in broken.functions.values() for fn in functions]
    monkeypatch.setattr("ranks.SELECTED", {(RUNNING.file, 2, name) for name in names})
    broken.expect(2, "before")
    with pytest.raises(AssertionError, match=r"on rank 1 of 2(.|\n)*no such row"):
        broken.expect(2, "fails_on_the_last")
    with pytest.raises(AssertionError, match="not run: fails_on_the_last failed before"):
        broken.expect(2, "after")
