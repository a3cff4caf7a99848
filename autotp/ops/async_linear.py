"""async_linear: linears that read one value, with its conjugate: in backward its all-reduce is asynchronous.

Several column-parallel products of one input (queries, keys and values; gate and up) are one operator here. In backward
the input's gradient is summed over ranks while the weights' gradients are computed. An input that was gathered is not
kept, but gathered again while the input's gradient is computed.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.

NOTE [Who takes a gradient] The autograd function that made an operand may take over what backward does with the
operand's gradient, by an attribute of its node: `start_gradient(gradient, group, fresh=True)` starts the sum of the
input's gradient over the ranks, which the node waits for; `add_to_gradient(a, b)` adds a product to the gradient of a
weight, which the node returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autotp.groups.process_group import seat
from autotp.ops.collectives import all_gather, copy, reduce, reduce_scatter, start_gather, start_sum
from autotp.ops.eager_mode import apply_plain, is_kept, no_transform, waits_now

Gathered = tuple[int, Any, int] | None
"""Dimension, global length and block for the `all_gather` of the input; None: the input is read through `copy`."""


def async_linear(
    x: Tensor,
    group: str | None,
    gathered: Gathered,
    flattened: tuple[int, int] | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    turned: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Returns `products` of `copy(x)`, or of `all_gather(x)`. x: [... hidden]

    Under transforms it calls these functions.
    """
    if group is None or not torch.is_grad_enabled() or seat(group)[1] == 1:
        return separate_products(x, group, gathered, flattened, weights, biases, turned)
    if no_transform(x, *weights):
        outputs: tuple[Tensor, ...] = apply_plain(AsyncLinear, group, gathered, flattened, turned, x, *weights, *biases)
        return outputs
    if torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        outputs = CompiledLinear.apply(group, gathered, flattened, turned, x, *weights, *biases)
        return outputs[: len(turned)]
    return separate_products(x, group, gathered, flattened, weights, biases, turned)


