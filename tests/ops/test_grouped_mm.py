"""grouped_mm: each group of rows times its own matrix, empty groups and rows behind the last group, and gradients."""

from __future__ import annotations

import pytest
import torch
from graphs import some
from torch import Tensor
from torch.autograd import gradcheck

from autotp.host_values import READ, host_values, read_again
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


def test_parts_of_a_known_tensor_are_known() -> None:
    x = torch.arange(12)
    assert READ.of(x[2:5]) is None and host_values(x) == list(range(12))
    assert [READ.of(part) for part in x.chunk(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert READ.of(x[1:][2:4]) == [3, 4]
    assert READ.of(x[::2]) is None and READ.of(x.view(3, 4)) is None and READ.of(x.view(3, 4)[1]) == [4, 5, 6, 7]
    x[5] = 0
    assert READ.of(x) is None and READ.of(x[2:5]) is None and host_values(x[2:5]) == [2, 3, 4]


def test_a_copy_is_known_as_its_tensor_and_a_write_that_torch_does_not_count_is_read_again() -> None:
    x, y = torch.arange(3), torch.arange(2)
    assert read_again([x, y, x]) == [[0, 1, 2], [0, 1], [0, 1, 2]]
    copy = x.clone()
    assert READ.of(copy) is None
    READ.copied(x, copy)
    assert READ.of(copy) == [0, 1, 2]
    x.data[0] = 7
    assert read_again([x]) == [[7, 1, 2]]
