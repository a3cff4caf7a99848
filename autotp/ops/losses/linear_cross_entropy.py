"""A head and its loss as one operator: what cross-entropy needs of the logits, computed in chunks of rows.

The logits of all rows are never in memory. There are two forms. `linear_class_terms` works on a part of the classes:
backward computes logits again, tile by tile, unless they are one chunk or the weight has no gradient.
`linear_loss_sum` has all classes and what the loss does with each row, and so forward knows the gradients but for a
number: it computes them from the same logits.

NOTE [Sums of products in 16 bits]
A sum in bfloat16 stops growing after 256 equal terms, so products of many chunks cannot be added in it. Backward of
`linear_class_terms` adds in float32, and needs little memory, as it takes one block of classes at a time.
`linear_loss_sum` takes all classes of some rows at a time, and adds in 16 bits for at most `MOST` chunks. For more it
is computed by the first form: a second gradient of the weight, in float32, is too much memory.

Source: Wijmans et al. 2025, Cut Your Losses in Large-Vocabulary Language Models; Liger-Kernel's fused cross-entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autotp.ops.eager_mode import is_kept, is_last_backward, is_plain
from autotp.ops.lookup import local_index
from autotp.ops.losses import chunks
from autotp.ops.losses.chunks import (
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
    gradients,
    has_arguments_of_mix,
    mix_of,
    read_rows,
    terms_at_once,
    tile_again,
)

MOST = 16
"""The chunks whose products are added in 16 bits, as the gradients of so many calls are."""


@has_arguments_of_mix
def linear_class_terms(
    weight: Tensor, x: Tensor, classes: Tensor, start: int, size: int, *mixed: Any, **named: Any
) -> Tensor:
    """Returns the logarithm of the sum of exponentials of each row's logits, and the logit of its class.

    The logits are those of this rank's classes. So `reduce` with a reducer of `JOINED` has the terms of all classes:
    another rank's term of the class's logit is minus infinity. They are in at least float32, unless the model casts.

    With parts there is their sum, too, of which entropies and divergences are made: `NOTE [A sum beside the
    terms]`. The last one is the first of another head.

    Args:
        weight: [v hidden] of the classes `start` to `start + v`.
        classes: [*] the global class of each row.
        size: number of classes on all ranks together.
        mixed, named: as of `mix_of`.

    Returns:
        [2 *]; [3 *] with parts, [4 *] with another head.
    """
    mix = mix_of(weight, x, *mixed, **named)
    if not has_numbers(weight, x):
        return terms_at_once(mix, classes, start, size)
    terms: Tensor = _LinearClassTerms.apply(*mix.operands, classes, start, size, mix.numbers)
    return terms


@has_arguments_of_mix
def linear_loss_sum(
    weight: Tensor,
    x: Tensor,
    classes: Tensor,
    of_lse: Tensor,
    of_class: Tensor,
    of_total: Tensor | None = None,
    of_second_lse: Tensor | None = None,
    *mixed: Any,
    **named: Any,
) -> Tensor:
    """Returns the sum over rows of the terms of all classes, each times a number of the row.

    Args:
        of_lse, of_class, of_total, of_second_lse: [*] factors of the terms of `linear_class_terms`, in their order. A
            row with 0 in all is not read.
        mixed, named: as of `mix_of`.
    """
    mix, numbers = mix_of(weight, x, *mixed, **named), (of_lse, of_class, of_total, of_second_lse)
    if not has_numbers(weight, x):
        return _sum_of_terms(terms_at_once(mix, classes, 0, weight.shape[0]), numbers)
    # Forward knows no gradients of these, and adds those of the weights in their own dtype.
    learns_numbers = any(y is not None and y.requires_grad for y in (*numbers, mix.shares))
    if learns_numbers or any(adds_in_float32(head.weight, classes.numel()) for head in mix.heads):
        return _sum_of_terms(_LinearClassTerms.apply(*mix.operands, classes, 0, len(weight), mix.numbers), numbers)
    total: Tensor = _LinearLossSum.apply(*mix.operands, classes, *numbers, mix.numbers)
    return total


def adds_in_float32(weight: Tensor, rows: int) -> bool:
    """True if the gradient of the weight is a sum of too many chunks for 16 bits: `NOTE [Sums of products]`."""
    is_trained = torch.is_grad_enabled() and weight.requires_grad
    return is_trained and has_many_chunks(weight.dtype, rows * len(weight))


def has_many_chunks(dtype: torch.dtype, logits: float) -> bool:
    """True if a sum over so many logits needs more bits than a weight of this dtype has."""
    return dtype.itemsize < 4 and logits > MOST * chunks.CHUNK


def has_numbers(weight: Tensor, x: Tensor) -> bool:
    """True outside of transforms and compilers, for tensors of known sizes: a loop over chunks can run."""
    return is_plain(x) and is_plain(weight) and all(isinstance(n, int) for n in (*x.shape, *weight.shape))


def linear_class_terms_like(weight: Tensor, x: Tensor, classes: Tensor, start: int, size: int, *mixed: Any) -> Tensor:
    """Returns an example value of `linear_class_terms`, without an assumption about sizes."""
    mix = mix_of(weight, x, *mixed)
    return x.new_empty((mix.number_of_terms, *classes.shape), dtype=mix.first.dtype_of_logits)


def linear_loss_sum_like(weight: Tensor, x: Tensor, classes: Tensor, *more: Any) -> Tensor:
    """Returns an example value of `linear_loss_sum`, without an assumption about sizes."""
    return x.new_empty((), dtype=mix_of(weight, x, *more[4:]).first.dtype_of_logits)


def _sum_of_terms(terms: Tensor, numbers: Sequence[Tensor | None]) -> Tensor:
    """Returns `linear_loss_sum` of terms, by operators that can be differentiated again, mapped and compiled."""
    weighted = [_weighted(term, y) for term, y in zip(terms, numbers, strict=False) if y is not None]
    return sum(weighted[1:], weighted[0])


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
        weight, rows = mix.first.weight, mix.first.x
        terms = rows.new_empty((mix.number_of_terms, len(index)), dtype=mix.first.dtype_of_logits)
        is_plain_head = mix.is_empty and not mix.first.cap  # The slope of tanh needs logits.
        means = rows.new_empty(rows.shape) if is_plain_head and [i for i in range(11) if needed[i]] == [1] else None
        in_one_chunk = is_plain_head and means is None and any(needed) and len(rows) * len(weight) <= chunks.CHUNK
        all_probabilities = None
        for part in row_chunks(len(index), len(weight) * (1 if mix.is_empty else 2)):
            z = mix.first.logits(part)
            terms[1, part] = picked(z, index[part], start, size)
            read, tile = read_rows(mix, part, z, keeps=False)
            terms[0, part] = read.lse
            if read.total is not None:
                terms[2, part] = read.total
            if read.second_lse is not None:
                terms[3, part] = read.second_lse
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
            of_x = _through_means(means, mix.first.weight, index, start, terms, grad * mix.first.scale)
            return None, of_x.view(operands[1].shape), *[None] * 13
        if all_probabilities is not None and not _may_overwrite(grad):
            all_probabilities = all_probabilities.clone()
        grads, second_lse = RowGrads.of(grad, terms), terms[3] if len(terms) > 3 else None
        of_shares = torch.zeros_like(mix.shares) if needed[10] and mix.shares is not None else None
        is_needed = any(needed[:5]), any(needed[5:10])

        def of_tile(block: slice, part: slice) -> list[Tensor | None]:
            if all_probabilities is None:
                with torch.enable_grad():  # As in forward: an estimate counts what is computed again by itself.
                    tile = tile_again(
                        mix, part, block, terms[0, part], None if second_lse is None else second_lse[part]
                    )
            else:
                probabilities = all_probabilities[part, block]
                tile = Tile(part, block, probabilities, None, probabilities, 1.0)
            of_part = grads.rows(part)
            if of_shares is not None:
                add_to_shares(of_shares, mix, tile, of_part)
            return gradients(mix, tile, of_part, index[part], start + block.start, is_needed)

        sums = sums_of_tiles(mix.heads, (needed[:5], needed[5:10])[: len(mix.heads)], of_tile)
        of_heads = [*(y for of_head in sums for y in of_head), *[None] * (5 * (2 - len(sums)))]
        return *in_shape(operands, [*of_heads, of_shares]), *[None] * 4


class _LinearLossSum(torch.autograd.Function):
    """The sum, with gradients of the heads that forward computes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, classes, of_lse, of_class, of_total, of_second_lse, numbers = args
        ctx.numbers, ctx.needed = numbers, ctx.needs_input_grad[:10]
        mix, index = Mix.of(operands, numbers).of_rows(), classes.reshape(-1)
        needed = (ctx.needed[:5], ctx.needed[5:])[: len(mix.heads)]
        counted = of_lse, of_class, of_total, of_second_lse
        counts = RowGrads(*(None if y is None else y.reshape(-1) for y in counted))  # type: ignore[arg-type]
        sums = [Sums.of(head, of_head, head.x.dtype) for head, of_head in zip(mix.heads, needed, strict=True)]
        total = mix.first.x.new_zeros((), dtype=mix.first.dtype_of_logits)
        for part in row_chunks(len(index), len(mix.first.weight) * (1 if mix.is_empty else 2)):
            z, count = mix.first.logits(part), counts.rows(part)
            of_row_class = picked(z, index[part], 0, len(mix.first.weight))
            read, tile = read_rows(mix, part, z, keeps=any(ctx.needed))
            for term, y in zip((read.lse, of_row_class, read.total, read.second_lse), count.in_order, strict=True):
                if term is not None and y is not None:
                    total += _weighted(term, y)
            grads = gradients(
                mix, tile, replace(count, total=read.total), index[part], 0, [*map(any, needed), False][:2]
            )
            for head_sums, g in zip(sums, grads, strict=True):
                if g is not None:
                    head_sums.add(g, part)
        of_heads = [*(y for head_sums in sums for y in head_sums.in_order()), *[None] * (5 * (2 - len(sums)))]
        ctx.save_for_backward(*operands, classes, *counted, *in_shape(operands[:10], of_heads))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        operands, classes, counted, grads = saved[:11], saved[11], saved[12:16], saved[16:]
        if torch.is_grad_enabled():

            def again(*of_heads: Tensor | None) -> Tensor:
                mix = Mix.of((*of_heads, operands[10]), ctx.numbers)
                return _sum_of_terms(terms_at_once(mix, classes, 0, mix.first.weight.shape[0]), counted)

            return *differentiable(again, grad, operands[:10], ctx.needed), *[None] * 7
        # Where no row counts, the divisor of a mean is 0 and `grad` infinite: no row gets a gradient all the same.
        nothing = torch.stack([(y == 0).all() for y in counted if y is not None]).all()
        # A number would be rounded to 16 bits first, and change all gradients by the same part.
        factor, is_last = grad.masked_fill(nothing, 0).view(1), _may_overwrite(grad)
        return *(None if y is None else (y if is_last else y.clone()).mul_(factor) for y in grads), *[None] * 7


def _may_overwrite(grad: Tensor) -> bool:
    """True in a backward after which nobody asks for what forward kept."""
    return is_last_backward() and not is_kept(grad)


def in_shape(operands: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
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
