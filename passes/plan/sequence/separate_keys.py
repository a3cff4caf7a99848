"""separate_keys: gives the keys of an attention an axis of their own, so that the axis of its queries can be cut.

    Before: matmul(q, k^T): f32[b, h, s, s]; matmul(p, v)         both dimensions are the sequence
    After:  matmul(q, apart(k)^T): f32[b, h, s, t]; matmul(p, apart(v))

A value that has a sequence in two dimensions cannot be cut along it. It begins where an operator has the sequence in
two factors, one of the rows and one of the columns: in attention, and where a mask compares positions. There `apart(x)`
is `x` with separate axes, and is whole on every rank: the operand of the columns is gathered. `apart` stands where the
operand is smallest, before keys are repeated for the heads of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.ops.placement_moves import apart, by_heads
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.plan.candidate import contracts, root
from autotp.passes.plan.choose import elements
from autotp.passes.plan.infer_axes import Axes, Bound, infer_axes, visit
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, find, touches

MOVES = Trait.SAME | Trait.RESHAPE | Trait.PERMUTE | Trait.REPEAT
"""Operators that copy the elements of their first operand."""

MOST = 64
"""The number of rounds after which a graph has no sequence that can be cut."""

Place = tuple[fx.Node, int]
"""A dimension of a value."""


@dataclass(frozen=True)
class Separated:
    """A graph whose attentions have separate axes for queries and keys.

    Attributes:
        graph: the graph.
        axes: its axes.
        sequences: the axes of the queries of self-attention.
    """

    graph: fx.Graph
    axes: Axes
    sequences: tuple[Axis, ...]


def separate_keys(graph: fx.Graph) -> Separated:
    """Returns the same function with `apart` where a sequence would be in two dimensions of a value."""
    whole, axes = graph, infer_axes(graph)
    rows = [place for place in _rows(axes) if _leaf(place, axes) in set(_columns(axes))]
    for _ in range(MOST):
        # An `apart` changes the axes of all that follows, so each round looks at the whole graph again.
        sequences = list(dict.fromkeys(_leaf(place, axes) for place in rows))
        separated = [place for place in _separated(axes) if _holds_one(_read(place, axes), sequences)]
        apart_at = _joining(graph, separated) if any(x is y for x, y in _pairs(separated, axes)) else {}
        apart_at = apart_at or {n: places for n in axes.bound if (places := list(_doubled(n, axes, sequences)))}
        if not apart_at:
            return Separated(graph, axes, tuple(axis for axis in sequences if axis.kind == "leaf" and not axis.tangled))
        graph, copies = _written(graph, axes, apart_at)
        axes, rows = infer_axes(graph), [(copies[node], dim) for node, dim in rows]
    # Not separated in so many rounds: the graph stays as it was, and nothing is cut.
    return Separated(whole, infer_axes(whole), ())


def _leaf(place: Place, axes: Axes) -> Axis:
    node, dim = place
    return find(axes.of(node)[dim])


def _read(place: Place, axes: Axes) -> Axis:
    """Returns the axis that an `apart` reads in a dimension."""
    node: Any = place[0].args[0]
    return find(axes.of(node)[place[1]])


def _rows(axes: Axes) -> Iterator[Place]:
    """Yields the dimension of the queries of each attention, in the operand that has it."""
    for node, bound in axes.bound.items():
        if _attends(node, bound):
            for factor in bound.factors:
                if 0 in factor.ins and 1 not in factor.ins and factor.outs:
                    yield bound.operands[0], factor.ins[0]


def _columns(axes: Axes) -> Iterator[Axis]:
    """Yields the axes over which attentions sum: the sequence of keys and values."""
    for node, bound in axes.bound.items():
        if _attends(node, bound):
            yield from (find(factor.axis) for factor in bound.factors if len(factor.ins) > 1 and not factor.outs)


def _attends(node: fx.Node, bound: Bound) -> bool:
    """True for an attention, and for a product of two activations."""
    attends = has(node.target, Trait.ATTENTION) or contracts(bound)
    return attends and all(root(operand).op != "placeholder" for operand in bound.operands[:2])


def _doubled(node: fx.Node, axes: Axes, sequences: list[Axis]) -> Iterator[tuple[int, int]]:
    """Yields operands, by position, with the dimension in which they have a sequence that the rows have, too."""
    bound = axes.bound[node]
    for leaf in sequences if node.target is not apart else ():
        factors = [factor for factor in bound.factors if touches(factor.axis, leaf)]
        if len(factors) < 2:
            continue
        # Rows are the earliest dimension of the result. What is summed is in none, and comes last.
        first = min(factors, key=lambda factor: factor.outs.get(0, len(factors) + 99))
        for factor in factors:
            if factor is not first:
                yield from ((i, dim) for i, dim in factor.ins.items() if _once(axes.of(bound.operands[i]), leaf))


def _joining(graph: fx.Graph, separated: Sequence[Place]) -> dict[fx.Node, list[tuple[int, int]]]:
    """Returns the first operator that makes the axes of rows and columns one again, with the operands that are rows.

    In attention with relative positions (DeBERTa), the keys are the rows of a product with positions, and its result
    is a column of the scores.

    Args:
        separated: the sequences that `apart` reads.
    """
    axes = Axes()
    for node in graph.nodes:
        before = {x: tuple(map(find, axes.of(x))) for x in node.all_input_nodes if axes.dims.get(x)}
        pairs = _pairs([place for place in separated if place[0] in axes.dims], axes)
        visit(node, axes)
        if any(find(x) is find(y) for x, y in pairs):
            rows, columns = ({find(pair[i]) for pair in pairs} for i in (0, 1))
            bound, row_operands = axes.bound[node], list[tuple[int, int]]()
            for factor in bound.factors:
                read = {(i, dim): before[bound.operands[i]][dim] for i, dim in factor.ins.items()}
                if any(touches(axis, leaf) for axis in read.values() for leaf in columns):
                    row_operands += [place for place, axis in read.items() if any(touches(axis, leaf) for leaf in rows)]
            return {node: row_operands} if row_operands else {}
    return {}


def _separated(axes: Axes) -> Iterator[Place]:
    """Yields the dimensions that `apart` reads."""
    for node in axes.bound:
        if node.target is apart:
            yield from ((node, dim) for dim in range(len(axes.of(node))))


def _pairs(separated: Sequence[Place], axes: Axes) -> list[tuple[Axis, Axis]]:
    """Returns the axes of rows and of columns that `apart` separates in these dimensions."""
    pairs = []
    for node, dim in separated:
        pairs.append((_read((node, dim), axes), find(axes.of(node)[dim])))
    return pairs


def _holds_one(axis: Axis, sequences: Sequence[Axis]) -> bool:
    return any(touches(axis, leaf) for leaf in sequences)


def _once(dims: tuple[Axis, ...], leaf: Axis) -> bool:
    return sum(touches(axis, leaf) for axis in dims) == 1


def _written(
    graph: fx.Graph, axes: Axes, apart_at: dict[fx.Node, list[tuple[int, int]]]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Returns the graph in which these operands are read `apart`, and its nodes for those of `graph`."""
    builder, apart_reads = Builder(fake_mode_of(graph)), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        builder.origin = node
        operands = axes.bound[node].operands if node in apart_at else ()
        places = {i for i, _ in apart_at.get(node, ())}
        read = {i: _read_apart(builder, operands[i], apart_reads) for i in sorted(places)}
        copied = builder.copy(node)
        if read:
            copied.args, copied.kwargs = with_operands(builder, node, operands, read)
    return builder.graph, builder.env


