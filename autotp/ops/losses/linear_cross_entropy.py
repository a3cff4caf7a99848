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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.async_linear import rows_of
from autotp.ops.eager_mode import is_kept, is_last_backward, is_plain
from autotp.ops.lookup import gather, local_index

CHUNK = 2**24
"""The logits of a chunk: 64 MiB in float32."""

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
) -> Tensor:
    """Returns the logarithm of the sum of exponentials of each row's logits, and the logit of its class, in one tensor.

    The logits are those of this rank's classes. So `reduce(terms, group, "logsumexp")` has the terms of all classes:
    another rank's term of the class's logit is minus infinity. They are in at least float32.

    Args:
        weight: [v hidden] of the classes `start` to `start + v`.
        x: [* hidden]
        classes: [*] the global class of each row.
        size: number of classes on all ranks together.
        scale: multiplies the logits, `x @ weight.T + bias`.
        cap: if not 0, it bounds the scaled logits: `cap * tanh(logits / cap)`.
        bias: [v]

    Returns:
        [2 *]
    """
    if _has_numbers(weight, x):
        terms: Tensor = _LinearClassTerms.apply(weight, x, classes, start, size, scale, cap, bias)
        return terms
    return _terms_at_once(weight, x, classes, start, size, scale, cap, bias)


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
        if is_trained and weight.dtype.itemsize < 4 and classes.numel() * len(weight) > MOST * CHUNK:
            return _difference(
                linear_class_terms(weight, x, classes, 0, len(weight), scale, cap, bias), of_sum, of_class
            )
        total: Tensor = _LinearLossSum.apply(weight, x, classes, of_sum, of_class, scale, cap, bias)
        return total
    return _sum_at_once(weight, x, classes, of_sum, of_class, scale, cap, bias)


def _has_numbers(weight: Tensor, x: Tensor) -> bool:
    """True outside of transforms and compilers, for tensors of known sizes: a loop over chunks can run."""
    return is_plain(x) and is_plain(weight) and all(isinstance(n, int) for n in (*x.shape, *weight.shape))


def linear_class_terms_like(weight: Tensor, x: Tensor, classes: Tensor, *_: Any) -> Tensor:
    """Returns an example value of `linear_class_terms`, without an assumption about sizes."""
    return x.new_empty((2, *classes.shape), dtype=torch.promote_types(x.dtype, torch.float32))


def linear_loss_sum_like(weight: Tensor, x: Tensor, *_: Any) -> Tensor:
    """Returns an example value of `linear_loss_sum`, without an assumption about sizes."""
    return x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))


