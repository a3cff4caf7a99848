"""strides: the order of a tensor's dimensions in memory, and back."""

from __future__ import annotations

import itertools

import torch

from autotp.sharding.strides import inverse, laid_out, memory_order, order_of_dimensions


def test_memory_order_permutes_to_contiguous() -> None:
    x = torch.empty(2, 3, 4, 5)
    for order in itertools.permutations(range(4)):
        moved = x.permute(order)
        assert moved.permute(memory_order(moved)).is_contiguous()
        assert moved.permute(memory_order(moved)).shape == x.shape
    assert memory_order(torch.empty(3, 4).expand(2, 3, 4)) == [1, 2, 0]
    assert memory_order(torch.empty(1, 1)) == [0, 1]
    assert memory_order(torch.empty(())) == []
    one = torch.empty(2, 12).as_strided((2, 1, 12), (12, 24, 1))
    assert memory_order(one) == [1, 0, 2] and order_of_dimensions(one) == [0, 1, 2]
    assert order_of_dimensions(torch.empty(2, 3).T) == [1, 0]


def test_inverse_undoes_a_permutation() -> None:
    for order in itertools.permutations(range(4)):
        assert [order[i] for i in inverse(order)] == [0, 1, 2, 3]


def test_laid_out_copies_into_the_order_of_dimensions() -> None:
    x = torch.randn(2, 3, 4)
    for order in itertools.permutations(range(3)):
        found = laid_out(x, order)
        assert torch.equal(found, x) and found.permute(order).is_contiguous()
        assert laid_out(found, (0, 1, 2)).is_contiguous()
    assert laid_out(x, (0, 1, 2)) is x