def with_operands(
    builder: Builder, node: fx.Node, operands: Sequence[fx.Node], read: dict[int, fx.Node]
) -> tuple[Any, Any]:
    """Returns the arguments of a call with some operands replaced, by position: `attention(x, x, x)` has one thrice."""
    remaining = list(enumerate(operands))

    def place(old: fx.Node) -> fx.Node:
        entry = next((pair for pair in remaining if pair[1] is old), None)
        if entry is not None:
            remaining.remove(entry)
        return builder.env[old] if entry is None else read.get(entry[0], builder.env[old])

    return fx.map_arg(node.args, place), fx.map_arg(node.kwargs, place)


def _read_apart(builder: Builder, operand: fx.Node, apart_reads: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns `operand`, computed again from the smallest value that it repeats or views, read `apart`."""
    if operand in apart_reads:
        return apart_reads[operand]
    chain = list(viewed(operand))
    smallest = min(map(elements, chain))
    # Of equally small values the one that all others are views of.
    source = next(node for node in reversed(chain) if elements(node) == smallest)
    if source not in apart_reads:
        apart_reads[source] = builder.call(apart, builder.env[source])
    x = apart_reads[source]
    for node in reversed(chain[: chain.index(source)]):
        if node not in apart_reads:
            apart_reads[node] = builder.call(node.target, x, *builder.map(node.args[1:]), **builder.map(node.kwargs))  # type: ignore[arg-type]
        x = apart_reads[node]
    return x


def viewed(node: fx.Node) -> Iterator[fx.Node]:
    """Yields a value, and the values that it repeats or views, one after the other."""
    yield node
    while node.op == "call_function" and has(node.target, MOVES):
        source: Any = node.args[0]
        yield source
        node = source


def joined_again(graph: fx.Graph) -> fx.Graph:
    """Returns the same function without `apart` and `by_heads`: a rank's graph is made, their axes say nothing more."""
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        if node.target in (apart, by_heads):
            builder.env[node] = builder.env[node.args[0]]
        else:
            builder.copy(node)
    return builder.graph
