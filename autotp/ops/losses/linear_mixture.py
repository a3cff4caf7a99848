"""The sums of which a Jensen-Shannon divergence of two heads is made, over the classes of a rank, in chunks of rows.

    p = exp(z - lse), q = exp(y - second_lse), m = exp(z + share) + exp(y + second_share): sum(p log m) and sum(q log m)

The logarithms of sums are those of all ranks, which `linear_class_terms` has made. So the sums of ranks are added.

Source: Agarwal et al. 2024, On-Policy Distillation of Language Models, equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autotp.ops.losses.chunks import differentiable, grad_of_product, row_chunks, slope_of, sums_of_tiles
from autotp.ops.losses.linear_cross_entropy import has_numbers, in_shape
from autotp.ops.losses.linear_mixed_terms import Mix, has_arguments_of_mix, mix_of


@has_arguments_of_mix
def linear_mixture_sums(
    weight: Tensor,
    x: Tensor,
    lse: Tensor,
    second_lse: Tensor,
    share: Tensor,
    second_share: Tensor,
    *mixed: Any,
    **named: Any,
) -> Tensor:
    """Returns the sums over this rank's classes of each head's probabilities times the logarithms of a mixture.

    Args:
        lse, second_lse: [*] the logarithm of the sum of exponentials of each head, over all classes.
        share, second_share: [*] what is added to the logits of each head before their exponentials are mixed.
        weight, x, mixed, named: as of `mix_of`, with a second head.

    Returns:
        [2 *]
    """
    mix, of_rows = mix_of(weight, x, *mixed, **named), (lse, second_lse, share, second_share)
    if not has_numbers(weight, x):
        return _at_once(mix, of_rows)
    sums: Tensor = _LinearMixtureSums.apply(*mix.operands, *of_rows, mix.numbers)
    return sums


def linear_mixture_sums_like(weight: Tensor, x: Tensor, lse: Tensor, *more: Any) -> Tensor:
    """Returns an example value of `linear_mixture_sums`, without an assumption about sizes."""
    return x.new_empty((2, *lse.shape), dtype=mix_of(weight, x, *more[3:]).first.dtype_of_logits)


def _at_once(mix: Mix, of_rows: Sequence[Tensor]) -> Tensor:
    assert mix.second is not None
    return _sums(mix.first.all_logits(), mix.second.all_logits(), of_rows)


def _sums(z: Tensor, y: Tensor, of_rows: Sequence[Tensor]) -> Tensor:
    lse, second_lse, share, second_share = (row.unsqueeze(-1) for row in of_rows)
    mixture = torch.logaddexp(z + share, y + second_share)
    return torch.stack([((z - lse).exp() * mixture).sum(-1), ((y - second_lse).exp() * mixture).sum(-1)])


class _LinearMixtureSums(torch.autograd.Function):
    """The sums, with gradients that are computed tile by tile, of logits that are computed again."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, lse, second_lse, share, second_share, numbers = args
        mix = Mix.of(operands, numbers).of_rows()
        of_rows = [y.reshape(-1) for y in (lse, second_lse, share, second_share)]
        assert mix.second is not None
        sums = lse.new_empty((2, lse.numel()), dtype=mix.first.dtype_of_logits)
        for part in row_chunks(lse.numel(), 2 * len(mix.first.weight)):
            sums[:, part] = _sums(mix.first.logits(part), mix.second.logits(part), [y[part] for y in of_rows])
        ctx.numbers = numbers
        ctx.save_for_backward(*operands, lse, second_lse, share, second_share)
        return sums.view(2, *lse.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        if torch.is_grad_enabled():
            again = lambda *tensors: _at_once(Mix.of(tensors[:11], ctx.numbers), tensors[11:])  # noqa: E731
            return *differentiable(again, grad, saved, needed[:15]), None
        mix, of_rows = Mix.of(saved[:11], ctx.numbers).of_rows(), [y.reshape(-1) for y in saved[11:]]
        grad, of_row_grads = grad.reshape(2, -1), [torch.zeros_like(y) for y in of_rows]

        def of_tile(block: slice, part: slice) -> list[Tensor | None]:
            *of_logits, of_part = _gradients(mix, part, block, [y[part] for y in of_rows], grad[:, part])
            for total, y in zip(of_row_grads, of_part, strict=True):
                total[part] += y
            return of_logits

        sums = sums_of_tiles(mix.heads, (needed[:5], needed[5:10]), of_tile)
        of_heads = in_shape(saved[:10], [y for of_head in sums for y in of_head])
        return *of_heads, None, *in_shape(saved[11:], of_row_grads), None


def _gradients(mix: Mix, part: slice, block: slice, of_rows: Sequence[Tensor], grad: Tensor) -> list[Any]:
    """Returns the gradients of both heads' products of a tile, and of its rows' numbers, in their order.

    grad: [2 rows]
    """
    assert mix.second is not None
    z, y = mix.first.logits(part, block), mix.second.logits(part, block)
    slopes = slope_of(z, mix.first.cap), slope_of(y, mix.second.cap)
    lse, second_lse, share, second_share = (row[:, None] for row in of_rows)
    mixture = torch.logaddexp(z + share, y + second_share)
    p, q = (z - lse).exp_().mul_(grad[0, :, None]), (y - second_lse).exp_().mul_(grad[1, :, None])
    # Of the logarithm of the mixture, and the part of it that is of the first head.
    of_mixture, first = p + q, z.add_(share).sub_(mixture).exp_()
    of_first = first.mul_(of_mixture)
    of_second = of_mixture.sub_(of_first)
    p, q = p.mul_(mixture), q.mul_(mixture)
    of_row_numbers = [-p.sum(1), -q.sum(1), of_first.sum(1), of_second.sum(1)]
    grads = (of_first.add_(p), of_second.add_(q))
    heads = zip(mix.heads, grads, slopes, strict=True)
    return [*(grad_of_product(g, slope, head.scale, head.x.dtype) for head, g, slope in heads), of_row_numbers]
