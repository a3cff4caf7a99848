"""A head and its loss as one operator: what cross-entropy needs of the logits, computed in chunks of rows.

The logits of all rows are never in memory. There are two forms. `linear_class_terms` works on a part of the classes:
backward computes logits again, tile by tile, unless they are one chunk or the weight has no gradient.
`linear_loss_sum` has all classes, and so forward knows the gradients but for a number: it computes them from the same
logits.

NOTE [Sums of products in 16 bits]
A sum in bfloat16 stops growing after 256 equal terms, so products of many chunks cannot be added in it. Backward of
`linear_class_terms` adds in float32, and needs little memory, as it takes one block of classes at a time.
`linear_loss_sum` takes all classes of some rows at a time, and adds in 16 bits for at most `MOST` chunks. For more it
is computed by the first form: a second gradient of the weight, in float32, is too much memory.

Source: Wijmans et al. 2025, Cut Your Losses in Large-Vocabulary Language Models; Liger-Kernel's fused cross-entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotp.ops.async_linear import rows_of
from autotp.ops.eager_mode import is_kept, is_last_backward, is_plain
from autotp.ops.lookup import local_index
from autotp.ops.losses import chunks
from autotp.ops.losses.chunks import (
    at_class,
    differentiable,
    exponentiate,
    grad_of_product,
    logits_of,
    picked,
    row_chunks,
    slope_of,
    sums_of_tiles,
    without_class,
)
from autotp.ops.losses.linear_mixed_terms import LinearMixedTerms, Mix, terms_at_once

MOST = 16
"""The chunks whose products are added in 16 bits, as the gradients of so many calls are."""


def linear_class_terms(
    weight: Tensor,
    x: Tensor,
    classes: Tensor,
    start: int,
    size: int,
    scale: float = 1.0,
    cap: float = 0.0,
    bias: Tensor | None = None,
    own_part: float = 0.0,
    other_part: float = 0.0,
    other_weight: Tensor | None = None,
    other_x: Tensor | None = None,
    other_scale: float = 1.0,
    other_cap: float = 0.0,
    other_bias: Tensor | None = None,
) -> Tensor:
    """Returns the logarithm of the sum of exponentials of each row's logits, and the logit of its class.

    The logits are those of this rank's classes. So `reduce(terms, group, "logsumexp")` has the terms of all classes:
    another rank's term of the class's logit is minus infinity. They are in at least float32.

    With parts there are two terms more, of which entropies and divergences are made: `NOTE [A mean in two terms]`. The
    last one is the first of another head.

    Args:
        weight: [v hidden] of the classes `start` to `start + v`.
        x: [* hidden]
        classes: [*] the global class of each row.
        size: number of classes on all ranks together.
        scale: multiplies the logits, `x @ weight.T + bias`.
        cap: if not 0, it bounds the scaled logits: `cap * tanh(logits / cap)`.
        bias: [v]
        own_part, other_part: `d = own_part * logits + other_part * logits of another head` is what the mean is of.
        other_weight, other_x, other_scale, other_cap, other_bias: the other head, with the same classes and rows.

    Returns:
        [2 *]; [4 *] with parts, [5 *] with another head.
    """
    mix = Mix(own_part, other_part, other_weight, other_x, other_scale, other_cap, other_bias)
    if not _has_numbers(weight, x):
        return terms_at_once(weight, x, classes, start, size, scale, cap, bias, mix)
    if mix.is_empty:
        terms: Tensor = _LinearClassTerms.apply(weight, x, classes, start, size, scale, cap, bias)
    else:
        terms = LinearMixedTerms.apply(
            weight, x, bias, other_weight, other_x, other_bias, classes, (start, size, scale, cap), mix.numbers
        )
    return terms


def linear_loss_sum(
    weight: Tensor,
    x: Tensor,
    classes: Tensor,
    of_sum: Tensor,
    of_class: Tensor,
    scale: float = 1.0,
    cap: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns the sum over rows of `of_sum * terms[0] - of_class * terms[1]`; `terms` are those of all classes.

    Args:
        weight, x, classes, scale, cap, bias: as of `linear_class_terms`.
        of_sum, of_class: [*] how much of each term counts. They get no gradient. A row with 0 in both is not read.
    """
    if _has_numbers(weight, x):
        is_trained = torch.is_grad_enabled() and weight.requires_grad
        if is_trained and weight.dtype.itemsize < 4 and classes.numel() * len(weight) > MOST * chunks.CHUNK:
            return _difference(
                linear_class_terms(weight, x, classes, 0, len(weight), scale, cap, bias), of_sum, of_class
            )
        total: Tensor = _LinearLossSum.apply(weight, x, classes, of_sum, of_class, scale, cap, bias)
        return total
    return _sum_at_once(weight, x, classes, of_sum, of_class, scale, cap, bias)


