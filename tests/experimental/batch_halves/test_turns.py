"""turns: a collective in two steps is that in one step; tests/passes/emit/test_interleave.py runs both in models."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from errors import message
from ranks import run_ranks
from torch import Tensor
from torch.func import grad, jvp, vmap

from autotp.experimental.batch_halves.turns import finish, is_awaited, start_copy, start_reduce, wait_in_backward
from autotp.ops.collectives import copy, reduce


def group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def in_one(x: Tensor) -> Tensor:
    return reduce(copy(x, group()).sin() * (dist.get_rank() + 1), group()).sum()


def in_two(x: Tensor) -> Tensor:
    anchor = x * 1
    read = start_copy(wait_in_backward(x * 1, group(), anchor), group())
    return finish(start_reduce(read.sin() * (dist.get_rank() + 1), group()), group()).sum()


def hessian_vector(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.autograd.functional.hvp(f, x, torch.ones_like(x))[1]


def batched(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Gradients that torch batches the old way."""

    def gradients(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x), x, torch.arange(1.0, 4.0, dtype=x.dtype), is_grads_batched=True)[0]

    return gradients


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "value": lambda f: f,
    "grad": grad,
    "vmap": vmap,
    "vmap-grad": lambda f: vmap(grad(f)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "hvp": hessian_vector,
    "batched": batched,
    "compiled": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}


def results(rank: int, n: int) -> dict[str, bool]:
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    return {name: torch.allclose(way(in_one)(x), way(in_two)(x), rtol=1e-12) for name, way in WAYS.items()}


def test_collectives_in_two_steps_equal_one_step() -> None:
    for found in run_ranks(results, 2):
        assert found == dict.fromkeys(WAYS, True)


def of_lazy_values(rank: int, n: int) -> list[list[float]]:
    """Sums of tensors whose memory has other values than they."""
    z = torch.complex(torch.arange(1.0, 4.0), torch.arange(4.0, 7.0))
    return [
        finish(start_reduce(x, group(), fresh=fresh), group()).tolist()
        for x in (torch._neg_view(torch.arange(1.0, 4.0)), z.conj().imag)
        for fresh in (False, True)
    ]


def test_two_step_sums_resolve_lazy_conjugation() -> None:
    assert run_ranks(of_lazy_values, 2) == [[[-2.0, -4.0, -6.0]] * 2 + [[-8.0, -10.0, -12.0]] * 2] * 2


def maximum(rank: int, n: int) -> list[float]:
    found = finish(start_reduce(torch.tensor([1.0 + rank, -rank]), group(), "max"), group())
    return found.tolist()


def test_two_step_reduce_takes_a_maximum() -> None:
    assert run_ranks(maximum, 2) == [[2.0, 0.0]] * 2


def readers(rank: int, n: int) -> list[bool]:
    """Whether the gradient of these values may be a running sum."""
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    awaited = wait_in_backward(y, group(), y)
    return [
        is_awaited(z) for z in (awaited, wait_in_backward(y, group(), x), wait_in_backward(y, None, y), awaited * 1)
    ]


def test_backward_sums_run_only_where_an_operator_waits() -> None:
    """Without an operator to wait behind, without a group, or with an operator between, backward sums at once."""
    assert run_ranks(readers, 2) == [[True, False, False, False]] * 2


def lost(rank: int, n: int) -> str:
    if rank == 1:
        os._exit(0)
    return message(lambda: finish(start_reduce(torch.ones(2), group()), group()))


def test_two_step_sum_names_a_lost_rank() -> None:
    text = run_ranks(lost, 2, may_die=[1])[0]
    assert "over axis `tp` failed on rank 0 of 2" in text
