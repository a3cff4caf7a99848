"""The terms of an entropy and of a divergence between two heads, in chunks: no logits of all rows are in memory.

NOTE [A mean in two terms]
Entropy and KL divergence need the mean over classes of `d`, a sum of logits, with probabilities `p = softmax(z)`. Ranks
that cut the classes join their terms by the logarithm of a sum of exponentials, and `d` has both signs. So there are

    t = log(sum(exp(z) * (1 + max(d, 0))))      u = log(sum(exp(z) * (1 + max(-d, 0))))      lse = log(sum(exp(z)))

and the mean is `exp(t - lse) - exp(u - lse)`. The 1 keeps both terms above `lse`, and every quotient finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.async_linear import rows_of
from autotp.ops.lookup import gather, local_index
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
)


class Mix(NamedTuple):
    """What the mean is of: a part of a head's own logits and one of another head's. See `linear_class_terms`."""

    own_part: float = 0.0
    other_part: float = 0.0
    weight: Tensor | None = None
    x: Tensor | None = None
    scale: float = 1.0
    cap: float = 0.0
    bias: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is no mean to compute."""
        return not (self.own_part or self.other_part)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """What a backward keeps beside the tensors."""
        return self.own_part, self.other_part, self.scale, self.cap


def terms_at_once(
    weight: Tensor, x: Tensor, classes: Tensor, start: int, size: int, scale: float, cap: float,
    bias: Tensor | None, mix: Mix = Mix(),  # noqa: B008
) -> Tensor:  # fmt: skip
    """Returns the terms by operators that can be differentiated again, mapped and compiled."""
    z = _all_logits(weight, x, scale, cap, bias)
    index = classes.unsqueeze(-1)
    _, outside = local_index(index, start, weight.shape[0])
    own_class = gather(z, -1, index, start, size).masked_fill(outside, -torch.inf)
    lse = z.logsumexp(-1)
    terms = [lse, own_class.squeeze(-1)]
    if not mix.is_empty:
        d, p, other_lse = z * mix.own_part, z.softmax(-1), []
        if mix.weight is not None and mix.x is not None:
            other_logits = _all_logits(mix.weight, mix.x, mix.scale, mix.cap, mix.bias)
            d, other_lse = d + other_logits * mix.other_part, [other_logits.logsumexp(-1)]
        terms += [lse + (p * part).sum(-1).log1p() for part in (d.where(d >= 0, 0), -d.where(d < 0, 0))]
        terms += other_lse
    return torch.stack(terms)


