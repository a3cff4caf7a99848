"""read_twice: gradients of a weight that two halves read are those of autograd, in every way of differentiating."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autotp.experimental.batch_halves.read_twice import linear, read_twice

X = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Products = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(weight, bias, x of both halves) -> a scalar"""


def parameters(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    w, b = torch.randn(6, 5, generator=made, dtype=dtype), torch.randn(6, generator=made, dtype=dtype)
    return w.requires_grad_(), b.requires_grad_()


def in_halves(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    w0, w1 = read_twice(w)
    return linear(x[0], w0, b).sin().sum() + linear(x[1], w1, b).exp().sum()


def plainly(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return F.linear(x[0], w, b).sin().sum() + F.linear(x[1], w, b).exp().sum()


def gradients(products: Products, x: Tensor = X, **given: Any) -> list[Tensor]:
    w, b = parameters(x.dtype)
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(products(w, b, x), (w, b, x), **given))


same = torch.testing.assert_close


def test_read_twice_has_autograd_s_first_and_second_derivatives() -> None:
    same(gradients(in_halves), gradients(plainly))
    for create in (False, True):
        found, expected = (gradients(f, create_graph=create) for f in (in_halves, plainly))
        same(found, expected)
    w, b = parameters()
    second = []
    for f in (in_halves, plainly):
        (first,) = torch.autograd.grad(f(w, b, X), w, create_graph=True)
        second += [torch.autograd.grad(first.square().sum(), (w, b))]
    same(*second)


def test_read_twice_in_float32_and_without_rows() -> None:
    same(gradients(in_halves, X.float()), gradients(plainly, X.float()))
    for empty in (X[:, :0], X[:, :, :0]):
        same(gradients(in_halves, empty), gradients(plainly, empty))
    for sizes in ((6, 0), (0, 5)):  # A rank without a share.
        found = []
        for f in (in_halves, plainly):
            w, b = torch.zeros(sizes, dtype=X.dtype, requires_grad=True), torch.zeros(sizes[0], dtype=X.dtype)
            found.append(torch.autograd.grad(f(w, b, X[..., : sizes[1]]), w))
        same(*found)


def test_read_twice_where_one_half_or_input_is_used() -> None:
    w, b = parameters()
    for half in (0, 1):
        read = read_twice(w)
        (found,) = torch.autograd.grad(linear(X[half], read[half], b).sin().sum(), w)
        same(found, torch.autograd.grad(F.linear(X[half], w, b).sin().sum(), w)[0])
    x = X.clone().requires_grad_()
    loss = in_halves(w, b, x)
    same(torch.autograd.grad(loss, x, retain_graph=True), torch.autograd.grad(plainly(w, b, x), x))
    same(torch.autograd.grad(loss, w, retain_graph=True), torch.autograd.grad(plainly(w, b, x), w))
    same(torch.autograd.grad(loss, w), torch.autograd.grad(plainly(w, b, x), w))


def test_read_twice_accumulates_beside_a_third_reader() -> None:
    """As of a tied head: the embedding reads the weight itself."""
    found = []
    for f in (in_halves, plainly):
        w, b = parameters()
        for _ in range(3):
            (f(w, b, X) + w.cos().sum()).backward()
        found.append((w.grad, b.grad))
    same(*found)


def test_read_twice_of_a_frozen_weight_is_the_weight() -> None:
    w, b = parameters()
    frozen = w.detach()
    assert read_twice(frozen)[0] is frozen and read_twice(frozen)[1] is frozen
    with torch.no_grad():
        assert read_twice(w)[0] is w and not linear(X[0], w, b).requires_grad
    found = torch.autograd.grad(in_halves(frozen, b, X), b)
    same(found, torch.autograd.grad(plainly(frozen, b, X), b))


def test_read_twice_leaves_nothing_after_a_failed_backward() -> None:
    w, b = parameters()
    w0, w1 = read_twice(w)
    first, second = linear(X[0], w0, b), linear(X[1], w1, b)
    loss = first.sin().sum() + second.exp().sum()
    handle = first.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()
    w.grad = b.grad = None
    loss.backward()
    same(w.grad, torch.autograd.grad(plainly(w, b, X), w)[0])


def test_read_twice_under_transforms_and_checkpoint() -> None:
    w, b = (x.detach() for x in parameters())
    of_a_transform = torch.func.grad(in_halves)
    for gradient in (of_a_transform, torch.func.jacrev(in_halves), torch.compile(of_a_transform, backend="eager")):
        same(gradient(w, b, X), torch.func.grad(plainly)(w, b, X))
    batch = torch.stack([w, 2 * w])
    found = [torch.vmap(torch.func.grad(f), (0, None, None))(batch, b, X) for f in (in_halves, plainly)]
    same(*found)
    same(*(torch.func.jvp(lambda w, f=f: f(w, b, X), (w,), (w,)) for f in (in_halves, plainly)))
    for reentrant in (False, True):
        again = lambda w, b, x, way=reentrant: checkpoint(in_halves, w, b, x, use_reentrant=way)  # noqa: E731
        if not reentrant:
            same(gradients(again), gradients(plainly))
        w, b = parameters()
        again(w, b, X).backward()
        same(w.grad, torch.autograd.grad(plainly(w, b, X), w)[0])
    compiled = torch.compile(in_halves, backend="aot_eager", fullgraph=True)
    same(gradients(compiled), gradients(plainly))


class Counted(TorchDispatchMode):
    """Counts operators. It keeps no tensor, so others may write into theirs."""

    keeps_no_tensor = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op._schema.name)
        return op(*args, **(kwargs or {}))


class Kept(Counted):
    """Keeps what operators return, so nothing may write into it."""

    keeps_no_tensor = False


@pytest.mark.parametrize(("mode", "adds"), [(Counted, "aten::addmm_"), (Kept, "aten::addmm")])
def test_read_twice_adds_the_second_product_into_the_first(mode: type[Counted], adds: str) -> None:
    w, b = parameters()
    for f, sums in ((in_halves, 0), (plainly, 1)):
        loss = f(w, b.detach(), X)
        with mode() as counted:
            (grad,) = torch.autograd.grad(loss, w)
        assert counted.seen.count("aten::add") + counted.seen.count("aten::add_") == sums
        assert counted.seen.count(adds) == 1 - sums
        assert grad.is_contiguous()


def test_read_twice_leaves_complex_weights_to_autograd() -> None:
    w = torch.randn(6, 5, dtype=torch.complex128, requires_grad=True)
    assert read_twice(w)[0] is w
