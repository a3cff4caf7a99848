"""The terms of a loss, an entropy or a divergence, and their gradients, of some rows and classes of one head or two.

NOTE [A sum beside the terms]
Entropy and KL divergence need the mean over classes of `d`, a sum of logits, with probabilities `softmax(z)`. A loss
with probabilities as its target needs the sum of logits times given shares. A rank that has a part of the classes
gives the mean with the probabilities over its own classes, or the sum of its own. `joined_terms` makes that of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import Signature, signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from autotp.ops.lookup import gather, local_index
from autotp.ops.losses.chunks import Head, at_class, dot, exponentiate, grad_of_product, slope_of

F = TypeVar("F", bound=Callable[..., Any])
Numbers = tuple[Any, ...]
WHOLE = slice(None)


@dataclass(frozen=True)
class Mix:
    """A head, perhaps a second one, and the sum over classes of which the terms are made.

    Attributes:
        first_part, second_part: the sum is that of `first_part * logits + second_part * logits of the second head`,
        shares: times these, [v] or [* v]; times the probabilities of the first head if None.
    """

    first: Head
    second: Head | None = None
    first_part: float = 0.0
    second_part: float = 0.0
    shares: Tensor | None = None

    @staticmethod
    def of(operands: Sequence[Tensor | None], numbers: Numbers) -> Mix:
        """Returns what `operands` and `numbers` were of."""
        first, second = _head(operands[:5], numbers[:3]), _head(operands[5:10], numbers[3:6])
        assert first is not None
        return Mix(first, second, numbers[6], numbers[7], operands[10])

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """The tensors: of both heads, and the shares."""
        return *self.first[:5], *([None] * 5 if self.second is None else self.second[:5]), self.shares

    @property
    def numbers(self) -> Numbers:
        """What a backward keeps beside the tensors."""
        second = self.second or self.first
        return *self.first[5:], *second[5:], self.first_part, self.second_part

    @property
    def heads(self) -> list[Head]:
        """The heads."""
        return [self.first] if self.second is None else [self.first, self.second]

    @property
    def is_empty(self) -> bool:
        """True if there is no sum to compute."""
        return not (self.first_part or self.second_part)

    @property
    def reads_logits(self) -> bool:
        """True if the gradient of the first head needs its logits, beside their exponentials."""
        return not self.is_empty or self.first.cap != 0

    @property
    def number_of_terms(self) -> int:
        """2, 3 with a sum, 4 with another head."""
        return 2 if self.is_empty else 3 if self.second is None else 4

    def of_rows(self) -> Mix:
        """Returns it without gradients, and with one dimension of rows."""
        shares = None if self.shares is None else self.shares.detach()
        if shares is not None and shares.dim() > 1:
            shares = shares.reshape(-1, shares.shape[-1]) if shares.numel() else shares.flatten(0, -2)
        return replace(
            self,
            first=self.first.of_rows(),
            second=None if self.second is None else self.second.of_rows(),
            shares=shares,
        )

    def shares_of(self, part: slice, block: slice, dtype: torch.dtype) -> Tensor | None:
        """Returns the shares of some rows and classes; None if they are probabilities."""
        if self.shares is None:
            return None
        return (self.shares[block] if self.shares.dim() == 1 else self.shares[part, block]).to(dtype)


def _head(operands: Sequence[Tensor | None], numbers: Numbers) -> Head | None:
    weight, x, bias, low_weight, low_x = operands
    return None if weight is None or x is None else Head(weight, x, bias, low_weight, low_x, *numbers)


def mix_of(
    weight: Tensor,
    x: Tensor,
    scale: float = 1.0,
    cap: float = 0.0,
    bias: Tensor | None = None,
    first_part: float = 0.0,
    second_part: float = 0.0,
    second_weight: Tensor | None = None,
    second_x: Tensor | None = None,
    second_scale: float = 1.0,
    second_cap: float = 0.0,
    second_bias: Tensor | None = None,
    shares: Tensor | None = None,
    low_weight: Tensor | None = None,
    low_x: Tensor | None = None,
    second_low_weight: Tensor | None = None,
    second_low_x: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Mix:
    """Returns the heads of an operator, of the arguments that all such operators have.

    Args:
        weight: [v hidden]
        x: [* hidden]
        scale: multiplies the logits, `x @ weight.T + bias`.
        cap: if not 0, it bounds the scaled logits: `cap * tanh(logits / cap)`.
        bias: [v]
        first_part, second_part: the sum is that of `d = first_part * logits + second_part * logits of a second head`.
        second_weight, second_x, second_scale, second_cap, second_bias: the second head, with the same classes and rows.
        shares: [v] or [* v] what multiplies `d` in the sum; the probabilities if None.
        low_weight, low_x: [v rank], [* rank] whose product is added to that of `weight` and `x`.
        second_low_weight, second_low_x: the same of the second head.
        dtype: the dtype to which the model casts the products of both; at least float32 by default.
    """
    second = second_weight, second_x, second_bias, second_low_weight, second_low_x
    numbers = scale, cap, dtype, second_scale, second_cap, dtype, first_part, second_part
    return Mix.of((weight, x, bias, low_weight, low_x, *second, shares), numbers)


def has_arguments_of_mix(operator: F) -> F:
    """Decorates an operator whose last parameters, `*mixed, **named`, are those of `mix_of` after `x`."""
    of_operator, of_mix = ([*signature(f).parameters.values()] for f in (operator, mix_of))
    operator.__signature__ = Signature([*of_operator[:-2], *of_mix[2:]])  # type: ignore[attr-defined]
    return operator


def terms_at_once(mix: Mix, classes: Tensor, start: int, size: int) -> Tensor:
    """Returns the terms by operators that can be differentiated again, mapped and compiled."""
    z, index = mix.first.all_logits(), classes.unsqueeze(-1)
    _, outside = local_index(index, start, z.shape[-1])
    own_class = gather(z, -1, index, start, size).masked_fill(outside, -torch.inf)
    lse = z.logsumexp(-1)
    terms = [lse, own_class.squeeze(-1)]
    if not mix.is_empty:
        d, second_lse = z * mix.first_part, []
        if mix.second is not None:
            second_logits = mix.second.all_logits()
            d, second_lse = d + second_logits * mix.second_part, [second_logits.logsumexp(-1)]
        shares = z.softmax(-1) if mix.shares is None else mix.shares.to(z.dtype)
        terms += [(shares * d).sum(-1), *second_lse]
    return torch.stack(terms)


@dataclass(frozen=True)
class Tile:
    """Logits of some rows and classes, and their exponentials, which may have overwritten the logits.

    Attributes:
        z, exponentials: of the first head; `exponentials * number` are probabilities over the classes of this rank.
        y, second_exponentials: of the second head.
    """

    part: slice
    block: slice
    z: Tensor
    y: Tensor | None
    exponentials: Tensor
    number: Tensor | float
    second_exponentials: Tensor | None = None
    second_number: Tensor | float = 1.0


@dataclass(frozen=True)
class RowTerms:
    """What a chunk of rows with all classes of this rank gives: [rows] each; None for what there is not."""

    lse: Tensor
    total: Tensor | None
    second_lse: Tensor | None


def read_rows(mix: Mix, part: slice, z: Tensor, keeps: bool) -> tuple[RowTerms, Tile]:
    """Returns the terms of some rows. z: their logits; keeps: whether logits stay for `gradients`"""
    y = None if mix.second is None else mix.second.logits(part)
    shares, total = mix.shares_of(part, WHOLE, z.dtype), None
    is_mean = not mix.is_empty and shares is None
    if shares is not None:
        total = _total(mix, shares, z, y)
    exponentials, lse, number = exponentiate(z, keeps=is_mean or (keeps and mix.first.cap != 0))
    if is_mean:
        total = _total(mix, exponentials, z, y) * number[:, 0]
    if y is None:
        return RowTerms(lse, total, None), Tile(part, WHOLE, z, y, exponentials, number)
    second_exponentials, second_lse, second_number = exponentiate(y, keeps)
    tile = Tile(part, WHOLE, z, y, exponentials, number, second_exponentials, second_number)
    return RowTerms(lse, total, second_lse), tile


def _total(mix: Mix, shares: Tensor, z: Tensor, y: Tensor | None) -> Tensor:
    total = mix.first_part * dot(shares, z) if mix.first_part else z.new_zeros(len(z))
    return total if y is None or not mix.second_part else total.add_(dot(shares, y), alpha=mix.second_part)


def tile_again(mix: Mix, part: slice, block: slice, lse: Tensor, second_lse: Tensor | None) -> Tile:
    """Returns a tile whose exponentials are probabilities over all classes of this rank. lse, second_lse: [rows]"""
    z, y = mix.first.logits(part, block), None if mix.second is None else mix.second.logits(part, block)
    exponentials = (z - lse[:, None] if mix.reads_logits else z.sub_(lse[:, None])).exp_()
    if y is None or second_lse is None:
        return Tile(part, block, z, y, exponentials, 1.0)
    return Tile(part, block, z, y, exponentials, 1.0, (y - second_lse[:, None]).exp_())


@dataclass(frozen=True)
class RowGrads:
    """The gradients of a loss by its terms of each row: [rows] each; None for 0.

    Attributes:
        of_total: by the sum itself, of which the two terms are made.
        total: the sum, if it is a mean with probabilities.
    """

    of_lse: Tensor
    of_class: Tensor
    of_total: Tensor | None = None
    of_second_lse: Tensor | None = None
    total: Tensor | None = None

    @staticmethod
    def of(grads: Tensor, terms: Tensor) -> RowGrads:
        """Returns the gradients of terms as they are in `linear_class_terms`. grads, terms: [terms rows]"""
        more = [*grads[2:], *[None] * 2][:2]
        return RowGrads(grads[0], grads[1], more[0], more[1], terms[2] if len(terms) > 2 else None)

    @property
    def in_order(self) -> tuple[Tensor | None, ...]:
        """The gradients in the order of the terms."""
        return self.of_lse, self.of_class, self.of_total, self.of_second_lse

    def rows(self, part: slice) -> RowGrads:
        """Returns those of some rows."""
        return RowGrads(*(None if x is None else x[part] for x in vars(self).values()))  # type: ignore[arg-type]


def gradients(
    mix: Mix, tile: Tile, grads: RowGrads, index: Tensor, start: int, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradient of the products of each head that needs it: [rows v]. The tile is overwritten.

    Args:
        grads: of the rows of the tile.
        index: [rows] the global class of each row.
        start: the first class of the tile.
    """
    # The second head first: it reads the probabilities that the first one overwrites.
    of_second = [_of_second(mix, tile, grads) if needed[1] else None] if mix.second is not None else []
    return [gradient_of_first(mix, tile, grads, index, start) if needed[0] else None, *of_second]


