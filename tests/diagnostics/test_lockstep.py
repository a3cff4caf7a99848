"""lockstep: collectives on all ranks' tensors at once, their conjugates as backward, and draws alike on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import draft, some
from torch import Tensor, fx

from autotp.diagnostics.lockstep import run_lockstep
from autotp.ops import collectives
from autotp.ops.coalesced import together

aten = torch.ops.aten
XS = [some(3, 4) * (rank + 1) for rank in range(3)]


def lockstep(make: Any, xs: list[Tensor]) -> list[Any]:
    graph = draft(make, x=xs[0])
    return [found[0] if len(found) == 1 else found for found in run_lockstep([graph] * len(xs), [[x] for x in xs])]


def collective(kind: str, *rest: Any) -> Any:
    return lambda call, x: call(getattr(collectives, kind), x, "tp", *rest)


WHOLE = torch.cat(XS, 1)
SUM = sum(XS)
PARTS = list(WHOLE.split([4, 4, 4], 1))


@pytest.mark.parametrize(
    ("kind", "rest", "given", "expected"),
    [
        ("copy", (), XS, XS),
        ("reduce", (), XS, [SUM] * 3),
        ("reduce", ("max",), XS, [torch.stack(XS).amax(0)] * 3),
        ("gather", (1, 12), XS, [WHOLE] * 3),
        ("all_gather", (1, 12), XS, [WHOLE] * 3),
        ("scatter", (1, 12), [WHOLE] * 3, PARTS),
        ("reduce_scatter", (1, 12), [WHOLE] * 3, [3 * part for part in PARTS]),
        ("scatter", (1, 10, 2), [WHOLE[:, :10]] * 3, [WHOLE[:, :4], WHOLE[:, 4:8], WHOLE[:, 8:10]]),
    ],
)
def test_lockstep_forward_gives_the_parts_of_each_rank(
    kind: str, rest: Any, given: list[Tensor], expected: list[Tensor]
) -> None:
    """Uneven parts are those of torch.chunk, in whole blocks."""
    for found, want in zip(lockstep(collective(kind, *rest), given), expected, strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    ("kind", "rest", "given", "expected"),
    [
        ("copy", (), (3, 4), lambda grads: [sum(grads)] * 3),
        ("reduce", (), (3, 4), lambda grads: grads),
        ("gather", (1, 12), (3, 4), lambda grads: [g[:, 4 * r : 4 * r + 4] for r, g in enumerate(grads)]),
        ("all_gather", (1, 12), (3, 4), lambda grads: [sum(grads)[:, 4 * r : 4 * r + 4] for r in range(3)]),
        ("scatter", (1, 12), (3, 12), lambda grads: [torch.cat(grads, 1)] * 3),
        ("reduce_scatter", (1, 12), (3, 12), lambda grads: [torch.cat(grads, 1)] * 3),
    ],
)
def test_lockstep_backward_is_the_conjugate(kind: str, rest: Any, given: tuple[int, ...], expected: Any) -> None:
    xs = [some(*given).requires_grad_() for _ in range(3)]
    found = lockstep(collective(kind, *rest), xs)
    grads = [some(*y.shape) * (rank + 2) for rank, y in enumerate(found)]
    made = torch.autograd.grad(found, xs, grads)
    for gradient, want in zip(made, expected(grads), strict=True):
        torch.testing.assert_close(gradient, want)


def test_lockstep_joins_parts_in_any_memory_order() -> None:
    """Parts are joined along the dimension that the call names, however they lie in memory."""
    turned = [x.t().contiguous().t() for x in XS]
    assert all(found.equal(WHOLE) for found in lockstep(collective("gather", 1, 12), turned))


def test_lockstep_ranks_draw_alike() -> None:
    torch.manual_seed(1)
    found = lockstep(lambda call, x: call(aten.rand_like.default, call(aten.rand_like.default, x)), XS)
    assert found[0].equal(found[1]) and found[1].equal(found[2])


def test_lockstep_sums_the_gradients_of_ranks_that_hold_the_same() -> None:
    """Of four ranks two and two hold the same rows: their gradients are summed, and other rows are their own."""
    xs = [some(3, 4).requires_grad_() for _ in range(4)]
    graphs = []
    for rank in range(4):
        ranges = ((0, 2),) if rank % 2 == 0 else ((1, 3),)
        graphs.append(draft(lambda call, x, r=ranges: call(collectives.share, x, "tp/2", 0, r), x=xs[0]))
    found = [row[0] for row in run_lockstep(graphs, [[x] for x in xs])]
    grads = [torch.full((3, 4), 10.0**rank, dtype=torch.float64) for rank in range(4)]
    made = torch.autograd.grad(found, xs, grads)
    assert [g[:, 0].tolist() for g in made] == [[11, 11, 1], [10, 11, 11], [1100, 1100, 100], [1000, 1100, 1100]]


def test_lockstep_together_sums_each_gradient() -> None:
    """Each tensor is copied, and their gradients are summed over the ranks."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(together, ((x, x), "tp", (None, None)))
    graph.output((graph.call_function(sum, (both,)),))
    xs = [some(3, 4).requires_grad_() for _ in range(2)]
    found = [row[0] for row in run_lockstep([graph, graph], [[x] for x in xs])]
    grads = [torch.ones(3, 4, dtype=torch.float64) * (rank + 1) for rank in range(2)]
    assert all(g.eq(6).all() for g in torch.autograd.grad(found, xs, grads))
