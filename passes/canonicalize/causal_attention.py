"""causal_attention: attention whose mask says only "no later key" is written as causal attention, without a mask.

    Before: m = expand(le(unsqueeze(arange(s), 0), unsqueeze(arange(s), 1)), [b, 1, s, s]); attention(q, k, v, m)
    After:  attention(q, k, v, is_causal=True)

transformers makes such a mask while a graph is captured; on one device, without padding, it makes none. The mask would
be s x s elements in memory, and the fastest kernels take none. It also asks whether the positions are those of several
packed sequences: where they only count, the answer is known, and the same everywhere.

With a mask transformers also repeats keys and values for the query heads that share them; without one, torch's kernels
for half precision take them as they are (`enable_gqa`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autotp.passes.builder import Builder, fake_mode_of
from autotp.rules.call import arguments_of
from autotp.sharding.axis import Size

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
GROUPED = (torch.float16, torch.bfloat16)
"""The dtypes in which torch has a fused kernel for fewer heads of keys than of queries."""
WIDEST = 256
"""The greatest width of a head that it takes."""
REPEATS = (aten.reshape, aten.expand, aten.unsqueeze)
"""The operators by which keys are repeated for heads, the last one first."""
WIDE = (torch.int32, torch.int64)
"""The dtypes that hold every position."""


@dataclass(frozen=True)
class Positions:
    """Integers that count along one dimension: `value[..., i, ...] == i + offset`.

    Attributes:
        dim: the dimension, from the end: -1 is the last.
        size: its length.
    """

    dim: int
    size: Size
    offset: int = 0


@dataclass(frozen=True)
class Everywhere:
    """A value that is the same number, or the same truth, at each position."""

    number: int


@dataclass(frozen=True)
class NoLaterKey:
    """A value that is True where the position in the last dimension is not after that in the dimension before.

    Attributes:
        sizes: the lengths of both dimensions.
    """

    sizes: tuple[Size, Size]


class Unknown:
    """Stands for an operand of which nothing is known; None stands for an argument that a call does not have."""


ALWAYS = Everywhere(True)
UNKNOWN = Unknown()
Fact = Positions | Everywhere | NoLaterKey


def causal_attention(graph: fx.Graph) -> fx.Graph:
    """Returns the same function without masks that are causal, where queries and keys have one length."""
    facts: dict[fx.Node, Fact] = {}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
            fact = _fact(node, facts)
            if fact is not None and _spans(fact, node.meta["val"]):
                facts[node] = fact
    masked = {node for node in graph.nodes if node.target is ATTENTION and _is_causal(node, facts)}
    if not masked:
        return graph
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        builder.origin = node
        if node not in masked:
            builder.copy(node)
            continue
        operands = builder.map(_with_own_heads(arguments_of(node))) | {"attn_mask": None, "is_causal": True}
        named = {name: operands.pop(name) for name in ("scale", "enable_gqa")}
        builder.env[node] = builder.call(ATTENTION, *operands.values(), **named)
    return builder.graph


def _with_own_heads(args: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an attention without a mask, with keys and values that are not repeated for heads."""
    key, value = (_not_repeated(args[name]) for name in ("key", "value"))
    if key is None or value is None or key.meta["val"].dtype not in GROUPED:
        return args
    widths = [Size.of(x.meta["val"].shape[-1]) for x in (key, value)]
    fused = widths[0] == widths[1] and not widths[0].symbols and widths[0].number <= WIDEST
    return args | {"key": key, "value": value, "enable_gqa": True} if fused else args


