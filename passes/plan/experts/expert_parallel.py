"""expert_parallel: sends rows to the ranks of their experts, which compute the rows of all ranks along `ep`.

    Before: p = dispatch(chosen, 8, ...); c = counts(chosen, 8, ...); y = grouped_mm(index_select(x, 0, p), w, c)
            z = combine(y, p, chosen)                                                     w[8, 64, 256]
    After:  t = exchange_counts(chosen, "ep", 8, ...); q = arrival(t); d = arrived_counts(t); p = dispatch(chosen, ...)
            y = grouped_mm(to_experts(index_select(x, 0, p), "ep", t, q), own(w, 4), d)
            z = combine(to_rows(y, "ep", t, q), p, chosen)

Ranks along `ep` are replicas: they have different rows, and the same parameters but for the experts', of which each
stores its own. The graph is one rank's. It has the whole weights as its inputs, so that all else knows them by the
shapes of the model; `own` says that a rank stores a part.

NOTE [Weights that are computed]
Experts may read what is computed of parameters, such as a stack with an adapter. Operators on each expert by itself run
on this rank's experts, `baddbmm(own(w, 4), ...)`. What has the experts elsewhere, as adapters of peft have, every rank
stores and computes whole, and reads its part: `select_own(x, "ep", 4)`. So it is with a stack that something else reads
whole, too. The gradient of such a parameter is summed over all replicas, as that of any other.

NOTE [Copies of experts]
Ranks along `ep` are replicas, or have other parts of sequences. Where sequences are cut, each parameter is copied along
`cp`, so that its gradient is summed over these ranks. The rows of some of them may have come to an expert's rank
already: they are ranks along `ep`. So a weight of which a rank stores its experts is copied along `cp/ep` instead: the
ranks along `cp` that have the same experts. Sums over replicas are the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autotp.display.text_table import bytes_text
from autotp.errors import Error
from autotp.ops.collectives import copy
from autotp.ops.experts import exchange
from autotp.ops.experts import rows as routing
from autotp.passes.builder import Builder, ancestors, fake_mode_of
from autotp.passes.lower.dce import dce
from autotp.passes.plan.experts.experts import NO_EXPERTS, of_host, of_rows_only
from autotp.passes.plan.infer_axes import Axes, is_getitem
from autotp.rules.call import operand_nodes
from autotp.sharding.axis import find
from autotp.sharding.layout import Layout
from autotp.sharding.partition import chunk_bounds

EP = "ep"
CP_COPIES = "cp/ep"
"""The mesh axis of the ranks along `cp` that have the same experts."""
ROWS = 11
"""The number of rows that arrive for an expert in example values: a number that no other size has."""


def expert_parallel(graph: fx.Graph, axes: Axes, parameters: Collection[str], ep: int) -> fx.Graph:
    """Returns the graph of one of `ep` ranks with experts of its own.

    Args:
        graph: with rows in the order of their experts, as the pass `experts` makes it.
        parameters: placeholder names of the parameters.

    Raises:
        Error: no rows choose experts, or `ep` does not divide their number.
    """
    numbers = [node.args[1] for node in graph.nodes if node.target is routing.dispatch]
    if not numbers:
        raise Error(
            f"ep={ep}, and {NO_EXPERTS}",
            fix="ep=1",
        )
    if uneven := [number for number in numbers if number % ep]:
        raise Error(f"ep={ep} does not divide the {uneven[0]} experts of a layer", fix="ep that divides all of them")
    whole: set[str] = set()
    while True:
        rewriting = _Exchanging(graph, axes, set(parameters) - whole, ep)
        for node in graph.nodes:
            rewriting.visit(node)
        new = dce(rewriting.builder.graph)
        stored: list[Any] = [node.args[0] for node in new.nodes if node.target is exchange.own]
        read_whole = {x.name for x in stored if any(reader.target is not exchange.own for reader in x.users)}
        if not read_whole:
            return new
        whole |= read_whole


def exchanges(graph: fx.Graph, names: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Returns the parameters that each rank has some experts of, for each exchange of rows of a graph in order.

    Args:
        names: placeholder -> parameter.
    """
    order: list[tuple[str, ...]] = []
    for node in graph.nodes:
        if node.target is exchange.exchange_counts:
            order.append(())
        elif node.target is exchange.own:
            order[-1] += (names[node.args[0].name],)
    return tuple(order)


