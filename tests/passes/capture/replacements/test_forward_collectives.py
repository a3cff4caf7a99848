"""forward_collectives: those of the model's code are operators of its graph, or refused if they count a row twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks
from torch import Tensor, nn
from torch.distributed import broadcast
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.passes.capture.replacements.forward_collectives import as_operators

checks = Checks()


class Codebook(nn.Module):
    """Keeps an average of what it computes, the same on all processes. x: [rows 8]"""

    def __init__(self, shared: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.shared = nn.Linear(8, 32), nn.Linear(32, 8), shared
        self.register_buffer("code", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        with torch.no_grad():
            self.code.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.shared(self.code)
        return y * self.code


SAME: dict[str, Callable[[Tensor], Any]] = {
    "broadcast": lambda code: dist.broadcast(code.data, src=0),
    "broadcast by name": lambda code: broadcast(code, group_src=0),
    "broadcast ahead": lambda code: dist.broadcast(code, 0, async_op=True).wait(),
    "largest": lambda code: dist.all_reduce(code, op=dist.ReduceOp.MAX),
    "smallest ahead": lambda code: dist.all_reduce(code, dist.ReduceOp.MIN, async_op=True).wait(),
    "largest ahead, by position": lambda code: dist.all_reduce(code, dist.ReduceOp.MAX, None, True).wait(),
    "barrier": lambda code: dist.barrier(),
}


def gathered(code: Tensor) -> None:
    every = [torch.empty_like(code) for _ in range(dist.get_world_size())]
    dist.all_gather(every, code)
    code.copy_(sum(every[1:], every[0]))


OTHER: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sum": (dist.all_reduce, "forward calls all_reduce over ranks [0, 1] of one tensor-parallel model"),
    "sum ahead": (
        lambda code: dist.all_reduce(code, async_op=True).wait(),
        "forward calls all_reduce over ranks [0, 1] of one tensor-parallel model",
    ),
    "gather": (gathered, "forward calls all_gather_into_tensor over ranks [0, 1] of one tensor-parallel model"),
    "reduce": (
        lambda code: dist.reduce(code, 0),
        "forward calls torch.distributed.reduce, which a graph does not have",
    ),
}


@checks.on(2)
def collectives_of_equal_tensors_equal_one_device(rank: int, n: int) -> None:
    """The same as on one device, which has no other process."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)
    for name, shared in SAME.items():
        torch.manual_seed(0)
        whole = Codebook(shared).double()
        parallel = autotp.parallelize(copy.deepcopy(whole), n, example_inputs=x)
        whole.shared = lambda code: None
        for _ in range(3):
            torch.testing.assert_close(parallel(x), whole(x), msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(parallel.code, whole.code)


@checks.on(2)
def collectives_that_count_a_row_once_a_rank_are_refused(rank: int, n: int) -> None:
    for shared, told in OTHER.values():
        with pytest.raises(autotp.Error) as raised:
            autotp.parallelize(Codebook(shared), n, example_inputs=torch.ones(3, 8))
        assert told in str(raised.value) and "test_forward_collectives.py" in str(raised.value), raised.value


@checks.on(2)
def collectives_over_replicas_stay_the_user_s(rank: int, n: int) -> None:
    """Each process is a model: their sum is the user's."""
    torch.manual_seed(0)
    x = torch.ones(3, 8)
    whole, parallel = (Codebook(dist.all_reduce) for _ in range(2))
    whole.load_state_dict(parallel.state_dict())
    mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("dp", "tp"))
    parallel = autotp.parallelize(parallel, mesh=mesh, example_inputs=x)
    torch.testing.assert_close(parallel(x), whole(x))


def test_as_operators_is_empty_without_processes() -> None:
    assert as_operators() == []


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
