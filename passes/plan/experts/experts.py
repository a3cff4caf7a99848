"""experts: sorts rows by their chosen expert, so that experts are an axis that can be cut.

    Before: v = index(w, [chosen]); y = bmm(x, v); z = gelu(y)                     w[8, 64, 256], chosen[rows]
    After:  p = dispatch(chosen, 8, ...); c = counts(chosen, 8, ...)
            v = spread(w, c, p); y = bmm(index_select(x, 0, p), v); z = combine(gelu(y), p, chosen)

The operators between dispatch and combine work on each row by itself. A rank that holds two experts computes the rows
of these experts only, and the result of its `combine` is a partial sum. The same holds for products of groups of rows
(`grouped_mm`). With a capacity, `p` are slots, and `fill_slots` reads rows into them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autotp.errors import Error
from autotp.ops.experts import rows as routing
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.plan.candidate import contracts, root
from autotp.passes.plan.infer_axes import Axes, infer_axes, is_getitem
from autotp.rules.call import arguments_of, operand_nodes, operator_name
from autotp.rules.registry import is_grouped
from autotp.rules.row import Trait
from autotp.rules.traits import has, size_argument
from autotp.sharding.axis import Axis, Size, find

aten = torch.ops.aten


NO_EXPERTS = (
    "no layer has experts that rows choose from: stacks of weights, as transformers' "
    'experts_implementation="grouped_mm" reads them'
)


def of_host(capacity: float | None) -> str:
    """Returns what the plan says of sizes: whether a layer waits for the device, which CUDA graphs cannot record."""
    if capacity is None:
        return "the host reads the counts of each layer once, so CUDA graphs cannot record them"
    return (
        f"capacity={capacity}: an expert drops rows, and the host reads no counts, so CUDA graphs can record the layers"
    )


@dataclass
class Routed:
    """Rows that are routed to experts.

    Attributes:
        chosen: the node with the expert of each row, [rows].
        number: the number of experts.
        grouped: whether the rows are in the experts' order already.
        reads: the nodes that read the experts' weights: for each row (`index`), or for groups of rows.
        inside: the nodes between dispatch and combine: `reads`, and operators on their rows.
    """

    chosen: fx.Node
    number: int
    grouped: bool
    reads: list[fx.Node] = field(default_factory=list)
    inside: set[fx.Node] = field(default_factory=set)


def experts(
    graph: fx.Graph,
    axes: Axes,
    parameters: Collection[str],
    tp: int,
    every: bool = True,
    capacity: float | None = None,
) -> tuple[fx.Graph, Axes]:
    """Returns the same function with rows in the experts' order, if `tp` divides the number of experts; and its axes.

    Args:
        parameters: placeholder names of the parameters.
        every: False to sort only the rows that the pass `unsort` has put out of the experts' order.
        capacity: a factor: rows for which their expert has no slot are dropped: NOTE [Capacity].

    Raises:
        Error: with a capacity, no rows choose experts.
    """
    routed_rows = _routed(graph, axes, parameters, tp if capacity is None else 1, every)
    if not routed_rows and capacity is not None:
        raise Error(f"capacity={capacity}, and {NO_EXPERTS}", fix="capacity=None")
    if not routed_rows:
        return graph, axes
    rewriting = _Rewriting(graph, axes, routed_rows, capacity)
    for node in graph.nodes:
        rewriting.visit(node)
    return rewriting.builder.graph, infer_axes(rewriting.builder.graph)


def _routed(graph: fx.Graph, axes: Axes, parameters: Collection[str], tp: int, every: bool) -> list[Routed]:
    """Returns the routed rows of a graph; no node is inside of two of them."""
    by_row: dict[tuple[fx.Node, int], Routed] = {}
    in_groups: dict[tuple[fx.Node, int], Routed] = {}
    for node in graph.nodes:
        if _is_product(node, every) and node in axes.bound and axes.bound[node].known:
            number, chosen = _experts_of(node, 1), _choice(node)
            if chosen is not None and number % tp == 0:
                in_groups.setdefault((chosen, number), Routed(chosen, number, True)).reads.append(node)
    for node in graph.nodes:
        if _is_read(node, parameters) and (number := _experts_of(node, 0)) % tp == 0:
            (chosen,) = arguments_of(node)["indices"]
            # The rows of such a read are sorted by the same choice, so it works on the same groups.
            grouped = in_groups.get((_source(chosen, number), number))
            if grouped is None and every:
                grouped = by_row.setdefault((_source(chosen), number), Routed(chosen, number, False))
            if grouped is not None:
                grouped.reads.append(node)
    routes = [*in_groups.values(), *by_row.values()]
    claimed = {read for routed in routes for read in routed.reads}
    for routed in routes:
        _fill(routed, graph, axes, claimed - set(routed.reads))
        claimed |= routed.inside
    return [routed for routed in routes if routed.inside]


def _is_product(node: fx.Node, sorted_too: bool = True) -> bool:
    """True for a product of rows with the matrices of their experts; sorted_too: also of rows in the experts' order."""
    return node.target is routing.chosen_mm or (sorted_too and node.op == "call_function" and is_grouped(node.target))


