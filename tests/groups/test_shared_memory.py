"""shared_memory: ranks exchange small tensors, all or none of them; a rank that waits in vain is told why."""

from __future__ import annotations

import os
import time
import weakref
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import Checks, run_ranks
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from autotp.distributed.mesh import new_group
from autotp.groups import shared_memory
from autotp.groups.point_to_point import started_collectives
from autotp.groups.shared_memory import DTYPES, LIMIT, channel_of, started_here
from autotp.ops.collectives import communicate, communicate_all

pytestmark = pytest.mark.skipif(shared_memory._memory(2) is None, reason="the system has no such memory")


def group_of(seconds: float = 30) -> tuple[str, Any]:
    group = new_group(None, timedelta(seconds=seconds))
    return group.group_name, group


def here(group: Any) -> int:
    """The collectives of a group that went through the memory."""
    assert channel_of(group) is not None
    return started_here(group)


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
        assert here(group) == before + 1


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
def all_ranks_use_torch_s_sum_where_one_is_observed(rank: int, n: int) -> None:
    name, group = group_of()
    communicate("all_reduce", torch.ones(2), "sum", name)
    for mode in (CommDebugMode(), None):
        before = started_collectives(name), here(group)
        for i in range(4):
            x = torch.full((3,), float(rank + i))
            if rank == 0 and mode is not None:
                with mode:
                    found = communicate("all_reduce", x, "sum", name)
            else:
                found = communicate("all_reduce", x, "sum", name)
            assert found.eq(sum(range(n)) + n * i).all()
        assert here(group) == before[1] + 4
        assert started_collectives(name) == before[0] + (8 if mode else 4), "gloo's are counted beside those here"
    if rank == 0:
        assert mode is None


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
def all_ranks_use_torch_s_sum_where_one_has_a_parameter(rank: int, n: int) -> None:
    """A Parameter is a plain tensor, for which torch's own operator runs: all ranks start that one."""
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
    channel = channel_of(group)
    assert channel is not None
    if rank:
        with patch.object(channel, "_parts", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            communicate("all_reduce", torch.ones(3), "sum", name)
        assert here(group) == 4
    assert communicate("all_reduce", torch.full((3,), float(rank)), "sum", name).tolist() == [sum(range(n))] * 3


@checks.on(2)
def a_sum_interrupted_while_waiting_is_never_overwritten(rank: int, n: int) -> None:
    """The next collective does not write where another rank may still read."""
    name, group = group_of()
    communicate("all_reduce", torch.full((3,), 7.0), "sum", name)
    channel = channel_of(group)
    assert channel is not None
    if rank == 0:
        with patch.object(channel, "_await", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            communicate("all_reduce", torch.full((3,), 1.0), "sum", name)
        waited_for = []
        wait = channel._await
        with patch.object(channel, "_await", side_effect=lambda *args: (waited_for.append(args[-1]), wait(*args))):
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
        finalize.atexit &= finalize.peek() is not None and finalize.peek()[1] is shared_memory._close
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


def without(rank: int, n: int, name: str, ranks: list[int], value: Any) -> None:
    if rank in ranks:
        setattr(shared_memory, name, lambda *args: value)
    name, group = group_of()
    for i in range(3):
        assert communicate("all_reduce", torch.full((2,), float(i)), "sum", name).tolist() == [n * i] * 2
    assert channel_of(group) is None and started_here(group) == 0


@pytest.mark.parametrize(
    ("name", "ranks", "value"),
    [
        ("_cores", [0, 1], [1] + [0] * 15),
        ("_machine", [1], 7),
        ("_machine", [0, 1], 0),
        ("_memory", [0], None),
        ("_mapped", [1], None),
    ],
    ids=["one-core", "another-machine", "unknown", "no-memory", "not-allowed"],
)
def test_ranks_agree_not_to_use_shared_memory(name: str, ranks: list[int], value: Any) -> None:
    run_ranks(without, 2, name, ranks, value, alone=True)


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


def small_and_large(rank: int, n: int) -> tuple[str, float]:
    name, _ = group_of(8)
    communicate("all_reduce", torch.ones(2), "sum", name)
    began = time.monotonic()
    told = message(lambda: communicate("all_reduce", torch.ones(LIMIT if rank else 2), "sum", name))
    return told, time.monotonic() - began


def test_a_rank_in_another_collective_is_seen_at_once() -> None:
    (told, seconds), (late, _) = run_ranks(small_and_large, 2)
    assert "ranks are at different collectives: a small tensor here, and another collective on rank 1" in told
    assert seconds < 5
    assert "all_reduce over axis `tp` failed on rank 1" in late or "failed on rank 1" in late


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
    channel = channel_of(group)
    assert channel is not None
    if rank == 0:
        with pytest.raises(RuntimeError):
            channel._fail("timed out")
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
