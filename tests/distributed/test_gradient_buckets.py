"""gradient_buckets: sums over ranks are those of each tensor, and no copy is larger than a bucket."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import Checks
from torch import Tensor

from autotp.distributed.gradient_buckets import buckets_of, sum_in_buckets

checks = Checks()


def sizes(gradients: list[Tensor], size: int) -> list[list[int]]:
    return [[x.nbytes for x in bucket] for bucket in buckets_of(gradients, size)]


def test_a_bucket_has_one_dtype_and_no_more_than_its_bytes() -> None:
    narrow, wide = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    assert sizes([narrow, wide, wide, wide, narrow], 16) == [[4, 4], [8, 8], [8]]


def test_what_is_larger_than_a_bucket_comes_alone() -> None:
    assert sizes([torch.zeros(1), torch.zeros(9), torch.zeros(1), torch.zeros(1)], 8) == [[4], [36], [4, 4]]
    assert sizes([], 8) == []


@checks.on(2)
def sums(rank: int, n: int) -> None:
    """In place, whatever the strides; small ones in one collective."""
    torch.manual_seed(rank)
    shapes = [(3,), (40, 5), (2, 2), (), (0,)]
    gradients = [torch.randn(shape, dtype=torch.float64) for shape in shapes] + [torch.randn(6, 30).double().T]
    everyone = [[torch.empty_like(x) for _ in range(n)] for x in gradients]
    for parts, mine in zip(everyone, gradients, strict=True):
        dist.all_gather(parts, mine.contiguous())
    before, calls, real = [x.data_ptr() for x in gradients], list[int](), dist.all_reduce
    copies = list[weakref.ref[Tensor]]()

    def counted(tensor: Tensor, group: dist.ProcessGroup) -> None:
        assert all(copy() is None for copy in copies)  # One copy at a time.
        if tensor.data_ptr() not in before:
            copies.append(weakref.ref(tensor))
        calls.append(tensor.nbytes)
        real(tensor, group=group)

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        sum_in_buckets(gradients, dist.group.WORLD, size=128)
    finally:
        dist.all_reduce = real
    assert len(copies) == 2
    assert calls == [24, 1600, 40, 1440]  # (3,) | (40, 5), where it is | (2, 2), () and (0,) | the transposed one
    assert [x.data_ptr() for x in gradients] == before
    for parts, found in zip(everyone, gradients, strict=True):
        assert torch.equal(found, sum(parts[1:], parts[0]))


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