def with_own_experts(
    layouts: Mapping[str, Layout], names: Iterable[Collection[str]], ep: int, rank: int
) -> dict[str, Layout]:
    """Returns layouts in which stacks of experts have the rows of a rank's experts.

    Args:
        names: the parameters of each exchange, from `exchanges`.
        ep, rank: the number of ranks that experts are cut over, and the rank among them.
    """
    stacks = {name for some in names for name in some}
    return {
        name: replace(layout, rows=chunk_bounds(layout.shape[0], ep, rank)) if name in stacks else layout
        for name, layout in layouts.items()
    }


def described(graph: fx.Graph, ep: int, names: Mapping[str, str]) -> str:
    """Returns what the plan says of a graph whose rows travel. names: placeholder -> parameter"""
    tables = [node for node in graph.nodes if node.target is exchange.exchange_counts]
    numbers, capacity = sorted({table.args[2] for table in tables}), tables[0].args[4]
    sent, most = 0.0, 0
    for node in graph.nodes:
        if node.target is exchange.to_experts:
            value, rows = node.meta["val"], node.args[2].args[0].meta["val"].shape[0]
            # `rows` is a number, or a symbol that has its number at capture.
            count = rows if isinstance(rows, int) else rows.node.hint
            most = max(most, count)
            sent += count * math.prod(value.shape[1:]) * value.dtype.itemsize * (ep - 1) / ep
    several = f"{len(tables)} layers" if len(tables) > 1 else "1 layer"
    return (
        f"{several} of {' or '.join(map(str, numbers))} experts over ep={ep}: for {most} rows of chosen experts, "
        f"those of the example inputs, a rank sends {bytes_text(sent)} there, as many back, and the gradients; "
        f"{of_host(capacity)}{_of_whole_weights(graph, names)}"
    )


def _of_whole_weights(graph: fx.Graph, names: Mapping[str, str]) -> str:
    """Returns what the plan says of parameters of experts that every rank stores whole."""
    read = ancestors(node for node in graph.nodes if node.target is exchange.select_own)
    whole = [names[node.name] for node in graph.nodes if node in read and node.name in names]
    if not whole:
        return ""
    more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
    return f"; each rank stores `{whole[0]}`{more} whole, and reads the part of its experts"


def order_of_rows(node: Any) -> Any:
    """Returns the places by which a node puts rows in the experts' order; None for another node."""
    position = {torch.ops.aten.index_select.default: 2, routing.fill_slots: 1}.get(getattr(node, "target", None))
    return None if position is None else node.args[position]


