"""Logits of some rows and some classes: what the operators of a head and its loss compute of them, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.ops.async_linear import rows_of
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


class Head(NamedTuple):
    """A head: its logits are `(x @ weight.T + bias + low_x @ low_weight.T) * scale`, or bounded by tanh.

    Attributes:
        weight: [v hidden]
        x: [* hidden]
        bias: [v]
        low_weight, low_x: [v rank], [* rank]: a product that is added, such as an adapter's; None without.
        scale: multiplies the products.
        cap: if not 0, it bounds the logits: `cap * tanh(logits / cap)`.
        dtype: the dtype to which the model casts the products; at least float32 by default.
    """

    weight: Tensor
    x: Tensor
    bias: Tensor | None = None
    low_weight: Tensor | None = None
    low_x: Tensor | None = None
    scale: float = 1.0
    cap: float = 0.0
    dtype: torch.dtype | None = None

    @property
    def dtype_of_logits(self) -> torch.dtype:
        """The dtype of logits, of their sums and of their gradients."""
        return self.dtype or torch.promote_types(self.x.dtype, torch.float32)

    def of_rows(self) -> Head:
        """Returns the head without a gradient, and with one dimension of rows."""
        bias, low_weight, low_x = (None if y is None else y.detach() for y in self[2:5])
        low_x = None if low_x is None else rows_of(low_x)
        return Head(self.weight.detach(), rows_of(self.x.detach()), bias, low_weight, low_x, *self[5:])

    def logits(self, part: slice = slice(None), block: slice = slice(None)) -> Tensor:
        """Returns the logits of some rows and classes in new memory: [rows v]"""
        z = F.linear(self.x[part], self.weight[block], None if self.bias is None else self.bias[block])
        if self.low_weight is not None and self.low_x is not None:
            z.addmm_(self.low_x[part], self.low_weight[block].t())
        z = z.to(self.dtype_of_logits)
        z = z if self.scale == 1 else z.mul_(self.scale)
        return z.div_(self.cap).tanh_().mul_(self.cap) if self.cap else z

    def all_logits(self) -> Tensor:
        """Returns the logits of all rows by operators that can be differentiated again, mapped and compiled: [* v]"""
        z = F.linear(self.x, self.weight, self.bias)
        if self.low_weight is not None and self.low_x is not None:
            z = z + F.linear(self.low_x, self.low_weight)
        z = z.to(self.dtype_of_logits) * self.scale
        return torch.tanh(z / self.cap) * self.cap if self.cap else z


def picked(z: Tensor, index: Tensor, start: int, size: int) -> Tensor:
    """Returns the logit of each row's class, minus infinity if another rank has it. z: [rows v], index: [rows]"""
    outside = local_index(index, start, z.shape[1])[1]
    return gather(z, 1, index[:, None], start, size)[:, 0].masked_fill_(outside, -torch.inf)


