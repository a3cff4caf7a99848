"""mask_window: how far before and after its own position a query reads, from the function of a mask.

    (q >= k) & (q - k < 3)          (2, 0)
    (q - k).abs() <= 4              (4, 4)
    q >= k                          None: all keys before

A mask that is true says that `k - q` is in a range. What is not known says nothing: each number is possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True)
class Distance:
    """A number `factor * (k - q) + offset`, or a number alone (factor 0); with `absolute` without its sign."""

    factor: int
    offset: float
    absolute: bool = False


@dataclass(frozen=True)
class Position:
    """A number `q * of_query + k * of_key + offset` that is no distance yet."""

    of_query: int
    of_key: int
    offset: float


Range = tuple[float, float]
"""The least and the greatest `k - q` of a mask that is true."""
ANY: Range = (-math.inf, math.inf)
NEVER: Range = (math.inf, -math.inf)


def window_of(graph: fx.Graph) -> tuple[int, int] | None:
    """Returns the numbers of keys before and after its own that a query reads; None without a bound on both sides."""
    facts = dict[fx.Node, Any]()
    for node in graph.nodes:
        if node.op == "placeholder":
            facts[node] = {"q": Position(1, 0, 0), "k": Position(0, 1, 0)}.get(node.name)
        elif node.op == "output":
            smallest, greatest = _range(facts.get(node.args[0]))
            bounded = math.isfinite(smallest) and math.isfinite(greatest)
            return (max(0, math.floor(-smallest)), max(0, math.floor(greatest))) if bounded else None
        else:
            packet = getattr(node.target, "overloadpacket", None)
            meaning = MEANINGS.get(packet)
            plain = not node.kwargs and len(node.args) <= 2
            operands = [facts.get(x) if isinstance(x, fx.Node) else _number(x) for x in node.args]
            facts[node] = meaning(*operands) if meaning is not None and plain else None
            if packet in (aten.new_zeros, aten.zeros) and node.kwargs.get("dtype") is torch.bool:
                facts[node] = NEVER  # `or_masks` begins with it.
    return None


def _number(x: Any) -> Position | None:
    return Position(0, 0, x) if isinstance(x, int | float) and not isinstance(x, bool) else None


def _range(fact: Any) -> Range:
    return fact if isinstance(fact, tuple) else ANY


def _sum(a: Any, b: Any, sign: int = 1) -> Position | None:
    if not (isinstance(a, Position) and isinstance(b, Position)):
        return None
    of_query, of_key = a.of_query + sign * b.of_query, a.of_key + sign * b.of_key
    return Position(of_query, of_key, a.offset + sign * b.offset)


def _absolute(a: Any) -> Distance | None:
    is_distance = isinstance(a, Position) and a.of_query == -a.of_key and abs(a.of_key) == 1
    return Distance(a.of_key, a.offset, True) if is_distance else None


def _at_most(a: Any, b: Any, less: int = 0) -> Range:
    """Returns the range in which `a <= b - less`, of whole numbers."""
    if isinstance(a, Distance) and isinstance(b, Position) and not (b.of_query or b.of_key):
        # -limit <= factor * distance + offset <= limit, and the other way round with a factor of -1.
        limit = b.offset - less
        return _divided(a.factor, -limit - a.offset, limit - a.offset)
    difference = _sum(a, b, -1)
    if difference is None or difference.of_query != -difference.of_key or abs(difference.of_key) != 1:
        return ANY
    return _divided(difference.of_key, -math.inf, -less - difference.offset)


def _divided(factor: int, least: float, greatest: float) -> Range:
    return (least, greatest) if factor > 0 else (-greatest, -least)


def _equal(a: Any, b: Any) -> Range:
    return _both(_at_most(a, b), _at_most(b, a))


def _both(a: Any, b: Any) -> Range:
    (low, high), (other_low, other_high) = _range(a), _range(b)
    return max(low, other_low), min(high, other_high)


def _either(a: Any, b: Any) -> Range:
    (low, high), (other_low, other_high) = _range(a), _range(b)
    return min(low, other_low), max(high, other_high)


MEANINGS: dict[Any, Callable[..., Any]] = {
    aten.add: _sum,
    aten.sub: lambda a, b: _sum(a, b, -1),
    aten.rsub: lambda a, b: _sum(b, a, -1),
    aten.neg: lambda a: _sum(Position(0, 0, 0), a, -1),
    aten.abs: _absolute,
    aten.le: _at_most,
    aten.lt: lambda a, b: _at_most(a, b, 1),
    aten.ge: lambda a, b: _at_most(b, a),
    aten.gt: lambda a, b: _at_most(b, a, 1),
    aten.eq: _equal,
    aten.bitwise_and: _both,
    aten.logical_and: _both,
    aten.__and__: _both,
    aten.bitwise_or: _either,
    aten.logical_or: _either,
    aten.__or__: _either,
}
"""An operator -> what is known of its result: a number by positions, or the range in which it is true."""
