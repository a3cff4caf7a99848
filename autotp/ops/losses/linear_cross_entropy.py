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
from typing import Any

import torch
from torch import Tensor

from autotp.ops.eager_mode import is_kept, is_last_backward, is_plain
from autotp.ops.lookup import local_index
from autotp.ops.losses import chunks
from autotp.ops.losses.chunks import (
    Head,
    Sums,
    differentiable,
    picked,
    row_chunks,
    sums_of_tiles,
    without_class,
)
from autotp.ops.losses.linear_mixed_terms import (
    Mix,
    RowGrads,
    Tile,
    add_to_shares,
    gradient_of_own,
    gradients,
    read_rows,
    terms_at_once,
    tile_again,
)

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
    shares: Tensor | None = None,
    low_weight: Tensor | None = None,
    low_x: Tensor | None = None,
    other_low_weight: Tensor | None = None,
    other_low_x: Tensor | None = None,
) -> Tensor:
    """Returns the logarithm of the sum of exponentials of each row's logits, and the logit of its class.

    The logits are those of this rank's classes. So `reduce` with a reducer of `JOINED` has the terms of all classes:
    another rank's term of the class's logit is minus infinity. They are in at least float32.

    With parts there is their sum, too, of which entropies and divergences are made: `NOTE [A sum beside the
    terms]`. The last one is the first of another head.

    Args:
        weight: [v hidden] of the classes `start` to `start + v`.
        x: [* hidden]
        classes: [*] the global class of each row.
        size: number of classes on all ranks together.
        scale: multiplies the logits, `x @ weight.T + bias`.
        cap: if not 0, it bounds the scaled logits: `cap * tanh(logits / cap)`.
        bias: [v]
        own_part, other_part: `d = own_part * logits + other_part * logits of another head` is what the sum is of.
        other_weight, other_x, other_scale, other_cap, other_bias: the other head, with the same classes and rows.
        shares: [v] or [* v] what multiplies `d` in the sum; the probabilities if None.
        low_weight, low_x: [v rank], [* rank] whose product is added to that of `weight` and `x`.
        other_low_weight, other_low_x: the same of the other head.

    Returns:
        [2 *]; [3 *] with parts, [4 *] with another head.
    """
    other = None
    if other_weight is not None and other_x is not None:
        other = Head(other_weight, other_x, other_bias, other_low_weight, other_low_x, other_scale, other_cap)
    mix = Mix(Head(weight, x, bias, low_weight, low_x, scale, cap), other, own_part, other_part, shares)
    if not _has_numbers(weight, x):
        return terms_at_once(mix, classes, start, size)
    terms: Tensor = _LinearClassTerms.apply(*mix.operands, classes, start, size, mix.numbers)
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
    shares: Tensor | None = None,
    low_weight: Tensor | None = None,
    low_x: Tensor | None = None,
    of_shares: Tensor | None = None,
) -> Tensor:
    """Returns the sum over rows of `of_sum * terms[0] - of_class * terms[1]`; `terms` are those of all classes.

    Args:
        weight, x, classes, scale, cap, bias, low_weight, low_x: as of `linear_class_terms`.
        of_sum, of_class: [*] how much of each term counts. Only `of_sum` has a gradient. A row with 0 in
            both, and in `of_shares`, is not read.
        shares, of_shares: [v] or [* v], and [*]: both or none. From each row's part of the sum
            `of_shares * (shares * logits).sum(-1)` is subtracted, too. `of_shares` has no gradient.
    """
    mix = Mix(
        Head(weight, x, bias, low_weight, low_x, scale, cap), own_part=0.0 if shares is None else -1.0, shares=shares
    )
    counts = RowGrads(of_sum, -of_class, of_shares)
    if not _has_numbers(weight, x):
        return _sum_of_terms(terms_at_once(mix, classes, 0, weight.shape[0]), counts)
    learns_counts = of_sum.requires_grad or (shares is not None and shares.requires_grad)
    if learns_counts or adds_in_float32(weight, classes.numel()):
        terms = _LinearClassTerms.apply(*mix.operands, classes, 0, len(weight), mix.numbers)
        return _sum_of_terms(terms, counts)
    total: Tensor = _LinearLossSum.apply(
        *mix.operands, classes, counts.of_lse, counts.of_class, counts.of_total, mix.numbers
    )
    return total


