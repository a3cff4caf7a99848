"""expert_rows: proves that a graph whose rows travel to the ranks of their experts computes the graph before.

    grouped_mm(to_experts(x, "ep", t, q), own(w, 4), arrived_counts(t))   rows of all ranks, by the table t; own weights

Two facts are derived from the new graph alone. Without the moves it is the old graph, operator by operator. And each
value is of one rank's rows, or of the rows of this rank's experts by one table, or of no rows: no operator reads values
of both kinds, and what a rank stores of an expert's weights is read for rows of its experts only. So the gradient of
such a weight is a sum over the rows of all ranks along `ep`, and that of any other parameter is a term of such a sum.
Where sequences are cut, a weight is copied along `cp/ep` in place of `cp`, and no other value is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import fx

from autotp.errors import REPORT, Error
from autotp.ops.collectives import copy
from autotp.ops.experts import exchange
from autotp.ops.experts import rows as routing
from autotp.passes.check.erase import is_along, target_name
from autotp.source_location import line_of

MOVES = (exchange.own, exchange.select_own, exchange.to_experts, exchange.to_rows)
"""Functions whose result is their first operand, in the graph before."""
OWN_ROWS, OWN_EXPERTS = "rows", "experts"
Kinds = frozenset[Any]
"""Of a value: `OWN_ROWS`, `OWN_EXPERTS` (weights), and the tables of rows that have travelled; none for no rows."""


def expect_expert_rows(before: fx.Graph, graph: fx.Graph, inputs: Collection[str], ep: int) -> None:
    """Raises Error unless `graph`, on each of `ep` ranks, computes what `before` does on all their rows.

    Args:
        before: the graph with rows in the order of their experts.
        inputs: placeholder names of the inputs.
    """
    _expect_same_operators(before, graph)
    kinds: dict[fx.Node, Kinds] = {}
    for node in graph.nodes:
        kinds[node] = _kinds(node, kinds, inputs, ep)


def _refuse(node: fx.Node, problem: str) -> NoReturn:
    raise Error(
        f"rows that travel would not compute the model: `{target_name(node.target)}` {problem}",
        at=line_of(node),
        fix=f"ep=1. {REPORT}",
    )


# ---- the same operators


def _expect_same_operators(before: fx.Graph, graph: fx.Graph) -> None:
    calls: dict[Any, list[fx.Node]] = {}
    for node in before.nodes:
        calls.setdefault(_call(node, {}), []).append(node)
    old_nodes: dict[fx.Node, fx.Node] = {}  # A node of the new graph -> that of the old graph.
    for node in graph.nodes:
        if node.target in MOVES:
            old_nodes[node] = old_nodes[node.args[0]]
        elif node.target is not exchange.exchange_counts:
            # Random numbers are drawn in the same order: the first of equal calls comes first.
            equal = calls.get(_call(node, old_nodes), [])
            if not equal:
                _refuse(node, "is not an operator of the graph before")
            old_nodes[node] = equal.pop(0) if len(equal) > 1 else equal[0]


def _call(node: fx.Node, old_nodes: Mapping[fx.Node, fx.Node]) -> Any:
    """Returns a node's operator and arguments, with nodes of the old graph in place of those of the new one."""
    if node.target in (exchange.arrival, exchange.arrived_counts):
        table: Any = node.args[0]
        chosen, _, number, grouped, capacity = table.args
        target = routing.dispatch if node.target is exchange.arrival else routing.counts
        return "call_function", target, str((old_nodes[chosen], number, grouped, 0, number, capacity)), "{}"
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: old_nodes.get(n, n))
    if node.target is copy:  # See NOTE [Copies of experts]; `_kinds` says whose copies these are.
        args = (args[0], str(args[1]).partition("/")[0])
    return node.op, node.target, str(args), str(kwargs)


# ---- whose rows


def _kinds(node: fx.Node, kinds: Mapping[fx.Node, Kinds], inputs: Collection[str], ep: int) -> Kinds:
    """Returns the kinds of a node's rows."""
    if node.op == "placeholder":
        return frozenset([OWN_ROWS] * (node.name in inputs))
    if node.target is exchange.own:
        parameter: Any = node.args[0]
        whole, part = (x.meta["val"].shape for x in (parameter, node))
        stored = parameter.op == "placeholder" and parameter.name not in inputs
        if not stored or any(reader.target is not exchange.own for reader in parameter.users):
            _refuse(node, f"is not the only reader of a parameter, `{parameter}`")
        if node.args[1] != ep or (part[0] * ep, *part[1:]) != tuple(whole):
            _refuse(node, f"is not one of {ep} parts of `{parameter}`")
        return frozenset([OWN_EXPERTS])
    if node.target is exchange.select_own:
        if kinds[node.args[0]] or node.args[2] != ep:  # type: ignore[index]
            _refuse(node, f"is not one of {ep} parts of what every rank has")
        return frozenset([OWN_EXPERTS])
    if node.target in (exchange.to_experts, exchange.to_rows):
        return _moved(node, kinds)
    if node.target in (exchange.arrival, exchange.arrived_counts):
        return frozenset(node.args)
    result = frozenset(kind for operand in node.all_input_nodes for kind in kinds[operand])
    if node.target is exchange.exchange_counts or node.op == "output":
        if not result <= {OWN_ROWS}:
            _refuse(node, "reads rows of this rank's experts")
        return frozenset()
    if node.target is copy and is_along(node.args[1], "cp") and (node.args[1] == "cp") == (OWN_EXPERTS in result):
        _refuse(node, f"sums gradients over the ranks along `{node.args[1]}`")
    if node.target in (routing.spread, routing.grouped_mm):
        weight: Any = node.args[int(node.target is routing.grouped_mm)]
        if kinds[weight] != {OWN_EXPERTS}:
            _refuse(node, "reads weights of all experts for rows of this rank's")
    if len(result - {OWN_EXPERTS}) > 1 or {OWN_ROWS, OWN_EXPERTS} <= result:
        _refuse(node, "reads rows of this rank, and of this rank's experts")
    return result


def _moved(node: fx.Node, kinds: Mapping[fx.Node, Kinds]) -> Kinds:
    """Returns the kinds of rows that have travelled."""
    x: Any
    table: Any
    places: Any
    x, _, table, places = node.args
    if places.target is not exchange.arrival or places.args != (table,):
        _refuse(node, "puts rows at places of another table")
    if node.target is exchange.to_experts:
        sorted_rows = x.args[1] if x.target is routing.fill_slots else x.args[2] if len(x.args) > 2 else None
        if not kinds[x] <= {OWN_ROWS} or not _is_dispatch_of(sorted_rows, table):
            _refuse(node, "sends what is not in the order of the experts of its table")
        return frozenset([table])
    if kinds[x] - {OWN_EXPERTS} != {table}:
        _refuse(node, "sends back rows that did not come by its table")
    if any(reader.target is not routing.combine or not _is_dispatch_of(reader.args[1], table) for reader in node.users):
        _refuse(node, "is read by what does not put rows back to their places")
    return frozenset([OWN_ROWS])


def _is_dispatch_of(node: Any, table: fx.Node) -> bool:
    """True for the order of all rows by the experts of a table."""
    chosen, _, number, grouped, capacity = table.args
    expected = (chosen, number, grouped, 0, number, capacity)
    return isinstance(node, fx.Node) and node.target is routing.dispatch and node.args == expected
