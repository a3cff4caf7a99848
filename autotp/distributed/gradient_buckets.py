"""gradient_buckets: sums gradients over ranks, small ones together, without a copy of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 25 * 2**20
"""The most bytes of gradients that are copied into one tensor; as many as in DistributedDataParallel by default."""


def sum_in_buckets(gradients: Sequence[Tensor], group: dist.ProcessGroup, size: int = BUCKET) -> None:
    """Sums each of these tensors over a group, in place. Every rank passes tensors of the same shapes, in one order.

    A collective has a cost of its own, so small tensors are summed together, in a copy of at most `size` bytes. A
    tensor that is larger is summed where it is.
    """
    for bucket in buckets_of(gradients, size):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
        else:
            _sum_together(bucket, group)


def _sum_together(bucket: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sums tensors in one collective. Their copy ends with it, before the next one is made."""
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def buckets_of(gradients: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yields tensors of one dtype that take at most `size` bytes together; a larger tensor comes alone."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket, held = list[Tensor](), 0
        for gradient in gradients:
            if gradient.dtype != dtype:
                continue
            if bucket and held + gradient.nbytes > size:
                yield bucket
                bucket, held = [], 0
            bucket.append(gradient)
            held += gradient.nbytes
        if bucket:
            yield bucket