def is_fused(product: fx.Node) -> bool:
    """Whether an operator of torch multiplies the groups of rows at once, on a device that has a kernel for it."""
    return str(product.target).startswith("aten.")


def _choice(product: fx.Node) -> fx.Node | None:
    """Returns the experts that the rows of a product choose; None if that is not known."""
    if product.target is not routing.chosen_mm:
        return sorted_choice(product)
    chosen: Any = product.args[2]
    return _source(chosen, _experts_of(product, 1))


def _experts_of(node: fx.Node, position: int) -> int:
    """Returns the number of experts whose weights an operand holds."""
    return int(operand_nodes(node)[position].meta["val"].shape[0])  # type: ignore[union-attr]


def _is_read(node: fx.Node, parameters: Collection[str]) -> bool:
    """True for a lookup of rows by a list of integers in a parameter, or in a view of a parameter."""
    if node.target is not aten.index.Tensor:
        return False
    weight, indices = operand_nodes(node)[0], arguments_of(node)["indices"]
    if weight is None or len(indices) != 1 or root(weight).name not in parameters:
        return False
    value = indices[0].meta["val"]
    return (
        value.dim() == 1 and value.dtype in (torch.int32, torch.int64) and isinstance(weight.meta["val"].shape[0], int)
    )


def sorted_choice(node: fx.Node) -> fx.Node | None:
    """Returns the sorted choice of grouped rows, if the groups end at `cumsum(histc(chosen))`; else None."""
    x, weight, ends = (operand_nodes(node))[:3]
    number = int(weight.meta["val"].shape[0])  # type: ignore[union-attr]
    counts: Any = ends.args[0] if ends is not None and ends.target is aten.cumsum.default else None
    if not isinstance(counts, fx.Node) or counts.target is not aten.histc.default:
        return None
    bins = arguments_of(counts)
    chosen = _source(bins["self"], number)
    lengths = [Size.of(value.meta["val"].shape[0]) for value in (chosen, x)]  # type: ignore[union-attr]
    as_many = (bins["bins"], bins["min"], bins["max"]) == (number, 0, number - 1)
    return chosen if as_many and lengths[0] == lengths[1] and _is_sorted(chosen) else None


def _is_sorted(chosen: fx.Node) -> bool:
    """True for the values of an ascending sort, or for a choice indexed by the order that sorts it."""
    if is_getitem(chosen):
        return bool(chosen.args[1] == 0) and is_sort(chosen.args[0])
    if chosen.target is not aten.index.Tensor:
        return False
    (order,) = arguments_of(chosen)["indices"]
    by: Any = order.args[0] if is_getitem(order) and order.args[1] == 1 else order
    return is_sort(by) and bool(arguments_of(by)["self"] is chosen.args[0])


