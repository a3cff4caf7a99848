"""benchmarks/overlap.py: a link carries one collective after the other, and what a step does not wait for is hidden."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import overlap
import pytest
import torch
import torch.distributed as dist
from overlap import LINK, Row, Sent
from ranks import run_ranks
from step import LlamaShape

from autotp.models.gpt import GPTConfig

SIZES = {"block_size": 8, "vocab_size": 32, "n_layer": 2, "n_head": 4, "n_embd": 16, "dropout": 0.0}


def connected(rank: int, n: int, folder: Path) -> None:
    dist.destroy_process_group()
    meeting = (folder / "meeting").as_uri()
    overlap.connect(init_method=meeting, rank=rank, world_size=n, timeout=timedelta(seconds=50))


def carried(rank: int, n: int, folder: Path) -> dict[str, float]:
    """The bytes of each collective, whose results are compared; and the seconds of two of them on a slow link."""
    connected(rank, n, folder)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ops, x = torch.ops._c10d_functional, torch.arange(6.0) + rank
    total, found = sum(torch.arange(6.0) + r for r in range(n)), dict[str, float]()
    for name, started, expected in (
        ("all_reduce", ops.all_reduce(x, "sum", group), total),
        ("all_gather", ops.all_gather_into_tensor(x, n, group), torch.cat([torch.arange(6.0) + r for r in range(n)])),
        ("reduce_scatter", ops.reduce_scatter_tensor(x, "sum", n, group), total.view(n, -1)[rank]),
        ("coalesced", ops.all_reduce_coalesced([x, x], "sum", group)[1], total),
    ):
        assert torch.equal(ops.wait_tensor(started), expected), name
    for name, run in (
        ("all_reduce", lambda: dist.all_reduce(x.clone())),
        ("all_gather", lambda: dist.all_gather([torch.empty(6) for _ in range(n)], x)),
        ("broadcast", lambda: dist.broadcast(x.clone(), 0)),
    ):
        LINK.reset()
        run()
        found[name] = LINK.bytes
    LINK.reset(seconds_per_byte=0.1 / (2 * 24 * (n - 1) / n))  # 0.1 s for an all-reduce of x.
    dist.barrier()
    start = time.perf_counter()
    both = [dist.all_reduce(x.clone(), async_op=True) for _ in range(2)]
    found["started"] = time.perf_counter() - start
    processor = time.process_time()
    for work in both:
        work.wait()  # type: ignore[union-attr]
    found["waited"], found["processor"] = time.perf_counter() - start, time.process_time() - processor
    return found


def test_a_link_carries_one_collective_after_the_other_and_takes_no_processor(tmp_path: Path) -> None:
    for found in run_ranks(carried, 2, tmp_path, alone=True):
        assert (found["all_reduce"], found["all_gather"], found["broadcast"]) == (24, 24, 24)
        assert found["waited"] >= 0.2 > found["processor"] and found["waited"] > found["started"]


def measured(rank: int, n: int, folder: Path) -> list[Row]:
    connected(rank, n, folder)
    return overlap.measure("tiny", GPTConfig(**SIZES), 2, 2, shares=(0.5,))  # It compares gradients first.


def test_all_ways_are_measured_on_one_link(tmp_path: Path) -> None:
    both = run_ranks(measured, 2, tmp_path, alone=True)
    ours = both[0][1]
    assert ours.share == 0.5 and ours.carried > 0  # The first rank's time says how fast the link is.
    for rows in both:
        assert [row.way for row in rows] == [overlap.HAND, overlap.OURS, "overlap=batch", "without overlap"]
        assert [row.carried for row in rows] == [row.carried for row in both[0]]
        assert all(row.seconds > 0 and row.free > 0 and row.beside > 0 for row in rows) and rows[1].beside == 1


def shared(rank: int, n: int, folder: Path) -> list[str]:
    connected(rank, n, folder)
    shape = LlamaShape(block_size=8, vocab_size=32, n_layer=2, n_head=4, n_embd=16, n_inner=24, n_kv=1)
    ways = [row.way for row in overlap.measure("tiny", shape, 2, 2, shares=(0.5,))]
    return ways + [row.way for row in overlap.measure("tiny", shape, 2, 2, shares=(0.5,), only=["overlap=batch"])]


def test_shared_heads_have_sums_of_gradients_in_place_of_what_is_written_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ways = [overlap.OURS, "overlap=batch", "without overlap", "without late_sums"]
    assert run_ranks(shared, 2, tmp_path, alone=True) == [ways + ways[:2]] * 2


def sent_beside(rank: int, n: int, folder: Path) -> None:
    connected(rank, n, folder)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ops = torch.ops._c10d_functional

    def step() -> None:
        ops.wait_tensor(ops.all_reduce(torch.ones(4), "sum", group))
        ops.wait_tensor(ops.all_gather_into_tensor(torch.ones(4), n, group))

    with pytest.raises(RuntimeError, match="a step has 2 collectives, and the link carried 1"):
        overlap._sent(step)


def test_a_step_that_the_link_does_not_carry_is_refused(tmp_path: Path) -> None:
    """torch sends an `all_gather_into_tensor` past a process group in Python."""
    run_ranks(sent_beside, 2, tmp_path, alone=True)


def test_latency_is_a_part_of_what_a_link_takes() -> None:
    sent = Sent(bytes=1000.0, number=4)
    assert sent.seconds(sent.speed(0.5, 0.1), 0.1) == pytest.approx(0.5)
    assert sent.speed(0.3, 0.1) == 0 and sent.seconds(0.0, 0.1) == pytest.approx(0.4)
    link = overlap.Link()
    link.reset(0.001, latency=0.5)
    start = time.perf_counter()
    assert link.carry("sum", 1000) - start >= 1.5 and link.carry("sum", 0) - start >= 2


def test_hidden() -> None:
    """Rounds are compared, and not their medians: here the machine is twice as slow in the last one."""
    row = Row("gpt", "halves", 0.5, frees=[1.0, 1.1, 2.0], ours=[1.0, 1.0, 1.9], each=[1.1, 1.2, 2.1], carried=0.5)
    assert row.hidden == pytest.approx(0.8) and row.beside == pytest.approx(2.0 / 1.9)
    assert row.quartiles(row.ours) == pytest.approx([0.6, 0.6, 0.7])
    assert str(row).split()[-5:] == ["80%", "80%", "to", "80%", "60%"]
