"""lookup: what ranks look up in their parts, put together, is what is looked up in the whole."""

import pytest
import torch
from torch import Tensor

from autotp.ops.lookup import embedding, gather, tied_embedding
from autotp.sharding.partition import chunk_bounds

ROWS, CLASSES = 6, 7
INDEX = torch.tensor([0, 6, 3, 3, 2, 5])


def parts(x: Tensor, tp: int, dim: int = 0) -> list[tuple[int, Tensor]]:
    """Where each rank's part starts, and the part."""
    bounds = [chunk_bounds(x.shape[dim], tp, rank) for rank in range(tp)]
    return [(a, x.narrow(dim, a, b - a)) for a, b in bounds]


@pytest.mark.parametrize("tp", (1, 2, 3, 8), ids=lambda tp: f"tp{tp}")  # On 8 ranks the last one has no class.
def test_lookups_in_parts_sum_to_the_whole(tp: int) -> None:
    table, x = torch.randn(CLASSES, 3), torch.randn(ROWS, CLASSES)
    rows = sum(embedding(part, INDEX, start, CLASSES) for start, part in parts(table, tp))
    torch.testing.assert_close(rows, table[INDEX], rtol=0, atol=0)
    index = INDEX[:, None]
    picked = sum(gather(part, 1, index, start, CLASSES) for start, part in parts(x, tp, 1))
    torch.testing.assert_close(picked, x.gather(1, index), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [-1, CLASSES, CLASSES + 4])
def test_lookups_refuse_an_index_out_of_range(wrong: int) -> None:
    """As on one device: it must not pass for what another rank has."""
    index, x = torch.tensor([0, wrong]), torch.randn(2, CLASSES)
    message = f"an index is out of range: not from 0 to {CLASSES - 1}"
    for call in (
        lambda: embedding(x.T[:3], index, 0, CLASSES),
        lambda: gather(x[:, :3], 1, index[:, None], 0, CLASSES),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


TIED = torch.tensor([[0, 6, 3, 3], [2, 5, 3, 0]])


def tied_loss(weight: Tensor, x: Tensor, start: int = 0, padding_idx: int = -1, tied: bool = True) -> Tensor:
    """A loss of looked-up rows and of a head with the same part of a table."""
    if tied:
        rows, table = tied_embedding(weight, TIED, start, CLASSES, padding_idx)
    else:
        rows, table = embedding(weight, TIED, start, CLASSES, padding_idx), weight
    return (torch.linspace(1, 2, 8, dtype=x.dtype).view(2, 4, 1) * rows).sin().sum() + (x @ table.T).cos().sum()


@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_tied_table_has_the_sum_of_both_gradients(tp: int, padding_idx: int, dtype: torch.dtype) -> None:
    """Bit for bit: each row of the head's gradient gets the sum of the rows that were looked up."""
    x = torch.randn(5, 3, dtype=dtype)
    for start, part in parts(torch.randn(CLASSES, 3, dtype=dtype), tp):
        grads = []
        for tied in (True, False):
            leaf = part.clone().requires_grad_()
            tied_loss(leaf, x, start, padding_idx, tied).backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)


def test_a_tied_table_adds_rows_to_the_gradient_of_the_head_in_place() -> None:
    weight, made = torch.randn(CLASSES, 3, requires_grad=True), []
    rows, table = tied_embedding(weight, TIED, 0, CLASSES)
    product = torch.randn(5, 3) @ table.T
    table.register_hook(lambda grad: made.append(grad.data_ptr()))
    (rows.sum() + product.sum()).backward()
    assert weight.grad is not None and made == [weight.grad.data_ptr()]


def test_a_tied_table_is_differentiated_as_two_tensors() -> None:
    """Twice, mapped, again over a kept graph, and through one of the two results alone."""
    weight, x = torch.randn(CLASSES, 3).double().requires_grad_(), torch.randn(5, 3).double()
    assert torch.autograd.gradcheck(lambda w: tied_loss(w, x), weight)
    assert torch.autograd.gradgradcheck(lambda w: tied_loss(w, x), weight)
    expected = torch.autograd.grad(tied_loss(weight, x, tied=False), weight)[0]
    torch.testing.assert_close(torch.func.grad(tied_loss)(weight.detach(), x), expected)
    mapped = torch.func.vmap(torch.func.grad(tied_loss), (None, 0))(weight.detach(), torch.stack([x, x]))
    torch.testing.assert_close(mapped, torch.stack([expected, expected]))
    loss = tied_loss(weight, x)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(loss, weight, retain_graph=True)[0], expected)
    rows, table = tied_embedding(weight, TIED, 0, CLASSES)
    for result, alone in ((rows, embedding(weight, TIED, 0, CLASSES)), (table, weight)):
        ours, theirs = (torch.autograd.grad(y.sin().sum(), weight)[0] for y in (result, alone))
        assert torch.equal(ours, theirs)


def test_a_tied_table_looks_up_nothing() -> None:
    weight = torch.randn(CLASSES, 3, requires_grad=True)
    rows, table = tied_embedding(weight, TIED[:0].int(), 0, CLASSES)
    (rows.sum() + (table * 2).sum()).backward()
    assert rows.shape == (0, 4, 3) and torch.equal(weight.grad, torch.full_like(weight, 2))  # type: ignore[arg-type]
