"""Operators of torch on cut tensors give what they give on one device: values, and gradients of what is learned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import autotp
from autotp.distributed.cut_tensors.cut_parameter import Cut, CutParameter, CutTensor
from autotp.distributed.cut_tensors.whole_operators import WholeView
from autotp.distributed.mesh import Mesh
from autotp.sharding.layout import Layout

checks = Checks()
EVERY = 10
"""Of torch's 640 operators with samples, one in so many is tried; all were, by hand, with EVERY = 1."""
SAMPLES = 3


def mesh_of(n: int) -> Mesh:
    model: nn.Module = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 8))
    model = autotp.parallelize(model, n, example_inputs=torch.ones(2, 8))
    weight = next(p for p in model.parameters() if isinstance(p, CutParameter))
    return weight.autotp_cut.mesh


def layouts(shape: torch.Size, dim: int, n: int) -> Iterator[Layout]:
    """Yields parts as of torch.chunk, of every n-th position, and the same part on all ranks."""
    size = shape[dim]
    bounds = [round(i * size / n) for i in range(n + 1)]
    pieces = [
        [[(a, b)] if a < b else [] for a, b in pairwise(bounds)],
        [[(k, k + 1) for k in range(i, size, n)] for i in range(n)],
        [[(0, size)]] * n,
    ]
    for of_ranks in pieces:
        yield Layout(tuple(shape), dim, tuple(tuple(piece) for piece in of_ranks), "x")


def cut(x: Tensor, layout: Layout, mesh: Mesh, learned: bool) -> Tensor:
    part: Any = layout.take(x.detach(), mesh.rank)
    part = nn.Parameter(part) if learned else part
    part.__class__ = CutParameter if learned else CutTensor
    part.autotp_cut = Cut("w", layout, mesh)
    return part


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


@checks.on(2)
def operators_as_on_one_device(rank: int, n: int) -> None:
    mesh, compared = mesh_of(n), 0
    for operator in [op for op in op_db if torch.float64 in op.dtypes][::EVERY]:
        for number, (sample, x) in enumerate(samples_of(operator)):
            learned = operator.supports_autograd and number % 2 == 0
            try:
                expected = results(operator, x.clone().requires_grad_(learned), sample)
            except Exception:  # As torch refuses this operand itself.
                continue
            dim = max(range(x.dim()), key=lambda d: x.shape[d])
            layout = list(layouts(x.shape, dim, n))[number % 3]
            values = results(operator, cut(x, layout, mesh, learned), sample)
            torch.testing.assert_close(
                values,
                expected,
                rtol=1e-7,
                atol=1e-9,
                equal_nan=True,
                msg=lambda m, name=operator.name, layout=layout: f"{name}, {layout}: {m}",
            )
            compared += 1
    assert compared > 60, compared


@checks.on(2)
def a_view_of_a_gathered_tensor_is_written_on_all_ranks(rank: int, n: int) -> None:
    """And shows what is written into the part later."""
    whole = torch.arange(24.0, dtype=torch.double).view(6, 4)
    layout = next(layouts(whole.shape, 0, n))
    part = cut(whole, layout, mesh_of(n), learned=False)
    expected = whole.clone()
    flat, of_whole = part.view(-1)[3:9], expected.view(-1)[3:9]
    assert isinstance(flat, WholeView)
    for x, view in ((part, flat), (expected, of_whole)):
        view.mul_(2)
        x[1] = 7
        view[0] -= 1
    assert torch.equal(autotp.gather(part), expected)
    assert flat.tolist() == of_whole.tolist()


@pytest.mark.parametrize("n, name", checks.cases())
def test_on_ranks(n: int, name: str) -> None:
    checks.expect(n, name)
