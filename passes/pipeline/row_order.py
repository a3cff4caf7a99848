"""row_order: proves that rows which are sorted by what they choose, and put back, do not depend on each other.

    s, o = sort(choice); y = index(x, [o // 2]); z = grouped_mm(y, w, cumsum(histc(s))); r = index(z, [inverse(o)])

A mixture of experts sorts the batch's choices, and with them rows, so that each expert's rows lie together. Another
part of the batch has another order. Still, each row of `z` is made of one row of `y`, and of the matrix that this row
chose: the inverse order puts it back to the same place in each part. So a value has one of five further kinds, each of
one sort:

    permuted   rows in the order of the sort; operators that work row by row keep the kind
    order      the places that the sorted rows had, divided by how many choices a row has
    inverse    the places that rows have in the order
    ends       how many sorted rows each expert has: only a product of groups of the same sort may read it
    blank      as large as one of these, and its values are not read: only `inverse` may be written into it

A permuted value at the inverse order has rows again. Everything else that reads one of the five is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from autotp.ops.placement_moves import apart
from autotp.passes.plan.experts.experts import sorted_choice
from autotp.passes.plan.infer_axes import is_getitem
from autotp.rules.call import arguments_of, operand_nodes
from autotp.rules.registry import is_grouped
from autotp.rules.row import Trait
from autotp.rules.traits import has

aten = torch.ops.aten
LIKE = tuple(getattr(aten, name).default for name in ("empty_like", "zeros_like", "ones_like", "full_like"))
"""Operators that make a tensor as large as another, and do not read its values."""


class Ordered(NamedTuple):
    """A kind, the sort whose order it has, and for an order the number of choices of a row."""

    kind: Literal["permuted", "order", "inverse", "ends", "blank"]
    by: fx.Node
    choices: int = 1


class RowOrder:
    """The values of the five kinds so far.

    Attributes:
        kinds: node -> its kind. A sort itself has both results, and no kind.
    """

    def __init__(self, rows: Collection[fx.Node], leads: Callable[[fx.Node], bool]) -> None:
        """rows: the values with rows so far; leads: True if a value's first dimension is the batch, outermost."""
        self.rows, self.leads = rows, leads
        self.sorts, self.kinds = set[fx.Node](), dict[fx.Node, Ordered]()

    def concerns(self, node: fx.Node) -> bool:
        """True for a sort of rows, and for what reads one of the kinds."""
        return self._is_sort(node) or any(n in self.kinds or n in self.sorts for n in node.all_input_nodes)

    def visit(self, node: fx.Node, by_row: bool, counts_from_zero: Callable[[Any], bool]) -> bool:
        """Notes the kind of a node's result; False if it may depend on other rows.

        Args:
            by_row: True if the axes say that each row of the result depends on the same row of the operands only.
            counts_from_zero: True for `arange` of the number of rows.
        """
        if self._is_sort(node):
            self.sorts.add(node)
            if has(node.target, Trait.SORT) and not isinstance(node.meta["val"], tuple | list):  # argsort
                self.kinds[node] = Ordered("order", node)
            return True
        if is_getitem(node) and node.args[0] in self.sorts:
            self.kinds[node] = Ordered("order" if node.args[1] else "permuted", node.args[0])  # type: ignore[arg-type]
            return True
        if self._back(node):
            return True
        ordered = self._product(node) or self._kind(node, by_row, counts_from_zero)
        if ordered is not None:
            self.kinds[node] = ordered
        return ordered is not None

    def has_rows(self, node: fx.Node) -> bool:
        """True for a visited node whose result has rows in the batch's own order."""
        return node not in self.kinds and node not in self.sorts

    def _is_sort(self, node: fx.Node) -> bool:
        """True for a sort of all rows' choices, in one dimension."""
        if not has(node.target, Trait.SORT):
            return False
        x: Any = arguments_of(node)["self"]
        return x in self.rows and x.meta["val"].dim() == 1 and self.leads(x)

    def _back(self, node: fx.Node) -> bool:
        """True for a permuted value at the inverse order."""
        x, index = _taken(node)
        x_order, index_order = self.kinds.get(x), self.kinds.get(index)
        if x_order is None or index_order is None:
            return False
        return (x_order.kind, index_order.kind) == ("permuted", "inverse") and x_order.by is index_order.by

    def _product(self, node: fx.Node) -> Ordered | None:
        """Returns the kind of a product of groups of sorted rows, if its groups are those of the same sort."""
        if not is_grouped(node.target):
            return None
        x, weight, ends = operand_nodes(node)[:3]
        x_order, ends_order = self.kinds.get(x), self.kinds.get(ends)  # type: ignore[arg-type]
        chosen = sorted_choice(node)
        if x_order is None or ends_order is None or chosen is None or weight in self.kinds or weight in self.rows:
            return None
        matches = x_order.kind == "permuted" and ends_order.kind == "ends" and x_order.by is ends_order.by
        choice_order = self.kinds.get(chosen)
        if choice_order is None or (choice_order.kind, choice_order.by) != ("permuted", x_order.by):
            return None
        return x_order if matches else None

    def _kind(self, node: fx.Node, by_row: bool, counts_from_zero: Callable[[Any], bool]) -> Ordered | None:
        """Returns the kind of another operator's result."""
        x, index = _taken(node)
        place = self.kinds.get(index)
        if place is not None and place.kind == "order" and x in self.rows:
            # One place for each choice of each row: fewer would leave rows out, by the choices of other rows.
            fits = self.leads(x) and _length(x, place.choices) == _length(index)
            return Ordered("permuted", place.by) if fits else None
        read = [n for n in node.all_input_nodes if n in self.kinds or n in self.rows]
        kinds = {self.kinds.get(n) for n in read}
        if None in kinds or len({order.by for order in kinds if order}) != 1:
            return self._inverse(node, counts_from_zero)
        if node.target in LIKE:
            return Ordered("blank", next(order.by for order in kinds if order))
        (order, *rest) = {order for order in kinds if order}
        if rest:
            return self._inverse(node, counts_from_zero)
        if order.kind == "permuted":
            return Ordered("ends", order.by) if node.target is aten.histc.default else order if by_row else None
        if order.kind == "order" and node.target is aten.floor_divide.default and isinstance(node.args[1], int):
            # The place of the k-th choice of a row, divided by the number of choices, is the row.
            return order._replace(choices=order.choices * node.args[1]) if node.args[0] in self.kinds else None
        # The argsort of a permutation is its inverse.
        if order.kind == "order" and has(node.target, Trait.SORT) and order.choices == 1:
            return Ordered("inverse", order.by) if not isinstance(node.meta["val"], tuple | list) else None
        if order.kind == "ends" and (node.target is aten.cumsum.default or has(node.target, Trait.SAME)):
            return order
        return None

    def _inverse(self, node: fx.Node, counts_from_zero: Callable[[Any], bool]) -> Ordered | None:
        """Returns the inverse of an order, if a node writes the numbers 0, 1, ... to its places."""
        if node.target is not aten.index_put.default:
            return None
        args = arguments_of(node)
        indices, values = args["indices"], args["values"]
        values = values.args[0] if values.target is apart else values
        order = self.kinds.get(indices[0]) if len(indices) == 1 else None
        if order is None or (order.kind, order.choices) != ("order", 1) or args.get("accumulate"):
            return None
        into = self.kinds.get(args["self"])
        if args["self"] in self.rows or (into is not None and into.kind != "blank"):
            return None
        takes_all_rows = _length(args["self"]) == _length(values) == _length(indices[0])
        return Ordered("inverse", order.by) if takes_all_rows and counts_from_zero(values) else None


def _taken(node: fx.Node) -> tuple[Any, Any]:
    """Returns a tensor and the index of its first dimension that an operator reads it at; None, None for others."""
    args = arguments_of(node) if has(node.target, Trait.INDICES) or node.target is aten.index_select.default else {}
    if node.target is aten.index_select.default:
        return (args["self"], args["index"]) if args["dim"] == 0 else (None, None)
    indices = args.get("indices", ())
    return (args["self"], indices[0]) if len(indices) == 1 and "values" not in args else (None, None)


def _length(node: Any, times: int = 1) -> Any:
    """Returns the length of a tensor's first dimension, times a number, as an expression."""
    size = node.meta["val"].shape[0]
    return (size if isinstance(size, int) else size.node.expr) * times
