"""experts: rows that each choose an expert are brought into the experts' order, so that experts can be cut.

    Before: v = index(w, [chosen]); y = bmm(x, v); z = gelu(y)                     w[8, 64, 256], chosen[rows]
    After:  p = dispatch(chosen, 0, 8); c = counts(chosen, 0, 8)
            v = spread(w, c, p); y = bmm(index_select(x, 0, p), v); z = combine(gelu(y), p, chosen)

Between dispatch and combine stands what works on each row by itself. A rank that holds two experts has their rows
there and no others; what `combine` makes of them is its summand. Products of groups of rows (`grouped_mm`) likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic

from autotp import routing
from autotp.axis import Axis, find
from autotp.builder import Builder, fake_mode_of
from autotp.call import bind, operand_nodes, outputs_of
from autotp.operators import SIZE_ARGUMENTS, is_grouped
from autotp.passes.axes import Axes, infer_axes, is_getitem
from autotp.passes.match import contracts, root

aten = torch.ops.aten


@dataclass
class Routed:
    """Rows that choose among one number of experts.

    Attributes:
        chosen: the node that says which, [rows].
        number: how many experts there are.
        reads: the nodes that read the experts' weights: a row's own (`index`), or of rows in groups.
        inside: those, and what works on each of their rows by itself.
    """

    chosen: fx.Node
    number: int
    reads: list[fx.Node] = field(default_factory=list)
    inside: set[fx.Node] = field(default_factory=set)


def experts(graph: fx.Graph, axes: Axes, parameters: Collection[str], tp: int) -> tuple[fx.Graph, Axes]:
    """The same function, experts' rows in the experts' order where their number divides by `tp`; and its axes.

    Args:
        parameters: placeholder names of the parameters.
    """
    found = [routed for routed in _routed(graph, axes, parameters) if routed.number % tp == 0]
    if not found:
        return graph, axes
    rewriting = _Rewriting(graph, axes, found)
    for node in graph.nodes:
        rewriting.visit(node)
    return rewriting.builder.graph, infer_axes(rewriting.builder.graph)


def _routed(graph: fx.Graph, axes: Axes, parameters: Collection[str]) -> Iterator[Routed]:
    """What is routed to experts, of whose weights some product reads each row's own."""
    found: dict[tuple[fx.Node, int], Routed] = {}
    for node in graph.nodes:
        chosen = _choice(node, axes, parameters)
        if chosen is not None:
            number = int(operand_nodes(node)[is_grouped(node.target)].meta["val"].shape[0])  # type: ignore[union-attr]
            routed = found.setdefault((_source(chosen, number), number), Routed(chosen, number))
            routed.reads.append(node)
    for routed in found.values():
        _grow(routed, graph, axes)
        if any(contracts(axes.bound.get(node)) for node in routed.inside):
            yield routed


def _choice(node: fx.Node, axes: Axes, parameters: Collection[str]) -> fx.Node | None:
    """The experts that rows choose, where a node reads the weights of these; else None."""
    operands = operand_nodes(node)
    if is_grouped(node.target) and axes.bound[node].known:
        return _counted(operands[2], int(outputs_of(operands[1])[0].shape[0]), operands[0], parameters)  # type: ignore[arg-type]
    if node.target is not aten.index.Tensor:
        return None
    weight, indices = operands[0], bind(node)["indices"]
    single = len(indices) == 1 and indices[0].meta["val"].dim() == 1
    integers = single and indices[0].meta["val"].dtype in (torch.int32, torch.int64)
    return indices[0] if integers and weight is not None and _stack(weight, parameters) else None


def _stack(weight: fx.Node, parameters: Collection[str]) -> bool:
    """True for a stack of parameters, or a view of one, the first dimension of which counts experts."""
    return root(weight).name in parameters and isinstance(weight.meta["val"].shape[0], int)


def _counted(ends: fx.Node, number: int, x: fx.Node, parameters: Collection[str]) -> fx.Node | None:
    """The choice whose groups end at `ends`: `cumsum(histc(chosen))`, with one bin for each expert."""
    if ends.target is not aten.cumsum.default or ends.args[0].target is not aten.histc.default:  # type: ignore[union-attr]
        return None
    counted: Any = bind(ends.args[0])  # type: ignore[arg-type]
    chosen = _source(counted["self"], number)
    bins = (counted["bins"], counted["min"], counted["max"]) == (number, 0, number - 1)
    same = chosen.meta["val"].dim() == 1 and chosen.meta["val"].shape[0] == x.meta["val"].shape[0]
    return chosen if bins and same else None


def _source(chosen: fx.Node, number: int) -> fx.Node:
    """The choice without casts and without bounds that hold of every expert."""
    while chosen.op == "call_function":
        arguments, name = bind(chosen), str(chosen.target).rsplit(".", 1)[0]
        bounded = name == "aten.clamp" and arguments["min"] in (None, 0) and arguments["max"] in (None, number - 1)
        if not bounded and name not in SAME:
            break
        chosen = arguments["self"]
    return chosen