class _Exchanging:
    """The new graph.

    Attributes:
        parameters: placeholder names of those of which a rank may store its experts only.
        routes: the rows in the experts' order -> the table of counts, the places of what arrives, its counts.
        inside: the nodes between `to_experts` and `to_rows`.
        owned: a parameter of experts, or a view of it -> the same of this rank's experts.
    """

    def __init__(self, graph: fx.Graph, axes: Axes, parameters: Collection[str], ep: int) -> None:
        self.axes, self.parameters, self.ep = axes, parameters, ep
        self.builder = Builder(fake_mode_of(graph))
        self.routes: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]] = {}
        self.inside: set[fx.Node] = set()
        self.owned: dict[fx.Node, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        env, self.builder.origin = self.builder.env, node
        if node.target is routing.dispatch:
            self.routes[node] = self._route(node)
            self.builder.copy(node)
        elif node.target is routing.counts:
            env[node] = next(counts for places, (_, _, counts) in self.routes.items() if places.args == node.args)
        elif node.target in (routing.spread, routing.grouped_mm):
            env[node] = self._read(node)
            self.inside.add(node)
        elif node.target is routing.combine:
            rows, places = node.args[:2]
            env[rows] = self._exchanged(exchange.to_rows, env[rows], places, env[places].meta["val"])  # type: ignore[index]
            self.builder.copy(node)
        elif any(operand in self.inside for operand in node.all_input_nodes):
            args, kwargs = self.builder.map((node.args, node.kwargs))
            env[node] = self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
            self.inside.add(node)
        else:
            copy = self.builder.copy(node)
            if (places := order_of_rows(node)) in self.routes:
                env[node] = self._exchanged(exchange.to_experts, copy, places)
                self.inside.add(node)

    def _route(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Writes what ranks tell each other of a choice."""
        chosen, number, grouped, *_, capacity = self.builder.map(node.args)
        table = self.builder.raw(exchange.exchange_counts, (chosen, EP, number, grouped, capacity))
        places, counts = (self.builder.raw(f, (table,)) for f in (exchange.arrival, exchange.arrived_counts))
        example, experts = node.meta["val"], number // self.ep
        with self.builder.mode:
            rows = experts * self.builder.length(f"arriving_rows_of_an_expert_{len(self.routes)}", ROWS)
            table.meta["val"] = example.new_empty([2, self.ep, experts])
            places.meta["val"], counts.meta["val"] = example.new_empty(rows), example.new_empty(experts)
        return table, places, counts

    def _exchanged(self, move: Any, x: fx.Node, places: Any, like: Any = None) -> fx.Node:
        table, arriving, _ = self.routes[places]
        moved = self.builder.raw(move, (x, EP, table, arriving))
        rows = (arriving.meta["val"] if like is None else like).shape[0]
        with self.builder.mode:
            moved.meta["val"] = x.meta["val"].new_empty([rows, *x.meta["val"].shape[1:]])
        return moved

    def _read(self, node: fx.Node) -> fx.Node:
        """Writes a read of the experts' weights, which gets those of this rank's experts."""
        arguments, weight = list(self.builder.map(node.args)), int(node.target is routing.grouped_mm)
        arguments[weight] = self._own(node.args[weight])
        count = node.args[1 + weight]
        _, arriving, counts = next(route for route in self.routes.values() if route[2] is self.builder.env[count])  # type: ignore[index]
        if node.target is routing.spread:
            arguments[2] = arriving
        assert arguments[1 + weight] is counts
        read, value = self.builder.raw(node.target, tuple(arguments)), node.meta["val"]  # type: ignore[arg-type]
        with self.builder.mode:
            read.meta["val"] = value.new_empty([arriving.meta["val"].shape[0], *value.shape[1:]])
        return read

    def _own(self, weight: Any) -> fx.Node:
        """Returns the weights of this rank's experts: NOTE [Weights that are computed]"""
        if weight not in self.owned:
            self.owned[weight] = self._copied(weight) or self._computed(weight) or self._part(weight)
        return self.owned[weight]

    def _copied(self, weight: fx.Node) -> fx.Node | None:
        """Writes a copy along `cp`; None for another weight: NOTE [Copies of experts]"""
        if weight.target is not copy:
            return None
        (parameter,) = weight.all_input_nodes
        # The gradient of a parameter that every rank stores has all experts, and is summed over all ranks.
        stored = parameter.name in self.parameters
        return self.builder.call(copy, self._own(parameter), CP_COPIES) if stored else self._part(weight)

    def _part(self, weight: fx.Node) -> fx.Node:
        """Writes a read of this rank's experts' weights, of a parameter that is so stored or of a whole value."""
        whole, value = self.builder.env[weight], weight.meta["val"]
        if weight.name in self.parameters:
            part = self.builder.raw(exchange.own, (whole, self.ep))
        else:
            part = self.builder.raw(exchange.select_own, (whole, EP, self.ep))
        with self.builder.mode:
            part.meta["val"] = value.new_empty([value.shape[0] // self.ep, *value.shape[1:]])
        return part

    def _computed(self, weight: fx.Node) -> fx.Node | None:
        """Writes an operator on each expert by itself for this rank's experts; None for another one."""
        experts = find(self.axes.of(weight)[0])
        if weight.op != "call_function" or is_getitem(weight) or not of_rows_only(weight, experts, self.axes):
            return None
        has_experts = {n for n in operand_nodes(weight) if n and find(self.axes.of(n)[0]) is experts}
        args, kwargs = fx.map_arg(
            (weight.args, weight.kwargs), lambda n: self._own(n) if n in has_experts else self.builder.env[n]
        )
        return self.builder.call(weight.target, *args, **kwargs)  # type: ignore[arg-type]
