"""Sums of user code over the ranks of one model that have the same tensor are told, with their line."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks, run_ranks
from small_models import Plain
from torch import Tensor, nn
from torch.distributed import all_reduce

import autotp
from autotp.runtime.torch_hooks.user_sums import COMPARED

checks = Checks()
X = torch.linspace(-1, 1, 16).view(2, 8)


class Codebook(nn.Module):
    """Counts which codes are used, and sums where torch.distributed runs, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(4))

    def count(self, codes: Tensor) -> None:
        """codes: [n], whole numbers below 4"""
        seen = torch.bincount(codes, minlength=4).float()
        if dist.is_initialized():
            all_reduce(seen)
        self.counts += seen


def told(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [f"{w.filename}: {w.message}" for w in caught if "this sum is over ranks" in str(w.message)]


@checks.on(2)
def user_sums_of_one_tensor_are_told_with_their_line(rank: int, n: int) -> None:
    model = autotp.parallelize(Plain(), n, example_inputs=X)
    loss, book = model(X).square().mean().detach(), Codebook()
    (said,) = told(lambda: book.count(torch.tensor([1, 1, 3])))
    assert "test_user_sums.py" in said and "over ranks [0, 1] of one tensor-parallel model" in said, said
    assert told(lambda: book.count(torch.tensor([1, 2, 3]))) == []  # Once for a line.
    assert told(lambda: dist.reduce(loss.clone(), 0)) or rank  # A rank that gets no sum may end before others begin.
    assert told(lambda: dist.all_reduce(loss.clone(), dist.ReduceOp.MAX)) == []
    assert told(lambda: dist.all_reduce(torch.tensor(rank + 1.0))) == []  # Each rank has its own, such as a time.
    assert told(lambda: dist.all_reduce(torch.zeros(3))) == []
    assert told(lambda: model(X).sum().backward()) == []
    alone = [dist.new_group([other]) for other in range(n)][rank]
    assert told(lambda: dist.all_reduce(loss.clone(), group=alone)) == []
    torch.testing.assert_close(book.counts, torch.tensor([0.0, 6, 2, 4]))


@checks.on(2)
def user_sums_are_not_watched_without_models(rank: int, n: int) -> None:
    """torch's own methods of process groups are back."""
    autotp.parallelize(Plain(), n, example_inputs=X)
    gc.collect()
    sent = torch.tensor([rank])
    dist.all_reduce(sent)
    (dist.send if rank else dist.recv)(sent, 1 - rank)


@checks.on(2)
def user_sums_go_on_with_a_model_on_one_rank(rank: int, n: int) -> None:
    """Python has freed the other rank's model: the sum goes on, and nobody waits."""
    model: Any = autotp.parallelize(Plain(), n, example_inputs=X)
    total = torch.ones(2)
    if rank == 0:
        del model
        gc.collect()
    assert told(lambda: dist.all_reduce(total)) == []
    torch.testing.assert_close(total, torch.full((2,), 2.0))
    dist.barrier()


@checks.on(4)
def user_sums_over_replicas_are_not_told(rank: int, n: int) -> None:
    """Ranks of one model have the same loss, and replicas another one."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = autotp.parallelize(Plain(), mesh=mesh, example_inputs=X)
    loss = model(X * (1 + rank // 2)).square().mean().detach()
    assert len(told(lambda: dist.all_reduce(loss.clone()))) == 1
    assert told(lambda: dist.all_reduce(loss.clone(), group=mesh["dp"].get_group())) == []


def compared_sums(rank: int, n: int, alike: bool) -> int:
    """Makes as many sums as a group compares; returns the number of warnings."""
    model = autotp.parallelize(Plain(), n, example_inputs=X)
    assert len(list(model.parameters())) > 0 and dist.group.WORLD is not None and dist.group.WORLD.group_name == "0"
    return len(told(lambda: [all_reduce(torch.tensor(1.0 if alike else rank + 1.0)) for _ in range(COMPARED)]))


def test_user_sums_of_a_later_group_of_the_same_name_are_told() -> None:
    """After `destroy_process_group` the next default group has the name of the first one."""
    assert run_ranks(compared_sums, 2, False) == [0, 0]
    assert run_ranks(compared_sums, 2, True) == [1, 1]


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