def is_sort(node: Any) -> bool:
    return has(node.target, Trait.SORT) and not arguments_of(node)["descending"] and node.args[0].meta["val"].dim() == 1


def _source(chosen: fx.Node, number: int | None = None) -> fx.Node:
    """Returns the choice before casts, and before a clamp that changes nothing for `number` experts."""
    while chosen.op == "call_function":
        arguments = arguments_of(chosen)
        bounded = number is not None and operator_name(chosen) == "aten::clamp"
        bounded = bounded and arguments["min"] in (None, 0) and arguments["max"] in (None, (number or 0) - 1)
        if not bounded and not (has(chosen.target, Trait.SAME) and _are_exact(chosen, arguments["self"])):
            break
        chosen = arguments["self"]
    return chosen


def _are_exact(*chosen: fx.Node) -> bool:
    """True if casts between these dtypes keep the indices of experts exact."""
    dtypes = [node.meta["val"].dtype for node in chosen]
    return dtypes[-1] in EXACT[:2] and dtypes[0] in EXACT


def _fill(routed: Routed, graph: fx.Graph, axes: Axes, claimed: Collection[fx.Node]) -> None:
    """Finds the nodes inside: from a read of weights to the last use of one. Without a product there are none.

    Args:
        claimed: reads of weights, and nodes inside, of other routed rows.
    """
    rows, after = find(axes.of(routed.reads[0])[0]), set(routed.reads)
    for node in graph.nodes:
        follows = node not in claimed and any(operand in after for operand in node.all_input_nodes)
        if follows and of_rows_only(node, rows, axes):
            after.add(node)
    needed = {read for read in routed.reads if _is_product(read)}
    queue = [user for read in set(routed.reads) - needed for user in read.users]
    while queue:
        user = queue.pop()
        if user in after and user not in needed:
            needed.add(user)
            # Further on only through views and casts of the weights: an operator with another operand is where they are
            # used.
            queue += user.users if len(operand_nodes(user)) == 1 else ()
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(operand for operand in node.all_input_nodes if operand in after)
    if any(contracts(axes.bound.get(node)) for node in needed):
        routed.inside = needed


def of_rows_only(node: fx.Node, rows: Axis, axes: Axes) -> bool:
    """True if each row of the result depends on the same row of the operands only, and rows are the first dimension."""
    if is_getitem(node):
        return True
    if node not in axes.bound or _says_length(node, rows):
        return False
    bound = axes.bound[node]
    row_factors = [factor for factor in bound.factors if find(factor.axis) is rows and not factor.mark]
    places = (
        [(bound.dims[side], (row_factors[0].ins, row_factors[0].outs)[side]) for side in (0, 1)]
        if len(row_factors) == 1
        else []
    )
    return bool(places) and len(row_factors[0].outs) == len(bound.rule.outs) and all(
        place.get(i) == 0 if has else i not in place
        for terms, place in places
        for i, dims in enumerate(terms)
        for has in [any(find(axis) is rows for axis in dims)]
    )  # fmt: skip


def _says_length(node: fx.Node, rows: Axis) -> bool:
    """True if an operator gets sizes, one of which may be the number of rows."""
    name = size_argument(node.target)
    sizes = arguments_of(node)[name] if name else ()
    every = sizes if isinstance(sizes, list | tuple) else (sizes,)
    return any(isinstance(size, fx.Node) or Size.of(size) == find(rows).size for size in every)


