"""The vocabulary-parallel cross-entropy: the largest logit, and a rank's terms of what each row needs.

Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotp.ops.eager_mode import is_last_backward, is_plain
from autotp.ops.lookup import gather, own


def peak(x: Tensor, dim: int) -> Tensor:
    """The maximum along `dim`, kept as one element, without a gradient; the lowest number where there is none."""
    x = x.detach()
    if x.shape[dim] == 0:
        shape = [1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
        return x.new_full(shape, torch.finfo(x.dtype).min)
    return x.amax(dim, keepdim=True)


def class_terms(
    x: Tensor, top: Tensor, classes: Tensor, dim: int, start: int, size: int, fresh: bool = False
) -> Tensor:
    """This rank's summands of what cross-entropy needs of each row, in one tensor and so in one reduction.

    For backward only the exponentials are kept; in a last backward their memory becomes the gradient's. The gradient of
    `top` is left out: a loss does not depend on it.

    Args:
        x: [* v *] logits of the classes `start` to `start + v`, along `dim`.
        top: [* 1 *] the maximum over the classes of all ranks.
        classes: [* *] a class for each row, counted over all ranks, which have `size` together.
        fresh: nobody else reads `x` (`passes/emit/in_place.py`): the exponentials may take its memory.

    Returns:
        [2 * *] the sum of `exp(x - top)`, and `x - top` at the class, 0 where another rank has it.
    """
    if is_plain(x):
        return _ClassTerms.apply(x, top, classes, dim, start, size, fresh and x.dtype == top.dtype)[0]
    z = x - top
    return torch.stack([z.exp().sum(dim), gather(z, dim, classes.unsqueeze(dim), start, size).squeeze(dim)])


class _ClassTerms(torch.autograd.Function):
    """The terms, and the exponentials: as an output, what backward computes of them can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, top: Tensor, classes: Tensor, dim: int, start: int, size: int, fresh: bool
    ) -> tuple[Tensor, Tensor]:
        z = x.detach().sub_(top) if fresh else x - top
        picked = gather(z, dim, classes.unsqueeze(dim), start, size).squeeze(dim)
        exponentials = z.exp_()
        ctx.dim, ctx.start, ctx.dtype = dim, start, x.dtype
        ctx.save_for_backward(exponentials, classes)
        ctx.set_materialize_grads(False)
        return torch.stack([exponentials.sum(dim), picked]), exponentials

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, again: Tensor | None) -> tuple[Tensor | None, ...]:
        exponentials, classes = ctx.saved_tensors
        dim, length = ctx.dim, exponentials.shape[ctx.dim]
        if grad is None:
            found = None if again is None else (exponentials * again).to(ctx.dtype)
            return found, *[None] * 6
        total, picked = (g.unsqueeze(dim) for g in grad.unbind())
        at, outside = own(classes.unsqueeze(dim), ctx.start, length)
        picked = picked.masked_fill(outside, 0)
        if again is None and is_plain(grad) and is_last_backward():
            found = exponentials.detach().mul_(total)
            found = found.scatter_add_(dim, at, picked) if length else found
        else:
            found = exponentials * (total if again is None else total + again)
            found = found.scatter_add(dim, at, picked) if length else found
        return found.to(ctx.dtype), *[None] * 6
