"""mask_window: which keys around its own position a query reads, from the function of a mask.

    (q >= k) & (q - k < 3)                      2 keys before, 0 after
    (q - k).abs() <= 4                          4 keys before, 4 after
    (q >= k) & (doc[b, q] == doc[b, k])         those before in the document that `doc` says
    q >= k                                      no bound: all keys before

A mask that is true says that `k - q` is in a range, and that two places of a table are equal. What is not known says
nothing: each number is possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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


QUERY, KEY = Position(1, 0, 0), Position(0, 1, 0)


@dataclass(frozen=True)
class NumberRead:
    """A number that a mask reads of a tensor by the position of the query or of the key.

    Attributes:
        tensor: the name of the tensor.
        dim: the dimension of that position.
        other_indices: how the places in the other dimensions are computed.
        of_query: whether it is the query's position.
    """

    tensor: str
    dim: int
    other_indices: tuple[Any, ...]
    of_query: bool


class MaskFacts(NamedTuple):
    """What a mask that is true says.

    Attributes:
        smallest, greatest: of `k - q`.
        equal: pairs of a tensor and a dimension, whose numbers are equal at the query's position and at the key's.
    """

    smallest: float = -math.inf
    greatest: float = math.inf
    equal: tuple[tuple[str, int], ...] = ()

    @property
    def is_never(self) -> bool:
        """True if no mask is true."""
        return self.smallest > self.greatest


ANY = MaskFacts()
NEVER = MaskFacts(math.inf, -math.inf)


class MaskWindow(NamedTuple):
    """Which keys around its own position a query reads.

    Attributes:
        before, after: how many; -1 for all.
        numbers: the tensor with numbers of documents, of which a query reads its own, and its dimension of positions.
    """

    before: int
    after: int
    numbers: tuple[str, int] | None = None


def window_of(graph: fx.Graph) -> MaskWindow | None:
    """Returns which keys a query reads; None if nothing says it: without documents, and without a bound on a side."""
    facts = dict[fx.Node, Any]()
    for node in graph.nodes:
        if node.op == "placeholder":
            facts[node] = {"q": QUERY, "k": KEY}.get(node.name)
        elif node.op == "output":
            mask_facts = _mask_facts(facts.get(node.args[0]))
            before, after = (
                max(0, math.floor(x)) if math.isfinite(x) else -1 for x in (-mask_facts.smallest, mask_facts.greatest)
            )
            numbers = next(iter(mask_facts.equal), None)
            is_bounded = numbers is not None or min(before, after) >= 0
            return MaskWindow(before, after, numbers) if is_bounded and not mask_facts.is_never else None
        else:
            packet = getattr(node.target, "overloadpacket", None)
            meaning = MEANINGS.get(packet)
            plain = not node.kwargs and len(node.args) <= 2
            operands = [facts.get(x) if isinstance(x, fx.Node) else _number(x) for x in node.args]
            facts[node] = meaning(*operands) if meaning is not None and plain else None
            if packet in (aten.new_zeros, aten.zeros) and node.kwargs.get("dtype") is torch.bool:
                facts[node] = NEVER  # `or_masks` begins with it.
            if packet is aten.index:
                facts[node] = _number_read(facts, *node.args)
    return None


def _number(x: Any) -> Position | None:
    return Position(0, 0, x) if isinstance(x, int | float) and not isinstance(x, bool) else None


def _number_read(facts: Mapping[fx.Node, Any], x: Any, indices: Any) -> NumberRead | None:
    """Returns what an index reads by the position of the query, or of the key, and in other dimensions elsewhere."""
    positions = [facts.get(index) for index in indices]
    dims = [d for d, position in enumerate(positions) if position in (QUERY, KEY)]
    if not isinstance(x, fx.Node) or x.op != "placeholder" or len(dims) != 1:
        return None
    other_indices = tuple(_expression(index) for d, index in enumerate(indices) if d != dims[0])
    return NumberRead(x.name, dims[0], other_indices, of_query=positions[dims[0]] == QUERY)


def _expression(x: Any) -> Any:
    """Returns how a number is computed: of two nodes that compute the same, the same."""
    if not isinstance(x, fx.Node):
        return x
    return x.name if x.op == "placeholder" else (x.target, *map(_expression, x.args), str(x.kwargs))


def _mask_facts(fact: Any) -> MaskFacts:
    return fact if isinstance(fact, MaskFacts) else ANY


def _sum(a: Any, b: Any, sign: int = 1) -> Position | None:
    if not (isinstance(a, Position) and isinstance(b, Position)):
        return None
    of_query, of_key = a.of_query + sign * b.of_query, a.of_key + sign * b.of_key
    return Position(of_query, of_key, a.offset + sign * b.offset)


def _absolute(a: Any) -> Distance | None:
    is_distance = isinstance(a, Position) and a.of_query == -a.of_key and abs(a.of_key) == 1
    return Distance(a.of_key, a.offset, True) if is_distance else None


def _at_most(a: Any, b: Any, less: bool = False) -> MaskFacts:
    """Returns the range in which `a <= b`, or with `less` `a < b`."""
    if isinstance(a, Distance) and isinstance(b, Position) and not (b.of_query or b.of_key):
        # -limit <= factor * distance + offset <= limit, and the other way round with a factor of -1.
        return _divided(a.factor, -_limit(b.offset + a.offset, less), _limit(b.offset - a.offset, less))
    difference = _sum(a, b, -1)
    if difference is None or difference.of_query != -difference.of_key or abs(difference.of_key) != 1:
        return ANY
    return _divided(difference.of_key, -math.inf, _limit(-difference.offset, less))


def _limit(x: float, less: bool) -> float:
    """Returns the greatest whole number that is at most `x`, or less than `x`."""
    return x if math.isinf(x) else math.ceil(x) - 1 if less else math.floor(x)


def _divided(factor: int, smallest: float, greatest: float) -> MaskFacts:
    return MaskFacts(smallest, greatest) if factor > 0 else MaskFacts(-greatest, -smallest)


def _equal(a: Any, b: Any) -> MaskFacts:
    if isinstance(a, NumberRead) and isinstance(b, NumberRead):
        is_other_side = replace(a, of_query=b.of_query) == b and a.of_query != b.of_query
        return MaskFacts(equal=((a.tensor, a.dim),)) if is_other_side else ANY
    return _both(_at_most(a, b), _at_most(b, a))


def _both(a: Any, b: Any) -> MaskFacts:
    x, y = _mask_facts(a), _mask_facts(b)
    return MaskFacts(max(x.smallest, y.smallest), min(x.greatest, y.greatest), tuple(dict.fromkeys(x.equal + y.equal)))


def _either(a: Any, b: Any) -> MaskFacts:
    x, y = _mask_facts(a), _mask_facts(b)
    if x.is_never or y.is_never:
        return y if x.is_never else x
    equal = tuple(pair for pair in x.equal if pair in y.equal)
    return MaskFacts(min(x.smallest, y.smallest), max(x.greatest, y.greatest), equal)


MEANINGS: dict[Any, Callable[..., Any]] = {
    aten.add: _sum,
    aten.sub: lambda a, b: _sum(a, b, -1),
    aten.rsub: lambda a, b: _sum(b, a, -1),
    aten.neg: lambda a: _sum(Position(0, 0, 0), a, -1),
    aten.abs: _absolute,
    aten.le: _at_most,
    aten.lt: lambda a, b: _at_most(a, b, less=True),
    aten.ge: lambda a, b: _at_most(b, a),
    aten.gt: lambda a, b: _at_most(b, a, less=True),
    aten.eq: _equal,
    aten.bitwise_and: _both,
    aten.logical_and: _both,
    aten.__and__: _both,
    aten.bitwise_or: _either,
    aten.logical_or: _either,
    aten.__or__: _either,
}
"""An operator -> what is known of its result: a number by positions, or what it says where it is true."""
