"""failures: an error of a collective names the axis and what is known of the lost rank; others stay what they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import autotp
from autotp.groups.failures import RanksApart, peer_error
from autotp.ops.collectives import copy, gather, reduce

LOST = (
    "{op} over axis `{axis}` failed on rank 0 of {n} (global rank 0): {reason}\n"
    "  try      every call is made by all ranks (none under `if rank == 0`); read the logs of the others\n"
    "  or       if it was only slow: timeout= of autotp.parallelize, or of init_process_group"
)
CLOSED, SILENT = "a peer closed its connection", "a peer did not answer within the group's timeout"


def run_lost(rank: int, n: int, dies: bool) -> list[str]:
    group = dist.new_group(timeout=timedelta(seconds=30 if dies else 5), group_desc="tp").group_name
    x = torch.ones(3, requires_grad=True)
    out = copy(reduce(x, group), group).sum()
    if rank == 1 and dies:
        os._exit(1)
    return [] if rank == 1 else [lost(lambda: gather(x, group, 0, 3 * n)), lost(lambda: out.backward())]


def lost(call: Callable[[], object]) -> str:
    with pytest.raises(autotp.Error) as raised:
        call()
    assert isinstance(raised.value.__cause__, RuntimeError)
    return str(raised.value)


@pytest.mark.system
@pytest.mark.parametrize(("dies", "reason"), [(False, SILENT), (True, CLOSED)], ids=["silent", "dead"])
def test_a_lost_peer_is_told_in_forward_and_backward(dies: bool, reason: str) -> None:
    got = run_ranks(run_lost, 2, dies, may_die=[1] if dies else [])
    ops = "all_gather_into_tensor", "all_reduce"
    assert got[0] == [LOST.format(op=op, axis="tp", n=2, reason=reason) for op in ops]


def run_lost_world(rank: int, n: int) -> str:
    if rank == 1:
        os._exit(1)
    return lost(lambda: reduce(torch.ones(3), str(dist.group.WORLD.group_name)))


def test_a_lost_peer_of_the_world_is_told_as_tp() -> None:
    # Two ranks: of three, one may wait for the other that has already failed, until the group's timeout.
    got = run_ranks(run_lost_world, 2, may_die=[1])
    assert got == [LOST.format(op="all_reduce", axis="tp", n=2, reason=CLOSED), None]


def errors_of_others(rank: int, n: int) -> list[bool]:
    group = str(dist.group.WORLD.group_name)
    said = ["Timed out waiting 5000ms", "Connection closed by peer", "expected a contiguous tensor"]
    told = peer_error("all_reduce", group, RanksApart("a sum here, and a gather on rank 1"))
    assert told is not None and "failed on rank" in str(told) and ": a sum here, and a gather on rank 1" in str(told)
    return [peer_error("all_reduce", group, RuntimeError(text)) is not None for text in said]


def test_an_error_with_another_cause_is_no_lost_peer() -> None:
    assert run_ranks(errors_of_others, 2) == [[True, True, False]] * 2
