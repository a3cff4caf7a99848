"""gathers: derives where each parameter of ZeRO is, and raises Error if a block reads one that is not there.

    Before: h_0.start((), w); v, = h_0.arrive(()); b = h_0.leave(block(x, v), (), ())
    After:  w f32[8@dp, 4]; v f32[8, 4]{dp}, there from `arrive` until its unit may leave; b f32[2, 4]

NOTE [What is proved of gathers]
Erasure: with `arrive` as the parameters themselves, and without the other nodes, the graph is the one that gathers
nothing. Typing: `start` reads rows, Shard over "dp"; `arrive` is `all_gather`, Shard -> Copied, whose conjugate sums
the gradient (reduce_scatter), and nothing else makes a whole parameter of rows. Memory: whatever leaves a room for
another unit, each call finds the parameters that it reads, in forward and in backward. Trusted is `ShardedUnit`, which
runs the nodes, and that a room never drops what stays `beside`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx

from autotp.errors import REPORT, Error
from autotp.source_location import block_of

Unit = str
"""The name of a unit: of its module in the graph."""


@dataclass(frozen=True)
class _Leaves:
    """A call of a block, with the arguments of its `leave` or `go_on`."""

    call: fx.Node
    unit: Unit
    beside: Sequence[Unit]
    before: Sequence[Unit]


def check_gathers(module: fx.GraphModule, model: fx.Graph, names: Mapping[str, str], rows: Collection[str]) -> None:
    """Raises Error unless a graph of ZeRO computes what the graph does that gathers nothing.

    Args:
        module: from `gather_ahead`; its units have `names`, those of their parameters, and a `room` or None.
        model: the graph that gathers nothing.
        names: placeholder -> name of the parameter.
        rows: the names of the parameters that come as rows.
    """
    _Gathers(module, model, names, rows).check()


class _Gathers:
    """What is known after each node."""

    def __init__(
        self, module: fx.GraphModule, model: fx.Graph, names: Mapping[str, str], rows: Collection[str]
    ) -> None:
        self.module, self.names = module, names
        self.rest = iter(model.nodes)
        self.parameters = {names[n.name]: n for n in model.nodes if n.op == "placeholder" and names.get(n.name) in rows}
        self.whole: dict[fx.Node, fx.Node] = {}  # Node -> the node of the model with its value.
        self.rows: dict[fx.Node, str] = {}
        self.units: dict[fx.Node, Unit] = {}
        self.bundles: dict[fx.Node, Unit] = {}  # An `arrive` -> its unit.
        self.values: dict[fx.Node, Unit] = {}  # A whole parameter -> its unit.
        self.there, self.on_the_way = set[Unit](), set[Unit]()
        self.left: list[_Leaves] = []
        self.methods: dict[Any, Callable[..., None]] = {
            "start": self._start, "arrive": self._arrive, "leave": self._leave, "go_on": self._go_on,
        }  # fmt: skip

    def check(self) -> None:
        for node in self.module.graph.nodes:
            if node.op == "get_attr" and self._is_unit(node):
                self.units[node] = str(node.target)
            elif node.op == "call_method" and node.args and node.args[0] in self.units:
                self._expect(node, node.target in self.methods and not node.kwargs, "is no gather and no end of one")
                self.methods[node.target](node, *node.args)
            elif node.target is operator.getitem and node.args[0] in self.bundles:
                self._value(node, *node.args)
            else:
                self._other(node)
        self._backward()

    def _is_unit(self, node: fx.Node) -> bool:
        return hasattr(getattr(self.module, str(node.target), None), "room")

    def _unit(self, unit: Unit) -> Any:
        return self.module.get_submodule(unit)

    # ---- nodes of units

    def _start(self, node: fx.Node, unit_node: fx.Node, beside: Sequence[fx.Node], *rows: fx.Node) -> None:
        unit, gathered_names = self.units[unit_node], [self.rows.get(row, f"`{row}`") for row in rows]
        if gathered_names != list(self._unit(unit).names):
            self.reject(node, "gathers others than the rows of its unit", self._unit(unit).names, gathered_names)
        self._keep(unit, beside)
        self.on_the_way.add(unit)

    def _arrive(self, node: fx.Node, unit_node: fx.Node, beside: Sequence[fx.Node]) -> None:
        unit = self.units[unit_node]
        self._expect(node, unit not in self.bundles.values(), "would sum the gradients of a unit a second time")
        self._expect(node, unit in self.on_the_way, "reads parameters that nothing gathers, or that may have left")
        self._keep(unit, beside)
        self.on_the_way.remove(unit)
        self.there.add(unit)
        self.bundles[node] = unit

    def _leave(
        self, node: fx.Node, unit: fx.Node, call: fx.Node, beside: Sequence[fx.Node], before: Sequence[fx.Node]
    ) -> None:
        self._end(node, call, _Leaves(call, self.units[unit], self._of(beside), self._of(before)))
        self.there.discard(self.units[unit])

    def _go_on(self, node: fx.Node, unit: fx.Node, call: fx.Node, beside: Sequence[fx.Node]) -> None:
        self._end(node, call, _Leaves(call, self.units[unit], self._of(beside), ()))

    def _end(self, node: fx.Node, call: fx.Node, leaves: _Leaves) -> None:
        self._expect(node, leaves.unit in self._reads(call), "is the end of a call that reads another unit")
        self._expect(node, list(call.users) == [node], f"does not see all of `{call}`: others read it, too")
        self.left.append(leaves)
        self.whole[node] = self.whole[call]

    def _value(self, node: fx.Node, bundle: fx.Node, place: int) -> None:
        unit = self.bundles[bundle]
        self.values[node], self.whole[node] = unit, self.parameters[self._unit(unit).names[place]]

    def _keep(self, unit: Unit, beside: Sequence[fx.Node]) -> None:
        """Notes what may leave for a unit: all units of a room that do not stay beside it."""
        if self._unit(unit).room is not None:
            staying = {unit, *self._of(beside)}
            self.there = {x for x in self.there if x in staying or self._unit(x).room is None}
            self.on_the_way = {x for x in self.on_the_way if x in staying or self._unit(x).room is None}

    def _of(self, nodes: Sequence[fx.Node]) -> tuple[Unit, ...]:
        return tuple(self.units[node] for node in nodes)

    # ---- nodes of the model

    def _other(self, node: fx.Node) -> None:
        model = next(self.rest, None)
        if model is None or (node.op, node.target) != (model.op, model.target):
            self.reject(node, "is not what the graph computes without ZeRO", model, node.target)
        asks_only = not getattr(node.target, "reads_values", True)
        for operand in node.all_input_nodes:
            if operand in self.rows and not asks_only:
                self.reject(node, f"reads `{operand}`", "the whole parameter", "the rows of this replica")
            if operand in self.values and self.values[operand] not in self.there:
                self.reject(node, f"reads `{operand}`, which may have left", "its unit beside", self.values[operand])
        erased = fx.map_arg((node.args, node.kwargs), lambda n: self.whole.get(n, n))
        if erased != (model.args, model.kwargs):
            self.reject(node, "reads others than without ZeRO", model.args, erased[0])
        in_rooms = {unit for unit in self._reads(node) if self._unit(unit).room is not None}
        if in_rooms and (node.op != "call_module" or not any(u.target in ("leave", "go_on") for u in node.users)):
            self.reject(node, "would read in backward what has left", "`leave`, or a unit that stays", sorted(in_rooms))
        self.whole[node] = model
        if node.op == "placeholder" and self.names.get(node.name) in self.parameters:
            self.rows[node] = self.names[node.name]

    def _reads(self, node: fx.Node) -> set[Unit]:
        return {self.values[operand] for operand in node.all_input_nodes if operand in self.values}

    def _backward(self) -> None:
        """Follows what is there while the calls run backward."""
        if (missing := next(self.rest, None)) is not None:
            raise Error(f"ZeRO's graph lacks `{missing}` of the graph without", fix=REPORT)
        self.there = {unit for unit in self.bundles.values() if self._unit(unit).room is None}
        first = {unit: leaves.call for leaves in reversed(self.left) for unit in [leaves.unit]}
        for leaves in reversed(self.left):
            staying = {leaves.unit, *leaves.beside, *leaves.before}
            self.there = {x for x in self.there if x in staying or self._unit(x).room is None} | {leaves.unit}
            lacking = self._reads(leaves.call) - self.there
            self._expect(leaves.call, not lacking, f"reads in backward what may have left: {sorted(lacking)}")
            if first[leaves.unit] is leaves.call:
                self.there.discard(leaves.unit)

    def _expect(self, node: fx.Node, holds: bool, problem: str) -> None:
        if not holds:
            self.reject(node, problem, "as `gather_ahead` writes it", node.format_node())

    def reject(self, node: fx.Node, problem: str, expected: Any, got: Any) -> NoReturn:
        block = f" of block {block_of(node)}" if block_of(node) else ""
        raise Error(f"ZeRO: `{node}`{block} {problem}", expected=str(expected), got=str(got), fix=REPORT)
