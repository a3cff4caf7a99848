"""Ranks that are killed or stopped in each phase that has collectives: the others end with an error that names them.

A rank ends itself right before some collective of a phase, so that it is known where it was.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from test_processes import gpt
from test_saving import batch
from test_saving import gpt as small
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp import collectives

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
TIMEOUT = timedelta(seconds=8)
Layout = tuple[int, int, int]


def trainer(layout: Layout) -> autotp.Trainer:
    tp, pp, dp = layout
    example = {name: x[: 4 // (2 * dp)] for name, x in batch(0).items()}
    return autotp.distribute(small(), tp=tp, pp=pp, dp=dp, microbatches=2, example_inputs=example, timeout=TIMEOUT)


def rows(it: autotp.Trainer) -> Any:
    mesh = it.mesh["dp"]
    return {name: x.chunk(mesh.size())[mesh.get_local_rank()] for name, x in batch(0).items()}


def step(layout: Layout, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    it = trainer(layout)
    return (lambda: it.step(**rows(it))), (lambda: it.step(**rows(it)))


def evaluate(layout: Layout, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    it = trainer(layout)
    return (lambda: it.evaluate(**rows(it))), (lambda: it.evaluate(**rows(it)))


def forward(layout: Layout, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    model, x = parallel(), torch.arange(12).view(2, 6)
    return (lambda: model(x, x)), (lambda: model(x, x))


def backward(layout: Layout, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    model, x = parallel(), torch.arange(12).view(2, 6)
    loss = model(x, x)
    return (lambda: model(x, x)), loss.backward


def parallel() -> Any:
    mesh = DeviceMesh.from_group(dist.new_group(timeout=TIMEOUT, group_desc="tp"), "cpu", mesh_dim_names=("tp",))
    return autotp.parallelize(gpt(dropout=0.0), mesh=mesh)


PHASES = {"step": step, "evaluate": evaluate, "forward": forward, "backward": backward}


def losing(rank: int, n: int, phase: str, layout: Layout, lost: int, at: int, how: int, folder: str) -> str:
    """What the others are told, once the lost rank was about to start the phase's collective of this number."""
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    before, call = PHASES[phase](layout, Path(folder))
    before()
    if rank == lost:
        _end_at(at, how)
        call()
        os.kill(os.getpid(), how)  # It had fewer collectives.
    try:
        call()
        before()  # It ended behind all collectives of the phase.
    except autotp.Error as error:
        return str(error).splitlines()[0]
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(Path(folder, f"pid-{lost}").read_text()), signal.SIGKILL)  # One that was stopped.
    return "no error"


def _end_at(at: int, how: int) -> None:
    count = itertools.count()

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if next(count) == at:
                os.kill(os.getpid(), how)
            return run(*args, **kwargs)

        return collective

    collectives._start = counted(collectives._start)
    dist.all_reduce, dist.batch_isend_irecv = counted(dist.all_reduce), counted(dist.batch_isend_irecv)


RARE = [
    (phase, layout, 1, at, how)
    for phase, layouts in (
        ("step", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)]),
        ("evaluate", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)]),
        ("forward", [(2, 1, 1)]),
        ("backward", [(2, 1, 1)]),
    )
    for layout, at, how in itertools.product(layouts, (0, 2, 5), (KILL, STOP))
]
USUAL = [("step", (1, 2, 1), 1, 3, KILL), ("backward", (2, 1, 1), 1, 2, STOP)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("phase", "layout", "lost", "at", "how"),
    [*USUAL, *(pytest.param(*case, marks=pytest.mark.rare) for case in RARE)],
    ids=str,
)
def test_the_lost_rank_is_named(phase: str, layout: Layout, lost: int, at: int, how: int, tmp_path: Path) -> None:
    n = layout[0] * layout[1] * layout[2]
    found = run_ranks(losing, n, phase, layout, lost, at, how, str(tmp_path), timeout=25, may_die=[lost])
    axis = next(axis for axis, size in zip(("tp", "pp", "dp"), layout, strict=True) if size > 1)  # Of rank 1.
    for rank, text in enumerate(found):
        if rank != lost:
            named = f"{axis} rank {lost} is lost", f"rank {lost} (global rank {lost}) is lost"
            assert any(name in text for name in named), text
