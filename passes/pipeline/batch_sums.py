"""batch_sums: finds what a loss computes from sums over the batch, and writes it as a graph of those sums alone.

Before: p = sum(softmax(x), [0]); c = bincount(choice); l = add(mean(e), sum(mul(c, p)))
After:  l = add(mean(e), 0), c and p of a part; beside it sum(mul(c, p)), of the c and p of the whole batch

NOTE [Functions of sums]
`f(s)` of a sum over the batch `s` is no sum over parts: a balancing loss is a product of two means. Its gradient is
one, by the chain rule: with `g = f'(s)` of the whole batch's `s`, each part adds `g * ds_part`. So a part returns its
sums beside its loss, `f` is computed once from the totals, and backward of a part starts from `g` at its sums.

NOTE [Names of sums]
Where rows end is seen by the symbol of their number. A graph of one row has none: there the sums have the names that
they had in the graph of a batch of two (operator, source line, how many of these came before).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from autotp.passes.builder import Builder, copied, dtype_of_sums, fake_mode_of, size_assumptions
from autotp.rules.call import arguments_of, operator_name, outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.source_location import line_of

aten = torch.ops.aten
Name = tuple[str, str, int]
MEAN = 1
"""The number of the reduction "mean" among the arguments of a loss."""


@dataclass(frozen=True)
class BatchSums:
    """The values of a graph in which rows have ended.

    Attributes:
        sums: those that are computed from rows, or from the number of rows.
        made: these, and what is computed from them and constants alone.
    """

    sums: frozenset[fx.Node]
    made: frozenset[fx.Node]

    @property
    def functions(self) -> frozenset[fx.Node]:
        """What is computed from sums."""
        return self.made - self.sums


def symbols(size: Any) -> set[Any]:
    """Returns the symbols in a size; an empty set for a number or a tensor."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt | torch.SymFloat) else set()


def equal_symbols(graph: fx.Graph) -> dict[Any, Any]:
    """Returns symbol -> another one that is as large in each call, as comparisons of sizes in the graph assume."""
    assumed, equal = size_assumptions(graph), dict[Any, Any]()
    at_most = {sympy.expand(x.lhs - x.rhs) for x in assumed if isinstance(x, sympy.Le)}
    zeros = [x.lhs - x.rhs for x in assumed if isinstance(x, sympy.Eq)] + [x for x in at_most if -x in at_most]
    before = -1
    while len(equal) != before:  # One equation may show that another one is of two symbols.
        before = len(equal)
        for zero in zeros:
            for factor, _ in sympy.factor_list(zero.subs(list(equal.items())))[1]:  # No size is 0.
                pair = sorted(factor.free_symbols, key=str)
                if len(pair) == 2 and sympy.expand(factor) in (pair[0] - pair[1], pair[1] - pair[0]):
                    equal = {x: pair[1] if y == pair[0] else y for x, y in equal.items()} | {pair[0]: pair[1]}
    return equal


def is_mean(node: fx.Node) -> bool:
    """True for a mean over all elements, or a loss with this reduction."""
    return node.target is aten.mean.default or (
        node.op == "call_function" and arguments_of(node).get("reduction") == MEAN
    )


def is_any_mean(node: fx.Node) -> bool:
    """True for a mean over all elements, or over some dimensions."""
    return is_mean(node) or node.target is aten.mean.dim