class _Rewriting:
    """The new graph. `ordered` has the values inside, in the experts' order; readers outside get them combined."""

    def __init__(self, graph: fx.Graph, axes: Axes, routed_rows: list[Routed], capacity: float | None) -> None:
        self.axes, self.builder, self.capacity = axes, Builder(fake_mode_of(graph)), capacity
        self.of = {node: routed for routed in routed_rows for node in routed.inside}
        self.choices = {routed.chosen for routed in routed_rows}
        self.ordered: dict[fx.Node, fx.Node] = {}  # Node inside -> its rows in the experts' order.
        self.routes: dict[int, tuple[fx.Node, fx.Node]] = {}
        self.sent: dict[tuple[int, fx.Node], fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        self.builder.origin = node
        routed = self.of.get(node)
        if routed is None:
            self.builder.copy(node)
            return
        ordered = self._read(routed, node) if node in routed.reads else self._inner(routed, node)
        self.ordered[node] = ordered
        outside = node in self.choices or any(self.of.get(user) is not routed for user in node.users)
        if outside and isinstance(node.meta["val"], torch.Tensor):
            places, _ = self._route(routed)
            arguments: tuple[Any, ...] = ordered, places, self.builder.env[routed.chosen]
            if self.capacity is not None:
                arguments += routed.number, routed.grouped
            back = self.builder.raw(routing.combine, arguments)
            back.meta["val"] = node.meta["val"]
            self.builder.env[node] = back

    def _route(self, routed: Routed) -> tuple[fx.Node, fx.Node]:
        """Returns the rows of each expert in order, and their numbers."""
        if id(routed) not in self.routes:
            chosen, number = self.builder.env[routed.chosen], routed.number
            arguments = (chosen, number, routed.grouped, 0, number, self.capacity)
            places, count = (self.builder.raw(f, arguments) for f in (routing.dispatch, routing.counts))
            with self.builder.mode:
                # A new symbol times the number of experts: the axis of the rows is `experts x rows of an expert`.
                rows = number * self.builder.length(f"rows_of_an_expert_{len(self.routes)}", ROWS)
                places.meta["val"] = torch.empty(rows, dtype=torch.int64, device=chosen.meta["val"].device)
                count.meta["val"] = places.meta["val"].new_empty(number)
            self.routes[id(routed)] = places, count
        return self.routes[id(routed)]

    def _read(self, routed: Routed, node: fx.Node) -> fx.Node:
        """Writes a read of the experts' weights."""
        places, count = self._route(routed)
        if _is_product(node):
            x, weight, _ = (n for n in operand_nodes(node) if n is not None)
            fused = node.args[3] if node.target is routing.chosen_mm else is_fused(node)
            arguments = (self._rows(routed, x), self.builder.env[weight], count, fused)
            result = self.builder.raw(routing.grouped_mm, arguments)
        else:
            result = self.builder.raw(routing.spread, (self.builder.env[node.args[0]], count, places))  # type: ignore[index]
        value = node.meta["val"]
        with self.builder.mode:
            result.meta["val"] = value.new_empty([places.meta["val"].shape[0], *value.shape[1:]])
        return result

    def _inner(self, routed: Routed, node: fx.Node) -> fx.Node:
        """Writes an operator on rows, with its operands in the experts' order."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._rows(routed, n))
        return self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _rows(self, routed: Routed, node: fx.Node) -> fx.Node:
        """Returns a value in the experts' order if it has rows; else unchanged."""
        if node in self.ordered and self.of[node] is routed:
            return self.ordered[node]
        rows = find(self.axes.of(routed.reads[0])[0])
        if not self.axes.dims.get(node) or not any(find(axis) is rows for axis in self.axes.of(node)):
            return self.builder.env[node]
        key = id(routed), node
        if key not in self.sent:
            self.sent[key] = self._in_order(self.builder.env[node], self._route(routed)[0])
        return self.sent[key]

    def _in_order(self, x: fx.Node, places: fx.Node) -> fx.Node:
        """Writes rows in the experts' order."""
        if self.capacity is None:
            return self.builder.call(aten.index_select.default, x, 0, places)
        taken, value = self.builder.raw(routing.fill_slots, (x, places)), x.meta["val"]
        with self.builder.mode:
            taken.meta["val"] = value.new_empty([places.meta["val"].shape[0], *value.shape[1:]])
        return taken


EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
ROWS = 7
"""The number of rows of an expert in example values: a number that no other size has."""