def _grow(routed: Routed, graph: fx.Graph, axes: Axes) -> None:
    """Finds what is inside: it reads such rows and works on each by itself."""
    routed.inside = set(routed.reads)
    rows = find(axes.of(routed.reads[0])[0])
    for node in graph.nodes:
        reads = any(operand in routed.inside for operand in node.all_input_nodes)
        if node not in routed.inside and reads and _by_rows(node, rows, axes):
            routed.inside.add(node)


def _by_rows(node: fx.Node, rows: Axis, axes: Axes) -> bool:
    """True if every result row comes from the operands' rows at its place; rows are the first dimension of all."""
    if is_getitem(node):
        return True
    if node not in axes.bound or str(node.target).rsplit(".", 1)[0] in SIZE_ARGUMENTS:
        return False
    bound = axes.bound[node]
    here = [factor for factor in bound.factors if find(factor.axis) is rows and not factor.mark]
    places = [(bound.dims[side], (here[0].ins, here[0].outs)[side]) for side in (0, 1)] if len(here) == 1 else []
    return bool(places) and len(here[0].outs) == len(bound.rule.outs) and all(
        place.get(i) == 0 if has else i not in place
        for terms, place in places
        for i, dims in enumerate(terms)
        for has in [any(find(axis) is rows for axis in dims)]
    )  # fmt: skip


class _Rewriting:
    """The new graph. Inside, `env` has rows in the experts' order; what reads them from outside gets them combined."""

    def __init__(self, graph: fx.Graph, axes: Axes, found: list[Routed]) -> None:
        self.axes, self.builder = axes, Builder(fake_mode_of(graph))
        self.of = {node: routed for routed in found for node in routed.inside}
        self.ordered: dict[fx.Node, fx.Node] = {}  # Node inside -> its rows in the experts' order.
        self.routes: dict[int, tuple[fx.Node, fx.Node]] = {}
        self.sent: dict[tuple[int, fx.Node], fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        self.builder.origin = node
        routed = self.of.get(node)
        if routed is None:
            self.builder.copy(node)
            return
        new = self._read(routed, node) if node in routed.reads else self._inner(routed, node)
        self.ordered[node] = new
        outside = any(user not in routed.inside for user in node.users)
        if outside and isinstance(node.meta["val"], torch.Tensor):
            places, _ = self._route(routed)
            back = self.builder.raw(routing.combine, (new, places, self.builder.env[routed.chosen]))
            back.meta["val"] = node.meta["val"]
            self.builder.env[node] = back

    def _route(self, routed: Routed) -> tuple[fx.Node, fx.Node]:
        """The rows of each expert in order, and how many they are."""
        if id(routed) not in self.routes:
            chosen, number = self.builder.env[routed.chosen], routed.number
            places, count = (self.builder.raw(f, (chosen, 0, number)) for f in (routing.dispatch, routing.counts))
            with self.builder.mode:
                rows = number * self._each(len(self.routes))
                places.meta["val"] = torch.empty(rows, dtype=torch.int64, device=chosen.meta["val"].device)
                count.meta["val"] = places.meta["val"].new_empty(number)
            self.routes[id(routed)] = places, count
        return self.routes[id(routed)]

    def _each(self, i: int) -> Any:
        """A length of its own: how many rows an expert has."""
        env, source = self.builder.mode.shape_env, ConstantSource(f"rows_of_an_expert_{i}")
        symbol = env.create_symbol(ROWS, source, DimDynamic.DYNAMIC)  # type: ignore[union-attr]
        return env.create_symintnode(symbol, hint=ROWS, source=source)  # type: ignore[union-attr]

    def _read(self, routed: Routed, node: fx.Node) -> fx.Node:
        """A read of the experts' weights."""
        places, count = self._route(routed)
        if is_grouped(node.target):
            x, weight, _ = (n for n in operand_nodes(node) if n is not None)
            arguments = (self._rows(routed, x), self.builder.env[weight], count, str(node.target).startswith("aten."))
            new = self.builder.raw(routing.grouped_mm, arguments)
        else:
            new = self.builder.raw(routing.spread, (self.builder.env[node.args[0]], count, places))  # type: ignore[index]
        value = node.meta["val"]
        with self.builder.mode:
            new.meta["val"] = value.new_empty([places.meta["val"].shape[0], *value.shape[1:]])
        return new

    def _inner(self, routed: Routed, node: fx.Node) -> fx.Node:
        """An operator on rows, on what it reads in the experts' order."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._rows(routed, n))
        return self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _rows(self, routed: Routed, node: fx.Node) -> fx.Node:
        """A value in the experts' order, if it has rows; else as it is."""
        if node in self.ordered and self.of[node] is routed:
            return self.ordered[node]
        rows = find(self.axes.of(routed.reads[0])[0])
        if not self.axes.dims.get(node) or not any(find(axis) is rows for axis in self.axes.of(node)):
            return self.builder.env[node]
        key = id(routed), node
        if key not in self.sent:
            places, _ = self._route(routed)
            self.sent[key] = self.builder.call(aten.index_select.default, self.builder.env[node], 0, places)
        return self.sent[key]


SAME = ("aten.to", "aten._to_copy", "aten.contiguous", "aten.clone")
"""Operators that leave a number of an expert as it is."""
ROWS = 7
"""How many rows an expert has in examples: a number that is nothing else's."""
