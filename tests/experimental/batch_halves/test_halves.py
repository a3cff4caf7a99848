"""halves: the two halves of a dimension, their inverse, and the rules of both."""

from __future__ import annotations

import pytest
import torch

from autotp.experimental.batch_halves.halves import ROWS, halves, joined
from autotp.rules.call import Call


@pytest.mark.parametrize(("n", "block"), [(1, 1), (2, 1), (5, 1), (6, 2), (10, 2), (0, 1)])
@pytest.mark.parametrize("dim", [0, 1])
def test_joined_is_the_inverse_of_halves(n: int, block: int, dim: int) -> None:
    x = torch.arange(n * 3).view(n, 3) if dim == 0 else torch.arange(n * 3).view(3, n)
    a, b = halves(x, dim, block)
    assert a.shape[dim] == (n // block + 1) // 2 * block
    assert torch.equal(joined(a, b, dim), x)


def test_halves_and_joined_pass_gradcheck() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: joined(*(y * i for i, y in enumerate(halves(x, 0), 2)), 0), [x])


@pytest.mark.parametrize("dim", [1, -2])
def test_rules_of_halves_keep_their_dimension_whole(dim: int) -> None:
    x, half = torch.empty(2, 6, 4), torch.empty(2, 3, 4)
    divide, join = ROWS[halves].rule, ROWS[joined].rule
    assert divide is not None and join is not None
    divided = divide(Call(halves, {"x": x, "dim": dim, "block": 1}, (x,), (half, half)))
    whole = join(Call(joined, {"a": half, "b": half, "dim": dim}, (half, half), (x,)))
    assert (str(divided), str(whole)) == ("a x^ c -> a y^ c, a z^ c", "a x^ c, a y^ c -> a z^ c")
