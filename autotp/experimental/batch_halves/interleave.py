"""interleave: lets the halves of a batch take turns, so that one computes while the other communicates.

    Before: r0 = reduce(linear(x0, w)); r1 = reduce(linear(x1, w)); y0 = norm(r0); y1 = norm(r1)
    After:  p0 = start_reduce(linear(x0, w)); p1 = start_reduce(linear(x1, w))
            y0 = norm(finish(p0)); y1 = norm(finish(p1))

A turn is the operators of one half up to the first that reads a sum which this turn has started. Then the other half
has its turn, while the sum runs. In backward the turns come in reverse order: a product's gradient is summed while the
turn before it has its backward (`turns.py`). Rows that travel to the ranks of their experts, and back, do so like sums.

The operators and what they read stay as they are. Random draws of one half keep their order, and an operator that
writes into its input stays behind the others that read it. A turn that ends one block and begins another belongs to
the other, so that the operators of a block follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx

from autotp.experimental.batch_halves.halves import half_of
from autotp.experimental.batch_halves.turns import finish, start_copy, start_reduce, start_rows, wait_in_backward
from autotp.ops import collectives
from autotp.ops.async_linear import async_linear
from autotp.ops.experts import exchange
from autotp.passes.builder import copied
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has
from autotp.sharding.placement import JOINED
from autotp.source_location import block_of


def interleave(graph: fx.Graph) -> fx.Graph:
    """Returns the same function, in which the halves take turns. Its nodes are those of a bound graph.

    A graph whose halves do not communicate stays as it is, and one with autocast regions: these cannot be moved.
    """
    regions = any(node.target in (enter_autocast, exit_autocast) for node in graph.nodes)
    if regions or not any(map(_can_start, graph.nodes)):
        return graph
    turns = list(_Turns(graph).all())
    _name_blocks(turns)
    writing = _Writing()
    for turn in turns:
        writing.turn(turn)
    return writing.graph


Turn = list[fx.Node]
EXCHANGES = frozenset({exchange.to_experts, exchange.to_rows})
"""Exchanges of rows, which communicate in forward and in backward."""


class _Turns:
    """The order of a graph's operators.

    Attributes:
        halves: the operators of each half that have not had a turn, in order.
        behind: node -> other nodes that must run before it.
        done: the nodes that have had a turn.
        started: the sums and exchanges that the present turn has started.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        # From the last to the first, so that the next operator is at the end of the list.
        self.halves = [[n for n in reversed(graph.nodes) if half_of(n) == half] for half in (0, 1)]
        self.behind = dict(_order(graph))
        self.done = set[fx.Node]()
        self.started = set[fx.Node]()

    def all(self) -> Iterator[Turn]:
        """Yields the turns; their operators in this order are the graph's."""
        stored = [node for node in self.graph.nodes if node.op in ("placeholder", "get_attr")]
        self.done.update(stored)
        yield stored
        half = 0
        while any(self.halves):
            if turn := self._turn(half):
                yield turn
            half = 1 - half
        # What neither half needed, such as the outputs.
        yield [node for node in self.graph.nodes if node not in self.done]

    def _turn(self, half: int) -> Turn:
        """Returns the operators up to the first that reads what this turn has started, if the other half has work."""
        turn: Turn = []
        self.started.clear()
        remaining, other_half = self.halves[half], self.halves[1 - half]
        while remaining:
            needed = self._needed(remaining[-1])
            if other_half and any(n in self.started for node in needed for n in node.all_input_nodes):
                break
            remaining.pop()
            turn += needed
            self.done.update(needed)
            self.started |= {node for node in needed if _can_start(node)}
        return turn

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        """Returns a node and all that must run before it, in an order in which they can run."""
        # No recursion: a path through a deep model is longer than Python's stack may be.
        needed, stack = dict[fx.Node, None](), [(node, False)]
        while stack:
            current, ready = stack.pop()
            if current in self.done or current in needed:
                continue
            if ready:
                needed[current] = None
            else:
                stack.append((current, True))
                stack += [(before, False) for before in (*current.all_input_nodes, *self.behind.get(current, ()))]
        return list(needed)


