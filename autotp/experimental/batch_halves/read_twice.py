"""Weights that the products of both halves read: their gradients are summed in one memory.

NOTE [Gradients of two halves] Autograd adds the gradients that a weight has from both halves: it reads both, and writes
a third. Here the product that has its backward last adds its own gradient into the memory of the first, while it
computes it (`addmm`). `ReadTwice` stands above both products in backward: it runs after them, and hands the sum on. A
product whose gradient others may still read (a backward that is differentiated, for example) returns its gradient to
autograd as usual, and `ReadTwice` adds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autotp.ops.async_linear import rows_of
from autotp.ops.eager_mode import apply_plain, is_kept, is_plain, no_transform


def read_twice(w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight for the products of the first and of the second half. w: [...] -> [...] each"""
    if not (torch.is_grad_enabled() and no_transform(w) and w.requires_grad) or w.is_complex():
        return w, w
    read: tuple[Tensor, Tensor] = apply_plain(ReadTwice, w)
    return read


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `F.linear`; the gradient of a weight from `read_twice` is summed with that of the other half.

    Args:
        x: [... in]
        w: [out in]
        bias: [out]

    Returns:
        [... out]
    """
    total = sum_of(w) if torch.is_grad_enabled() and no_transform(x) else None
    if total is None:
        return F.linear(x, w, bias)
    output: Tensor = apply_plain(HalfLinear, total, x, w, bias)
    return output


class Sum:
    """The sum of a weight's gradients.

    Attributes:
        values: run of backward -> what its products have added up to now. (A backward may run inside of another, and
            one that ends in an error leaves its sum here.)
    """

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}

    def add(self, a: Tensor, b: Tensor) -> None:
        """Adds the product of two matrices. a: [out rows], b: [rows in]"""
        run = torch._C._current_graph_task_id()
        value = self.values.get(run)
        if value is None:
            self.values[run] = a.mm(b)
        elif is_kept(value):
            self.values[run] = value.addmm(a, b)
        else:
            value.addmm_(a, b)

    def take(self) -> Tensor | None:
        """Returns the sum of this run of backward, and forgets it."""
        return self.values.pop(torch._C._current_graph_task_id(), None)


def sum_of(w: Tensor) -> Sum | None:
    """Returns where the gradient of a weight from `read_twice` is summed; None for other weights."""
    # autograd makes a class of its own for the nodes of a Function, and `grad_fn` is an instance of that.
    made_by, its_class = w.grad_fn, ReadTwice._backward_cls  # type: Any, Any
    return made_by.total if made_by is not None and isinstance(made_by, its_class) else None


class ReadTwice(torch.autograd.Function):
    """The identity, for two readers."""

    @staticmethod
    def forward(w: Tensor) -> tuple[Tensor, Tensor]:
        return w.view_as(w), w.view_as(w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], _: Any) -> None:
        ctx.total = Sum()
        ctx.add_to_gradient = ctx.total.add  # NOTE [Who takes a gradient] in `async_linear.py`
        # None says that a product has added its gradient to `total` itself.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        total: Tensor | None = ctx.total.take()
        for grad in grads:
            total = grad if total is None else total if grad is None else total + grad
        return total


class HalfLinear(torch.autograd.Function):
    """`F.linear` of one half."""

    @staticmethod
    def forward(total: Sum, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.total = inputs[0]
        ctx.save_for_backward(*inputs[1:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        _, for_x, for_w, for_bias = ctx.needs_input_grad
        of_x = of_w = of_bias = None
        if for_x:
            of_x = grad.matmul(w)
        rows = rows_of(grad)
        if for_w:
            columns = rows_of(x)
            if torch.is_grad_enabled() or not is_plain(grad):
                of_w = rows.t().mm(columns)
            else:
                ctx.total.add(rows.t(), columns)
        if for_bias:
            of_bias = rows.sum(0)
        return None, of_x, of_w, of_bias
