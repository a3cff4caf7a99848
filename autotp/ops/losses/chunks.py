"""Logits of some rows and some classes: what the operators of a head and its loss compute of them, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.lookup import gather, local_index

CHUNK = 2**24
"""The logits of a chunk: 64 MiB in float32."""


def row_chunks(rows: int, classes: int) -> Iterator[slice]:
    """Yields ranges of rows whose logits are at most `CHUNK`, of equal lengths but for the last; at least one."""
    number = max(-(-rows * classes // CHUNK), 1)
    yield from _ranges(rows, -(-rows // number))


def _ranges(n: int, length: int) -> Iterator[slice]:
    """Yields ranges of a length, at least one."""
    length = max(length, 1)
    yield from (slice(first, min(first + length, n)) for first in range(0, max(n, 1), length))


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, cap: float) -> Tensor:
    """Returns the logits in new memory, in at least float32. x: [rows hidden] -> [rows v]"""
    z = F.linear(x, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = z if scale == 1 else z.mul_(scale)
    return z.div_(cap).tanh_().mul_(cap) if cap else z


def picked(z: Tensor, index: Tensor, start: int, size: int) -> Tensor:
    """Returns the logit of each row's class, minus infinity if another rank has it. z: [rows v], index: [rows]"""
    outside = local_index(index, start, z.shape[1])[1]
    return gather(z, 1, index[:, None], start, size)[:, 0].masked_fill_(outside, -torch.inf)


def exponentiate(z: Tensor) -> Tensor:
    """Returns the logarithm of the sum of exponentials of each row, and overwrites logits with probabilities."""
    if z.shape[1] == 0:
        return z.new_full((len(z),), -torch.inf)
    # In a row without a finite logit the differences are minus infinity, and not NaN.
    top = z.amax(1, keepdim=True).clamp_(min=torch.finfo(z.dtype).min)
    total = z.sub_(top).exp_().sum(1, keepdim=True)
    z.div_(total)
    return (total.log_() + top)[:, 0]


def slope_of(z: Tensor, cap: float) -> Tensor | None:
    """Returns the derivative of the bound by tanh at these logits; None without a bound."""
    return 1 - (z / cap).square_() if cap else None


def at_class(g: Tensor, index: Tensor, start: int, values: Tensor) -> Tensor:
    """Returns the gradient of logits with a value added at each row's class, in place. g: [rows v]"""
    local, outside = local_index(index, start, g.shape[1])
    return g.scatter_add_(1, local[:, None], values.masked_fill(outside, 0)[:, None].to(g.dtype)) if g.shape[1] else g


def grad_of_product(g: Tensor, slope: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of the product of rows and weight, of that of the logits, which is overwritten."""
    g = g if slope is None else g.mul_(slope)
    return (g if scale == 1 else g.mul_(scale)).to(dtype)


def without_class(probabilities: Tensor, index: Tensor, start: int) -> Tensor:
    """Returns the probabilities with 0 for each row's class, in place. probabilities: [rows v]"""
    if probabilities.shape[1] == 0:
        return probabilities
    local, outside = local_index(index, start, probabilities.shape[1])
    at_class = probabilities.gather(1, local[:, None]).masked_fill_(~outside[:, None], 0)
    return probabilities.scatter_(1, local[:, None], at_class)


def sums_of_tiles(
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


def differentiable(
    again: Callable[..., Tensor], grad: Tensor, operands: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns gradients that can be differentiated again.

    Args:
        again: computes the result of operands. Two of them may be one tensor: each gets the gradient of its own place.
    """
    aliases = [None if y is None else y.view_as(y) for y in operands]
    differentiated = [y for y, is_needed in zip(aliases, needed, strict=True) if is_needed and y is not None]
    grads = iter(torch.autograd.grad(again(*aliases), differentiated, grad, create_graph=True))
    return [next(grads) if is_needed else None for is_needed in needed]
