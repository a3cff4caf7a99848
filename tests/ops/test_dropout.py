"""dropout: each rank drops by itself, from a stream that all of them share."""

import pytest
import torch
from torch import Tensor

from autotp.ops.dropout import exact_dropout, fast_dropout


def test_fast_dropout() -> None:
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

    torch.manual_seed(0)
    found = slope(x)
    torch.manual_seed(0)
    assert torch.equal(found, fast_dropout(x, 0.5, 1))
    first, second, _ = torch.func.vmap(slope, randomness="same")(x)
    assert torch.equal(first, second) and first.unique().tolist() == [0, 2]
    for f in (slope, lambda _: fast_dropout(torch.ones(40), 0.5, 1)):
        rows = torch.func.vmap(f, randomness="different")(x)
        assert not torch.equal(rows[0], rows[1]) and rows.unique().tolist() == [0, 2]
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(slope)(x)