def adds_in_float32(weight: Tensor, rows: int) -> bool:
    """True if the gradient of the weight is a sum of too many chunks for 16 bits: `NOTE [Sums of products]`."""
    is_trained = torch.is_grad_enabled() and weight.requires_grad
    return is_trained and weight.dtype.itemsize < 4 and rows * len(weight) > MOST * chunks.CHUNK


def _has_numbers(weight: Tensor, x: Tensor) -> bool:
    """True outside of transforms and compilers, for tensors of known sizes: a loop over chunks can run."""
    return is_plain(x) and is_plain(weight) and all(isinstance(n, int) for n in (*x.shape, *weight.shape))


def linear_class_terms_like(weight: Tensor, x: Tensor, classes: Tensor, *more: Any) -> Tensor:
    """Returns an example value of `linear_class_terms`, without an assumption about sizes."""
    number = 4 if len(more) > 7 and more[7] is not None else 3 if any(more[5:7]) else 2
    return x.new_empty((number, *classes.shape), dtype=torch.promote_types(x.dtype, torch.float32))


def linear_loss_sum_like(weight: Tensor, x: Tensor, *_: Any) -> Tensor:
    """Returns an example value of `linear_loss_sum`, without an assumption about sizes."""
    return x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))


def _sum_of_terms(terms: Tensor, counts: RowGrads) -> Tensor:
    """Returns `linear_loss_sum` of terms, by operators that can be differentiated again, mapped and compiled."""
    result = _weighted(terms[0], counts.of_lse) + _weighted(terms[1], counts.of_class.detach())
    if counts.of_total is not None:
        result = result + _weighted(terms[2], counts.of_total.detach())
    return result


def _weighted(term: Tensor, weights: Tensor) -> Tensor:
    # A row that does not count may have any number, also infinity. With a gradient it counts.
    return ((term if weights.requires_grad else term.masked_fill(weights == 0, 0)) * weights).sum()


