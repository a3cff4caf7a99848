"""sharded_unit: the bits of `fully_shard`, in the memory of two gathered blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_models import assert_values_close
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.passes.emit.zero.sharded_unit import ShardedUnit
from autotp.sharding.boxes import local_of


class Added(nn.Module):
    """Blocks of sizes that nothing divides, a weight that all of them read, and a sum over rows as the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(5, 5)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 5]"""
        for block in self.h:
            x = x + block(self.shared(x))
        return x.square().sum()


class Twice(Added):
    """Its first two blocks run twice, in turn."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 5]"""
        for block in (*self.h[:2], *self.h):
            x = x + block(x)
        return x.square().sum()


class HandsOn(nn.Sequential):
    """A block that returns a view of its parameter, too."""

    def forward(self, x: Tensor, weight: Tensor) -> Any:
        """x: [batch seq 5], weight: [1 5]"""
        return x + super().forward(x * weight), self[0].weight[2:3]


class Handed(Added):
    """Each block reads a view of a parameter of the block before it."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(HandsOn(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch seq 5]"""
        weight = self.shared.weight[:1]
        for block in self.h:
            x, weight = block(x, weight)
        return (x * weight).square().sum()


def rows_of(step: int, length: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(12, length, 5, dtype=dtype)


def with_fully_shard(rank: int, n: int, dtype: torch.dtype | None, frozen: bool) -> None:
    """Two steps of two microbatches beside torch's own hooks: the same bits."""
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
    model = Added()
    model.h[1].requires_grad_(not frozen)
    theirs: Any = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
    for module in (*theirs.h, theirs):
        unit = fully_shard(module, mesh=mesh, mp_policy=policy)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    ours = autotp.distribute(
        model, dp=n, zero=3, microbatches=2, compute_dtype=dtype, example_inputs=rows_of(0, dtype=torch.float32)[:2]
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (theirs, ours)]
    for step in range(2):
        own = rows_of(step, 3 + step, torch.float32).chunk(n)[rank]
        for part in own.chunk(2):
            theirs(part.to(dtype or part.dtype)).backward()
        ours.step(own)
        for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert p.grad.dtype == torch.float32 and torch.equal(local_of(p.grad), local_of(q.grad)), name
            assert p.stride() == q.stride() and local_of(p).shape == local_of(q).shape
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.not_on_cards("`fully_shard` waits on the stream of torch.accelerator, which takes no pretended event")
@pytest.mark.parametrize(("n", "dtype", "frozen"), [(2, torch.bfloat16, False), (3, None, True)], ids=str)
def test_gradients_have_the_bits_of_fully_shard(n: int, dtype: torch.dtype | None, frozen: bool) -> None:
    run_ranks(with_fully_shard, n, dtype, frozen, timeout=100)


def equal(rank: int, n: int, zero: Any, more: dict[str, Any], built: type[nn.Module] = Added) -> None:
    """Steps and evaluations, of other lengths than at capture, beside one device."""
    alone: Any = built().double()
    if more.pop("frozen", False):
        alone.h[1].requires_grad_(False)
        alone.h[2].requires_grad_(False)
    trainer = autotp.distribute(copy.deepcopy(alone), zero=zero, microbatches=2, example_inputs=rows_of(0)[:2], **more)
    dp, place = trainer.mesh["dp"].size(), trainer.mesh["dp"].get_local_rank()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (alone, trainer)]
    names = dict(alone.named_parameters())
    for step, length in enumerate([3, 3, 5, 4]):
        rows = rows_of(step, length)
        expected = alone(rows)
        assert_values_close(trainer.evaluate(rows.chunk(dp)[place]), expected.detach(), rtol=1e-12, atol=0)
        assert_values_close(trainer.step(rows.chunk(dp)[place]), expected.detach(), rtol=1e-12, atol=0)
        expected.backward()
        for name, p in trainer.named_parameters():
            if names[name].grad is None:
                assert p.grad is None, name
            else:
                assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
                assert_values_close(p.grad.full_tensor(), names[name].grad, rtol=0, atol=1e-10, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("n", "zero", "more"),
    [
        (3, 3, {"dp": 3, "recompute": "full"}),
        (4, 3, {"dp": 2, "tp": 2, "frozen": True}),
        (4, 3, {"dp": 2, "pp": 2}),
        pytest.param(4, 3, {"dp": 2, "pp": 2, "schedule": "interleaved", "frozen": True}, marks=pytest.mark.rare),
        pytest.param(4, 3, {"dp": 2, "pp": 2, "schedule": "zero-bubble"}, marks=pytest.mark.rare),
        pytest.param(4, 1, {"dp": 2, "pp": 2, "frozen": True}, marks=pytest.mark.rare),
        pytest.param(2, 2, {"dp": 2, "memory": 2**20}, marks=pytest.mark.rare),
        pytest.param(2, 3, {"dp": 2, "recompute": "selective"}, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_zero_has_the_gradients_of_one_device(n: int, zero: int, more: dict[str, Any]) -> None:
    run_ranks(equal, n, zero, more, timeout=100)


def test_blocks_that_run_twice_have_the_gradients_of_one_device() -> None:
    run_ranks(equal, 2, 3, {"dp": 2}, Twice, timeout=100)


@pytest.mark.parametrize("more", [{}, {"recompute": "full"}], ids=str)
def test_a_block_that_returns_a_view_of_its_parameter_has_the_gradients_of_one_device(more: dict[str, Any]) -> None:
    run_ranks(equal, 2, 3, {"dp": 2, **more}, Handed, timeout=100)


class Watch(TorchDispatchMode):
    """Sees, at each operator, which blocks are gathered; and the bytes that each collective sends."""

    def __init__(self, units: list[ShardedUnit]) -> None:
        super().__init__()
        self.units, self.most, self.peak, self.sent = units, 0, 0, dict[str, list[int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        blocks = [unit for unit in self.units if unit.room is not None]
        self.most = max(self.most, sum(unit.is_whole or bool(unit._running) for unit in blocks))
        self.peak = max(self.peak, sum(map(nbytes, blocks)))
        name = func.overloadpacket.__name__
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor") and args[0].is_floating_point():
            self.sent.setdefault(name, []).append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def nbytes(unit: ShardedUnit) -> int:
    """The bytes of a unit's memory as it is now."""
    return sum(memory.untyped_storage().nbytes() for memory in unit._memories)


def counted(rank: int, n: int, dtype: torch.dtype | None, frozen: bool) -> tuple[int, int, dict[str, list[int]]]:
    model = Added()
    for block in model.h[1:3] if frozen else ():
        block.requires_grad_(False)
    example, rows = rows_of(0, dtype=torch.float32), rows_of(1, dtype=torch.float32).chunk(n)[rank]
    trainer = autotp.distribute(model, dp=n, zero=3, microbatches=2, compute_dtype=dtype, example_inputs=example[:3])
    trainer.step(rows)
    (pipeline,) = trainer._pipelines
    units = pipeline.stages[0].units
    with Watch(units) as watch:
        trainer.step(rows)
    assert not any(unit.is_whole or nbytes(unit) for unit in units)
    with Watch(units) as evaluation:
        trainer.evaluate(rows)
    assert evaluation.most <= 2 and not any(map(nbytes, units))
    return watch.most, watch.peak, watch.sent


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_two_blocks_at_most_are_gathered(dtype: torch.dtype | None, frozen: bool) -> None:
    """Bytes as counted by hand: rows of 5 and 7, of which the first of two replicas has 3 and 4."""
    itemsize, block, rest = (2 if dtype else 4), 4 * 5 + 4 + 3 * 7 + 3, 3 * 5 + 3
    for most, peak, sent in run_ranks(counted, 2, dtype, frozen, timeout=100):
        assert most == 2 and peak == 2 * block * itemsize
        # Four blocks for forward and three for backward; the first one stays for the second microbatch.
        gathers = [rest, *[block] * (4 + 3 + 3 + 3)]
        assert sent["all_gather_into_tensor"] == [elements * itemsize for elements in gathers]
        # The sum of all rows is sent, in float32.
        trained = [*[block] * (2 if frozen else 4), rest] * 2
        assert sent["reduce_scatter_tensor"] == [2 * elements * 4 for elements in trained]
