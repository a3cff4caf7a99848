"""members_only: groups that only their own ranks make, in a world that is bound to cards, in a large one, by name."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.distributed.mesh import new_group
from autotp.groups.members_only import LATE, MANY, connecting_late

TIMEOUT = timedelta(seconds=20)


def summed(group: Any, value: int, device: str = "cpu") -> int:
    x = torch.tensor(value, device=device)
    dist.all_reduce(x, group=group)
    return int(x)


# ---- names


def named(rank: int, n: int) -> list[str]:
    """Two ranks make groups, before and after the others made some; torch's own names of later groups still agree."""
    names = []
    if rank < 2:
        names = [new_group([1, 0], TIMEOUT, "tp").group_name for _ in range(2)]
        assert summed(dist.distributed_c10d._resolve_process_group(names[1]), rank + 1) == 3  # type: ignore[arg-type]
    if rank > 0:
        assert summed(new_group(range(1, n), TIMEOUT, "dp"), rank) == sum(range(n))
    if rank < 2:
        assert summed(new_group([0, 1], TIMEOUT, "tp"), rank + 1) == 3
    assert summed(dist.new_group(list(range(n))), rank) == sum(range(n))
    assert summed(new_group(None, TIMEOUT), rank) == sum(range(n))
    return names


def test_members_of_a_group_agree_on_its_name() -> None:
    first, second, other = run_ranks(named, 3)
    assert first == second and other == [] and len(set(first)) == 2
    assert all(re.fullmatch(r"autotp/tp/[0-9a-f]{40}/\d+", name) for name in first), "short with any number of ranks"


# ---- a world that is bound to cards: each of torch's own groups is a split of its communicator


def on_a_part_of_a_bound_world(rank: int, n: int) -> list[float]:
    world: Any = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", rank)  # As `init_process_group(device_id=...)` does.
    pair = dist.new_group([0, 1])
    if rank > 1:
        return []
    mesh = DeviceMesh.from_group(pair, "cuda", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.ones(3, 4)
    expected = whole(x)
    model = autotp.parallelize(whole, mesh=mesh, example_inputs=x, timeout=TIMEOUT)
    assert world.bound_device_id == torch.device("cuda", rank), "it is bound as before"
    return [float((model(x.cuda()).cpu() - expected).abs().max())]


def test_a_model_runs_on_some_ranks_of_a_bound_world() -> None:
    found = run_ranks(on_a_part_of_a_bound_world, 3, cards=True, alone=True)
    assert found[2] == [] and all(difference < 1e-6 for difference in found[0] + found[1])


# ---- torch's other way to make groups


def test_new_group_refuses_torchcomms(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(distributed_c10d, "_use_torchcomms_enabled", lambda: True)
        with pytest.raises(autotp.Error) as raised:
            new_group([0], TIMEOUT)
    finally:
        dist.destroy_process_group()
    assert str(raised.value) == (
        "torch cannot make a process group of some ranks only: new_group cannot delegate to split_group with "
        "use_local_synchronization=True\n  try      TORCH_DISTRIBUTED_USE_TORCHCOMMS=0"
    )


# ---- a large group over gloo


def test_ranks_of_a_large_group_connect_when_they_send() -> None:
    """One thread makes the groups of all ranks in turn: none waits for another. With a few ranks it would."""
    store, size = dist.HashStore(), MANY + 1
    with connecting_late(size):
        groups = [dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=5)) for rank in range(size)]
    assert store.num_keys() <= size + 1, "each rank writes its address, and reads no other's"
    assert len(groups) == size and LATE not in os.environ


def test_ranks_of_a_small_group_connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with connecting_late(MANY):
        assert LATE not in os.environ
    monkeypatch.setenv(LATE, "0")
    with connecting_late(MANY + 1):
        assert os.environ[LATE] == "0", "the user's own word counts"
    assert os.environ[LATE] == "0"


def communicate_late(rank: int, n: int) -> float:
    from autotp.groups import members_only

    members_only.MANY = 1
    group = new_group(None, TIMEOUT)
    assert summed(group, rank) == sum(range(n))
    every = torch.empty(n)
    dist.all_gather_into_tensor(every, torch.tensor([float(rank)]), group=group)
    assert every.tolist() == list(range(n))
    dist.barrier(group)
    return float(every.sum())


def test_ranks_that_connect_late_can_communicate() -> None:
    assert run_ranks(communicate_late, 3, alone=True) == [3.0] * 3


def trained_in_two_worlds(rank: int, n: int, folder: str) -> list[str]:
    """torch has caches with the mesh of the first world, which is equal to that of the second one."""
    names = []
    for world in range(2):
        if world:
            dist.destroy_process_group()
            init = f"file://{folder}/second"
            dist.init_process_group("gloo", init_method=init, rank=rank, world_size=n, timeout=TIMEOUT)
        x = torch.ones(2, 4)
        model = Regression()
        trainer = autotp.distribute(model, dp=n, zero=3, example_inputs=x, timeout=TIMEOUT)
        trainer.step(x + rank)
        next(trainer.parameters()).full_tensor()  # type: ignore[attr-defined]
        names.append(trainer.mesh.get_group("dp").group_name)
    return names


class Regression(nn.Module):
    """A linear layer that returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).square().mean()


def test_group_names_begin_anew_with_each_world(tmp_path: Path) -> None:
    for first, second in run_ranks(trained_in_two_worlds, 2, str(tmp_path), alone=True):
        assert first == second
