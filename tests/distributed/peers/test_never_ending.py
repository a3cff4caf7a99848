"""never_ending: a process that waits for a lost rank is ended, and no other; `test_lost_ranks.py` has each call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cards.pretend import REAL
from ranks import Died, run_ranks
from small_models import gpt
from trainers import SMALL

import autotp
from autotp.distributed.peers import heartbeat, never_ending
from autotp.distributed.peers.heartbeat import lost_ranks
from autotp.groups.one_thread import one_thread

pytestmark = pytest.mark.skipif(REAL, reason="the machine's cards do not fail when asked to")
TIMEOUT = timedelta(seconds=4)
LONG = 4.5
"""Seconds that are longer than TIMEOUT, and than what a process waits after a loss."""


def model_of(n: int) -> Any:
    """A parallel model that all ranks have called; from here on things happen faster."""
    heartbeat.INTERVAL, never_ending.GRACE, never_ending.STILL, never_ending.LAST = 0.1, 0.5, 0.3, 1.0
    model = autotp.parallelize(gpt(seed=0, **SMALL), n, timeout=TIMEOUT, check_inputs="never")
    call(model).item()
    return model


def call(model: Any) -> Any:
    x = torch.arange(12, device="cuda").view(2, 6)
    return model(x, x)


def lose_last(rank: int, n: int) -> None:
    """The last rank ends; the others return when they know it."""
    if rank == n - 1:
        os._exit(3)
    while not lost_ranks():
        threading.Event().wait(0.05)


def busy_with_other_things(rank: int, n: int) -> str:
    """Reads data, say, for longer than any timeout, after a rank was lost; and then needs it."""
    model = model_of(n)
    lose_last(rank, n)
    threading.Event().wait(LONG)
    with one_thread("forward", model.mesh.group):  # It compiles, say.
        threading.Event().wait(LONG)
    return problem_of(lambda: call(model).item())


def problem_of(run: Callable[[], Any]) -> str:
    with pytest.raises(autotp.Error) as raised:
        run()
    return raised.value.problem


def test_a_process_that_waits_for_nobody_goes_on() -> None:
    told, _ = run_ranks(busy_with_other_things, 2, cards=True, may_die=[1])
    assert told.endswith("tp rank 1 (global rank 1) is lost, ended or stopped")


def catches_the_error(rank: int, n: int) -> list[str]:
    """The read that blocks raises, and so does each call after it."""
    model = model_of(n)
    lose_last(rank, n)
    return [problem_of(lambda: call(model).item()) for _ in range(3)]


def test_the_error_can_be_caught_and_comes_again() -> None:
    told, _ = run_ranks(catches_the_error, 2, cards=True, may_die=[1])
    assert len(told) == 3 and len(set(told)) == 1 and "global rank 1) is lost" in told[0]


def stays_blocked(rank: int, n: int) -> None:
    model = model_of(n)
    if rank == 0:
        never_ending._abort = lambda group: None  # type: ignore[assignment]  # It blocks, too.
        never_ending.write_error = lambda error, rank: "\ud800".encode()  # type: ignore[assignment]  # It raises.
    lose_last(rank, n)
    call(model).item()


def test_a_process_that_does_not_come_back_is_ended() -> None:
    with pytest.raises(Died, match="rank 0 of 2, exit code 1"):
        run_ranks(stays_blocked, 2, cards=True, may_die=[1])


def stays_away(rank: int, n: int) -> str:
    """The first rank makes a call alone, and is told so before torch's watchdog would abort it."""
    model = model_of(n)
    if rank == 0:
        return problem_of(lambda: call(model).item())
    threading.Event().wait(LONG)
    return ""


def test_a_call_of_one_rank_alone() -> None:
    told, _ = run_ranks(stays_away, 2, cards=True, alone=True)
    assert told.endswith("tp rank 1 (global rank 1) is alive, but did not come to this call")


def stands_still_in_a_capture(rank: int, n: int) -> list[int]:
    """Numbers of waits of all threads for the card: while a CUDA graph is captured, and after."""
    waits, real, base = list[int](), torch.cuda.synchronize, torch.cuda.CUDAGraph.__base__
    with (
        patch.object(base, "capture_begin", lambda graph, **kwargs: None, create=True),
        patch.object(base, "capture_end", lambda graph: None, create=True),
        patch.object(torch.cuda, "synchronize", lambda *args: (waits.append(1), real(*args))),
    ):
        model = model_of(n)
        never_ending.AGAIN = 0.1
        graph = object.__new__(torch.cuda.CUDAGraph)
        graph._tracker = None
        waits.clear()
        graph.capture_begin()
        threading.Event().wait(1.5)
        during = len(waits)
        graph.capture_end()
        threading.Event().wait(1.5)
        call(model).item()
        return [during, len(waits)]


def test_no_thread_waits_for_the_card_during_a_capture() -> None:
    for during, after in run_ranks(stands_still_in_a_capture, 2, cards=True):
        assert during == 0 and after > 0


def test_a_later_world_has_a_watch_of_its_own() -> None:
    """Python gives a later group the address of one that is gone."""
    watches = list[never_ending.Watch]()
    for _ in range(8):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        watches.append(never_ending._watch())
        assert never_ending._watch() is watches[-1]
        dist.destroy_process_group()
    assert len(set(map(id, watches))) == len(watches)