def exponentiate(z: Tensor, keeps: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Returns exponentials of each row, the logarithm of their sum, and the number that makes them probabilities.

    Args:
        z: [rows v] logits, which the exponentials overwrite, unless they are kept.

    Returns:
        [rows v], [rows] and [rows 1]: `exp(z - lse) = exponentials * number`.
    """
    if z.shape[1] == 0:
        return z, z.new_full((len(z),), -torch.inf), z.new_zeros((len(z), 1))
    # In a row without a finite logit the differences are minus infinity, and not NaN.
    top = z.amax(1, keepdim=True).clamp_(min=torch.finfo(z.dtype).min)
    exponentials = (z - top if keeps else z.sub_(top)).exp_()
    total = exponentials.sum(1, keepdim=True)
    return exponentials, (total.log() + top)[:, 0], total.reciprocal_()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns the sum of products of each row. a, b: [rows v] -> [rows]; one of them may be [v]"""
    a, b = (b, a) if a.dim() == 1 else (a, b)
    return a.mv(b) if b.dim() == 1 else torch.bmm(a.unsqueeze(1), b.unsqueeze(2))[:, 0, 0]


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
    heads: Sequence[Head], needed: Sequence[Sequence[bool]], of_tile: Callable[[slice, slice], Sequence[Tensor | None]]
) -> list[list[Tensor | None]]:
    """Returns the gradients of each head's tensors, None for one that is not needed; see `NOTE [Sums of products]`.

    Args:
        heads: with one dimension of rows.
        needed: whether weight, x, bias, low_weight and low_x of each head get a gradient.
        of_tile: the gradient of each head's products, of a block of classes and a part of rows. It is called once for
            each.
    """
    n, classes = len(heads[0].x), len(heads[0].weight)
    dtype = torch.promote_types(heads[0].x.dtype, torch.float32)
    sums = [Sums.of(head, is_needed, dtype) for head, is_needed in zip(heads, needed, strict=True)]
    # Tiles are squares if there are as many rows and classes.
    side = max(math.isqrt(CHUNK), 1)
    for block in _ranges(classes, CHUNK // max(min(n, side), 1)):
        of_block = [head_sums.of_block(block) for head_sums in sums]
        for part in _ranges(n, CHUNK // max(min(classes, side), 1)):
            for head_sums, of_weights, g in zip(sums, of_block, of_tile(block, part), strict=True):
                if g is not None:
                    head_sums.add(g, part, block, of_weights)
        for head_sums, of_weights in zip(sums, of_block, strict=True):
            for total, of_classes in zip(head_sums.of_weights, of_weights, strict=True):
                if total is not None and of_classes is not None:
                    total[block] = of_classes
    return [head_sums.in_order() for head_sums in sums]


@dataclass(frozen=True)
class Sums:
    """The gradients of a head to which tiles or chunks add. Each is None if nobody needs it.

    Attributes:
        of_weights: of weight, low_weight and bias.
        of_rows: of x and low_x.
    """

    head: Head
    of_weights: tuple[Tensor | None, ...]
    of_rows: tuple[Tensor | None, ...]

    @staticmethod
    def of(head: Head, needed: Sequence[bool], dtype: torch.dtype) -> Sums:
        """Returns zeros. needed: of weight, x, bias, low_weight and low_x; dtype: that of sums over classes"""

        def zeros(y: Tensor | None, is_needed: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.zeros_like(y, dtype=dtype) if y is not None and is_needed else None

        weights = (head.weight, needed[0]), (head.low_weight, needed[3]), (head.bias, needed[2])
        rows = (head.x, needed[1]), (head.low_x, needed[4])
        of_weights = (zeros(y, is_needed, head.x.dtype) for y, is_needed in weights)
        return Sums(head, tuple(of_weights), tuple(zeros(y, is_needed, dtype) for y, is_needed in rows))

    def of_block(self, block: slice) -> list[Tensor | None]:
        """Returns zeros in at least float32 for some classes of `of_weights`."""
        dtype = torch.promote_types(self.head.x.dtype, torch.float32)
        return [None if y is None else torch.zeros_like(y[block], dtype=dtype) for y in self.of_weights]

    def add(
        self,
        g: Tensor,
        part: slice,
        block: slice = slice(None),
        of_block: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Adds what follows from the gradient of a tile's products. g: [rows v]; of_block: `of_weights` if None"""
        of_weights = self.of_weights if of_block is None else of_block
        head, (of_weight, of_low_weight, of_bias), (of_x, of_low_x) = self.head, of_weights, self.of_rows
        for weight, rows, weight_sum, row_sum in (
            (head.weight, head.x, of_weight, of_x),
            (head.low_weight, head.low_x, of_low_weight, of_low_x),
        ):
            if row_sum is not None:
                _add_product(row_sum[part], g, weight[block])  # type: ignore[index]
            if weight_sum is not None:
                _add_product(weight_sum, g.t(), rows[part])  # type: ignore[index]
        if of_bias is not None:
            of_bias += g.sum(0, dtype=of_bias.dtype)

    def in_order(self) -> list[Tensor | None]:
        """Returns the gradients of weight, x, bias, low_weight and low_x."""
        (of_weight, of_low_weight, of_bias), dtype = self.of_weights, self.head.x.dtype
        of_x, of_low_x = (None if y is None else y.to(dtype) for y in self.of_rows)
        return [of_weight, of_x, of_bias, of_low_weight, of_low_x]


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
