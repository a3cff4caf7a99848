"""dropout: each rank drops by itself, from a stream that all of them share."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from cards.spies import host_waits
from ranks import Checks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autotp.ops.dropout import exact_dropout, fast_attention, fast_dropout, keep, own_stream
from autotp.ops.eager_mode import runs_at_once

checks = Checks(cards=True)


def test_fast_dropout_masks_differ_by_rank_from_one_stream() -> None:
    """Scaled; other masks on other ranks; as much from the shared stream however much is dropped."""
    masks, states = [], []
    for rank, size in ((0, 1000), (1, 1000), (2, 10)):
        torch.manual_seed(0)
        masks.append(fast_dropout(torch.ones(size), 0.25, rank))
        states.append(torch.get_rng_state())
    assert masks[0].unique().tolist() == [0, pytest.approx(1 / 0.75)]
    assert 0.7 < (masks[0] > 0).float().mean() < 0.8
    assert not torch.equal(masks[0], masks[1])
    assert all(torch.equal(state, states[0]) for state in states)
    assert not fast_dropout(torch.ones(5), 1.0, 0).any()


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_parts_of_two_axes_have_the_mask_of_one_device(dims: tuple[int, int, int]) -> None:
    """A first cut of positions; a second of heads inside features, or of a part's positions; in any memory order."""

    def ones(*shape: int) -> Tensor:
        return torch.ones([shape[d] for d in dims]).permute([dims.index(d) for d in range(3)])

    x = ones(2, 5, 12)
    torch.manual_seed(0)
    whole = torch.nn.functional.dropout(x, 0.5)
    first = (1, (1, 5, 1), ((1, 2), (3, 5)))
    for cuts, expected in (
        ((first,), whole[:, [1, 3, 4]]),
        ((first, (2, (1, 4, 3), ((1, 3),))), whole[:, [1, 3, 4], 3:9]),
        ((first, (1, (1, 3, 1), ((0, 1), (2, 3)))), whole[:, [1, 4]]),
        ((first, (1, (1, 3, 1), ())), whole[:, :0]),
    ):
        torch.manual_seed(0)
        assert torch.equal(exact_dropout(ones(*expected.shape), 0.5, (2, 5, 12), cuts, dims), expected)


@pytest.mark.parametrize("positions", [0, 1])
def test_a_part_with_one_position_has_the_mask_of_one_device(positions: int) -> None:
    """Its strides do not say that the positions of the whole are outermost in memory."""
    torch.manual_seed(0)
    whole = torch.nn.functional.dropout(torch.ones(5, 2, 12).transpose(0, 1), 0.5)
    torch.manual_seed(0)
    cut = (1, (1, 5, 1), ((4, 4 + positions),))
    found = exact_dropout(torch.ones(2, positions, 12), 0.5, (2, 5, 12), (cut,), (1, 0, 2))
    assert torch.equal(found, whole[:, 4 : 4 + positions])


def test_fast_dropout_under_transforms() -> None:
    """Its slope is its mask; of several samples, one mask or each its own, as `vmap` is asked for."""
    x = torch.ones(3, 40)

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: fast_dropout(x, 0.5, 1).sum())(x)

    assert slope(x).unique().tolist() == [0, 2]
    first, second, _ = torch.func.vmap(slope, randomness="same")(x)
    assert torch.equal(first, second) and first.unique().tolist() == [0, 2]
    for f in (slope, lambda _: fast_dropout(torch.ones(40), 0.5, 1)):
        rows = torch.func.vmap(f, randomness="different")(x)
        assert not torch.equal(rows[0], rows[1]) and rows.unique().tolist() == [0, 2]
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(slope)(x)


def test_keep_masks_are_unbiased_and_uncorrelated() -> None:
    """As often as asked, other ones for each seed and rank, and without a pattern along rows or columns."""
    seed = torch.tensor(2**61 + 5)
    for p in (0.0, 0.1, 0.5, 0.999, 1.0):
        assert abs(float(keep(torch.empty(10**6), p, seed, 1).float().mean()) - (1 - p)) < 2e-3
    masks = [keep(torch.empty(500, 500), 0.5, s, rank) for s, rank in ((seed, 0), (seed, 1), (seed + 1, 0))]
    signs = torch.stack([mask.double().flatten() * 2 - 1 for mask in masks])
    noise = 500.0  # The sum of 250,000 independent signs.
    assert ((signs @ signs.T) - torch.eye(3) * 500 * 500).abs().max() < 4 * noise
    square = signs[0].view(500, 500)
    for neighbours in (square[1:] * square[:-1], square[:, 1:] * square[:, :-1]):
        assert neighbours.sum().abs() < 4 * noise
    assert torch.equal(masks[0], keep(torch.empty(500, 500), 0.5, seed, 0))


