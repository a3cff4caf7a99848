"""Exceptions that leave a forward or a backward: on one rank an error on all, on all ranks nothing."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import Checks, run_ranks
from small_models import Normed, X
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.distributed.mesh import numbered_groups
from autotp.groups import failures
from autotp.ops.async_linear import async_linear
from autotp.runtime.torch_hooks import interrupted

checks = Checks()
STEPS, FAILS = 8, 5
INPUT = X[torch.float64]


class Stop(Exception):
    pass


def model_on(n: int, **how: Any) -> Any:
    torch.manual_seed(0)
    model = Normed().double()
    how = {"timeout": timedelta(seconds=3), **how}
    return autotp.parallelize(model, n, example_inputs=INPUT, **how) if n else model


def trained(model: nn.Module, run: Callable[[int], Any], steps: range = range(STEPS)) -> list[float]:
    """A loop that skips a batch in which something is raised; returns the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for step in steps:
        optimizer.zero_grad()
        try:
            losses.append(run(step))
        except (Stop, MemoryError):
            continue
        optimizer.step()
    return losses


def in_backward(model: nn.Module, fails: bool) -> Callable[[int], float]:
    """A step in which a user's hook on a gradient raises."""
    now = [-1]

    def hook(gradient: Tensor) -> None:
        if fails and now[0] == FAILS:
            raise Stop

    model.norm.weight.register_hook(hook)  # type: ignore[union-attr, operator]

    def run(step: int) -> float:
        now[0] = step
        loss = model(INPUT * (1 + step))
        loss.backward()
        return float(loss)

    return run


def in_forward(model: nn.Module, fails: bool) -> Callable[[int], float]:
    """A step in which there is no memory for what backward needs."""

    def run(step: int) -> float:
        def pack(x: Tensor) -> Tensor:
            if fails and step == FAILS:
                raise MemoryError
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(INPUT * (1 + step))
        loss.backward()
        return float(loss)

    return run


PLACES = {"backward": in_backward, "forward": in_forward}


def on_one_rank(rank: int, n: int, place: str) -> None:
    model = model_on(n)
    step = PLACES[place](model, rank == 0)
    text = message(lambda: trained(model, step))
    if rank == 0:
        assert "an exception left a forward or backward on some ranks only: tp rank 1 " in text
        assert "let the exception end the program on all ranks" in text
    else:
        assert f"tp rank 0 (global rank 0) raised {'Stop' if place == 'backward' else 'MemoryError'}" in text


@pytest.mark.parametrize("place", PLACES)
def test_exception_on_one_rank_is_an_error_on_all(place: str) -> None:
    run_ranks(on_one_rank, 2, place, alone=True)


def told_early(rank: int, n: int) -> float:
    """Returns the seconds until the rank that raised is told; it ends, and with it the wait of the other."""
    model = model_on(n, timeout=timedelta(seconds=50))
    began = time.monotonic()
    with pytest.raises(autotp.Error) as raised:
        trained(model, in_backward(model, rank == 0))
    if rank == 0:
        assert "an exception left a forward or backward on some ranks only: tp rank 1 went on" in str(raised.value)
        found = time.monotonic() - began
        os._exit(3 if found > 20 else 7)
    return time.monotonic() - began


def test_exception_on_one_rank_is_told_before_the_timeout() -> None:
    assert run_ranks(told_early, 2, may_die=[0])[1] < 25


@checks.on(2)
def exception_on_all_ranks_leaves_training_right(rank: int, n: int) -> None:
    for make in PLACES.values():
        expected, model = model_on(0), model_on(n)
        losses = trained(expected, make(expected, True))
        assert len(losses) == STEPS - 1
        # As if the other rank waited there already; its count is not below this rank's, so nobody is told.
        interrupted._waiting[interrupted._key(numbered_groups()[str(model.mesh.group)])] = {1 - rank: 10**9}
        assert trained(model, make(model, True)) == pytest.approx(losses, abs=1e-12)
        assert model.mesh.group not in failures.uncompared
        assert not any(f"/{model.mesh.group}/" in key for key in interrupted._waiting)


@checks.on(2)
def exception_beside_other_models_on_one_mesh_leaves_training_right(rank: int, n: int) -> None:
    """One rank has dropped some of them, and the other has them still."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    expected, models = model_on(0), [model_on(n, mesh=mesh) for _ in range(8)]
    del models[: 7 * rank]
    gc.collect()
    losses = trained(expected, in_backward(expected, True))
    assert trained(models[-1], in_backward(models[-1], True)) == pytest.approx(losses, abs=1e-12)


def in_a_second_world(rank: int, n: int, place: str) -> None:
    """An exception in the first one is no matter there, although its groups have the same names."""
    models = [model_on(n) for _ in range(8)]
    with pytest.raises(Stop):
        in_backward(models[-1], True)(FAILS)
    before = models[0].mesh.group
    del models[: 7 * rank]
    gc.collect()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=n, timeout=timedelta(seconds=20))
    expected, again = model_on(0), model_on(n)
    assert again.mesh.group == before
    losses = trained(expected, in_backward(expected, False))
    assert trained(again, in_backward(again, False)) == pytest.approx(losses, abs=1e-12)


def test_exceptions_are_compared_in_a_second_world(tmp_path: Path) -> None:
    run_ranks(in_a_second_world, 2, (tmp_path / "meet").as_uri(), alone=True)


@checks.on(2)
def exception_in_another_model_leaves_training_right(rank: int, n: int) -> None:
    model, other = model_on(n), model_on(0)
    plain, beside = in_backward(model, False), in_backward(copy.deepcopy(other), rank == 0)

    def run(step: int) -> float:
        try:
            beside(step)
        except Stop:
            assert rank == 0
        return plain(step)

    assert trained(model, run) == pytest.approx(trained(other, in_backward(other, False)), abs=1e-12)


@checks.on(2)
def early_stop_of_checkpoint_is_no_interruption(rank: int, n: int) -> None:
    model, expected = model_on(n), model_on(0)

    def run(step: int) -> float:
        loss = checkpoint(model, INPUT * (1 + step), use_reentrant=False)
        loss.backward()
        assert model.mesh.group not in failures.uncompared
        return float(loss)

    assert trained(model, run) == pytest.approx(trained(expected, in_backward(expected, False)), abs=1e-12)


@checks.on(2)
def exceptions_at_different_places_are_an_error(rank: int, n: int) -> None:
    model = model_on(n)
    started = interrupted.started_collectives
    interrupted.started_collectives = lambda group: started(group) + (rank == 1)
    try:
        with pytest.raises(autotp.Error, match=r"tp rank 1 left a .* at another place than rank 0"):
            trained(model, in_backward(model, True))
    finally:
        interrupted.started_collectives = started
        failures.uncompared.clear()


@checks.on(2)
def backward_of_inputs_alone_counts_as_the_model_s(rank: int, n: int) -> None:
    """It ends at no parameter; products that sum their input's gradient say that it is of a parallel model."""
    x = INPUT.clone().requires_grad_()
    (y,) = async_linear(
        x, dist.group.WORLD.group_name, None, None, (torch.ones(2, x.shape[-1]).double(),), (None,), (False,)
    )
    assert interrupted._is_of_model([y.sum()])
    assert not interrupted._is_of_model([(2 * x).sum()])


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)


def test_interrupted_undo_restores_the_autograd_engine() -> None:
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward
    undo = interrupted.install()
    assert autograd._engine_run_backward is not run
    undo()
    assert autograd._engine_run_backward is run
