"""zigzag: an order in which parts of a sequence have equal work in causal attention, for any length."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.attention.zigzag import in_order, pieces, positions, zigzag, zigzag_like, zigzag_rows, zigzag_rows_like
from autotp.sharding.partition import chunk_sizes

LENGTHS = [0, 1, 2, 3, 5, 7, 8, 13, 24]
PARTS = [1, 2, 3, 4, 8]


def work(n: int, parts: int, rank: int) -> int:
    """How many keys the queries of a rank read."""
    return sum(i + 1 for start, stop in pieces(n, parts, rank) for i in range(start, stop))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("n", LENGTHS)
def test_zigzag_order_has_each_position_once_in_chunk_sizes(n: int, parts: int) -> None:
    order = positions(n, parts)
    assert sorted(order.tolist()) == list(range(n))
    held = [[i for start, stop in pieces(n, parts, rank) for i in range(start, stop)] for rank in range(parts)]
    assert [i for part in held for i in part] == order.tolist()
    assert list(map(len, held)) == chunk_sizes(n, parts)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("n", LENGTHS)
def test_in_order_undoes_zigzag(n: int, parts: int) -> None:
    x = torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True)
    moved = zigzag(x, 1, parts)
    assert torch.equal(moved, x[:, positions(n, parts)])
    assert torch.equal(in_order(moved, 1, parts), x)
    weights = torch.randn_like(x)
    (gradient,) = torch.autograd.grad((in_order(moved, 1, parts) * weights).sum(), x)
    assert torch.equal(gradient, weights)


@pytest.mark.parametrize("parts", PARTS)
def test_zigzag_ranks_have_equal_work(parts: int) -> None:
    """Exactly for lengths of two pieces a rank; the last of four ranks would read 1.75 of the mean otherwise."""
    whole = [work(16 * parts, parts, rank) for rank in range(parts)]
    assert len(set(whole)) == 1
    odd = [work(16 * parts - 3, parts, rank) for rank in range(parts)]
    assert max(odd) < 1.1 * sum(odd) / parts


def inputs(n: int, kv_heads: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, h, n, 8, dtype=torch.float64, requires_grad=True) for h in (4, kv_heads, kv_heads)]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("n", "parts"), [(1, 2), (5, 2), (8, 2), (7, 3), (13, 4), (3, 8)])
def test_zigzag_rows_of_all_ranks_are_causal_attention(n: int, parts: int, kv_heads: int) -> None:
    q, k, v = inputs(n, kv_heads)
    gqa = kv_heads != 4
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=gqa)
    parts_of = zigzag(q, -2, parts).split(chunk_sizes(n, parts), -2)
    found = torch.cat([zigzag_rows(x, k, v, parts, rank, 0.3, gqa) for rank, x in enumerate(parts_of)], -2)
    whole = zigzag_rows(zigzag(q, -2, parts), k, v, parts, None, 0.3, gqa)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), [q, k, v])
    for mine in (found, whole):
        mine = in_order(mine, -2, parts)
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad((mine * weights).sum(), [q, k, v])
        torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)


def test_zigzag_rows_keep_one_copy_of_repeated_keys() -> None:
    """Keys and values of two heads are repeated for four."""
    q, k, v = inputs(64, 2)
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        zigzag_rows(zigzag(q, -2, 2)[..., :32, :], k, v, 2, 0, None, True)
    repeated = 2 * k.nbytes
    assert sum(size >= repeated for size in kept.values()) == 2  # One of keys, and one of values.


def test_zigzag_example_values_have_the_shapes_of_results() -> None:
    q, k, v = inputs(6)
    assert zigzag_like(q, -2, 2).shape == zigzag(q, -2, 2).shape
    assert zigzag_rows_like(q[..., :3, :], k, v[..., :5], 2, 0, None, False).shape == (2, 4, 3, 5)