def with_counts(
    graph: fx.Graph, loss: fx.Node, inputs: Sequence[str], rows: Collection[Any], names: Collection[Name]
) -> tuple[fx.Graph, fx.Node, frozenset[fx.Node], frozenset[Name]]:
    """Returns the graph with tensors for the numbers of rows, or of places, that a value without rows is divided by.

    Args:
        inputs: the names of the inputs that are a batch.
        rows: the symbols of the number of rows; none for one row.
        names: of one row, the names of the operators that read such numbers in the graph of two.

    Returns:
        the graph, its loss, these tensors, and the names of their readers.
    """
    readers = [
        (node, name)
        for node, name in _named(graph)
        if has(node.target, Trait.SUM | Trait.SCALE)
        and not _is_tensor(node.args[1])
        and (name in names or _reads_count(node, rows))
    ]
    if not readers:
        return graph, loss, frozenset(), frozenset()
    first = next(node for node in graph.nodes if node.name == inputs[0])
    builder, by_node, counts = Builder(fake_mode_of(graph)), dict(readers), set[fx.Node]()
    for node in graph.nodes:
        builder.origin = node
        if node.op == "output":
            builder.graph.output(builder.map(node.args[0]))
            continue
        copy = builder.copy(node)
        if node in by_node:
            x, number, *rest = copy.args
            dtype = dtype_of_sums(node.meta["val"].dtype)
            with builder.graph.inserting_before(copy):
                count = builder.call(aten.full.default, [], number, dtype=dtype)
                if not rows:  # The number is that of one row, and a replica counts all of its rows.
                    size = builder.call(aten.sym_size.int, builder.env[first], 0)
                    count = builder.call(aten.mul.Tensor, count, size)
            counts.add(count)
            copy.args = (x, count, *rest)
    return builder.graph, builder.env[loss], frozenset(counts), frozenset(by_node.values())


