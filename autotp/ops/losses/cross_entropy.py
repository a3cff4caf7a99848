"""The vocabulary-parallel cross-entropy: the largest logit of each row, and a rank's terms of the loss.

Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.ops.eager_mode import is_kept, is_last_backward, is_plain
from autotp.ops.lookup import gather, local_index


def peak(x: Tensor, dim: int) -> Tensor:
    """Returns the maximum along `dim`, keeping `dim`, without a gradient; the lowest number if `dim` is empty."""
    x = x.detach()
    if x.shape[dim] == 0:
        shape = [1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
        # It changes no maximum over ranks.
        return x.new_full(shape, torch.finfo(x.dtype).min)
    return x.amax(dim, keepdim=True)


def class_terms(
    x: Tensor, top: Tensor, classes: Tensor, dim: int, start: int, size: int, fresh: bool = False
) -> Tensor:
    """Returns this rank's terms of the two sums that cross-entropy needs for each row, in one tensor.

    Only the exponentials are kept for backward; the last backward overwrites them with the gradient. There is no
    gradient of `top`, because a loss does not depend on it.

    Args:
        x: [* v *] logits of the classes `start` to `start + v`, along `dim`.
        top: [* 1 *] the maximum over the classes of all ranks.
        classes: [* *] the global class of each row.
        size: number of classes on all ranks together.
        fresh: whether no other operator reads `x` (`passes/emit/in_place.py`): then the exponentials overwrite it.

    Returns:
        [2 * *] the sum of `exp(x - top)`, and `x - top` at the row's class, or 0 if another rank has this class.
    """
    if is_plain(x) and not is_kept(x):  # NOTE [What others keep is not overwritten]
        return _ClassTerms.apply(x, top, classes, dim, start, size, fresh and x.dtype == top.dtype)[0]
    z = x - top
    return torch.stack([z.exp().sum(dim), gather(z, dim, classes.unsqueeze(dim), start, size).squeeze(dim)])


class _ClassTerms(torch.autograd.Function):
    """Returns the terms and the exponentials, which are an output so that backward can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, top: Tensor, classes: Tensor, dim: int, start: int, size: int, fresh: bool
    ) -> tuple[Tensor, Tensor]:
        # With `fresh` both have one dtype; else `top` may be float32 beside 16-bit logits, and so is z.
        z = x.detach().sub_(top) if fresh else x - top
        picked = gather(z, dim, classes.unsqueeze(dim), start, size).squeeze(dim)
        # In place, in the memory of `z`: the row's class was read before.
        exponentials = z.exp_()
        ctx.dim, ctx.start, ctx.dtype = dim, start, x.dtype
        ctx.save_for_backward(exponentials, classes)
        ctx.set_materialize_grads(False)
        return torch.stack([exponentials.sum(dim), picked]), exponentials

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, again: Tensor | None) -> tuple[Tensor | None, ...]:
        exponentials, classes = ctx.saved_tensors
        dim, length = ctx.dim, exponentials.shape[ctx.dim]
        # Only the exponentials have a gradient: from a derivative of this backward.
        if grad is None:
            input_grad = None if again is None else (exponentials * again).to(ctx.dtype)
            return input_grad, *[None] * 6
        total, picked = (g.unsqueeze(dim) for g in grad.unbind())
        index, outside = local_index(classes.unsqueeze(dim), ctx.start, length)
        picked = picked.masked_fill(outside, 0)
        if again is None and is_plain(grad) and is_last_backward() and not is_kept(grad):
            input_grad = exponentials.detach().mul_(total)
            input_grad = input_grad.scatter_add_(dim, index, picked) if length else input_grad
        else:
            input_grad = exponentials * (total if again is None else total + again)
            input_grad = input_grad.scatter_add(dim, index, picked) if length else input_grad
        return input_grad.to(ctx.dtype), *[None] * 6