def gradient_of_first(mix: Mix, tile: Tile, grads: RowGrads, index: Tensor, start: int) -> Tensor:
    """Returns the gradient of the products of the first head, as `gradients` does."""
    z, slope = tile.z, slope_of(tile.z, mix.first.cap)
    of_lse = grads.of_lse[:, None] * tile.number
    if grads.of_total is None or mix.shares is not None:
        g = tile.exponentials.mul_(of_lse)
        if grads.of_total is not None and mix.first_part:
            shares = mix.shares_of(tile.part, tile.block, z.dtype)
            g.addcmul_(shares, grads.of_total[:, None] * mix.first_part)  # type: ignore[arg-type]
    else:
        # Of `sum(p * d)` by the logits: p * (d - sum(p * d) + first_part), with all that is of rows in two numbers.
        of_total = grads.of_total[:, None] * tile.number
        of_rows = torch.addcmul(of_lse, of_total, mix.first_part - grads.total[:, None])  # type: ignore[index]
        g = torch.addcmul(of_rows, z, of_total * mix.first_part, out=z)
        if tile.y is not None and mix.second_part:
            g.addcmul_(tile.y, of_total * mix.second_part)
        g.mul_(tile.exponentials)
    return grad_of_product(at_class(g, index, start, grads.of_class), slope, mix.first.scale, mix.first.x.dtype)