def _terms_at_once(
    weight: Tensor, x: Tensor, classes: Tensor, start: int, size: int, scale: float, cap: float, bias: Tensor | None
) -> Tensor:
    """Returns the terms by operators that can be differentiated again, mapped and compiled."""
    z = F.linear(x, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    z = torch.tanh(z / cap) * cap if cap else z
    index = classes.unsqueeze(-1)
    _, outside = local_index(index, start, weight.shape[0])
    picked = gather(z, -1, index, start, size).masked_fill(outside, -torch.inf)
    return torch.stack([z.logsumexp(-1), picked.squeeze(-1)])


def _sum_at_once(
    weight: Tensor, x: Tensor, classes: Tensor, of_sum: Tensor, of_class: Tensor, scale: float, cap: float,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns `linear_loss_sum` by operators that can be differentiated again, mapped and compiled."""
    terms = _terms_at_once(weight, x, classes, 0, weight.shape[0], scale, cap, bias)
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
            elif len(rows) * len(weight) <= CHUNK:
                in_one_chunk = True
        for part in _chunks(len(index), len(weight)):
            z = _logits(rows[part], weight, bias, scale, cap)
            terms[1, part] = _picked(z, index[part], start, size)
            terms[0, part] = _exponentiate(z)
            if means is not None:
                torch.mm(_without_class(z, index[part], start).to(weight.dtype), weight, out=means[part])
            all_probabilities = z if in_one_chunk else None
        ctx.save_for_backward(weight, x, classes, bias, terms, all_probabilities, means)
        return terms.view(2, *classes.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, classes, bias, terms, all_probabilities, means = ctx.saved_tensors
        start, _, scale, cap = ctx.where
        needed = [ctx.needs_input_grad[i] for i in (0, 1, 7)]
        if torch.is_grad_enabled():
            again = _terms_at_once(weight, x, classes, start, ctx.where[1], scale, cap, bias)
            return _spread(_differentiable(again, grad, (weight, x, bias), needed), 5)
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
                    z = _logits(rows[part], weight[block], None if bias is None else bias[block], scale, cap)
                slope = _slope(z, cap)
                probabilities = z.sub_(terms[0, part, None]).exp_()
            g = probabilities.mul_(grad[0, part, None])
            return _of_product(_at_class(g, index[part], start + block.start, grad[1, part]), slope, scale, x.dtype)

        of_weight, of_rows, of_bias = _sums_of_tiles(weight, rows, needed, of_product)
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
        for part in _chunks(len(index), size):
            z, (of_sums, of_classes) = _logits(rows[part], weight, bias, scale, cap), (w[part] for w in weights)
            total -= _weighted(_picked(z, index[part], 0, size), of_classes)
            slope = _slope(z, cap) if any(ctx.needed) else None
            total += _weighted(_exponentiate(z), of_sums)
            if any(ctx.needed):
                g = _at_class(z.mul_(of_sums[:, None]), index[part], 0, -of_classes)
                sums.add(part, _of_product(g, slope, scale, x.dtype))
        grads = sums.weight, None if sums.x is None else sums.x.view(x.shape), sums.bias
        ctx.save_for_backward(weight, x, classes, of_sum, of_class, bias, *grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, classes, of_sum, of_class, bias, *grads = ctx.saved_tensors
        if torch.is_grad_enabled():
            scale, cap = ctx.settings
            again = _sum_at_once(weight, x, classes, of_sum, of_class, scale, cap, bias)
            return _spread(_differentiable(again, grad, (weight, x, bias), ctx.needed), 5)
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


def _differentiable(
    result: Tensor, grad: Tensor, operands: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns gradients that can be differentiated again."""
    differentiated = [y for y, is_needed in zip(operands, needed, strict=True) if is_needed and y is not None]
    grads = iter(torch.autograd.grad(result, differentiated, grad, create_graph=True))
    return [next(grads) if is_needed else None for is_needed in needed]


# ---- one chunk


def _chunks(rows: int, classes: int) -> Iterator[slice]:
    """Yields ranges of rows whose logits are at most `CHUNK`, of equal lengths but for the last; at least one."""
    number = max(-(-rows * classes // CHUNK), 1)
    yield from _ranges(rows, -(-rows // number))


def _ranges(n: int, length: int) -> Iterator[slice]:
    """Yields ranges of a length, at least one."""
    length = max(length, 1)
    yield from (slice(first, min(first + length, n)) for first in range(0, max(n, 1), length))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, cap: float) -> Tensor:
    """Returns the logits in new memory, in at least float32. x: [rows hidden] -> [rows v]"""
    z = F.linear(x, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = z if scale == 1 else z.mul_(scale)
    return z.div_(cap).tanh_().mul_(cap) if cap else z


def _picked(z: Tensor, index: Tensor, start: int, size: int) -> Tensor:
    """Returns the logit of each row's class, minus infinity if another rank has it. z: [rows v], index: [rows]"""
    outside = local_index(index, start, z.shape[1])[1]
    return gather(z, 1, index[:, None], start, size)[:, 0].masked_fill_(outside, -torch.inf)


def _exponentiate(z: Tensor) -> Tensor:
    """Returns the logarithm of the sum of exponentials of each row, and overwrites logits with probabilities."""
    if z.shape[1] == 0:
        return z.new_full((len(z),), -torch.inf)
    # In a row without a finite logit the differences are minus infinity, and not NaN.
    top = z.amax(1, keepdim=True).clamp_(min=torch.finfo(z.dtype).min)
    total = z.sub_(top).exp_().sum(1, keepdim=True)
    z.div_(total)
    return (total.log_() + top)[:, 0]


def _slope(z: Tensor, cap: float) -> Tensor | None:
    """Returns the derivative of the bound by tanh at these logits; None without a bound."""
    return 1 - (z / cap).square_() if cap else None


def _at_class(g: Tensor, index: Tensor, start: int, values: Tensor) -> Tensor:
    """Returns the gradient of logits with a value added at each row's class, in place. g: [rows v]"""
    local, outside = local_index(index, start, g.shape[1])
    return g.scatter_add_(1, local[:, None], values.masked_fill(outside, 0)[:, None].to(g.dtype)) if g.shape[1] else g


def _of_product(g: Tensor, slope: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of the product of rows and weight, of that of the logits, which is overwritten."""
    g = g if slope is None else g.mul_(slope)
    return (g if scale == 1 else g.mul_(scale)).to(dtype)


def _without_class(probabilities: Tensor, index: Tensor, start: int) -> Tensor:
    """Returns the probabilities with 0 for each row's class, in place. probabilities: [rows v]"""
    if probabilities.shape[1] == 0:
        return probabilities
    local, outside = local_index(index, start, probabilities.shape[1])
    at_class = probabilities.gather(1, local[:, None]).masked_fill_(~outside[:, None], 0)
    return probabilities.scatter_(1, local[:, None], at_class)


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


def _sums_of_tiles(
    weight: Tensor, rows: Tensor, needed: Sequence[bool], of_product: Callable[[slice, slice], Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of weight, rows and bias, None for one that is not needed; see `NOTE [Sums of products]`.

    Args:
        of_product: the gradient of `rows[part] @ weight[block].T`, of block and part. It is called once for each.
    """
    dtype, (n, classes) = torch.promote_types(rows.dtype, torch.float32), (len(rows), len(weight))
    of_weight = torch.empty_like(weight) if needed[0] else None
    of_rows = rows.new_zeros(rows.shape, dtype=dtype) if needed[1] else None
    of_bias = weight.new_empty(classes) if needed[2] else None
    # Tiles are squares if there are as many rows and classes.
    side = max(math.isqrt(CHUNK), 1)
    for block in _ranges(classes, CHUNK // max(min(n, side), 1)):
        of_block = weight.new_zeros(weight[block].shape, dtype=dtype)
        of_bias_block = weight.new_zeros(len(of_block), dtype=dtype)
        for part in _ranges(n, CHUNK // max(min(classes, side), 1)):
            g = of_product(block, part)
            if of_rows is not None:
                _add_product(of_rows[part], g, weight[block])
            if of_weight is not None:
                _add_product(of_block, g.t(), rows[part])
            if of_bias is not None:
                of_bias_block += g.sum(0, dtype=dtype)
        for gradient, of_classes in ((of_weight, of_block), (of_bias, of_bias_block)):
            if gradient is not None:
                gradient[block] = of_classes
    return of_weight, None if of_rows is None else of_rows.to(rows.dtype), of_bias


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


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
