"""gradient_buckets: sums over ranks are those of each tensor, and no copy is larger than a bucket."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks
from torch import Tensor, nn

from autotp.training.pipeline.gradient_buckets import GradientSums, buckets_of, sum_in_buckets

checks = Checks()


def sizes(gradients: list[Tensor], size: int) -> list[list[int]]:
    return [[x.nbytes for x in bucket] for bucket in buckets_of(gradients, size)]


def test_a_bucket_has_one_dtype_and_no_more_than_its_bytes() -> None:
    narrow, wide = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    assert sizes([narrow, wide, wide, wide, narrow], 16) == [[4, 4], [8, 8], [8]]


def test_a_tensor_larger_than_a_bucket_comes_alone() -> None:
    assert sizes([torch.zeros(1), torch.zeros(9), torch.zeros(1), torch.zeros(1)], 8) == [[4], [36], [4, 4]]
    assert sizes([], 8) == []


@checks.on(2)
def gradient_sums_in_place_with_one_copy_at_a_time(rank: int, n: int) -> None:
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
        sent = tensor.clone()  # A thread of gloo may hold what it has sent for a moment after the call.
        real(sent, group=group)
        tensor.copy_(sent)

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


# ---- under backward


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).double()


@contextmanager
def sums_started() -> Iterator[list[str]]:
    """A region; yields the events in it: tests add theirs."""
    real, events = dist.all_reduce, list[str]()

    def noted(tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        events.append(f"sum of {tensor.numel()}")
        return real(tensor, group=group, async_op=async_op)

    dist.all_reduce = noted  # type: ignore[assignment]
    try:
        yield events
    finally:
        dist.all_reduce = real


@checks.on(2)
def gradient_sums_run_under_backward(rank: int, n: int) -> None:
    """A bucket has two layers: the sum of the last two begins before the gradient of the fourth is computed."""
    model, alone = deep(), deep()
    x = torch.arange(8.0).view(2, 4).double().requires_grad_()
    sums = GradientSums(list(model.parameters()), dist.group.WORLD, size=2 * (16 + 4) * 8)
    with sums_started() as events:
        for i, layer in enumerate(model):
            layer.register_full_backward_pre_hook(lambda *_, i=i: events.append(f"backward of layer {i}"))
        with sums.under_backward(model.parameters()):
            (model(x) * (rank + 1)).sum().backward()
        sums.finish()
    assert events == [
        "backward of layer 5", "backward of layer 4", "sum of 40",
        "backward of layer 3", "backward of layer 2", "sum of 40",
        "backward of layer 1", "backward of layer 0", "sum of 40",
    ]  # fmt: skip
    (alone(x) * 3).sum().backward()
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-14, atol=0)


@checks.on(2)
def buckets_begin_in_one_order_on_all_ranks(rank: int, n: int) -> None:
    """Whatever gradient comes first on a rank; those of halves of backward, which call no hooks, and none at all."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (1, 2, 3, 4)]
    sums = GradientSums(parameters, dist.group.WORLD, size=4)
    with sums_started() as events:
        for index in (1, 3, 2) if rank else (3, 2, 1):
            parameter = parameters[index]
            with sums.under_backward([parameter]):
                parameter.grad = torch.full_like(parameter, rank + 1.0)
            events.append("next")
        sums.finish()
    assert [event for event in events if event != "next"] == ["sum of 4", "sum of 3", "sum of 2"]
    assert events[:2] == (["next", "sum of 4"] if rank else ["sum of 4", "next"])
    assert [None if p.grad is None else p.grad.tolist() for p in parameters] == [None, [3.0] * 2, [3.0] * 3, [3.0] * 4]
    assert parameters[0] in sums and nn.Parameter(torch.zeros(1)) not in sums


@checks.on(2)
def gradients_become_views_of_their_bucket(rank: int, n: int) -> None:
    """Gradients become views of it; a large one is summed where it is."""
    parameters = [nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    large = torch.ones(100)
    with (sums := GradientSums(parameters, dist.group.WORLD, size=64)).under_backward(parameters):
        parameters[0].grad, parameters[1].grad, parameters[2].grad = large, torch.ones(3), torch.ones(2, 2)
    sums.finish()
    first, second, third = (p.grad for p in parameters)
    assert first is large and large.tolist() == [2.0] * 100
    assert second is not None and third is not None and second._base is third._base is not None
    assert second.tolist() == [2.0] * 3 and third.tolist() == [[2.0] * 2] * 2


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