def _order(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yields nodes with other nodes that must run before them although they do not read these."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    drawn: dict[int | None, fx.Node] = {}
    for node in graph.nodes:
        before = [user for x in _overwritten(node) for user in x.users if order[user] < order[node]]
        if draws(node):
            half = half_of(node)
            # A draw of the whole batch keeps its place among all draws, and one of a half among those of this half.
            before += [draw for key, draw in drawn.items() if half is None or key in (half, None)]
            drawn[half] = node
        if before:
            yield node, before


def _overwritten(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the values that an operator writes into, and those that they are views of."""
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    if not mutable and not node.kwargs.get("fresh"):
        return
    x = node.args[0]
    while isinstance(x, fx.Node):
        yield x
        x = x.args[0] if has(x.target, Trait.RESHAPE) and x.args else None


def _is_sum(node: fx.Node) -> bool:
    """True for a sum over ranks of one half, which can run while the other half computes."""
    is_reduction = node.target is collectives.reduce and not {*node.args[2:]} & {*JOINED}
    return is_reduction and half_of(node) is not None


def _can_start(node: fx.Node) -> bool:
    """True for a sum, or an exchange of rows, that can run while the other half computes."""
    return _is_sum(node) or (node.target in EXCHANGES and half_of(node) is not None)


def _name_blocks(turns: Collection[Turn]) -> None:
    """Gives the operators of a turn the block of its last operator."""
    for turn in turns:
        halves = [node for node in turn if half_of(node) is not None]
        if halves and len({block_of(node) for node in halves}) > 1:
            stack = halves[-1].meta.get("nn_module_stack")
            for node in turn:
                if node.op == "call_function":
                    node.meta["nn_module_stack"] = stack


class _Writing:
    """The new graph.

    Attributes:
        env: old node -> new node.
        running: the sums and exchanges that no operator has waited for.
        anchor, first: in the turn before and in this turn, the first value that may have a gradient.
    """

    def __init__(self) -> None:
        self.graph, self.env = fx.Graph(), dict[fx.Node, fx.Node]()
        self.running = set[fx.Node]()
        self.anchor: fx.Node | None = None
        self.first: fx.Node | None = None

    def turn(self, turn: Turn) -> None:
        """Writes the operators of a turn."""
        self.anchor, self.first = self.first, None
        for node in turn:
            for x in node.all_input_nodes:
                if x in self.running:
                    self.running.remove(x)
                    started = self.env[x]
                    if block_of(node) != block_of(started):  # The argument `outside`: the wait is in another block.
                        default = ("sum",) if started.target is start_reduce and len(started.args) == 2 else ()
                        started.args = (*started.args, *default, True)
                    self.env[x] = self._finished(x, node, started)
            self._write(node)

    def _finished(self, x: fx.Node, reader: fx.Node, started: fx.Node) -> fx.Node:
        """Writes what waits for a sum or an exchange, in the block of its reader."""
        arrived = self._call(finish, reader, x, started, x.args[1])
        if x.target is not exchange.to_experts:
            return arrived
        return self._call(exchange.in_experts_order, reader, x, arrived, self.env[x.args[3]])  # type: ignore[index]

    def _write(self, node: fx.Node) -> None:
        if node.target in EXCHANGES and half_of(node) is not None:
            self.env[node] = self._exchange(node)
            self.running.add(node)
            return
        copy = self.env[node] = copied(self.graph, node, self.env.__getitem__)
        if _is_sum(node):
            copy.target = start_reduce
            self.running.add(node)
        elif _sums_in_backward(node) and self.anchor is not None:
            x: Any = node.args[0]
            with self.graph.inserting_before(copy):
                read = self._waiting(node, x, self.env[x])
            copy.args = (read, *copy.args[1:])
            copy.target = start_copy if node.target is collectives.copy else copy.target
        elif self.first is None and half_of(node) is not None and _is_floating(node):
            self.first = copy

    def _waiting(self, node: fx.Node, like: fx.Node, x: fx.Node) -> fx.Node:
        """Writes what waits in backward for the gradient of an operand of a node."""
        return x if self.anchor is None else self._call(wait_in_backward, node, like, x, node.args[1], self.anchor)

    def _exchange(self, node: fx.Node) -> fx.Node:
        """Writes the start of an exchange of rows."""
        x, group, table, places = node.args
        rows, back = self.env[x], node.target is exchange.to_rows  # type: ignore[index]
        if back:
            rows = self._call(torch.ops.aten.index_select.default, node, x, rows, 0, self.env[places])  # type: ignore[arg-type, index]
        return self._call(start_rows, node, node, self._waiting(node, x, rows), group, self.env[table], back)  # type: ignore[arg-type, index]

    def _call(self, target: Callable[..., Any], reader: fx.Node, x: fx.Node, *args: Any) -> fx.Node:
        """Writes a call in the block of its reader, with the example value of `x`."""
        call = self.graph.call_function(target, args)
        call.meta = {**reader.meta, "val": x.meta["val"]}
        # Rows of other types travel, too, such as a mask of rows: they have no gradient to wait for.
        if self.first is None and _is_floating(call):
            self.first = call
        return call


def _sums_in_backward(node: fx.Node) -> bool:
    """True for an operator of one half whose backward adds a gradient over ranks."""
    copies = node.target is collectives.copy or (node.target is async_linear and node.args[2] is None)
    return copies and half_of(node) is not None and _is_floating(node.args[0])


def _is_floating(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
