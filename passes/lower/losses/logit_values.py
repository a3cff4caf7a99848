"""Values that have one number for each class of each row, written with the logits of heads: they are never computed.

    y = log_softmax(z)        Affine(z, -lse(z))            y * 2               Affine(2 z, -2 lse(z))
    p = exp(y)                Exp(Affine(z, -lse(z)))       p * (y - w)         WeightedValue(p, Affine(z - w, -lse(z)))

`logit_rules.read` says what an operator makes of such values: another one, or a `RowReader`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autotp.passes.builder import dtype_of_sums


@dataclass(frozen=True)
class Logits:
    """The logits of a head: `inner * y`, or `outer * tanh(inner * y)`, of its product with a bias, `y`.

    Attributes:
        linear: the product.
        added: products that are added, such as those of adapters, with factors.
        views: views of rows, which apply to the input of the head as well.
        detached: whether no gradient flows.
        dtype: of logits and of their sums.
    """

    linear: fx.Node
    views: tuple[fx.Node, ...] = ()
    inner: float = 1.0
    outer: float = 1.0
    bounded: bool = False
    bias: fx.Node | None = None
    detached: bool = False
    added: tuple[tuple[fx.Node, float], ...] = ()
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(linear: fx.Node) -> Logits:
        """Returns the logits that are the product of a head."""
        return Logits(linear, dtype=dtype_of_sums(linear.meta["val"].dtype))

    @property
    def cast_to(self) -> torch.dtype | None:
        """The dtype to which the model casts the product; None if it is that of its sums anyway."""
        return None if Logits.of(self.linear).dtype == self.dtype else self.dtype

    @property
    def linears(self) -> list[fx.Node]:
        """All products."""
        return [self.linear, *(linear for linear, _ in self.added)]

    @property
    def scale(self) -> float:
        """The number that multiplies the product: `outer * tanh(inner * y) = cap * tanh(scale * y / cap)`."""
        return self.inner * self.outer

    @property
    def cap(self) -> float:
        """The bound by tanh; 0 without."""
        return self.outer if self.bounded else 0.0

    def times(self, factor: float) -> Logits:
        """Returns the logits times a number."""
        if self.bounded:
            return replace(self, outer=self.outer * factor)
        return replace(self, inner=self.inner * factor)

    def cast(self, dtype: torch.dtype) -> Logits | None:
        """Returns the logits in another dtype; None if the model scales or bounds them in another precision before."""
        dtype = dtype_of_sums(dtype)
        if dtype == self.dtype:
            return self
        return None if self.bounded or self.inner != 1 else replace(self, dtype=dtype)

    def plus(self, other: Logits) -> Logits | None:
        """Returns the logits of a head with the sum of both products, such as with an adapter; None for other sums."""
        a, b = sorted((self, other), key=lambda logits: -logits.linear.args[1].meta["val"].shape[1])  # type: ignore[union-attr]
        factor = b.inner / a.inner
        is_product = not (a.bounded or b.bounded) and {*a.linears}.isdisjoint(b.linears)
        if not is_product or any(getattr(a, name) != getattr(b, name) for name in ("views", "detached", "dtype")):
            return None
        if b.bias is not None and (a.bias is not None or factor != 1):
            return None
        added = (*a.added, (b.linear, factor), *((linear, number * factor) for linear, number in b.added))
        return replace(a, added=added, bias=a.bias or b.bias)


@dataclass(frozen=True)
class Lse:
    """The logarithm of the sum of exponentials of logits, for each row."""

    logits: Logits


@dataclass(frozen=True)
class RowNumbers:
    """A value of the model with one number for each row. node: [* 1]"""

    node: fx.Node
    detached: bool = False


@dataclass(frozen=True)
class One:
    """The number 1, for each row."""


@dataclass(frozen=True)
class Mixture:
    """The logarithms of the sum of the exponentials of two values, each of one head: `logaddexp(first, second)`."""

    first: Affine
    second: Affine


@dataclass(frozen=True)
class Affine:
    """A sum of logits with factors, and of values of rows with factors.

    Attributes:
        is_moved: whether the classes are in dimension 1, as a loss wants them, of three or more.
        mixtures: mixtures that are added, with factors.
    """

    parts: tuple[tuple[Logits, float], ...]
    rows: tuple[tuple[Lse | RowNumbers | One, float], ...] = ()
    is_moved: bool = False
    mixtures: tuple[tuple[Mixture, float], ...] = ()

    @property
    def logits(self) -> Logits | None:
        """The logits that this value is; None for a sum."""
        is_one = len(self.parts) == 1 and self.parts[0][1] == 1 and not (self.rows or self.mixtures)
        return self.parts[0][0] if is_one else None

    @property
    def softmax_of(self) -> Logits | None:
        """The logits with the same softmax: a number for a whole row changes nothing. None for a sum of logits."""
        if len(self.parts) != 1 or self.mixtures:
            return None
        logits, factor = self.parts[0]
        return logits.times(factor)

    @property
    def logarithms_of(self) -> Logits | None:
        """The logits of which this value is `log_softmax`; None if it is not."""
        logits = self.softmax_of
        return logits if logits is not None and self.rows == ((Lse(logits), -1.0),) else None

    def plus(self, other: Affine, factor: float = 1.0) -> Affine:
        """Returns this value plus another one times a number."""
        added = other.times_each(factor)
        sums = {name: _added(getattr(self, name) + getattr(added, name)) for name in ("parts", "rows", "mixtures")}
        return replace(self, **sums)

    def times_each(self, factor: float) -> Affine:
        """Returns this value times a number, which multiplies each factor."""
        return replace(self, **{name: _scaled(getattr(self, name), factor) for name in ("parts", "rows", "mixtures")})

    def times(self, factor: float) -> Affine:
        """Returns this value times a number."""
        if self.logits is not None:
            return replace(self, parts=((self.logits.times(factor), 1.0),))
        return self.times_each(factor)


@dataclass(frozen=True)
class Exp:
    """The exponentials of a value, such as probabilities."""

    of: Affine


@dataclass(frozen=True)
class Shares:
    """A tensor of the model with a number for each class, perhaps of each row: [v] or [* v].

    node: the tensor; a loss, whose shares follow from its target, its weights and its smoothing; None if all are 1.
    """

    node: fx.Node | None


@dataclass(frozen=True)
class WeightedValue:
    """Probabilities, or other numbers of classes, times another value."""

    probabilities: Exp | Shares
    of: Affine

    def times(self, factor: float) -> WeightedValue:
        """Returns this value times a number."""
        return replace(self, of=self.of.times_each(factor))


Value = Affine | Exp | WeightedValue


@dataclass(frozen=True)
class RowReader:
    """An operator whose result has no classes.

    Attributes:
        name: "loss", "pick", "lse", "sum" or "argmax".
        value: what it reads.
        keeps_dim: whether the result has a dimension of length 1 in place of the classes.
        divisor: "" or "classes", "rows", "all": by what a sum is divided for a mean.
        over_rows: whether rows are added up, too.
    """

    name: str
    value: Value
    keeps_dim: bool = False
    divisor: str = ""
    over_rows: bool = False


def _added(terms: Any) -> Any:
    sums: dict[Any, float] = {}
    for key, number in terms:
        sums[key] = sums.get(key, 0.0) + number
    return tuple((key, number) for key, number in sums.items() if number)


def _scaled(terms: Any, factor: float) -> Any:
    return tuple((key, number * factor) for key, number in terms)
