"""The pretended NCCL: what it refuses, that its results come late, and how it fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cards.pretend import REAL, communicators_made, pretended
from cards.spies import collective_order
from ranks import Checks, Died, run_ranks
from torch import Tensor

checks = Checks(cards=True)


def ours(rank: int) -> Tensor:
    return torch.arange(4.0, device="cuda").view(2, 2) + 10 * rank


@checks.on(2, 3)
def collectives_compute_what_they_say(rank: int, n: int) -> None:
    total = sum((ours(r) for r in range(1, n)), ours(0))
    x = ours(rank)
    dist.all_reduce(x)
    assert torch.equal(x, total)
    x = ours(rank)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert torch.allclose(x, total / n)
    x = ours(rank)
    dist.broadcast(x, n - 1)
    assert torch.equal(x, ours(n - 1))
    every = torch.empty(2 * n, 2, device="cuda")
    dist.all_gather_into_tensor(every, ours(rank))
    assert torch.equal(every, torch.cat([ours(r) for r in range(n)]))
    parts = [torch.empty(2, 2, device="cuda") for _ in range(n)]
    dist.all_gather(parts, ours(rank))
    assert all(torch.equal(part, ours(r)) for r, part in enumerate(parts))
    mine = torch.empty(2, 2, device="cuda")
    dist.reduce_scatter_tensor(mine, every * (rank + 1))
    assert torch.equal(mine, ours(rank) * sum(range(1, n + 1)))
    received = torch.empty(n, device="cuda")
    dist.all_to_all_single(received, torch.arange(float(n), device="cuda") + 100 * rank)
    assert received.tolist() == [rank + 100.0 * r for r in range(n)]
    objects: list[object] = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(n)]


@checks.on(2)
def tensors_are_sent_both_ways_at_once(rank: int, n: int) -> None:
    received = torch.empty(2, 2, device="cuda")
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ours(rank), 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    )
    for work in works:
        work.wait()
    assert torch.equal(received, ours(1 - rank))


@checks.on(2)
def the_host_is_served_by_gloo(rank: int, n: int) -> None:
    x = torch.tensor([rank + 1])
    dist.all_reduce(x)
    assert x.item() == 3 and dist.get_backend() == "cpu:gloo,cuda:nccl"


@checks.on(2)
def results_are_nothing_before_they_are_waited_for(rank: int, n: int) -> None:
    if REAL:
        return
    x = torch.ones(3, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    assert x.isnan().all()
    work.wait()
    assert x.tolist() == [2.0] * 3
    out = torch.zeros(6, dtype=torch.long, device="cuda")
    work = dist.all_gather_into_tensor(out, torch.full((3,), rank, device="cuda"), async_op=True)
    assert out.tolist() == [-1] * 6
    work.wait()
    assert out.tolist() == [0, 0, 0, 1, 1, 1]


@checks.on(2)
def functional_collectives_are_late_too(rank: int, n: int) -> None:
    x = torch.ones(3, device="cuda")
    y = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
    assert REAL or y.isnan().all()
    torch.ops._c10d_functional.wait_tensor(y)
    assert y.tolist() == [2.0] * 3
    ys = torch.ops._c10d_functional.all_reduce_coalesced([x, x * 2], "sum", dist.group.WORLD.group_name)
    assert [torch.ops._c10d_functional.wait_tensor(y).tolist() for y in ys] == [[2.0] * 3, [4.0] * 3]


@checks.on(2)
def writing_before_the_wait_is_an_error(rank: int, n: int) -> None:
    if REAL:
        return
    x, out = torch.ones(3, device="cuda"), torch.empty(6, device="cuda")
    for written, told in ((x, "its input was written before wait"), (out, "its output was written before wait")):
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        written.fill_(7)
        with pytest.raises(RuntimeError, match=told):
            work.wait()


@checks.on(2)
def what_nccl_refuses_is_refused(rank: int, n: int) -> None:
    transposed, longs = ours(0).T, torch.ones(2, dtype=torch.long, device="cuda")
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "contiguous", lambda: dist.all_gather_into_tensor(torch.empty(4, 2, device="cuda"), transposed)),
        (TypeError, "not supported", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16, device="cuda"))),
        (TypeError, "same type", lambda: dist.all_gather_into_tensor(torch.empty(4, device="cuda"), longs)),
    ]  # fmt: skip
    for kind, told, call in cases:
        with pytest.raises((kind, RuntimeError), match=told):
            call()


@checks.on(2)
def strides_that_differ_are_an_error(rank: int, n: int) -> None:
    if REAL:
        return
    x = ours(rank) if rank == 0 else ours(rank).T
    with pytest.raises(RuntimeError, match="ranks call different collectives, or with other sizes or strides"):
        dist.all_reduce(x)


@checks.on(2)
def the_order_of_collectives_is_logged(rank: int, n: int) -> None:
    if REAL:
        return
    with collective_order() as order:
        dist.all_reduce(ours(rank))
        dist.broadcast(ours(rank), 0)
    assert [line.partition(": ")[2] for line in order] == ["allreduce Float[2, 2]", "broadcast Float[2, 2]"]


@checks.on(2)
def communicators_are_counted(rank: int, n: int) -> None:
    if REAL:
        return
    with communicators_made() as made:
        dist.new_group([0, 1])
        dist.new_group([0])
    assert [size for _, size in made] == ([2, 1] if rank == 0 else [2])


@checks.on(2)
def ddp_averages_gradients(rank: int, n: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2).cuda(), device_ids=[rank])
    model(torch.full((1, 3), float(rank + 1), device="cuda")).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5] * 3] * 2


@pytest.mark.parametrize("n, name", checks.cases())
def test_nccl(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- failures: each run has processes of its own


def hangs(rank: int, n: int) -> str:
    """A collective that never ends: `wait()` returns, and the next read of the host blocks until the abort."""
    group = dist.group.WORLD
    pretended().set_fault(lambda name, call, number: "hang")
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    dist.all_reduce(x)
    assert pretended().is_stuck()
    threading.Timer(0.3, lambda: group._get_backend(torch.device("cuda")).abort()).start()
    began = time.monotonic()
    x.cpu()
    assert time.monotonic() - began > 0.2
    with pytest.raises(dist.DistBackendError, match="NCCL communicator was aborted on rank"):
        dist.all_reduce(x)
    return "ended"


def test_a_collective_that_never_ends_blocks_the_next_read() -> None:
    if REAL:
        pytest.skip("the machine's cards do not fail when asked to")
    assert run_ranks(hangs, 2, cards=True, alone=True) == ["ended", "ended"]


def lost(rank: int, n: int, silently: bool) -> str:
    pretended().lose_silently(silently)
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    if rank == 1:
        os._exit(3)
    while not pretended().is_stuck():
        dist.all_reduce(x)  # Never raises: not in `wait()`, and not at a start.
    if not silently:
        x.cpu()
    return "went on"


@pytest.mark.parametrize("silently", [True, False], ids=["silent", "watchdog"])
def test_a_lost_peer_raises_nothing(silently: bool) -> None:
    if REAL:
        pytest.skip("the machine's cards do not fail when asked to")
    if silently:
        assert run_ranks(lost, 2, True, cards=True, may_die=[1]) == ["went on", None]
    else:
        with pytest.raises(Died, match="rank 0 of 2, exit code -6"):  # SIGABRT, of the watchdog
            run_ranks(lost, 2, False, cards=True, may_die=[1])