class _LinearClassTerms(torch.autograd.Function):
    """The terms, with gradients of all tensors that are computed tile by tile, of logits that are computed again."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, classes, start, size, numbers = args
        given, index, needed = Mix.of(operands, numbers), classes.reshape(-1), ctx.needs_input_grad[:11]
        mix = given.of_rows()
        weight, rows = mix.own.weight, mix.own.x
        terms = rows.new_empty((mix.number_of_terms, len(index)), dtype=torch.promote_types(rows.dtype, torch.float32))
        is_plain_head = mix.is_empty and not mix.own.cap  # The slope of tanh needs logits.
        means = rows.new_empty(rows.shape) if is_plain_head and [i for i in range(11) if needed[i]] == [1] else None
        in_one_chunk = is_plain_head and means is None and any(needed) and len(rows) * len(weight) <= chunks.CHUNK
        all_probabilities = None
        for part in row_chunks(len(index), len(weight) * (1 if mix.is_empty else 2)):
            z = mix.own.logits(part)
            terms[1, part] = picked(z, index[part], start, size)
            read, tile = read_rows(mix, part, z, keeps=False)
            terms[0, part] = read.lse
            if read.total is not None:
                terms[2, part] = read.total
            if read.other_lse is not None:
                terms[3, part] = read.other_lse
            if means is not None or in_one_chunk:
                z = tile.exponentials.mul_(tile.number)
            if means is not None:
                torch.mm(without_class(z, index[part], start).to(weight.dtype), weight, out=means[part])
            all_probabilities = z if in_one_chunk else None
        ctx.where, ctx.numbers = (start, size), numbers
        ctx.save_for_backward(*operands, classes, terms, all_probabilities, means)
        return terms.view(len(terms), *classes.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *operands, classes, terms, all_probabilities, means = ctx.saved_tensors
        (start, size), needed, index = ctx.where, ctx.needs_input_grad[:11], classes.reshape(-1)
        if torch.is_grad_enabled():
            again = lambda *tensors: terms_at_once(Mix.of(tensors, ctx.numbers), classes, start, size)  # noqa: E731
            return *differentiable(again, grad, operands, needed), *[None] * 4
        mix, grad = Mix.of(operands, ctx.numbers).of_rows(), grad.reshape(len(terms), -1)
        if means is not None:
            of_x = _through_means(means, mix.own.weight, index, start, terms, grad * mix.own.scale)
            return None, of_x.view(operands[1].shape), *[None] * 13
        if all_probabilities is not None and not _may_overwrite(grad):
            all_probabilities = all_probabilities.clone()
        grads, other_lse = RowGrads.of(grad, terms), terms[3] if len(terms) > 3 else None
        of_shares = torch.zeros_like(mix.shares) if needed[10] and mix.shares is not None else None
        is_needed = any(needed[:5]), any(needed[5:10])

        def of_tile(block: slice, part: slice) -> list[Tensor | None]:
            if all_probabilities is None:
                with torch.enable_grad():  # As in forward: an estimate counts what is computed again by itself.
                    tile = tile_again(mix, part, block, terms[0, part], None if other_lse is None else other_lse[part])
            else:
                probabilities = all_probabilities[part, block]
                tile = Tile(part, block, probabilities, None, probabilities, 1.0)
            own = grads.rows(part)
            if of_shares is not None:
                add_to_shares(of_shares, mix, tile, own)
            return gradients(mix, tile, own, index[part], start + block.start, is_needed)

        sums = sums_of_tiles(mix.heads, (needed[:5], needed[5:10])[: len(mix.heads)], of_tile)
        of_heads = [*(y for of_head in sums for y in of_head), *[None] * (5 * (2 - len(sums)))]
        return *_in_shape(operands, [*of_heads, of_shares]), *[None] * 4


class _LinearLossSum(torch.autograd.Function):
    """The sum, with gradients of the head that forward computes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, classes, of_sum, of_class, of_total, numbers = args
        ctx.numbers, ctx.needed = numbers, ctx.needs_input_grad[:5]
        mix, index, is_needed = Mix.of(operands, numbers).of_rows(), classes.reshape(-1), any(ctx.needed)
        counts = RowGrads(of_sum.reshape(-1), of_class.reshape(-1), None if of_total is None else of_total.reshape(-1))
        sums = Sums.of(mix.own, ctx.needed, mix.own.x.dtype)
        total = mix.own.x.new_zeros((), dtype=torch.promote_types(mix.own.x.dtype, torch.float32))
        for part in row_chunks(len(index), len(mix.own.weight)):
            z, count = mix.own.logits(part), counts.rows(part)
            total += _weighted(picked(z, index[part], 0, len(mix.own.weight)), count.of_class)
            read, tile = read_rows(mix, part, z, keeps=is_needed)
            total += _weighted(read.lse, count.of_lse)
            if read.total is not None and count.of_total is not None:
                total += _weighted(read.total, count.of_total)
            if is_needed:
                sums.add(gradient_of_own(mix, tile, count, index[part], 0), part)
        of_head = _in_shape(operands[:5], sums.in_order())
        ctx.save_for_backward(*operands, classes, of_sum, of_class, of_total, *of_head)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        operands, classes, counted, grads = saved[:11], saved[11], saved[12:15], saved[15:]
        if torch.is_grad_enabled():

            def again(*of_head: Tensor | None) -> Tensor:
                mix = Mix.of((*of_head, *operands[5:]), ctx.numbers)
                return _sum_of_terms(terms_at_once(mix, classes, 0, mix.own.weight.shape[0]), RowGrads(*counted))

            return *differentiable(again, grad, operands[:5], ctx.needed), *[None] * 11
        # Where no row counts, the divisor of a mean is 0 and `grad` infinite: no row gets a gradient all the same.
        nothing = torch.stack([(y == 0).all() for y in counted if y is not None]).all()
        # A number would be rounded to 16 bits first, and change all gradients by the same part.
        factor, is_last = grad.masked_fill(nothing, 0).view(1), _may_overwrite(grad)
        return *(None if y is None else (y if is_last else y.clone()).mul_(factor) for y in grads), *[None] * 11


def _may_overwrite(grad: Tensor) -> bool:
    """True in a backward after which nobody asks for what forward kept."""
    return is_last_backward() and not is_kept(grad)


def _in_shape(operands: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the gradients of operands, with their dimensions of rows."""
    return [
        None if y is None or operand is None else y.to(operand.dtype).view(operand.shape)
        for y, operand in zip(grads, operands, strict=True)
    ]


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
