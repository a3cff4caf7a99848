"""unsort: computes experts for rows in their own order, so that the axis of the rows can be cut.

    Before: s, p = sort(chosen); g = index(x, [p // 2]); y = grouped_mm(g, w, cumsum(histc(s)))
            z = index(gelu(y), [inverse(p)])                                              x[8, 64], chosen[16]
    After:  r = reshape(expand(unsqueeze(x, 1), [-1, 2, -1]), [-1, 64]); y = chosen_mm(r, w, chosen); z = gelu(y)

A sort reads all rows, so a rank that has some rows only (of a sequence that is cut over `cp`, or of half a batch) would
need all of them. In their own order each row's result depends on that row alone. Once rows are cut, the pass `experts`
puts those of a rank in the order of their experts, and a capacity keeps the first rows of the batch. The proof that
rows are independent (`passes/pipeline/row_independence.py`) reads this form, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from autotp.ops.experts import rows as routing
from autotp.ops.placement_moves import apart
from autotp.passes.builder import Builder, ancestors, fake_mode_of
from autotp.passes.lower.dce import dce
from autotp.passes.plan.experts.experts import is_fused, is_sort, of_rows_only, sorted_choice
from autotp.passes.plan.infer_axes import Axes, infer_axes, is_getitem
from autotp.rules.call import arguments_of, operand_nodes
from autotp.rules.registry import is_grouped
from autotp.rules.traits import draws
from autotp.sharding.axis import Size, find

aten = torch.ops.aten


class Order(NamedTuple):
    """An order of rows: the sort that makes it, and how many neighbours in it are one row of a smaller tensor."""

    sort: fx.Node
    copies: int = 1


class SortedRows(NamedTuple):
    """A value whose rows are sorted: the sort, and the node of the new graph that has the rows in their own order."""

    sort: fx.Node
    unsorted: fx.Node


def unsort(graph: fx.Graph) -> fx.Graph:
    """Returns the same function with experts computed for rows in their own order, where all their readers allow it."""
    if not any(is_grouped(node.target) and sorted_choice(node) is not None for node in graph.nodes):
        return graph
    rewriting = _Unsorting(graph, infer_axes(graph))
    for node in graph.nodes:
        rewriting.visit(node)
    new = rewriting.builder.graph
    read = ancestors(node for node in new.nodes if node.op == "output")
    # Experts that somebody reads in the sorted order as well would be computed twice.
    return graph if any(is_grouped(node.target) for node in read & rewriting.sorted_products) else dce(new)


class _Unsorting:
    """The new graph. It has each operator as it was; for those on sorted rows also one on rows in their own order.

    Attributes:
        orders: a permutation of rows -> the order that rows have which it selects.
        inverses: a permutation -> the sort that it undoes.
        rows: a value with sorted rows -> the same in the order of the rows.
        sorted_products: products of sorted rows in the new graph, for which it has another.
    """

    def __init__(self, graph: fx.Graph, axes: Axes) -> None:
        self.axes, self.builder = axes, Builder(fake_mode_of(graph))
        self.orders: dict[fx.Node, Order] = {}
        self.inverses: dict[fx.Node, fx.Node] = {}
        self.rows: dict[fx.Node, SortedRows] = {}
        self.sorted_products = set[fx.Node]()

    def visit(self, node: fx.Node) -> None:
        self.builder.origin = node
        if (restored := self._restored(node)) is not None:
            self.builder.env[node] = restored
            return
        copy = self.builder.copy(node)
        if node.op != "call_function":
            return
        self._note_permutation(node)
        if (unsorted := self._unsorted(node)) is not None:
            self.rows[node] = unsorted
            if is_grouped(node.target):
                self.sorted_products.add(copy)

    def _note_permutation(self, node: fx.Node) -> None:
        """Notes a node that is a permutation of rows, or that gives each sorted row its row of a smaller tensor."""
        by: Any = node.args[0] if node.args else None
        if (sort := _sort_of(node)) is not None:
            self.orders[node] = Order(sort)
            undone = self.orders.get(sort.args[0])  # type: ignore[arg-type]
            if undone is not None and undone.copies == 1:
                self.inverses[node] = undone.sort
        elif node.target is aten.floor_divide.default and by in self.orders and isinstance(node.args[1], int):
            self.orders[node] = Order(self.orders[by].sort, self.orders[by].copies * node.args[1])
        elif node.target is aten.index_put.default and (order := self._filled(node)) is not None:
            self.inverses[node] = order.sort

    def _filled(self, node: fx.Node) -> Order | None:
        """Returns the order that `empty[p] = arange(n)` undoes; None if a node is not that."""
        arguments = arguments_of(node)
        indices, values = arguments["indices"], arguments["values"]
        values = values.args[0] if values.target is apart else values
        order = self.orders.get(indices[0]) if len(indices) == 1 else None
        if order is None or order.copies != 1 or arguments["accumulate"] or values.target is not aten.arange.default:
            return None
        lengths = {Size.of(x.meta["val"].shape[0]) for x in (arguments["self"], indices[0], values)}
        return order if len(lengths) == 1 else None

    def _restored(self, node: fx.Node) -> fx.Node | None:
        """Returns rows in their own order for a node that undoes the sort; else None."""
        x, index = _taken(node)
        rows = self.rows.get(x)
        return rows.unsorted if rows is not None and self.inverses.get(index) is rows.sort else None

    def _unsorted(self, node: fx.Node) -> SortedRows | None:
        """Returns a value with sorted rows in the order of the rows; None if it has none, or not for sure."""
        if is_getitem(node) and node.args[1] == 0 and is_sort(node.args[0]):
            sort: Any = node.args[0]
            return SortedRows(sort, self.builder.env[sort.args[0]])
        x, index = _taken(node)
        if index in self.orders:
            return self._selected(x, self.orders[index])
        operands = [operand for operand in node.all_input_nodes if operand in self.rows]
        sorts = {self.rows[operand].sort for operand in operands}
        if len(sorts) != 1 or draws(node):
            return None
        (sort,) = sorts
        if is_grouped(node.target):
            return self._product(node, sort)
        rows = find(self.axes.of(operands[0])[0])
        with_rows = [
            operand
            for operand in node.all_input_nodes
            if self.axes.dims.get(operand) and any(find(axis) is rows for axis in self.axes.of(operand))
        ]
        if not is_getitem(node) and (set(with_rows) != set(operands) or not of_rows_only(node, rows, self.axes)):
            return None
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: self.rows[n].unsorted if n in self.rows else self.builder.env[n]
        )
        return SortedRows(sort, self.builder.call(node.target, *args, **kwargs))  # type: ignore[arg-type]

    def _selected(self, x: fx.Node, order: Order) -> SortedRows | None:
        """Returns the rows that a permutation selects, unsorted: each of `x` as often as it is selected."""
        shape, number = x.meta["val"].shape, order.sort.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
        lengths = [Size.of(length) for length in shape]
        if lengths[0] * Size(order.copies) != Size.of(number) or any(length.symbols for length in lengths[1:]):
            return None
        rows = self.builder.env[x]
        if order.copies > 1:
            spread = self.builder.call(aten.unsqueeze.default, rows, 1)
            spread = self.builder.call(aten.expand.default, spread, [-1, order.copies, *[-1] * (len(shape) - 1)])
            rows = self.builder.call(aten.reshape.default, spread, [-1, *(length.number for length in lengths[1:])])
        return SortedRows(order.sort, rows)

    def _product(self, node: fx.Node, sort: fx.Node) -> SortedRows | None:
        """Returns the product of unsorted rows, each with the matrix of its expert."""
        x, weight, _, *more = operand_nodes(node)
        choice: Any = sorted_choice(node)
        chosen = None if choice is None else self.rows.get(choice)
        if chosen is None or chosen.sort is not sort or x not in self.rows or any(more):
            return None
        product = self.builder.raw(
            routing.chosen_mm,
            (self.rows[x].unsorted, self.builder.env[weight], chosen.unsorted, is_fused(node)),  # type: ignore[index]
        )
        product.meta["val"] = node.meta["val"]
        return SortedRows(sort, product)


def _sort_of(node: fx.Node) -> fx.Node | None:
    """Returns the sort whose permutation a node is; None if it is none."""
    if is_getitem(node):
        return node.args[0] if node.args[1] == 1 and is_sort(node.args[0]) else None  # type: ignore[return-value]
    return node if is_sort(node) and isinstance(node.meta["val"], torch.Tensor) else None


def _taken(node: fx.Node) -> tuple[Any, Any]:
    """Returns a tensor and the index of its first dimension that an operator reads it at; None, None for others."""
    if node.target is aten.index_select.default:
        arguments = arguments_of(node)
        return (arguments["self"], arguments["index"]) if arguments["dim"] == 0 else (None, None)
    indices: Any = arguments_of(node)["indices"] if node.target is aten.index.Tensor else ()
    return (node.args[0], indices[0]) if len(indices) == 1 else (None, None)
