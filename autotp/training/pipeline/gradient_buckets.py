"""gradient_buckets: sums gradients over ranks, small ones together, without a copy of all of them.

NOTE [Sums under backward]
The sums of the last layers run while backward still computes the first ones, as in DistributedDataParallel. That class
itself is not used: it averages; it does not see gradients that backward in two halves adds (zero-bubble schedules); it
wants each parameter to get a gradient, or searches the graph for those that do not; and it learns its buckets anew on
the first rank, which sends them to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotp.sharding.boxes import local_of

T = TypeVar("T", bound=Tensor)
BUCKET = 25 * 2**20
"""The most bytes of gradients that are copied into one tensor; as many as in DistributedDataParallel by default."""


def sum_in_buckets(gradients: Sequence[Tensor], group: dist.ProcessGroup, size: int = BUCKET) -> None:
    """Sums each of these tensors over a group, in place. Every rank passes tensors of the same shapes, in one order.

    A collective has a cost of its own, so small tensors are summed together, in a copy of at most `size` bytes. A
    tensor that is larger is summed where it is.
    """
    for bucket in buckets_of(gradients, size):
        # A collective needs contiguous memory.
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
        else:
            _sum_together(bucket, group)


class GradientSums:
    """The sums of parameters' gradients over a group, each started as soon as the gradients of its bucket are there.

    Buckets are started in a fixed order, whatever comes first, so that all ranks pair their sums. Gradients of a bucket
    become views of its memory: no copy of all gradients is made. (Of DTensors there is one of each bucket under way.)

    Args:
        parameters: the same ones in the same order on every rank; those whose gradients come first are last.
        size: the most bytes of a bucket.
        complete: called with each parameter whose gradient is summed; it may free it. Then a bucket's sums are waited
            for when the next one has started.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        size: int = BUCKET,
        complete: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        self._group, self._complete = group, complete
        self._buckets = list(buckets_of(parameters[::-1], size))
        self._every = frozenset(parameters)
        self._missing = set(parameters)
        self._started: list[dist.Work | None] = []
        self._copied: dict[int, list[tuple[Tensor, Tensor]]] = {}  # Bucket -> a gradient's memory, and its sum.

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._every

    @contextmanager
    def under_backward(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """A region around the last backward that adds to these parameters' gradients."""
        missing = [parameter for parameter in parameters if parameter in self._missing]
        handles = [parameter.register_post_accumulate_grad_hook(self._add) for parameter in missing]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for parameter in missing:  # Backward in halves calls no hooks.
            self._add(parameter)

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter) -> None:
        """Notes that a gradient is there, and starts the sums that it completes."""
        if parameter.grad is not None:
            self._missing.discard(parameter)
        while len(self._started) < len(self._buckets):
            bucket = self._buckets[len(self._started)]
            if not self._missing.isdisjoint(bucket):
                break
            self._start(bucket)
            if self._complete is not None and len(self._started) > 1:
                self._wait(len(self._started) - 2)

    def _start(self, bucket: Sequence[nn.Parameter]) -> None:
        having = [parameter for parameter in bucket if parameter.grad is not None]
        gradients = [local_of(parameter.grad) for parameter in having]  # type: ignore[arg-type]
        if not gradients:
            self._started.append(None)
            return
        whole = gradients[0] if len(gradients) == 1 and gradients[0].is_contiguous() else None
        if whole is None:
            whole = torch.cat([gradient.flatten() for gradient in gradients])
            views = whole.split([gradient.numel() for gradient in gradients])
            for parameter, gradient, view in zip(having, gradients, views, strict=True):
                if gradient is parameter.grad:
                    parameter.grad = view.view(gradient.shape)
                else:
                    self._copied.setdefault(len(self._started), []).append((gradient, view))
        self._started.append(dist.all_reduce(whole, group=self._group, async_op=True))

    @torch.no_grad()
    def finish(self) -> None:
        """Starts the sums that are left, and waits for all. (On a GPU only what is computed next waits.)"""
        for bucket in self._buckets[len(self._started) :]:
            self._start(bucket)
        for i in range(len(self._started)):
            self._wait(i)

    def _wait(self, i: int) -> None:
        work, self._started[i] = self._started[i], None  # It holds the bucket's memory, which ends with the gradients.
        if work is not None:  # None in a bucket without gradients, and in one that was waited for.
            work.wait()
            for gradient, total in self._copied.pop(i, ()):
                gradient.copy_(total.view(gradient.shape))
            if self._complete is not None:
                for parameter in self._buckets[i]:
                    self._complete(parameter)


def _sum_together(bucket: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sums tensors in one collective. Their copy ends with it, before the next one is made."""
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def buckets_of(gradients: Sequence[T], size: int) -> Iterator[list[T]]:
    """Yields tensors of one dtype that take at most `size` bytes together; a larger tensor comes alone."""
    # One dtype in a bucket: `torch.cat` would cast the others.
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket, nbytes = list[T](), 0
        for gradient in gradients:
            if gradient.dtype != dtype:
                continue
            if bucket and nbytes + gradient.numel() * gradient.element_size() > size:
                yield bucket
                bucket, nbytes = [], 0
            bucket.append(gradient)
            nbytes += gradient.numel() * gradient.element_size()
        if bucket:
            yield bucket