def test_own_stream_leaves_the_shared_stream_alike() -> None:
    """It takes as much from the shared stream on each rank, however much is drawn in it."""
    drawn, after = [], []
    for rank, count in ((0, 5), (1, 1000)):
        torch.manual_seed(0)
        with own_stream(torch.device("cpu"), rank):
            drawn.append(torch.rand(count)[:5])
        after.append(torch.rand(5))
    assert torch.equal(after[0], after[1]) and not torch.equal(drawn[0], drawn[1])


def attended(rank: int, device: str = "cpu", p: float = 0.5) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The result, the weights that were not dropped (scaled), and queries, keys and values."""
    given = [torch.ones(2, 4, 6, 6, dtype=torch.float64, device=device) for _ in range(2)]
    q, k = (x.requires_grad_() for x in given)
    v = torch.eye(6, dtype=torch.float64, device=device).expand(2, 4, 6, 6).clone().requires_grad_()
    out = fast_attention(q, k, v, None, p, False, None, False, rank)
    return out, out.detach() * 6, [q, k, v]


def test_attention_drops_other_weights_on_each_rank() -> None:
    weights = []
    for rank in (0, 0, 1):
        torch.manual_seed(3)
        out, kept, given = attended(rank)
        weights.append(kept)
        assert sorted(kept.unique().tolist()) == pytest.approx([0, 2])
        (grad,) = torch.autograd.grad(out.sum(), given[2])
        torch.testing.assert_close(grad.sum(-1), kept.sum(-2))  # Backward drops the same weights.
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_flash_attention_with_dropout_keeps_no_weights() -> None:
    """By the operator that torch calls there: its result, and 4 bytes a query; no weights of queries and keys."""
    q, k, v = (torch.empty(8, 2, 1024, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    kept = dict[int, int]()

    def note(x: Tensor) -> Tensor:
        kept[id(x.untyped_storage())] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.1, True)
    weights = 8 * 2 * 1024 * 1024
    assert (sum(kept.values()) - 3 * q.nbytes) / weights < 0.14  # The result itself is 0.125.


def test_recomputed_dropout_draws_the_same_masks() -> None:
    x = torch.ones(50, requires_grad=True)
    out = checkpoint(lambda x: fast_dropout(x, 0.5, 1) * x, x, use_reentrant=False)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, out.detach() * 2)


@checks.on(2)
def fast_dropout_on_cards_draws_from_its_own_stream(rank: int, n: int) -> None:
    """In a stream of its own, by one operator; while a CUDA graph is recorded, without anything of the host."""
    assert runs_at_once(torch.ones(1, device="cuda"))
    x = torch.ones(2000, device="cuda")
    recorded = patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
    with host_waits() as waits:
        masks = [fast_dropout(x, 0.5, r) for r in range(2)]
        after = torch.rand(3, device="cuda")
        with recorded:
            before = torch.get_rng_state()
            masks += [fast_dropout(x, 0.5, r) for r in (0, 1)]
            assert torch.equal(before, torch.get_rng_state())
    assert not waits.waits, waits
    for mask in masks:
        assert mask.unique().tolist() == [0, 2] and 0.4 < float(mask.mean()) / 2 < 0.6
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    torch.manual_seed(0)
    with own_stream(x.device, rank):
        mine = torch.rand(3 + rank, device="cuda")
    alike = torch.rand(3, device="cuda")
    every = [torch.empty_like(alike) for _ in range(2 * n)]
    torch.distributed.all_gather(every[:n], alike)
    torch.distributed.all_gather(every[n:], mine[:3].contiguous())
    assert torch.equal(every[0], every[1]) and not torch.equal(every[2], every[3])
    assert torch.equal(after, alike)  # The first numbers of this seed: masks took none of the card's shared stream.


@checks.on(1)
def attention_dropout_on_cards_has_the_same_weights_in_backward(rank: int, n: int) -> None:
    """By torch's own operator, with the same weights in backward; not where the host gives no stream."""
    with host_waits() as waits:
        out, kept, given = attended(0, "cuda")
        (grad,) = torch.autograd.grad(out.sum(), given[2])
    assert waits.count("attention that a flash kernel computes") == 1 and not waits.waits
    torch.testing.assert_close(grad.sum(-1), kept.sum(-2))
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True), host_waits() as waits:
        attended(0, "cuda")
    assert not waits.count("attention that") and not waits.waits


@pytest.mark.parametrize(("n", "name"), checks.cases())
def test_on_cards(n: int, name: str) -> None:
    checks.expect(n, name)
