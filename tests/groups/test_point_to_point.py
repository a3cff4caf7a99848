"""point_to_point: what some ranks start alone in a group does not make ranks seem to have come apart."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg

import autotp
from autotp.distributed import mesh
from autotp.distributed.peers import heartbeat, in_step
from autotp.groups import point_to_point

X = torch.ones(2, 4)


def send_once(rank: int) -> None:
    one = torch.zeros(1)
    if rank == 0:
        dist.send(one, 1)
    elif rank == 1:
        dist.recv(one, 0)


def some_ranks_alone(rank: int, n: int) -> None:
    """The group of the user's mesh is the default one, in which the user's code sends, too."""
    heartbeat.INTERVAL = 0.05
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    send_once(rank)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 4))
    model = autotp.parallelize(model, mesh=mesh, example_inputs=X)
    for step in range(100):
        model(X).sum().backward()
        if step % 10 == 5:
            send_once(rank)
            dist.monitored_barrier()
        if step == 50:
            loss = model(X).sum()
            loss.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()  # On all ranks: they are compared before the next call.
        time.sleep(0.002)
    one = next(it for it in in_step._progress.values() if it.kind == in_step.CALL)
    assert one.told >= 64 and not one.apart
    assert point_to_point.started_collectives(str(mesh.get_group().group_name)) > 100


def test_what_some_ranks_start_alone_does_not_count() -> None:
    run_ranks(some_ranks_alone, 3, alone=True)


def on_a_backend_of_others(rank: int, n: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    assert fake_pg  # It registers the backend, whose groups have no timeout.
    mesh.timeout_of = lambda group: timedelta(seconds=20)
    whole = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model: Any = autotp.parallelize(whole, 2, example_inputs=torch.ones(3, 4))
    for _ in range(20):
        model(torch.ones(3, 4)).sum().backward()
    assert point_to_point.started_collectives(model.mesh.group) == 0


def test_a_backend_need_not_number_its_collectives() -> None:
    run_ranks(on_a_backend_of_others, 1, alone=True)


def test_a_later_group_of_the_same_name_counts_from_its_beginning() -> None:
    counts = []
    for collectives in (3, 1):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        name = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        for _ in range(collectives):
            dist.all_reduce(X.clone())
        counts.append((name, point_to_point.started_collectives(name)))
        point_to_point.count_from_here(name)
        dist.destroy_process_group()
    assert counts == [(counts[0][0], 3), (counts[0][0], 1)]
