"""replica_check: replicas are over other ranks than those of one model: DDP and fully_shard there are an Error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import Checks
from small_models import Normed, X, expect_equal_state, pair
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autotp

checks = Checks()
FLOAT64 = torch.float64


class Blocks(nn.Module):
    """Numbered blocks, which `fully_shard` takes one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Normed(), Normed()])

    def forward(self, x: Any) -> Any:
        return sum(block(x) for block in self.h)


class Engine(nn.Module):
    """Another wrapper with a process group, as torch's FullyShardedDataParallel is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.process_group = dist.group.WORLD
        self.module = module


def said(what: str, call: str, shown: str) -> str:
    return (
        f"{call}{what} over ranks [0, 1] of one tensor-parallel model, which are not replicas\n"
        f"  try      no {what}: these ranks hold the model together, and autotp has summed their gradients\n"
        f"  or       with replicas: parallelize(model, mesh=mesh), and {what}(model, {shown})"
    )


@checks.on(2)
def ddp_over_its_ranks(rank: int, n: int) -> None:
    """Nothing is sent: the model works as before."""
    whole, parallel = pair(n)
    for wrap in (DistributedDataParallel, Engine):
        for model in (parallel, nn.Sequential(parallel)):
            found = message(lambda: wrap(model))  # noqa: B023
            assert found == said(wrap.__name__, "", "process_group=mesh['dp'].get_group()")
    for model in (whole, parallel):
        model(X[FLOAT64]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    expect_equal_state(whole, parallel, 1e-12)


@checks.on(2)
def ddp_that_was_there_before(rank: int, n: int) -> None:
    """Around a model that becomes parallel inside of it, in place."""
    torch.manual_seed(0)
    model = Normed().double()
    replica = DistributedDataParallel(model)
    autotp.parallelize(model, n, example_inputs=X[FLOAT64])
    found = message(lambda: replica(X[FLOAT64]))
    assert found == said("DistributedDataParallel", "", "process_group=mesh['dp'].get_group()")


@checks.on(2)
def fully_shard_over_its_ranks(rank: int, n: int) -> None:
    """Of the whole model, of its blocks alone, of one that was called before."""
    for shard in (lambda m: [fully_shard(m)], lambda m: [fully_shard(block) for block in m.h]):
        for called in (False, True):
            torch.manual_seed(0)
            parallel = autotp.parallelize(Blocks().double(), n, example_inputs=X[FLOAT64])
            if called:
                parallel(X[FLOAT64]).backward()
            shard(parallel)
            found = message(lambda: parallel(X[FLOAT64]))  # noqa: B023
            assert found.removeprefix("Blocks.forward: ") == said("fully_shard", "", "mesh=mesh['dp']")


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model.h[0])
    return model


WRAPPED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "ddp": (DistributedDataParallel, "the DistributedDataParallel is a wrapper around a model\n  try      paralle"),
    "dp": (nn.DataParallel, "the DataParallel is a wrapper around a model\n  try      parallelize the model itself"),
    "inside": (lambda m: nn.Sequential(DistributedDataParallel(m)), "`0`, a DistributedDataParallel, is a wrapper a"),
    "fully_shard": (
        sharded,
        "`h.0`, a FSDPNormed, is sharded already, by fully_shard or as DTensors\n  try      paral",
    ),
    "compile": (
        torch.compile,
        "the model is compiled already, and the parallel model would not be\n  try      tor",
    ),
}


@checks.on(2)
def wrapped_before(rank: int, n: int) -> None:
    """What belongs around a parallel model, or comes after, is named, and nothing is changed."""
    for wrap, problem in WRAPPED.values():
        model = wrap(Blocks().double())
        before = list(model.parameters())
        found = message(lambda: autotp.parallelize(model, n, example_inputs=X[FLOAT64]))  # noqa: B023
        assert problem in found and found.startswith(f"parallelize({type(model).__name__}, tp=2): "), found
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    average = torch.optim.swa_utils.AveragedModel(Normed().double())
    parallel = autotp.parallelize(Normed().double(), n, example_inputs=X[FLOAT64])
    average.update_parameters(parallel)  # Of wholes, outside.
    torch.testing.assert_close(
        dict(average.module.named_parameters()), autotp.gather(dict(parallel.named_parameters()))
    )


@checks.on(2)
def over_a_part_of_the_world(rank: int, n: int) -> None:
    """A group of this rank alone, and models that are not parallel, are nobody's business."""
    whole, parallel = pair(n)
    alone = [dist.new_group([i]) for i in range(n)][rank]
    replica = DistributedDataParallel(parallel, process_group=alone)
    torch.testing.assert_close(replica(X[FLOAT64]), whole(X[FLOAT64]))
    DistributedDataParallel(copy.deepcopy(whole))
    mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("dp", "tp"))
    single = autotp.parallelize(copy.deepcopy(whole), mesh=mesh["tp"], example_inputs=X[FLOAT64])
    DistributedDataParallel(single)(X[FLOAT64])


@checks.on(4)
def over_the_world_of_two_replicas(rank: int, n: int) -> None:
    """The default group has both kinds of ranks: an Error; the group of replicas is right (`test_processes.py`)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    parallel = autotp.parallelize(Blocks().double(), mesh=mesh["tp"], example_inputs=X[FLOAT64])
    ours = [0, 1] if rank < 2 else [2, 3]
    for kind, call in (
        ("DistributedDataParallel", lambda: DistributedDataParallel(parallel)),
        ("fully_shard", lambda: [fully_shard(parallel), parallel(X[FLOAT64])]),
    ):
        assert f"{kind} over ranks {ours} of one tensor-parallel model" in message(call)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