def _not_repeated(node: fx.Node) -> fx.Node | None:
    """Returns the `[b h s d]` of which a node is `[b (h n) s d]`, each head n times in a row; None if it is not."""
    shapes = list[list[Size]]()
    for packet in REPEATS:
        if getattr(node.target, "overloadpacket", None) is not packet:
            return None
        shapes.append([Size.of(n) for n in node.meta["val"].shape])
        node = arguments_of(node)["self"]
    heads, repeated, opened = shapes
    b, *rest = [Size.of(n) for n in node.meta["val"].shape]
    if len(rest) != 3 or len(repeated) != 5 or opened != [b, rest[0], Size.of(1), *rest[1:]]:
        return None
    n = repeated[2]
    every = repeated == [b, rest[0], n, *rest[1:]] and heads == [b, rest[0] * n, *rest[1:]]
    return node if every else None


def _spans(fact: Fact, value: torch.Tensor) -> bool:
    """True if a fact is about whole dimensions of a value: a dimension of length 1 may have been repeated."""
    sizes = [Size.of(n) for n in value.shape]
    if isinstance(fact, Positions):
        return sizes[fact.dim] == fact.size
    return isinstance(fact, Everywhere) or tuple(sizes[-2:]) == fact.sizes


def _is_causal(node: fx.Node, facts: dict[fx.Node, Fact]) -> bool:
    """True for an attention with a causal mask alone, of as many queries as keys."""
    args = arguments_of(node)
    sizes = tuple(Size.of(args[name].meta["val"].shape[-2]) for name in ("query", "key"))
    mask = facts.get(args["attn_mask"]) if isinstance(args["attn_mask"], fx.Node) else None
    # With fewer queries than keys `is_causal` is another mask: torch lets the first query read the first key only.
    return mask == NoLaterKey(sizes) and not args["is_causal"] and sizes[0] == sizes[1]  # type: ignore[arg-type]


def _fact(node: fx.Node, facts: dict[fx.Node, Fact]) -> Fact | None:
    """Returns what is known of a value, from what is known of its operands."""
    meaning = MEANINGS.get(getattr(node.target, "overloadpacket", None))
    if meaning is None:
        return None
    args = {name: facts.get(x, UNKNOWN) if isinstance(x, fx.Node) else x for name, x in arguments_of(node).items()}
    fact = meaning(node.meta["val"], args)
    return None if isinstance(fact, Unknown) else fact


Arguments = dict[str, Any]
"""The arguments of a call, with what is known of its operands in their place."""


def _counted(value: Tensor, args: Arguments) -> Fact | None:
    counts = args.get("start", 0) == 0 and args.get("step", 1) == 1 and value.dtype in WIDE
    return Positions(-1, Size.of(value.shape[0])) if counts else None


def _filled(value: Tensor, args: Arguments) -> Fact | None:
    return ALWAYS if value.dtype == torch.bool and args.get("fill_value", True) is True else None


def _lower(value: Tensor, args: Arguments) -> Fact | None:
    sizes = Size.of(value.shape[-2]), Size.of(value.shape[-1])
    return NoLaterKey(sizes) if args["self"] == ALWAYS and args["diagonal"] == 0 else None


def _both(value: Tensor, args: Arguments) -> Fact | None:
    facts = args["self"], args["other"]
    masks = {fact for fact in facts if isinstance(fact, NoLaterKey)}
    if len(masks) > 1 or not all(isinstance(fact, NoLaterKey) or fact == ALWAYS for fact in facts):
        return None
    return next(iter(masks), ALWAYS)


def _no_later(key: Any, query: Any, more: int) -> Fact | None:
    """Returns what is known of `key <= query + more`."""
    if not isinstance(key, Positions) or not isinstance(query, Positions):
        return None
    # `k + a <= q + b` means `k <= q` for a = b, and `k + a < q + b` for a = b - 1.
    causal = (key.dim, query.dim) == (-1, -2) and key.offset == query.offset + more
    return NoLaterKey((query.size, key.size)) if causal else None


def _shifted(value: Tensor, args: Arguments, sign: int) -> Fact | None:
    x, by = args["self"], args["other"]
    plain = isinstance(x, Positions) and type(by) is int and args.get("alpha", 1) == 1
    return replace(x, offset=x.offset + sign * by) if plain else None


