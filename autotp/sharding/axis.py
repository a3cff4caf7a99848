"""Axes: the logical dimensions of a model, found by unifying the dimensions of its tensors.

An `Axis` is an equivalence class (union-find) of tensor dimensions or of factors of them. An axis is a
*leaf*, or it is refined into a *product* of axes (`heads x head_dim`, major to minor) or a
*concatenation* (`q | k | v`). Tensor parallelism is: choose leaves, cut every tensor that has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, Literal

from autotp.sharding.size_form import size_form


@dataclass(frozen=True)
class Size:
    """The length of an axis, in elements: an integer times symbols, so `4*s77` is `Size(4, ("s77",))`."""

    number: int = 1
    symbols: tuple[str, ...] = ()

    @staticmethod
    def of(length: Any) -> Size:
        """Returns the size of an int or a SymInt; a sum of symbols becomes one opaque symbol."""
        if isinstance(length, Size):
            return length
        if isinstance(length, int):
            return Size(length)
        return _of_expression(length.node.expr)

    def __mul__(self, other: Size) -> Size:
        return Size(self.number * other.number, tuple(sorted(self.symbols + other.symbols)))

    def divided(self, divisor: Size) -> Size | None:
        """Returns `self / other` if it is whole, else None."""
        symbols = list(self.symbols)
        for symbol in divisor.symbols:
            if symbol not in symbols:
                return None
            symbols.remove(symbol)
        if divisor.number == 0 or self.number % divisor.number:
            return None
        return Size(self.number // divisor.number, tuple(symbols))

    def common(self, other: Size) -> Size:
        """Returns the greatest common divisor."""
        rest, shared = list(other.symbols), []
        for symbol in self.symbols:
            if symbol in rest:
                rest.remove(symbol)
                shared.append(symbol)
        return Size(gcd(self.number, other.number), tuple(shared))

    def __str__(self) -> str:
        return "*".join([str(self.number)] * (self.number != 1 or not self.symbols) + list(self.symbols))


@lru_cache(maxsize=1024)
def _of_expression(length: Any) -> Size:
    expr = size_form(length)
    number, rest = expr.as_coeff_Mul()
    symbols: list[str] = []
    for base, power in rest.as_powers_dict().items():
        # A quotient or a root is one symbol, which `divided` can take away as a whole only.
        whole = power.is_Integer and power > 0
        symbols += [str(base)] * int(power) if whole else [str(base**power)]
    if not number.is_Integer or rest == 1:
        return Size(int(number)) if rest == 1 and number.is_Integer else Size(1, (str(expr),))
    return Size(int(number), tuple(sorted(symbols)))


ONE = Size(1)


@dataclass(eq=False)
class Axis:
    """A node of the union-find. Compare axes by `find(axis)`, and read `kind` and `parts` of `find(axis)` only.

    Attributes:
        size: the number of positions along the axis, over all ranks.
        kind: leaf, or how the axis consists of `parts`; "grid" for a cut of several leaves (`autotp/sharding/grid.py`).
        tangled: two refinements of this axis did not line up (`6 x 4` against `4 x 6`), so it is never cut.
        counts: for a grid, for each leaf the number of its parts, and of consecutive ranks that hold the same part.
        tp: for a grid, the number of ranks.
    """

    size: Size
    kind: Literal["leaf", "product", "concat", "grid"] = "leaf"
    parts: tuple[Axis, ...] = ()
    tangled: bool = False
    link: Axis | None = None
    counts: tuple[tuple[int, int], ...] = ()
    tp: int = 0

    def __str__(self) -> str:
        axis = find(self)
        if axis.kind == "leaf":
            return str(axis.size)
        return "(" + {"product": " ", "concat": " | ", "grid": " x "}[axis.kind].join(map(str, axis.parts)) + ")"


def find(axis: Axis) -> Axis:
    """Returns the representative of an axis."""
    while axis.link is not None:
        # Path halving: each call shortens the chain, so that the next calls take fewer steps.
        if axis.link.link is not None:
            axis.link = axis.link.link
        axis = axis.link
    return axis


def product(parts: Sequence[Axis]) -> Axis:
    """Returns the product of `parts`, major to minor; parts of size 1 are dropped."""
    # A factor of size 1 has nothing to cut, and without it `(1 heads)` and `heads` are one axis.
    factors = tuple(part for part in parts if part.size != ONE)
    if len(factors) == 1:
        return factors[0]
    size = ONE
    for part in factors:
        size = size * part.size
    return Axis(size, "product" if factors else "leaf", factors)


def concat(parts: Sequence[Axis]) -> Axis:
    """Returns the concatenation of `parts`. Their sizes must be numbers."""
    nonempty = tuple(part for part in parts if part.size != Size(0))
    if len(nonempty) == 1:
        return nonempty[0]
    return Axis(Size(sum(part.size.number for part in nonempty)), "concat", nonempty)


def unify(a: Axis, b: Axis) -> bool:
    """Makes `a` and `b` one axis. Parts that do not line up are marked tangled, and are never cut.

    Returns:
        False if their sizes are equal on these inputs only, `s0*s1` and `s2*s3`: they stay two axes.
    """
    a, b = find(a), find(b)
    if a is b or a.size == b.size == Size(0):  # An empty axis cannot be cut.
        return True
    if a.size != b.size:
        if a.size.symbols or b.size.symbols:
            return False
        tangle(a)
        tangle(b)
        return True
    # A leaf says nothing of its parts, so it takes those of the other axis.
    if a.kind == "leaf":
        a.link, b.tangled = b, a.tangled or b.tangled
        if a.tangled:
            tangle(b)
        return True
    if b.kind == "leaf":
        return unify(b, a)
    b.link = a  # Linked first: an axis that contains itself must not cause endless recursion.
    if a.kind != b.kind:
        tangle(a)
        for part in b.parts:
            tangle(part)
    else:
        (_align_products if a.kind == "product" else _align_concats)(list(a.parts), list(b.parts))
    return True


def tangle(axis: Axis) -> None:
    """Marks an axis and all its parts as never to be cut."""
    axis = find(axis)
    axis.tangled = True
    for part in axis.parts:
        if not find(part).tangled:
            tangle(part)


def leaves(axis: Axis) -> Iterator[Axis]:
    """Yields the leaves of an axis in order; a leaf in several parts of a concatenation comes several times."""
    axis = find(axis)
    if axis.kind == "leaf":
        yield axis
    for part in axis.parts:
        yield from leaves(part)


def holds(axis: Axis, leaf: Axis) -> bool:
    """True if cutting `leaf` cuts all of `axis`: it is in every part of a concatenation, and in one part of a product.

    A grid cuts an axis that has one of its leaves; some parts of a concatenation may have none.
    """
    axis, leaf = find(axis), find(leaf)
    if leaf.kind == "grid":
        return touches(axis, leaf) and all(_whole_in(axis, part) for part in leaf.parts)
    if axis is leaf:
        return not leaf.tangled
    inside = [holds(part, leaf) for part in axis.parts]
    if axis.kind == "concat":
        return all(inside)
    # With the leaf in two factors, ranks would hold the blocks on the diagonal, and nobody the others.
    return sum(inside) == 1


def _whole_in(axis: Axis, leaf: Axis) -> bool:
    """True if `leaf` is in at most one factor of each product in `axis`, and nowhere tangled."""
    axis, leaf = find(axis), find(leaf)
    if axis is leaf or axis.kind == "leaf":
        return axis is not leaf or not leaf.tangled
    inside = [part for part in axis.parts if touches(part, leaf)]
    return (axis.kind == "concat" or len(inside) < 2) and all(_whole_in(part, leaf) for part in inside)


def touches(axis: Axis, leaf: Axis) -> bool:
    """True if `leaf`, or a leaf of the grid, is anywhere in `axis`."""
    leaf = find(leaf)
    leaf_ids = {id(find(part)) for part in leaf.parts} if leaf.kind == "grid" else {id(leaf)}
    return any(id(part) in leaf_ids for part in leaves(axis))


def open_product(axis: Axis, leaf: Axis) -> tuple[Size, Size] | None:
    """Returns the sizes (major, minor) around `leaf` in an axis that is a product with it; None for other axes."""
    axis, leaf = find(axis), find(leaf)
    if leaf.kind == "grid":  # A grid of one leaf on all ranks is the same as a cut of the leaf.
        return open_product(axis, leaf.parts[0]) if leaf.counts == ((leaf.tp, 1),) else None
    if axis is leaf:
        return ONE, ONE
    if axis.kind != "product" or not holds(axis, leaf):
        return None
    major, inner, minor = ONE, None, ONE
    for part in axis.parts:
        if holds(part, leaf):
            inner = open_product(part, leaf)
        elif inner is None:
            major = major * part.size
        else:
            minor = minor * part.size
    return None if inner is None else (major * inner[0], inner[1] * minor)


def is_major(axis: Axis, leaf: Axis) -> bool:
    """Returns whether a rank that has a part of `leaf` has positions of the axis that follow one another."""
    opened = open_product(axis, leaf)
    return opened is not None and opened[0] == ONE


def _align_products(xs: list[Axis], ys: list[Axis]) -> None:
    """Unifies two products of equal size factor by factor, splitting factors at common divisors."""
    while xs and ys:
        x, y = find(xs.pop(0)), find(ys.pop(0))
        if x.size == y.size:
            unify(x, y)
            continue
        if x.kind == "product" or y.kind == "product":  # Already split: compare its parts.
            # The factors in front are unified already, so these two begin at the same place of the product.
            xs[:0] = x.parts if x.kind == "product" else [x]
            ys[:0] = y.parts if y.kind == "product" else [y]
            continue
        # 6 x 4 against 4 x 6: both first factors become `2 x rest`, and the next round compares 3 with 2.
        major = x.size.common(y.size)
        if major == ONE or not (_split(x, major) and _split(y, major)):
            for rest in [x, y, *xs, *ys]:
                tangle(rest)
            return
        xs.insert(0, x)
        ys.insert(0, y)


def _split(x: Axis, major: Size) -> bool:
    """Refines the leaf `x` into `major x rest`; True if it is now a product, or had the size `major` already."""
    if x.size == major:
        return True
    minor = x.size.divided(major)
    if x.kind != "leaf" or minor is None:
        return False
    # A refinement does not make an axis legal to cut: the parts inherit the mark.
    x.kind, x.parts = "product", (Axis(major, tangled=x.tangled), Axis(minor, tangled=x.tangled))
    return True


def _align_concats(xs: list[Axis], ys: list[Axis]) -> None:
    """Unifies two concatenations of equal size part by part, splitting parts at each other's boundaries."""
    while xs and ys:
        x, y = find(xs.pop(0)), find(ys.pop(0))
        if x.size == y.size:
            unify(x, y)
            continue
        if x.kind == "concat" or y.kind == "concat":
            xs[:0] = x.parts if x.kind == "concat" else [x]
            ys[:0] = y.parts if y.kind == "concat" else [y]
            continue
        long, length = (x, y.size.number) if x.size.number > y.size.number else (y, x.size.number)
        if long.kind != "leaf":
            for rest in [x, y, *xs, *ys]:
                tangle(rest)
            return
        sizes = (Size(length), Size(long.size.number - length))
        long.kind, long.parts = "concat", tuple(Axis(size, tangled=long.tangled) for size in sizes)
        xs.insert(0, x)
        ys.insert(0, y)