def _named(graph: fx.Graph) -> Iterator[tuple[fx.Node, Name]]:
    """Yields the operators of a graph, with their names."""
    before: dict[tuple[str, str], int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and outputs_of(node):
            key = operator_name(node), line_of(node)
            before[key] = before.get(key, -1) + 1
            yield node, (*key, before[key])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _reads_count(node: fx.Node, rows: Collection[Any]) -> bool:
    """True for an operator on a value without rows and a number that is proportional to the number of rows."""
    value = node.args[1].meta.get("val") if isinstance(node.args[1], fx.Node) else None
    return bool(symbols(value) & set(rows)) and not _has_rows(node, rows) and _is_proportional(value, rows)


def _is_proportional(value: Any, rows: Collection[Any]) -> bool:
    expr = value.node.expr.replace(lambda e: type(e).__name__ == "ToFloat", lambda e: e.args[0])
    (row, *further_symbols) = rows
    return not further_symbols and sympy.expand(expr.subs(row, 2 * row) - 2 * expr) == 0


def _has_rows(node: fx.Node, rows: Collection[Any]) -> bool:
    return any(symbols(size) & set(rows) for value in outputs_of(node) for size in value.shape)


def batch_sums(
    graph: fx.Graph,
    inputs: Sequence[str],
    rows: Collection[Any],
    names: Collection[Name],
    counts: Collection[fx.Node],
    constant: Collection[fx.Node],
) -> tuple[BatchSums, frozenset[Name]]:
    """Returns the sums over the batch in a graph and what is made of them, and the names of the sums.

    Args:
        inputs: the names of the inputs that are a batch.
        rows, names: as for `with_counts`; the names of the sums.
        counts: the tensors of `with_counts`.
        constant: the values that depend on constants only.
    """
    by_rows = {node for node in graph.nodes if node.op == "placeholder" and node.name in inputs}
    sums, made, named = set(counts), set(counts), dict(_named(graph))
    for node in graph.nodes:
        operands = [n for n in node.all_input_nodes if n.target is not aten.sym_size.int]
        if node.op != "call_function" or node in counts or not outputs_of(node):
            continue
        if by_rows.intersection(operands):
            ends = not _has_rows(node, rows) if rows else named[node] in names
            # A pair of results, such as `var_mean`'s, has no sum.
            is_sum = ends and isinstance(node.meta["val"], torch.Tensor)
            for nodes in (sums, made) if is_sum else (by_rows,):
                nodes.add(node)
        elif made.intersection(operands) and all(n in made or n in constant for n in node.all_input_nodes):
            made.add(node)
    return BatchSums(frozenset(sums), frozenset(made)), frozenset(named[n] for n in sums if n not in counts)


def read_sums(functions: Collection[fx.Node], found: BatchSums, apart: Collection[fx.Node]) -> list[fx.Node]:
    """Returns the values, sums over the batch, that functions of sums are computed from, in the order of their graph.

    Sums of layers that are added up are one sum.

    Args:
        apart: sums that are not added up.
    """
    (graph,) = {node.graph for node in functions}
    whole = set[fx.Node]()
    for node in (node for node in graph.nodes if node in found.made):
        if node in found.sums:
            if not is_any_mean(node) and node not in apart:
                whole.add(node)
        elif _adds_sums(node, whole):
            whole.add(node)
    ends = whole | found.sums
    reached = between(functions, ends)
    return [node for node in graph.nodes if node in reached and node in ends]


def between(nodes: Collection[fx.Node], ends: Collection[fx.Node]) -> set[fx.Node]:
    """Returns these nodes and all that they are computed from, without what `ends` are computed from."""
    reached, queue = set[fx.Node](), list(nodes)
    while queue:
        node = queue.pop()
        if node not in reached:
            reached.add(node)
            queue += [] if node in ends else node.all_input_nodes
    return reached


def _adds_sums(node: fx.Node, whole: Collection[fx.Node]) -> bool:
    """True for a sum of sums, or a cast of one that loses nothing."""
    x = node.args[0]
    if node.target is aten.add.Tensor and not node.kwargs:
        return all(operand in whole or is_zero(operand) for operand in node.args)
    if node.target is aten.to.dtype and x in whole:
        before, after = x.meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
        return bool(after.is_floating_point and (not before.is_floating_point or after.itemsize >= before.itemsize))
    return has(node.target, Trait.SAME) and not has(node.target, Trait.CAST | Trait.NO_GRADIENT) and x in whole


def is_zero(value: Any) -> bool:
    """True for the number 0, and for a tensor that is made of zeros."""
    if not isinstance(value, fx.Node):
        return type(value) in (int, float) and value == 0
    full = value.target is aten.full.default and type(value.args[1]) in (int, float)
    return has(value.target, Trait.ZEROS) or (full and bool(value.args[1] == 0))


def function_of_sums(
    graph: fx.Graph, loss: fx.Node, ends: Mapping[fx.Node, str], values: Mapping[fx.Node, Sequence[Any]]
) -> fx.Graph:
    """Returns a loss as a graph of the sums that its functions read: all its other terms are zero.

    Args:
        ends: what the loss is made of by sums, differences and constant factors: a "function", a "count", or a sum.
        values: a read sum -> example values of the sum, and of the count if it is a mean. They are the placeholders.
    """
    builder = Builder(fake_mode_of(graph))
    places = {node: [_placeholder(builder, value) for value in parts] for node, parts in values.items()}
    functions = between([node for node, end in ends.items() if end == "function"], values)
    for node, (total, *count) in places.items():
        builder.origin = node
        mean = builder.cast(builder.call(aten.div.Tensor, total, *count), node.meta["val"].dtype) if count else total
        builder.env[node] = mean
    for node in graph.nodes:
        if node in functions and node not in values:
            builder.copy(node)
    linear = between([loss], ends)
    terms = dict(builder.env)
    for node in graph.nodes:
        if node in linear:
            end = ends.get(node)
            builder.origin = node
            if end in ("sum", "mean", "count"):
                terms[node] = builder.call(aten.full.default, [], int(end == "count"), dtype=node.meta["val"].dtype)
            elif end is None:
                terms[node] = copied(builder.graph, node, terms.__getitem__)
    builder.graph.output((terms[loss],))
    return builder.graph


def _placeholder(builder: Builder, value: Any) -> fx.Node:
    node = builder.graph.placeholder(f"sum_{len(builder.graph.nodes)}")
    node.meta["val"] = value
    return node
