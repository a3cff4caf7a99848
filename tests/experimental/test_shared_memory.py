"""shared_memory: ranks exchange small tensors, all or none of them; a rank that waits in vain is told why."""

from __future__ import annotations

import os
import platform
import time
import warnings
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import Checks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import autotp
from autotp.distributed.mesh import new_group
from autotp.experimental import shared_memory
from autotp.experimental.shared_memory import DTYPES, LIMIT
from autotp.groups.point_to_point import started_collectives
from autotp.ops.collectives import communicate, communicate_all

pytestmark = pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="no such memory")


def group_of(seconds: float = 30) -> tuple[str, Any]:
    shared_memory.register()
    group = new_group(None, timedelta(seconds=seconds), backend="shared_memory")
    return group.group_name, group


def here(group: Any) -> int:
    """The collectives of a group that went through the memory."""
    count: int = group.memory.begun
    return count


# ---- what it computes

checks = Checks()


@checks.on(2)
def shared_memory_sums_and_maxima_of_every_dtype(rank: int, n: int) -> None:
    name, group = group_of()
    for dtype in DTYPES:
        for shape in ((5,), (2, 3), (), (0, 4), (1, LIMIT // 8 // n)):
            every = [(torch.arange(torch.Size(shape).numel()) % 50 + r).to(dtype).view(shape) for r in range(n)]
            before = here(group)
            own = every[rank].clone()
            assert communicate("all_reduce", own, "sum", name).equal(sum(every[1:], every[0]))
            assert own.equal(every[rank]), "the operand is as it was"
            assert communicate("all_reduce", own, "max", name).equal(torch.stack(every).amax(0))
            found = communicate("all_reduce_", own, "sum", name)
            assert found is own and own.equal(sum(every[1:], every[0]))
            assert here(group) == before + 3


@checks.on(2)
def shared_memory_joins_parts(rank: int, n: int) -> None:
    name, group = group_of()
    for shape in ((5,), (2, 3), (0, 4)):
        every = [torch.full(shape, float(r)) for r in range(n)]
        before = here(group)
        assert communicate("all_gather_into_tensor", every[rank], n, name).equal(torch.cat(every))
        joined = every[0].new_empty(n * shape[0], *shape[1:])
        dist.all_gather_into_tensor(joined, every[rank], group=group)
        assert joined.equal(torch.cat(every))
        assert here(group) == before + 2


@checks.on(2)
def shared_memory_keeps_nan_negative_zeros_and_strides(rank: int, n: int) -> None:
    """Negative zeros stay, NaN is the maximum; operands that are not contiguous, and of inference mode."""
    name, group = group_of()
    zero = communicate("all_reduce", torch.full((2,), -0.0), "sum", name)
    assert zero.signbit().all()
    some = torch.tensor([1.0, torch.nan if rank else 2.0, -torch.inf])
    assert communicate("all_reduce", some, "max", name).isnan().tolist() == [False, True, False]
    across = torch.arange(6.0).view(2, 3).t()
    assert communicate("all_reduce", across, "sum", name).equal(n * across)
    with torch.inference_mode():
        inside = torch.ones(3)
        assert communicate("all_reduce_", inside, "sum", name).tolist() == [n] * 3
        assert communicate("all_reduce", torch.ones(4), "sum", name).tolist() == [n] * 4
    assert communicate("all_reduce", torch.ones(4), "sum", name).tolist() == [n] * 4
    assert here(group) == 6


@checks.on(2)
def shared_memory_in_place_sum_counts_no_version(rank: int, n: int) -> None:
    """As of c10d's own sums in place. NOTE [What others keep is not overwritten]"""
    name, _ = group_of()
    x = torch.ones(3)
    communicate("all_reduce_", x, "sum", name)
    assert x._version == 0


@checks.on(2)
def shared_memory_loses_none_of_1500_sums(rank: int, n: int) -> None:
    """Of all sizes, ranks late in turn, both ways, and no number is lost."""
    name, group = group_of()
    sizes = torch.Generator().manual_seed(0)
    late = torch.Generator().manual_seed(rank)
    for i in range(1500):
        numel = int(torch.randint(1, 2000, (1,), generator=sizes))
        large = i % 97 == 0
        x = torch.full((numel + LIMIT * large,), float(rank * 1000 + i))
        if int(torch.randint(20, (1,), generator=late)) == 0:
            time.sleep(0.002)
        found = communicate("all_reduce_" if i % 2 else "all_reduce", x, "sum", name)
        assert found.eq(sum(r * 1000.0 + i for r in range(n))).all(), i
    assert 1400 < here(group) < 1500
    assert started_collectives(name) > 1500


@checks.on(2)
def shared_memory_pairs_observed_and_other_ranks(rank: int, n: int) -> None:
    """A mode on one rank follows torch's own operators there, and sees them."""
    name, group = group_of()
    with CommDebugMode() as mode:
        for i in range(4):
            x = torch.full((3,), float(rank + i))
            if rank == 0:
                summed, joined = (
                    communicate("all_reduce", x, "sum", name),
                    communicate("all_gather_into_tensor", x, n, name),
                )
            else:
                with torch.utils._python_dispatch._disable_current_modes():
                    summed = communicate("all_reduce", x, "sum", name)
                    joined = communicate("all_gather_into_tensor", x, n, name)
            assert summed.eq(sum(range(n)) + n * i).all() and joined[::3].tolist() == [i, i + 1]
    assert here(group) == 8 and mode.get_total_counts() == (0 if rank else 8)


@checks.on(2)
def what_is_not_small_or_no_sum_goes_over_gloo(rank: int, n: int) -> None:
    """All of torch's collectives work, are counted, and the small ones behind them pair."""
    name, group = group_of()
    x, ranks = torch.full((4,), float(rank)), range(n)
    parts = [torch.zeros(4) for _ in ranks]
    calls: dict[str, Any] = {
        "min": lambda: dist.all_reduce(x.clone(), dist.ReduceOp.MIN, group=group),
        "large": lambda: dist.all_reduce(torch.ones(LIMIT), group=group),
        "large gather": lambda: dist.all_gather_into_tensor(torch.ones(n * LIMIT), torch.ones(LIMIT), group=group),
        "functional": lambda: communicate("all_gather_into_tensor", torch.nn.Parameter(torch.ones(LIMIT)), n, name),
        "broadcast": lambda: dist.broadcast(x.clone(), 0, group=group),
        "reduce": lambda: dist.reduce(x.clone(), 0, group=group),
        "all_gather": lambda: dist.all_gather(parts, x, group=group),
        "gather": lambda: dist.gather(x, None if rank else parts, 0, group=group),
        "scatter": lambda: dist.scatter(x.clone(), None if rank else parts, 0, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.zeros(2), x, group=group),
        "functional reduce_scatter": lambda: communicate(
            "reduce_scatter_tensor", torch.nn.Parameter(x), "sum", n, name
        ),
        "all_to_all": lambda: dist.all_to_all_single(torch.zeros(4), x, group=group),
        "several": lambda: communicate_all([x, x], name),
        "barrier": lambda: dist.barrier(group=group),
    }
    for what, call in calls.items():
        before = started_collectives(name), here(group)
        call()
        assert (started_collectives(name), here(group)) == (before[0] + 1, before[1]), what
        assert communicate("all_reduce", torch.ones(2), "sum", name).tolist() == [n, n], what
    assert parts[0].tolist() == [0.0] * 4 and (rank or parts[1].tolist() == [1.0] * 4)
    other = torch.zeros(1)
    dist.send(other, 1, group=group) if rank == 0 else dist.recv(other, 0, group=group)
    assert communicate("all_reduce", torch.ones(2), "sum", name).tolist() == [n, n]


@checks.on(2)
def a_sum_that_is_started_does_not_wait(rank: int, n: int) -> None:
    """What a rank does between start and wait may be what another rank waits for before its own sum."""
    _, group = group_of(10)
    x, message_ = torch.full((3,), float(rank)), torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        assert not work.is_completed()
        dist.send(message_, 1, group=group)
        work.wait()
    else:
        dist.recv(message_, 0, group=group)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work.is_completed(), "the other rank has begun"
    assert x.tolist() == [1.0] * 3
    y = torch.full((3,), float(rank))
    assert dist.all_reduce(y, group=group, async_op=True).get_future().wait()[0] is y and y.tolist() == [1.0] * 3
    left = torch.ones(3)
    dist.all_reduce(left, group=group, async_op=True)  # Nobody waits for it.
    assert communicate("all_reduce", torch.ones(3), "sum", group.group_name).tolist() == [n] * 3
    assert left.tolist() == [n] * 3 and here(group) == 4


@checks.on(2)
def shared_memory_sums_in_compiled_code(rank: int, n: int) -> None:
    """Sums this way; so does the first rank, which is not compiled."""
    name, group = group_of()
    run = lambda x: communicate("all_reduce", 2 * x, "sum", name) + 1  # noqa: E731
    communicate("all_reduce", torch.ones(2), "sum", name)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for call in (compiled, compiled if rank else run):
        before = here(group)
        assert call(torch.full((3,), float(rank))).eq(2 * sum(range(n)) + 1).all()
        assert here(group) == before + 1


@checks.on(2)
def shared_memory_pairs_compiled_and_eager_ranks(rank: int, n: int) -> None:
    """It pairs with eager code from the first collective on, and makes each one, also those that nobody reads."""
    name, group = group_of(10)

    def run(x: Tensor) -> Tensor:
        communicate("all_reduce", x, "sum", name).sin()
        joined = communicate("all_gather_into_tensor", x, n, name)
        one, other = communicate_all([x, 2 * x], name)
        return joined.sum() + one + other + communicate("all_reduce", 3 * x, "sum", name)

    call = torch.compile(run, backend="aot_eager", fullgraph=True) if rank else run
    for i in range(3):
        whole = sum(range(n)) + n * i
        assert call(torch.full((3,), float(rank + i))).eq(3 * whole + 3 * whole + 3 * whole).all()
    time.sleep(0.2 * (1 - rank))
    assert communicate("all_reduce", torch.ones(3), "sum", name).tolist() == [n] * 3
    assert here(group) == 10


@checks.on(2)
def shared_memory_takes_a_parameter_on_one_rank(rank: int, n: int) -> None:
    """A Parameter is a plain tensor, for which torch's own operator runs: it pairs with the method of a group."""
    name, group = group_of(10)
    x = torch.nn.Parameter(torch.ones(3)) if rank else torch.ones(3)
    assert communicate("all_reduce", x, "sum", name).tolist() == [n] * 3
    assert here(group) == 1


@checks.on(2)
def a_sum_interrupted_before_start_counts_as_not_started(rank: int, n: int) -> None:
    """A rank that is interrupted before it has written its number has not started: nobody reads older values."""
    name, group = group_of()
    for _ in range(4):
        communicate("all_reduce", torch.full((3,), 7.0), "sum", name)
    memory = group.memory
    if rank:
        with patch.object(memory, "_parts", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            communicate("all_reduce", torch.ones(3), "sum", name)
        assert here(group) == 4
    assert communicate("all_reduce", torch.full((3,), float(rank)), "sum", name).tolist() == [sum(range(n))] * 3


@checks.on(2)
def a_sum_interrupted_while_waiting_is_never_overwritten(rank: int, n: int) -> None:
    """The next collective does not write where another rank may still read."""
    name, group = group_of()
    communicate("all_reduce", torch.full((3,), 7.0), "sum", name)
    memory = group.memory
    if rank == 0:
        with patch.object(memory, "_await", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            communicate("all_reduce", torch.full((3,), 1.0), "sum", name)
        waited_for = []
        wait = memory._await
        with patch.object(memory, "_await", side_effect=lambda *args: (waited_for.append(args[1]), wait(*args))):
            found = communicate("all_reduce", torch.full((3,), 10.0), "sum", name)
        assert waited_for == [2, 3]
    else:
        assert communicate("all_reduce", torch.full((3,), 2.0), "sum", name).tolist() == [3] * 3
        found = communicate("all_reduce", torch.full((3,), 20.0), "sum", name)
    assert found.tolist() == [30] * 3


@checks.on(2)
def shared_memory_works_in_atexit_functions(rank: int, n: int) -> None:
    """Functions of atexit may run behind those of weakref."""
    name, _ = group_of()
    communicate("all_reduce", torch.ones(2), "sum", name)
    of_others = [(f, info.atexit) for f, info in weakref.finalize._registry.items()]  # type: ignore[attr-defined]
    for finalize, _ in of_others:
        finalize.atexit &= finalize.peek() is not None and finalize.peek()[1] == shared_memory.Memory.close
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    for finalize, before in of_others:
        if finalize.alive:
            finalize.atexit = before
    time.sleep(0.2 * rank)
    assert communicate("all_reduce", torch.ones(2), "sum", name).tolist() == [n, n]


@checks.on(2)
def shared_memory_in_a_forked_process_is_an_error(rank: int, n: int) -> None:
    """It is an error there, and their parents' numbers are right."""
    name, _ = group_of()
    communicate("all_reduce", torch.ones(2), "sum", name)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        told = [message(partial(communicate, "all_reduce", torch.ones(k), "sum", name)) for k in (2, LIMIT)]
        os.write(write, "\n".join(told).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 4000).decode().count("a process that was forked uses the process group of its parent") == 2
    for end in read, write:
        os.close(end)
    for i in range(20):
        assert communicate("all_reduce", torch.full((2,), float(rank + i)), "sum", name).tolist() == [1 + 2 * i] * 2


@checks.on(2)
def a_forked_process_leaves_its_parent_s_memory_open(rank: int, n: int) -> None:
    name, _ = group_of()
    communicate("all_reduce", torch.ones(2), "sum", name)
    child = os.fork()
    if child == 0:
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.1 * rank)
    assert communicate("all_reduce", torch.ones(2), "sum", name).tolist() == [n, n]


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


# ---- where there is none


def without(rank: int, n: int, name: str, ranks: list[int], value: Any) -> list[str]:
    if rank in ranks:
        setattr(shared_memory, name, lambda *args: value)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        name, group = group_of()
    before = started_collectives(name)
    for i in range(3):
        assert communicate("all_reduce", torch.full((2,), float(i)), "sum", name).tolist() == [n * i] * 2
    assert group.memory is None and started_collectives(name) == before + 3
    return [str(each.message) for each in told]


@pytest.mark.parametrize(
    ("name", "ranks", "value", "why"),
    [
        ("_cores", [0, 1], [1] + [0] * 15, "this machine has 2 ranks, and 1 cores"),
        ("_machine", [1], 7, ""),
        ("_memory", [0], -1, "the system does not let the ranks open each other's memory"),
        ("_mapped", [1], None, "the system does not let the ranks open each other's memory"),
    ],
    ids=["one-core", "another-machine", "no-memory", "not-allowed"],
)
def test_ranks_agree_not_to_use_shared_memory(name: str, ranks: list[int], value: Any, why: str) -> None:
    """One rank says why, unless they are on several machines: there is none to share."""
    told = [f"the backend 'shared_memory' sends all over gloo: {why}"] if why else []
    assert run_ranks(without, 2, name, ranks, value, alone=True) == [told, []]


def test_register_refuses_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    found = message(shared_memory.register)
    assert "the backend 'shared_memory' needs Linux on x86-64, and this is Linux on arm64" in found
    assert 'torch.distributed.init_process_group("gloo")' in found


# ---- models


def trained(rank: int, n: int, folder: str) -> None:
    """A model on a mesh of this backend, beside the same one on gloo; groups of its ranks are of this backend, too."""
    losses = []
    for backend in ("gloo", "shared_memory"):
        dist.destroy_process_group()
        shared_memory.register()
        store = dist.FileStore(f"{folder}/{backend}", n)
        dist.init_process_group(backend, store=store, rank=rank, world_size=n)
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 4))
        model: Any = autotp.parallelize(whole, mesh=mesh, example_inputs=torch.ones(2, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(20):
            loss = model(torch.full((2, 4), float(i % 3))).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        group = mesh.get_group()
        count = 0 if backend == "gloo" else here(group)
        assert (type(group) is shared_memory.SharedMemoryGroup) == (count >= 20), count
    assert losses[0] == losses[1]


def test_a_model_trains_on_a_mesh_of_this_backend(tmp_path: Path) -> None:
    run_ranks(trained, 2, str(tmp_path), alone=True)


# ---- ranks that do not come


def other_sizes(rank: int, n: int) -> list[str]:
    name, _ = group_of()
    sums = lambda size: communicate("all_reduce", torch.ones(size), "sum", name)  # noqa: E731
    sums(2)
    return [message(lambda: sums(3 + rank)), message(lambda: sums(2)), message(lambda: sums(LIMIT))]


def test_shared_memory_sums_of_other_sizes_are_an_error_for_good() -> None:
    for rank, found in enumerate(run_ranks(other_sizes, 2)):
        mine, theirs = ("`sum` of 3 x float32", "`sum` of 4 x float32")[:: -1 if rank else 1]
        assert f"ranks are at different collectives: {mine} here, and {theirs} on rank {1 - rank}" in found[0]
        assert all("ranks are at different collectives" in later for later in found[1:])


def in_different_collectives(rank: int, n: int, elsewhere: str) -> tuple[str, float]:
    name, group = group_of(8)
    communicate("all_reduce", torch.ones(2), "sum", name)
    others: dict[str, Any] = {
        "large": lambda: communicate("all_reduce", torch.ones(LIMIT), "sum", name),
        "broadcast": lambda: dist.broadcast(torch.ones(2), 0, group=group),
    }
    small = lambda: communicate("all_reduce", torch.nn.Parameter(torch.ones(2)), "sum", name)  # noqa: E731
    began = time.monotonic()
    if rank:
        with pytest.raises(RuntimeError if elsewhere == "broadcast" else autotp.Error) as late:
            others[elsewhere]()
        return str(late.value), 0.0
    return message(small), time.monotonic() - began


@pytest.mark.parametrize("elsewhere", ["large", "broadcast"])
def test_a_rank_in_another_collective_is_seen_at_once(elsewhere: str) -> None:
    (told, seconds), (late, _) = run_ranks(in_different_collectives, 2, elsewhere, alone=True)
    assert "ranks are at different collectives: a small tensor here, and another collective on rank 1" in told
    assert "over axis `global` failed on rank 0 of 2" in told
    assert seconds < 5
    assert elsewhere != "large" or "failed on rank 1" in late


def slow(rank: int, n: int) -> tuple[str, float]:
    name, _ = group_of(1)
    communicate("all_reduce", torch.ones(2), "sum", name)
    began = time.monotonic()
    if rank:
        time.sleep(3)
        return "", 0.0
    return message(lambda: communicate("all_reduce", torch.ones(2), "sum", name)), time.monotonic() - began


def test_shared_memory_waits_no_longer_than_the_group_s_timeout() -> None:
    told, seconds = run_ranks(slow, 2)[0]
    assert "a peer did not answer within the group's timeout" in told
    assert 1 <= seconds < 3


def after_a_failure(rank: int, n: int) -> tuple[str, float]:
    name, group = group_of(20)
    communicate("all_reduce", torch.ones(2), "sum", name)
    if rank == 0:
        with pytest.raises(RuntimeError):
            group.memory._fail(RuntimeError, "timed out")
    began = time.monotonic()
    return message(lambda: communicate("all_reduce", torch.ones(2), "sum", name)), time.monotonic() - began


def test_shared_memory_does_not_wait_for_a_failed_rank() -> None:
    (own, _), (told, seconds) = run_ranks(after_a_failure, 2)
    assert "a peer did not answer within the group's timeout" in own
    assert "a peer closed its connection" in told and seconds < 5


def left(rank: int, n: int, how: str) -> str:
    name, group = group_of(20)
    communicate("all_reduce", torch.ones(2), "sum", name)
    if rank and how == "killed":
        os.kill(os.getpid(), 9)
    if rank:
        del group
        dist.destroy_process_group()
        time.sleep(4)
        return ""
    began = time.monotonic()
    told = message(lambda: communicate("all_reduce", torch.ones(2), "sum", name))
    assert time.monotonic() - began < 4
    return told


@pytest.mark.parametrize("how", ["killed", "destroyed"])
def test_shared_memory_tells_that_a_peer_left(how: str) -> None:
    told = run_ranks(left, 2, how, may_die=[1])[0]
    assert "all_reduce over axis" in told and "a peer closed its connection" in told
