"""grouped_mm: each group of rows times its own matrix, empty groups and rows behind the last group, and gradients."""

from __future__ import annotations

import torch
from graphs import some
from torch.autograd import gradcheck

from autotp.ops.grouped_mm import grouped_mm

ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)


def test_rows_times_their_groups_matrix() -> None:
    x, weight = some(7, 4), some(3, 4, 5)
    found = grouped_mm(x, weight, ENDS)
    expected = torch.cat([x[:2] @ weight[0], x[2:5] @ weight[2], torch.zeros(2, 5, dtype=x.dtype)])
    torch.testing.assert_close(found, expected)


def test_gradients() -> None:
    x, weight = some(7, 4).requires_grad_(), some(3, 4, 5).requires_grad_()
    assert gradcheck(lambda x, weight: grouped_mm(x, weight, ENDS), (x, weight))
    torch.library.opcheck(grouped_mm, (x, weight, ENDS))