def _all_logits(weight: Tensor, x: Tensor, scale: float, cap: float, bias: Tensor | None) -> Tensor:
    z = F.linear(x, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    return torch.tanh(z / cap) * cap if cap else z


class LinearMixedTerms(torch.autograd.Function):
    """Four terms of each row, five with another head. Backward computes logits again, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None, other_weight: Tensor | None, other_x: Tensor | None,
        other_bias: Tensor | None, classes: Tensor, where: tuple[int, int, float, float],
        numbers: tuple[float, float, float, float],
    ) -> Tensor:  # fmt: skip
        ctx.where, ctx.numbers = where, numbers
        start, size, *_ = where
        index = classes.reshape(-1)
        heads = _Heads.of([weight, x, bias, other_weight, other_x, other_bias], where, numbers)
        number = 4 + (other_weight is not None)
        terms = x.new_empty((number, len(index)), dtype=torch.promote_types(x.dtype, torch.float32))
        for part in row_chunks(len(index), 2 * len(weight)):
            z, d, other_logits, _ = heads.tile(slice(None), part)
            if other_logits is not None:
                terms[4, part] = exponentiate(other_logits)
                del other_logits
            terms[1, part] = picked(z, index[part], start, size)
            terms[0, part] = exponentiate(z)
            for i, mean in ((2, _mean_of(z, d.clamp(min=0))), (3, _mean_of(z, d.neg_().clamp_(min=0)))):
                terms[i, part] = terms[0, part] + mean.log1p_()
        ctx.save_for_backward(weight, x, bias, other_weight, other_x, other_bias, classes, terms)
        return terms.view(number, *classes.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *operands, classes, terms = ctx.saved_tensors
        needed = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():
            (own_part, other_part, scale, cap), (start, size, own_scale, own_cap) = ctx.numbers, ctx.where

            def again(weight: Tensor, x: Tensor, bias: Tensor | None, *other: Tensor | None) -> Tensor:
                mix = Mix(own_part, other_part, other[0], other[1], scale, cap, other[2])
                return terms_at_once(weight, x, classes, start, size, own_scale, own_cap, bias, mix)

            return *differentiable(again, grad, operands, needed), None, None, None
        detached: list[Any] = [None if y is None else y.detach() for y in operands]
        heads = _Heads.of(detached, ctx.where, ctx.numbers)
        index, grad = classes.reshape(-1), grad.reshape(len(terms), -1)
        # The gradients of `exp(z) * (1 + |d|)`, for classes of each sign of `d`, as parts of the probabilities.
        up, down = ((grad[i] * (terms[0] - terms[i]).exp())[:, None] for i in (2, 3))
        of_sum = grad[0, :, None] + up + down

        def probabilities(block: slice, part: slice) -> tuple[Tensor, Tensor, Tensor, Any, list[Any]]:
            with torch.enable_grad():  # As in forward: an estimate counts what is computed again by itself.
                z, d, other_logits, slopes = heads.tile(block, part, with_slopes=True)
            return (
                z.sub_(terms[0, part, None]).exp_(),
                d,
                torch.where(d >= 0, up[part], -down[part]),
                other_logits,
                slopes,
            )

        def of_own(block: slice, part: slice) -> Tensor:
            p, d, sign, _, slopes = probabilities(block, part)
            g = p.mul_(d.add_(ctx.numbers[0]).mul_(sign).add_(of_sum[part]))
            g = at_class(g, index[part], ctx.where[0] + (block.start or 0), grad[1, part])
            return grad_of_product(g, slopes[0], ctx.where[2], heads.rows.dtype)

        def of_other(block: slice, part: slice) -> Tensor:
            p, _, sign, other_logits, slopes = probabilities(block, part)
            g = p.mul_(sign).mul_(ctx.numbers[1])
            g.add_(other_logits.sub_(terms[4, part, None]).exp_().mul_(grad[4, part, None]))
            return grad_of_product(g, slopes[1], ctx.numbers[2], heads.rows.dtype)

        of_own_head = _in_order(sums_of_tiles(heads.weight, heads.rows, needed[:3], of_own), operands[1])
        of_other_head: Sequence[Tensor | None] = (None, None, None)
        if any(needed[3:]):
            sums = sums_of_tiles(heads.other_weight, heads.other_rows, needed[3:], of_other)
            of_other_head = _in_order(sums, operands[4])
        return *of_own_head, *of_other_head, None, None, None


def _in_order(sums: Sequence[Tensor | None], x: Tensor) -> Sequence[Tensor | None]:
    of_weight, of_rows, of_bias = sums
    return of_weight, None if of_rows is None else of_rows.view(x.shape), of_bias


def _mean_of(p: Tensor, y: Tensor) -> Tensor:
    return y.mul_(p).sum(1)


class _Heads(NamedTuple):
    """One head or two, with rows of their inputs."""

    weight: Tensor
    rows: Tensor
    bias: Tensor | None
    other_weight: Any
    other_rows: Any
    other_bias: Tensor | None
    scale: float
    cap: float
    numbers: tuple[float, float, float, float]

    @staticmethod
    def of(operands: Sequence[Any], where: Sequence[Any], numbers: Any) -> _Heads:
        """Returns heads of the operands of the operator."""
        weight, x, bias, other_weight, other_x, other_bias = operands
        other_rows = None if other_x is None else rows_of(other_x)
        return _Heads(weight, rows_of(x), bias, other_weight, other_rows, other_bias, where[2], where[3], numbers)

    def tile(self, block: slice, part: slice, with_slopes: bool = False) -> tuple[Tensor, Tensor, Any, list[Any]]:
        """Returns the logits of some classes and rows, what the mean is of, and the logits of the other head; slopes.

        Slopes are those of both bounds by tanh.
        """
        z = logits_of(self.rows[part], self.weight[block], _block(self.bias, block), self.scale, self.cap)
        own_part, other_part, scale, cap = self.numbers
        d, other_logits, slopes = z * own_part, None, [slope_of(z, self.cap) if with_slopes else None, None]
        if self.other_weight is not None:
            other_logits = logits_of(
                self.other_rows[part], self.other_weight[block], _block(self.other_bias, block), scale, cap
            )
            slopes[1] = slope_of(other_logits, cap) if with_slopes else None
            d.add_(other_logits, alpha=other_part)
        return z, d, other_logits, slopes


def _block(bias: Tensor | None, block: slice) -> Tensor | None:
    return None if bias is None else bias[block]
