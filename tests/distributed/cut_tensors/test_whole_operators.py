"""Operators of torch on cut tensors give what they give on one device: values, and gradients of what is learned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Checks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import autotp
from autotp.distributed.cut_tensors.cut_parameter import Cut, CutParameter, as_cut, hold_parts
from autotp.distributed.cut_tensors.whole_operators import WholeView
from autotp.distributed.mesh import Mesh
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds, chunk_size

checks = Checks(timeout=600)
EVERY = 10
"""Of torch's 640 operators with samples, one in so many is tried in one layout; with `--all` each is in all layouts."""
SAMPLES = 3
ORIGINS = ("parameter", "gradient", "state")
REFUSED = ("resize_", "resize_as_")


def mesh_of(n: int) -> Mesh:
    model: nn.Module = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 8))
    model = autotp.parallelize(model, n, example_inputs=torch.ones(2, 8))
    weight = next(p for p in model.parameters() if isinstance(p, CutParameter))
    return weight.autotp_cut.mesh


def layouts(shape: torch.Size, dim: int, n: int) -> list[Layout]:
    """Returns parts as of torch.chunk, uneven ones, those of three matrices in one, of every n-th, and repeated ones.

    Of 7 rows two ranks have 4 and 3; 6 and 1; three ranges each; 4 and 3 that alternate; and all 7.
    """
    size = shape[dim]
    starts = [(0, size // 3), (size // 3, 2 * size // 3), (2 * size // 3, size)]
    qkv = [[(a + x, a + y) for a, b in starts for x, y in [chunk_bounds(b - a, n, i)] if x < y] for i in range(n)]
    pieces: list[Any] = [
        [[chunk_bounds(size, n, i)] if chunk_size(size, n, i) else [] for i in range(n)],
        [[(0, size - n + 1)], *([(size - n + i, size - n + i + 1)] for i in range(1, n))],
        qkv,
        [[(k, k + 1) for k in range(i, size, n)] for i in range(n)],
        [[(0, size)]] * n,
    ]
    return [Layout(tuple(shape), dim, tuple(map(tuple, of_ranks)), "x") for of_ranks in pieces]


def cut(x: Tensor, layout: Layout, mesh: Mesh, origin: str) -> Tensor:
    """Returns a cut tensor with these values: a parameter, the gradient of one, or an optimizer's state of one."""
    p: Any = as_cut(nn.Parameter(layout.take(x.detach(), mesh.rank)), Cut("w", layout, mesh))
    if origin == "gradient":
        p.grad = x.detach()
        return p.grad  # type: ignore[no-any-return]
    optimizer = torch.optim.SGD([p])
    optimizer.state[p]["momentum"] = layout.take(x.detach(), mesh.rank)
    hold_parts(optimizer, plain_are_parts=True)
    state: Tensor = optimizer.state[p]["momentum"]
    return p if origin == "parameter" else state


def results(operator: Any, x: Tensor, sample: Any) -> list[Any]:
    """Returns what an operator gives, and the gradient of a sum of it with weights."""
    torch.manual_seed(5)
    values = pytree.tree_leaves(operator(x, *copy.deepcopy(sample.args), **copy.deepcopy(sample.kwargs)))
    total = sum(
        ((y * torch.linspace(0.5, 1.5, max(y.numel(), 1), dtype=torch.double)[: y.numel()].view(y.shape)).sum()).abs()
        for y in values
        if isinstance(y, Tensor) and y.requires_grad
    )
    gradient = torch.autograd.grad(total, x, allow_unused=True)[0] if isinstance(total, Tensor) else None
    return [y.detach() if isinstance(y, Tensor) else y for y in map(autotp.gather, [*values, gradient])]


def samples_of(operator: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yields samples whose operand can be cut, with this operand."""
    try:
        samples = list(operator.sample_inputs("cpu", torch.float64, requires_grad=False))
    except Exception:  # Some need a GPU, or a package.
        return
    for sample in samples[:SAMPLES]:
        x = sample.input
        if isinstance(x, Tensor) and x.layout is torch.strided and max(x.shape, default=0) > 1:
            yield sample, x


def compare(operator: Any, mesh: Mesh, chosen: Callable[[int], Sequence[int]]) -> int:
    """Compares an operator on cut tensors with one device; returns the number of comparisons.

    Args:
        chosen: returns the positions of the layouts for a sample, by its number.
    """
    compared = 0
    for number, (sample, x) in enumerate(samples_of(operator)):
        dim = max(range(x.dim()), key=lambda d: x.shape[d])
        for position in chosen(number):
            origin = ORIGINS[(number + position) % len(ORIGINS) if operator.supports_autograd else 1 + position % 2]
            try:
                expected = results(operator, x.clone().requires_grad_(origin == "parameter"), sample)
            except Exception:  # As torch refuses this operand itself.
                continue
            layout = layouts(x.shape, dim, mesh.size)[position]
            if operator.name in REFUSED:
                with pytest.raises(autotp.Error, match="changes the shape of a tensor of which each rank holds a part"):
                    results(operator, cut(x, layout, mesh, origin), sample)
                continue
            values = results(operator, cut(x, layout, mesh, origin), sample)
            torch.testing.assert_close(
                values,
                expected,
                rtol=1e-7,
                atol=1e-9,
                equal_nan=True,
                msg=lambda m, layout=layout, origin=origin: f"{operator.name} of a {origin}, {layout}: {m}",
            )
            compared += 1
    return compared


OPERATORS = [op for op in op_db if torch.float64 in op.dtypes and "empty" not in op.name]
LAYOUTS = 5


@checks.on(2)
def operators_as_on_one_device(rank: int, n: int) -> None:
    mesh = mesh_of(n)
    compared = [
        compare(operator, mesh, lambda number, i=i: [(number + i) % LAYOUTS])
        for i, operator in enumerate(OPERATORS[::EVERY])
    ]
    assert sum(compared) > 100, compared


@checks.on(2, rare=True)
def all_operators_in_all_layouts(rank: int, n: int) -> None:
    mesh = mesh_of(n)
    compared = [compare(operator, mesh, lambda _: range(LAYOUTS)) for operator in OPERATORS]
    assert sum(compared) > 6000 and sum(map(bool, compared)) > 500, (sum(compared), sum(map(bool, compared)))


@checks.on(2)
def a_view_of_a_gathered_tensor_is_written_on_all_ranks(rank: int, n: int) -> None:
    """And shows what is written into the part later."""
    whole = torch.arange(24.0, dtype=torch.double).view(6, 4)
    layout = layouts(whole.shape, 0, n)[0]
    part = cut(whole, layout, mesh_of(n), "state")
    expected = whole.clone()
    flat, of_whole = part.view(-1)[3:9], expected.view(-1)[3:9]
    assert isinstance(flat, WholeView)
    for x, view in ((part, flat), (expected, of_whole)):
        view.mul_(2)
        x[1] = 7
        view[0] -= 1
    assert torch.equal(autotp.gather(part), expected)
    assert flat.tolist() == of_whole.tolist()


@checks.on(2)
def short_integers_that_all_ranks_hold(rank: int, n: int) -> None:
    """They are gathered by a sum, which gloo has not of their dtype."""
    whole = torch.arange(8.0, dtype=torch.double).view(4, 2)
    for layout in layouts(whole.shape, 0, n):
        part = cut(whole, layout, mesh_of(n), "state").short()
        assert torch.equal(autotp.gather(part), whole.short()), layout


@checks.on(2)
def random_numbers_are_those_of_one_rank(rank: int, n: int) -> None:
    """Also where an operator reads what it writes, writes noise beside its result, or writes into `out`."""
    mesh, whole = mesh_of(n), torch.linspace(-3, 3, 24, dtype=torch.double).view(6, 4)
    layout = layouts(whole.shape, 0, n)[0]
    torch.manual_seed(rank)
    written, read, drawn = (cut(whole, layout, mesh, "state") for _ in range(3))
    F.rrelu(written, 0.1, 0.3, training=True, inplace=True)
    results = [written, F.rrelu(read, 0.1, 0.3, training=True), torch.normal(whole, whole.abs(), out=drawn)]
    wholes = [autotp.gather(x).contiguous() for x in results]
    for x in wholes:
        of_ranks = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(of_ranks, x)
        assert all(torch.equal(of_rank, x) for of_rank in of_ranks)
    for x in wholes[:2]:
        shares = x / whole
        assert shares[whole > 0].eq(1).all() and shares[whole < 0].ge(0.1).all() and shares[whole < 0].le(0.3).all()


@pytest.mark.timeout(600)  # All operators with `--all`.
@pytest.mark.parametrize("n, name", checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