def separate_products(
    x: Tensor,
    group: str | None,
    gathered: Gathered,
    flattened: tuple[int, int] | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    turned: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Returns the same by operators of their own: in backward the products come first, and then the collective."""
    whole = copy(x, group) if gathered is None else all_gather(x, group, *gathered)
    return products(whole, flattened, weights, biases, turned)


def products(
    x: Tensor,
    flattened: tuple[int, int] | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    turned: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Returns `x` times each weight, plus its bias if there is one. x: [... hidden] -> [... out] each

    Args:
        flattened: first and last of the dimensions of `x` that are flattened before.
        weights: [out hidden] each, or [hidden out] where `turned`.
    """
    rows = x if flattened is None else x.flatten(*flattened)
    every = zip(weights, biases, turned, strict=True)
    return tuple([  # (`F.linear` with a bias is an `addmm`, and would turn the weight again.)
        torch.addmm(bias, rows, w) if turn and bias is not None and rows.dim() == 2
        else F.linear(rows, w.t() if turn else w, bias)
        for w, bias, turn in every
    ])  # fmt: skip


class CompiledLinear(torch.autograd.Function):
    """The products in compiled code, with a backward in the order of `AsyncLinear`'s.

    NOTE [Overlap in compiled code] torch traces the order in which backward starts a collective, computes, and waits;
    its Inductor most often keeps it. Operators that torch differentiates by itself do not overlap: all products come
    before the collective. An input that was gathered is kept here, as a further result: the compiler decides what is
    computed again.
    """

    @staticmethod
    def forward(
        group: str, gathered: Gathered, flattened: Any, turned: tuple[bool, ...], x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        whole, n = () if gathered is None else (start_gather(x, group, *gathered)(),), len(turned)
        return *products(whole[0] if whole else x, flattened, parameters[:n], parameters[n:], turned), *whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        ctx.group, ctx.gathered, ctx.flattened, ctx.turned = inputs[:4]
        ctx.adds = [None] * len(ctx.turned)
        ctx.save_for_backward(inputs[4] if ctx.gathered is None else outputs[-1], *inputs[5 : 5 + len(ctx.turned)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        whole, *weights = ctx.saved_tensors
        rows = [rows_of(grad) for grad in grads[: len(weights)]]
        sent = None
        if ctx.needs_input_grad[4]:
            sent = start_sum(_input_gradient(ctx, whole, whole.shape, weights, rows), ctx.group, ctx.gathered)
        rest = _other_gradients(ctx, whole, rows)
        return None, None, None, None, None if sent is None else sent(), *rest


class AsyncLinear(torch.autograd.Function):
    """The products, with a backward that communicates and computes at the same time."""

    @staticmethod
    def forward(
        group: str, gathered: Gathered, flattened: Any, turned: tuple[bool, ...], x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        whole = x if gathered is None else start_gather(x, group, *gathered)()
        n = len(turned)
        return products(whole, flattened, parameters[:n], parameters[n:], turned)  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.group, ctx.gathered, ctx.flattened, ctx.turned, x = inputs[:5]
        # (Names of their own: an operand may be the result of an AsyncLinear.)
        ctx.start = _taken_over(x, "start_gradient") if ctx.gathered is None else None
        weights = inputs[5 : 5 + len(ctx.turned)]
        ctx.adds = [_taken_over(w, "add_to_gradient") for w in weights]
        ctx.save_for_backward(x, *weights)
        # A product that nothing read has None for a gradient, and its products in backward are left out.
        ctx.materialize_grads = False

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        plain = not torch.is_grad_enabled() and no_transform(*[grad for grad in grads if grad is not None])
        gradients = _overlapped if plain else _differentiable
        with torch._C.DisableTorchFunctionSubclass():  # No warnings about parts inside.
            input_grads = gradients(ctx, x, weights, [None if grad is None else rows_of(grad) for grad in grads])
        return None, None, None, None, *input_grads


def _taken_over(x: Tensor, name: str) -> Any:
    """Returns an attribute of the node that made `x`: NOTE [Who takes a gradient]; None if it has none."""
    return getattr(x.grad_fn, name, None)


def _overlapped(ctx: Any, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Any]:
    """Returns the gradients of input, weights and biases; sums the first over ranks while computing the others."""
    again = sent = None
    if ctx.gathered is not None and any(ctx.needs_input_grad[5 : 5 + len(weights)]):
        # Only the weights' gradients read the whole input. The gather runs while the input's gradient is computed.
        again = start_gather(x, ctx.group, *ctx.gathered)
    total = _input_gradient(ctx, x, _whole_shape(ctx, x), weights, grads) if ctx.needs_input_grad[4] else None
    if total is not None and ctx.start is not None and not waits_now():
        return [ctx.start(total, ctx.group, fresh=True), *_other_gradients(ctx, x, grads)]
    if total is not None:
        sent = start_sum(total, ctx.group, ctx.gathered)
    rest = _other_gradients(ctx, x if again is None else again(), grads)
    return [None if sent is None else sent(), *rest]


def _differentiable(ctx: Any, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Any]:
    """Returns the same gradients by operators that can be differentiated again."""
    whole = copy(x, ctx.group) if ctx.gathered is None else all_gather(x, ctx.group, *ctx.gathered)
    total = _input_gradient(ctx, x, _whole_shape(ctx, x), weights, grads)
    total = reduce(total, ctx.group) if ctx.gathered is None else reduce_scatter(total, ctx.group, *ctx.gathered)
    return [total, *_other_gradients(ctx, whole, grads)]


def _whole_shape(ctx: Any, x: Tensor) -> Sequence[int]:
    if ctx.gathered is None:
        return x.shape
    shape = list(x.shape)
    shape[ctx.gathered[0]] = int(ctx.gathered[1])
    return shape


def _input_gradient(
    ctx: Any, x: Tensor, shape: Sequence[int], weights: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Tensor:
    """Returns the input's gradient, summed over the products, in new memory.

    It is zeros if all are None here: another rank may have one (see NOTE [A gradient that some ranks lack]).

    grads: [rows out] each -> [... hidden], `shape`, which is that of the whole input
    """
    total: Tensor | None = None
    for w, grad, turn in zip(weights, grads, ctx.turned, strict=True):
        if grad is not None:
            matrix = w.t() if turn else w
            if total is None:
                # A new tensor: `start_sum` overwrites it.
                total = grad.mm(matrix)
            else:
                total = total.addmm(grad, matrix) if _is_read_later(total) else total.addmm_(grad, matrix)
    return x.new_zeros(shape) if total is None else total.view(shape)


def rows_of(x: Tensor) -> Tensor:
    """Flattens all dimensions but the last, without -1, which is ambiguous for an empty shard."""
    if x.dim() == 2:
        return x
    if x.numel():
        return x.reshape(-1, x.shape[-1])
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # Not `flatten`: gradients that torch batches have no rule.


def _is_read_later(total: Tensor) -> bool:
    """True if other code may keep this sum of products."""
    return torch.compiler.is_compiling() or torch.is_grad_enabled() or is_kept(total)


def _other_gradients(ctx: Any, whole: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the gradients of the weights, then of the biases. grads: [rows out] each"""
    # If the flattening ends before the last dimension, flattening all but the last gives the rows of the gradients.
    into_rows = ctx.flattened is None or ctx.flattened[1] in (-2, whole.dim() - 2)
    rows = rows_of(whole if into_rows else whole.flatten(*ctx.flattened))
    n, needed = len(grads), ctx.needs_input_grad[5:]
    result: list[Tensor | None] = [None] * (2 * n)
    for i, grad in enumerate(grads):
        if grad is not None:
            if needed[i]:
                a, b = (rows.t(), grad) if ctx.turned[i] else (grad.t(), rows)
                if ctx.adds[i] is None or torch.is_grad_enabled():
                    result[i] = a.mm(b)
                else:
                    ctx.adds[i](a, b)
            if needed[n + i]:
                result[n + i] = grad.sum(0)
    return result