def _same(value: Tensor, args: Arguments) -> Fact | None:
    x = args["self"]
    # A cast may round positions, and make numbers of truths.
    holds = value.dtype == torch.bool if isinstance(x, NoLaterKey) or x == ALWAYS else value.dtype in WIDE
    return x if holds else None


def _unsqueezed(value: Tensor, args: Arguments) -> Fact | None:
    x, trailing = args["self"], value.dim() - 1 - args["dim"] % value.dim()  # The dimensions behind the new one.
    if isinstance(x, Positions):
        return replace(x, dim=x.dim - (trailing < -x.dim))
    return x if isinstance(x, Everywhere) or trailing >= 2 else None


def _first(value: Tensor, args: Arguments) -> Fact | None:
    """What is known of positions from `start` on."""
    x = args["self"]
    if not isinstance(x, Positions) or args["dim"] % value.dim() != value.dim() + x.dim or args.get("step", 1) != 1:
        return x if isinstance(x, Everywhere) else None
    start = args.get("start") or 0
    # A negative start counts from the end, and which position that is may differ from call to call.
    counts = type(start) is int and start >= 0
    return Positions(x.dim, Size.of(value.shape[x.dim]), x.offset + start) if counts else None


def _stepped(value: Tensor, args: Arguments) -> Fact | None:
    """Positions that follow one another differ by one; so do those of `prepend`, if they end right before them."""
    x, before = args["self"], args.get("prepend")
    along = isinstance(x, Positions) and args.get("dim", -1) % value.dim() == value.dim() + x.dim
    if not along or args.get("n", 1) != 1 or args.get("append") is not None:
        return None
    follows = before is None or (
        isinstance(before, Positions)
        and (before.dim, before.size) == (x.dim, Size.of(1))
        and before.offset + 1 == x.offset
    )
    return Everywhere(1) if follows else None


def _compared(value: Tensor, args: Arguments, equal: bool) -> Fact | None:
    sides = [
        operand.number if isinstance(operand, Everywhere) else operand for operand in (args["self"], args["other"])
    ]
    return Everywhere((sides[0] == sides[1]) is equal) if all(type(side) in (int, bool) for side in sides) else None


def _summed(value: Tensor, args: Arguments) -> Fact | None:
    """Sums of zeros, however many, are zero."""
    x = args["self"]
    return Everywhere(0) if isinstance(x, Everywhere) and x.number == 0 and value.dtype in WIDE else None


def _anywhere(value: Tensor, args: Arguments) -> Fact | None:
    x = args["self"]
    return x if isinstance(x, Everywhere) else None


MEANINGS: dict[Any, Callable[[Tensor, Arguments], Fact | Unknown | None]] = {
    aten.arange: _counted,
    aten.ones: _filled,
    aten.full: _filled,
    aten.tril: _lower,
    aten.__and__: _both,
    aten.bitwise_and: _both,
    aten.logical_and: _both,
    aten.le: lambda value, args: _no_later(args["self"], args["other"], 0),
    aten.lt: lambda value, args: _no_later(args["self"], args["other"], -1),
    aten.ge: lambda value, args: _no_later(args["other"], args["self"], 0),
    aten.gt: lambda value, args: _no_later(args["other"], args["self"], -1),
    aten.add: lambda value, args: _shifted(value, args, 1),
    aten.sub: lambda value, args: _shifted(value, args, -1),
    aten.to: _same,
    aten.alias: _same,
    aten.detach: _same,
    aten.expand: lambda value, args: args["self"],
    aten.unsqueeze: _unsqueezed,
    aten.slice: _first,
    aten.diff: _stepped,
    aten.ne: lambda value, args: _compared(value, args, False),
    aten.eq: lambda value, args: _compared(value, args, True),
    aten.cumsum: _summed,
    aten.index: _anywhere,
}
"""An operator -> what is known of its result: from its example value, and its arguments."""
