"""grouped_mm: each group of rows times its own matrix, empty groups and rows behind the last group, and gradients."""

from __future__ import annotations

import pytest
import torch
from graphs import some
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck

from autotp.ops.grouped_mm import grouped_mm

ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)


def test_grouped_mm_multiplies_rows_by_their_group_s_matrix() -> None:
    x, weight = some(7, 4), some(3, 4, 5)
    found = grouped_mm(x, weight, ENDS)
    expected = torch.cat([x[:2] @ weight[0], x[2:5] @ weight[2], torch.zeros(2, 5, dtype=x.dtype)])
    torch.testing.assert_close(found, expected)


def test_grouped_mm_passes_gradcheck_and_opcheck() -> None:
    x, weight = some(7, 4).requires_grad_(), some(3, 4, 5).requires_grad_()
    assert gradcheck(lambda x, weight: grouped_mm(x, weight, ENDS), (x, weight))
    torch.library.opcheck(grouped_mm, (x, weight, ENDS))


def test_grouped_mm_reads_group_ends_once_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of the same groups, and their gradients, know where the groups end; a changed tensor is read."""
    reads, ends, read = [], ENDS.clone(), Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: reads.append(len(x)) or read(x))
    x, up, down = some(7, 4).requires_grad_(), some(3, 4, 5).requires_grad_(), some(3, 5, 4).requires_grad_()
    grouped_mm(grouped_mm(x, up, ends), down, ends).sum().backward()
    assert reads == [3]
    ends.fill_(7)
    grouped_mm(x, up, ends)
    assert reads == [3, 3]


def test_backward_runs_where_nobody_knows_the_groups() -> None:
    """On fake tensors: a budget of memory counts the bytes of backward so."""
    with FakeTensorMode():
        x, weight = torch.empty(8, 3, requires_grad=True), torch.empty(2, 3, 4, requires_grad=True)
        grads = torch.autograd.grad(grouped_mm(x, weight, torch.empty(2, dtype=torch.int32)).sum(), (x, weight))
    assert [g.shape for g in grads] == [x.shape, weight.shape]


def test_second_gradients_are_right() -> None:
    x, weight = (torch.rand(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (2, 3, 4)))
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_mm(x, w, ENDS[1:]), (x, weight))
