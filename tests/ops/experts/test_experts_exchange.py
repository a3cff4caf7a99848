"""exchange: ranks with different rows and different experts together compute what one device computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import message
from ranks import Checks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autotp.ops.experts import exchange
from autotp.ops.experts import rows as routing

checks = Checks()
EXPERTS, WIDTH = 8, 6


class Sent(TorchDispatchMode):
    """Counts the bytes that leave this rank in exchanges of floating-point rows."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.bytes = rank, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all_single" in str(func) and args[0].is_floating_point():
            self.bytes += (sum(args[2]) - args[2][self.rank]) * args[0].itemsize
        return func(*args, **(kwargs or {}))


def name_of_world() -> str:
    return str(dist.group.WORLD.group_name)


def through_experts(x: Tensor, chosen: Tensor, weight: Tensor, group: str | None) -> Tensor:
    """Each row times the matrix of its expert. x: [rows in], weight: [experts of this rank, in out]"""
    table = exchange.exchange_counts(chosen, group, EXPERTS, True)
    places, own_places = routing.dispatch(chosen, EXPERTS, True, 0, EXPERTS), exchange.arrival(table)
    rows = exchange.to_experts(x[places], group, table, own_places)
    made = routing.grouped_mm(rows, weight, exchange.arrived_counts(table), False).sin()
    return routing.combine(exchange.to_rows(made, group, table, own_places), places, chosen)


def on_one_device(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("ri,rio->ro", x, weight[chosen]).sin()


CHOICES = {
    "uneven": lambda rank: torch.randint(EXPERTS, (5 + 3 * rank,)),
    "a rank without rows": lambda rank: torch.randint(EXPERTS, (7 * (rank != 1),)),
    "all rows to one expert": lambda rank: torch.full((4 + rank,), 5),
    "no rows at all": lambda rank: torch.randint(EXPERTS, (0,)),
}


@checks.on(2, 4)
def rows_computed_by_other_ranks_equal_one_device(rank: int, n: int) -> None:
    for name, choose in CHOICES.items():
        torch.manual_seed(3)
        choices = [choose(r) for r in range(n)]
        inputs = [torch.randn(len(chosen), WIDTH, dtype=torch.float64) for chosen in choices]
        weight = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
        every = torch.cat(inputs).requires_grad_()
        expected = on_one_device(every, torch.cat(choices), weight)
        wanted = torch.autograd.grad(expected.square().sum(), [every, weight])

        x, part = inputs[rank].clone().requires_grad_(), weight.detach().chunk(n)[rank].clone().requires_grad_()
        found = through_experts(x, choices[rank], part, name_of_world())
        sizes = [len(chosen) for chosen in choices]
        close = {"rtol": 0, "atol": 1e-10, "msg": lambda m, name=name: f"{name}: {m}"}
        torch.testing.assert_close(found, expected.split(sizes)[rank], **close)
        grads = torch.autograd.grad(found.square().sum(), [x, part])
        torch.testing.assert_close(grads[0], wanted[0].split(sizes)[rank], **close)
        torch.testing.assert_close(grads[1], wanted[1].chunk(n)[rank], **close)


@checks.on(2)
def second_derivatives_travel_too(rank: int, n: int) -> None:
    torch.manual_seed(3)
    choices = [torch.randint(EXPERTS, (4,)) for _ in range(n)]
    inputs, weight = torch.randn(n, 4, WIDTH, dtype=torch.float64), torch.randn(EXPERTS, WIDTH, WIDTH).double()

    def twice(loss_of: Any, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(loss_of(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(3).sum(), x)[0]

    every = inputs.flatten(0, 1).requires_grad_()
    expected = twice(lambda x: on_one_device(x, torch.cat(choices), weight), every).chunk(n)[rank]
    x, part = inputs[rank].clone().requires_grad_(), weight.chunk(n)[rank].clone()
    found = twice(lambda x: through_experts(x, choices[rank], part, name_of_world()), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@checks.on(4)
def bytes_are_those_of_rows_for_other_ranks(rank: int, n: int) -> None:
    """tokens x top-k x width x (ranks - 1) / ranks there, and as many back; forward and backward."""
    tokens, top_k, width = 64, 2, 32
    chosen = (torch.arange(tokens * top_k) + rank) % EXPERTS  # Each expert as often as the others.
    x = torch.randn(tokens * top_k, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(EXPERTS // n, width, width, dtype=torch.float64)
    with Sent(rank) as sent:
        through_experts(x, chosen, weight, name_of_world()).sum().backward()
    once = tokens * top_k * width * 8 * (n - 1) / n
    assert abs(sent.bytes / (4 * once) - 1) < 0.02


@checks.on(2)
def host_reads_once_for_a_layer(rank: int, n: int) -> None:
    """Sizes come with the counts: nothing else asks for numbers of a tensor."""
    chosen, x = torch.tensor([0, 7, 2, 2, 5, 1]), torch.randn(6, WIDTH)
    reads: list[Any] = []
    whole = Tensor.tolist
    try:
        Tensor.tolist = lambda x: reads.append(x.shape) or whole(x)  # type: ignore[method-assign, func-returns-value]
        through_experts(x, chosen, torch.randn(EXPERTS // n, WIDTH, WIDTH), name_of_world())
    finally:
        Tensor.tolist = whole  # type: ignore[method-assign]
    assert reads == [(2, n, EXPERTS // n + 1)]


@checks.on(2)
def an_expert_out_of_range_is_one_error_on_every_rank(rank: int, n: int) -> None:
    chosen = torch.tensor([0, 3, 8 if rank == 1 else 1])
    assert message(lambda: exchange.exchange_counts(chosen, name_of_world(), EXPERTS, True)) == (
        "1 rows of ep rank 1 chose no expert of the 8: an index is out of range\n"
        "  try      a router with as many outputs as there are experts"
    )


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
