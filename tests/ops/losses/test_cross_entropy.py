"""cross_entropy: what ranks compute of their classes, put together, is the loss of the whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from autotp.ops.losses.cross_entropy import class_terms, peak
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
def test_class_terms_give_cross_entropy_and_its_gradient(tp: int) -> None:
    x = logits()
    found, expected = loss(x, TARGETS, tp), F.cross_entropy(x, TARGETS)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    (mine,), (theirs,) = (torch.autograd.grad(value, x) for value in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-16)


@over_ranks
def test_class_terms_overwrite_logits_in_the_last_backward_only(tp: int) -> None:
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
def test_class_terms_have_second_derivatives(tp: int) -> None:
    x = (logits() / 30).detach().requires_grad_()
    direction = torch.randn_like(x)

    def curvature(f) -> Tensor:
        (grad,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad((grad * direction).sum(), x)[0]

    mine, theirs = curvature(lambda x: loss(x, TARGETS, tp)), curvature(lambda x: F.cross_entropy(x, TARGETS))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)


@over_ranks
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, at its first jvp
def test_class_terms_have_forward_mode_derivatives(tp: int) -> None:
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
def test_class_terms_under_vmap_give_per_sample_gradients(tp: int) -> None:
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


@pytest.mark.parametrize("wrong", [-1, CLASSES, CLASSES + 4])
def test_class_terms_refuse_a_class_out_of_range(wrong: int) -> None:
    """As on one device: it must not pass for what another rank has."""
    x = logits().detach()[:2]
    with pytest.raises(RuntimeError, match=f"an index is out of range: not from 0 to {CLASSES - 1}"):
        class_terms(x[:, :3], peak(x, 1), torch.tensor([0, wrong]), 1, 0, CLASSES)
