"""The parallel forms: what ranks compute of their parts, put together, is the operator on the whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from autotp.ops.cross_entropy import class_terms, peak
from autotp.ops.dropout import fast_dropout
from autotp.ops.lookup import embedding, gather
from autotp.sharding.partition import chunk_bounds

ROWS, CLASSES, TP = 6, 7, (1, 2, 3, 8)  # on 8 ranks the last one has no class
TARGETS = torch.tensor([0, 6, 3, 3, 2, 5])

over_ranks = pytest.mark.parametrize("tp", TP, ids=lambda tp: f"tp{tp}")


def parts(x: Tensor, tp: int, dim: int = 0) -> list[tuple[int, Tensor]]:
    """Where each rank's part starts, and the part."""
    bounds = [chunk_bounds(x.shape[dim], tp, rank) for rank in range(tp)]
    return [(a, x.narrow(dim, a, b - a)) for a, b in bounds]


def logits(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, CLASSES, dtype=torch.float64).mul(30).to(dtype).requires_grad_()


def loss(x: Tensor, targets: Tensor, tp: int, fresh: bool = False) -> Tensor:
    """Cross-entropy from the ranks' terms, the reductions by hand."""
    top = torch.stack([peak(part, 1) for _, part in parts(x, tp, 1)]).amax(0)
    mine = [(start, part.clone() if fresh else part) for start, part in parts(x, tp, 1)]
    total, picked = sum(class_terms(part, top, targets, 1, start, CLASSES, fresh) for start, part in mine)
    return (total.log() - picked).mean()


@over_ranks
def test_class_terms(tp: int) -> None:
    x = logits()
    found, expected = loss(x, TARGETS, tp), F.cross_entropy(x, TARGETS)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    (mine,), (theirs,) = (torch.autograd.grad(value, x) for value in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-16)


@over_ranks
def test_class_terms_in_place(tp: int) -> None:
    """In the logits' memory, and in the last backward only: whoever retains the graph gets the same twice."""
    x = logits()
    found = loss(x, TARGETS, tp, fresh=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(x, TARGETS), x)
    for retain in (True, True, False):
        (grad,) = torch.autograd.grad(found, x, retain_graph=retain)
        torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-16)


def test_class_terms_take_memory_only_where_they_may() -> None:
    x = logits().clone()
    before, top = x.detach().clone(), peak(x, 1)
    class_terms(x, top, TARGETS, 1, 0, CLASSES)
    torch.func.vmap(lambda x, t: class_terms(x[None], t[None], TARGETS[:1], 1, 0, CLASSES, fresh=True))(x, top)
    assert torch.equal(x, before)
    class_terms(x, top, TARGETS, 1, 0, CLASSES, fresh=True)
    assert torch.equal(x, (before - top).exp())


@over_ranks
def test_class_terms_differentiated_again(tp: int) -> None:
    x = (logits() / 30).detach().requires_grad_()
    direction = torch.randn_like(x)

    def curvature(f) -> Tensor:
        (grad,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad((grad * direction).sum(), x)[0]

    mine, theirs = curvature(lambda x: loss(x, TARGETS, tp)), curvature(lambda x: F.cross_entropy(x, TARGETS))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)


@over_ranks
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, at its first jvp
def test_class_terms_forward_mode(tp: int) -> None:
    x = logits().detach()
    direction = torch.randn_like(x)
    mine, theirs = (
        torch.func.jvp(f, (x,), (direction,))
        for f in (lambda x: loss(x, TARGETS, tp), lambda x: F.cross_entropy(x, TARGETS))
    )
    torch.testing.assert_close(mine, theirs)
    with forward_ad.dual_level():
        dual = loss(forward_ad.make_dual(x, direction), TARGETS, tp, fresh=True)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, theirs[1])


@over_ranks
def test_class_terms_of_each_sample(tp: int) -> None:
    """vmap(grad), over logits and targets, and over targets alone; and a batch of gradients."""
    x = logits().detach()
    each = torch.func.vmap(torch.func.grad(lambda x, t, tp=tp: loss(x[None], t[None], tp)))
    expected = torch.stack([torch.func.grad(F.cross_entropy)(x[i : i + 1], TARGETS[i : i + 1])[0] for i in range(ROWS)])
    torch.testing.assert_close(each(x, TARGETS), expected)
    shared = torch.func.vmap(torch.func.grad(lambda x, t: loss(x, t[None], tp)), in_dims=(None, 0))
    expected = torch.stack([torch.func.grad(F.cross_entropy)(x[:1], TARGETS[i : i + 1]) for i in range(ROWS)])
    torch.testing.assert_close(shared(x[:1], TARGETS), expected)
    x.requires_grad_()
    batch = torch.randn(4, dtype=x.dtype)
    (mine,) = torch.autograd.grad(loss(x, TARGETS, tp), x, batch, is_grads_batched=True)
    (theirs,) = torch.autograd.grad(F.cross_entropy(x, TARGETS), x, batch, is_grads_batched=True)
    torch.testing.assert_close(mine, theirs)


def test_class_terms_of_half_precision_are_float32() -> None:
    x = logits(torch.bfloat16)
    top = peak(x, 1).float()
    terms = class_terms(x, top, TARGETS, 1, 0, CLASSES)
    assert terms.dtype == torch.float32
    torch.testing.assert_close(terms[0], (x.float() - top).exp().sum(1))
    terms.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


@over_ranks
def test_lookups(tp: int) -> None:
    table, x = torch.randn(CLASSES, 3), logits().detach()
    rows = sum(embedding(part, TARGETS, start, CLASSES) for start, part in parts(table, tp))
    torch.testing.assert_close(rows, table[TARGETS], rtol=0, atol=0)
    index = TARGETS[:, None]
    picked = sum(gather(part, 1, index, start, CLASSES) for start, part in parts(x, tp, 1))
    torch.testing.assert_close(picked, x.gather(1, index), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [-1, CLASSES, CLASSES + 4])
def test_what_no_rank_has_is_an_error(wrong: int) -> None:
    """As on one device: it must not pass for what another rank has."""
    index, x = torch.tensor([0, wrong]), logits().detach()[:2]
    message = f"an index is out of range: not from 0 to {CLASSES - 1}"
    for call in (
        lambda: embedding(x.T[:3], index, 0, CLASSES),
        lambda: gather(x[:, :3], 1, index[:, None], 0, CLASSES),
        lambda: class_terms(x[:, :3], peak(x, 1), index, 1, 0, CLASSES),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


# ---- dropout, each rank by itself


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