def _of_second(mix: Mix, tile: Tile, grads: RowGrads) -> Tensor:
    head, g = mix.second, tile.second_exponentials
    assert head is not None and g is not None and tile.y is not None
    slope = slope_of(tile.y, head.cap)
    g = g.zero_() if grads.of_second_lse is None else g.mul_(grads.of_second_lse[:, None] * tile.second_number)
    if grads.of_total is not None and mix.second_part:
        shares, number = mix.shares_of(tile.part, tile.block, g.dtype), tile.number if mix.shares is None else 1.0
        g.addcmul_(tile.exponentials if shares is None else shares, grads.of_total[:, None] * mix.second_part * number)
    return grad_of_product(g, slope, head.scale, head.x.dtype)


def add_to_shares(of_shares: Tensor, mix: Mix, tile: Tile, grads: RowGrads) -> None:
    """Adds the gradient of the shares of a tile: what they multiply. of_shares: [v] or [rows v]"""
    d = tile.z * mix.first_part
    if tile.y is not None:
        d.add_(tile.y, alpha=mix.second_part)
    d.mul_(grads.of_total[:, None])  # type: ignore[index]
    if of_shares.dim() == 1:
        of_shares[tile.block] += d.sum(0)
    else:
        of_shares[tile.part, tile.block] = d