def _has_numbers(weight: Tensor, x: Tensor) -> bool:
    """True outside of transforms and compilers, for tensors of known sizes: a loop over chunks can run."""
    return is_plain(x) and is_plain(weight) and all(isinstance(n, int) for n in (*x.shape, *weight.shape))


def linear_class_terms_like(weight: Tensor, x: Tensor, classes: Tensor, *more: Any) -> Tensor:
    """Returns an example value of `linear_class_terms`, without an assumption about sizes."""
    number = 5 if len(more) > 7 and more[7] is not None else 4 if any(more[5:7]) else 2
    return x.new_empty((number, *classes.shape), dtype=torch.promote_types(x.dtype, torch.float32))


def linear_loss_sum_like(weight: Tensor, x: Tensor, *_: Any) -> Tensor:
    """Returns an example value of `linear_loss_sum`, without an assumption about sizes."""
    return x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))


def _sum_at_once(
    weight: Tensor, x: Tensor, classes: Tensor, of_sum: Tensor, of_class: Tensor, scale: float, cap: float,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns `linear_loss_sum` by operators that can be differentiated again, mapped and compiled."""
    terms = terms_at_once(weight, x, classes, 0, weight.shape[0], scale, cap, bias)
    return _difference(terms, of_sum, of_class)


def _difference(terms: Tensor, of_sum: Tensor, of_class: Tensor) -> Tensor:
    return _weighted(terms[0], of_sum.detach()) - _weighted(terms[1], of_class.detach())


def _weighted(term: Tensor, weights: Tensor) -> Tensor:
    # A row that does not count may have any number, also infinity.
    return (term.masked_fill(weights == 0, 0) * weights).sum()


class _LinearClassTerms(torch.autograd.Function):
    """The terms, with gradients of `weight`, `x` and `bias` that are computed chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, classes: Tensor, start: int, size: int, scale: float, cap: float,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.where = start, size, scale, cap
        rows, index = rows_of(x), classes.reshape(-1)
        terms = x.new_empty((2, len(index)), dtype=torch.promote_types(x.dtype, torch.float32))
        in_one_chunk, all_probabilities, means = False, None, None
        if any(ctx.needs_input_grad) and not cap:  # The slope of tanh needs logits.
            if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[7]):
                means = rows.new_empty(rows.shape)
            elif len(rows) * len(weight) <= chunks.CHUNK:
                in_one_chunk = True
        for part in row_chunks(len(index), len(weight)):
            z = logits_of(rows[part], weight, bias, scale, cap)
            terms[1, part] = picked(z, index[part], start, size)
            terms[0, part] = exponentiate(z)
            if means is not None:
                torch.mm(without_class(z, index[part], start).to(weight.dtype), weight, out=means[part])
            all_probabilities = z if in_one_chunk else None
        ctx.save_for_backward(weight, x, classes, bias, terms, all_probabilities, means)
        return terms.view(2, *classes.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, classes, bias, terms, all_probabilities, means = ctx.saved_tensors
        start, _, scale, cap = ctx.where
        needed = [ctx.needs_input_grad[i] for i in (0, 1, 7)]
        if torch.is_grad_enabled():
            more = classes, start, ctx.where[1], scale, cap
            again = lambda weight, x, bias: terms_at_once(weight, x, *more, bias)  # noqa: E731
            return _spread(differentiable(again, grad, (weight, x, bias), needed), 5)
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        rows, index, grad = rows_of(x.detach()), classes.reshape(-1), grad.reshape(2, -1)
        if means is not None:
            of_x = _through_means(means, weight, index, start, terms, grad * scale).view(x.shape)
            return _spread((None, of_x, None), 5)
        if all_probabilities is not None and not _may_overwrite(grad):
            all_probabilities = all_probabilities.clone()

        def of_product(block: slice, part: slice) -> Tensor:
            slope, probabilities = None, None if all_probabilities is None else all_probabilities[part, block]
            if probabilities is None:
                with torch.enable_grad():  # As in forward: an estimate counts what is computed again by itself.
                    z = logits_of(rows[part], weight[block], None if bias is None else bias[block], scale, cap)
                slope = slope_of(z, cap)
                probabilities = z.sub_(terms[0, part, None]).exp_()
            g = probabilities.mul_(grad[0, part, None])
            return grad_of_product(at_class(g, index[part], start + block.start, grad[1, part]), slope, scale, x.dtype)

        of_weight, of_rows, of_bias = sums_of_tiles(weight, rows, needed, of_product)
        return _spread((of_weight, None if of_rows is None else of_rows.view(x.shape), of_bias), 5)


class _LinearLossSum(torch.autograd.Function):
    """The sum, with gradients that forward computes."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, classes: Tensor, of_sum: Tensor, of_class: Tensor, scale: float,
        cap: float, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.settings, ctx.needed = (scale, cap), [ctx.needs_input_grad[i] for i in (0, 1, 7)]
        rows, index, size = rows_of(x), classes.reshape(-1), len(weight)
        weights = of_sum.reshape(-1), of_class.reshape(-1)
        sums = _Gradients.of(weight, rows, bias, ctx.needed)
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for part in row_chunks(len(index), size):
            z, (of_sums, of_classes) = logits_of(rows[part], weight, bias, scale, cap), (w[part] for w in weights)
            total -= _weighted(picked(z, index[part], 0, size), of_classes)
            slope = slope_of(z, cap) if any(ctx.needed) else None
            total += _weighted(exponentiate(z), of_sums)
            if any(ctx.needed):
                g = at_class(z.mul_(of_sums[:, None]), index[part], 0, -of_classes)
                sums.add(part, grad_of_product(g, slope, scale, x.dtype))
        grads = sums.weight, None if sums.x is None else sums.x.view(x.shape), sums.bias
        ctx.save_for_backward(weight, x, classes, of_sum, of_class, bias, *grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, classes, of_sum, of_class, bias, *grads = ctx.saved_tensors
        if torch.is_grad_enabled():
            more = classes, of_sum, of_class, ctx.settings[0], ctx.settings[1]
            again = lambda weight, x, bias: _sum_at_once(weight, x, *more, bias)  # noqa: E731
            return _spread(differentiable(again, grad, (weight, x, bias), ctx.needed), 5)
        # Where no row counts, the divisor of a mean is 0 and `grad` infinite: no row gets a gradient all the same.
        nothing = ((of_sum == 0) & (of_class == 0)).all()
        # A number would be rounded to 16 bits first, and change all gradients by the same part.
        factor, is_last = grad.masked_fill(nothing, 0).view(1), _may_overwrite(grad)
        return _spread([None if y is None else (y if is_last else y.clone()).mul_(factor) for y in grads], 5)


def _may_overwrite(grad: Tensor) -> bool:
    """True in a backward after which nobody asks for what forward kept."""
    return is_last_backward() and not is_kept(grad)


def _spread(grads: Sequence[Tensor | None], between: int) -> tuple[Tensor | None, ...]:
    """Returns the gradients of weight, x and bias, with those of the arguments between x and bias."""
    return grads[0], grads[1], *[None] * between, grads[2]


def _through_means(means: Tensor, weight: Tensor, index: Tensor, start: int, terms: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient of the rows, where the weight has none.

    A probability near 1 is 1 in 16 bits, and 1 is subtracted from that of the class: this is done in float32.

    Args:
        means: [rows hidden] the sum over classes, without the row's own, of the weight's rows times probabilities.
        terms: [2 rows]
        grad: [2 rows] the gradient of the terms.
    """
    result = means * grad[0, :, None]
    if len(weight):
        local, outside = local_index(index, start, len(weight))
        of_class = torch.addcmul(grad[1], grad[0], (terms[1] - terms[0]).exp())
        result.addcmul_(weight[local], of_class.masked_fill(outside, 0)[:, None])
    return result.to(means.dtype)


@dataclass(frozen=True)
class _Gradients:
    """The gradients, to which each chunk of rows adds its part in their dtype; None for one that nobody wants.

    Attributes:
        operands: weight, [v hidden], and the rows, [rows hidden].
    """

    operands: tuple[Tensor, Tensor]
    weight: Tensor | None
    x: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(weight: Tensor, rows: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> _Gradients:
        """Returns zeros."""
        return _Gradients(
            operands=(weight, rows),
            weight=weight.new_zeros(weight.shape) if needed[0] else None,
            x=rows.new_empty(rows.shape) if needed[1] else None,
            bias=torch.zeros_like(bias) if needed[2] and bias is not None else None,
        )

    def add(self, part: slice, g: Tensor) -> None:
        """Adds the gradients of a chunk. g: [rows v] that of its products"""
        weight, rows = self.operands
        if self.x is not None:
            torch.mm(g, weight, out=self.x[part])
        if self.weight is not None:
            self.weight.addmm_(g.t(), rows[part])
        if self.bias is not None:
            self.bias.add_(g.sum(0))
