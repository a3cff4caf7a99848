"""gather_ahead: gathers the parameters of which replicas keep rows a block ahead of the block that reads them.

    Before: b = block(x, w0); c = block(b, w1)                                        w0, w1: the whole parameters
    After:  h_0.start((), w0); v0, = h_0.arrive((h_1,)); h_1.start((h_0,), w1); b = h_0.leave(block(x, v0), (), ())
            v1, = h_1.arrive(()); c = h_1.leave(block(b, v1), (), (h_0,))             w0, w1: rows

Backward gathers again what has left the room (`room.py`), the next block ahead in the other direction, and sums the
gradients of each block when its backward has ended (`sharded_unit.py`). While the room has places, blocks further ahead
are gathered, too. What blocks share, and what the graph reads outside of blocks, is gathered first, in one unit that
stays for the whole step.

NOTE [Why no pass looks for the place of a gather]
The passes that overlap collectives of `tp` move them within a block, beside operators that do not need them. A block's
gather needs only rows, so that it could start at the beginning of a step: what limits it is memory. A block ahead is
the latest place at which a whole block's work hides it; the first places are those that the room has memory for. Sums
start when a block's backward ends, which is the first place. Operators within a block are no better places: a
collective started there has less of the block beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autotp.passes.builder import copied
from autotp.passes.emit.attach_parameters import block_that_reads
from autotp.passes.emit.memory.graph_table import SetsFates
from autotp.passes.emit.zero.room import Room
from autotp.passes.emit.zero.sharded_unit import RunningSum, ShardedUnit
from autotp.source_location import block_of

REST = "rest"
"""The name of the unit of all that is in no block's unit."""


def gather_ahead(
    outlined: fx.GraphModule,
    names: Mapping[str, str],
    rows: Collection[str],
    dtype: torch.dtype | None,
    room: Room[ShardedUnit] | None,
) -> fx.GraphModule:
    """Returns an outlined graph that takes rows of some parameters, and gathers them.

    Args:
        outlined: from `outline`; the result uses its submodules.
        names: placeholder name -> name of the parameter.
        rows: the names of the parameters that come as rows.
        dtype, room: as for `ShardedUnit`. Without a room all is gathered at once, and stays for the step.
    """
    return _Gathering(outlined, names, rows, dtype, room).result()


def units_of_blocks(outlined: fx.GraphModule, names: Mapping[str, str], rows: Collection[str]) -> dict[str, list[str]]:
    """Returns the block of each unit, in the order of placeholders -> the placeholders of its parameters.

    Arguments as for `gather_ahead`. A parameter that several blocks read, or none, is of the block `REST`.
    """
    units = dict[str, list[str]]({REST: []})
    for node in outlined.graph.find_nodes(op="placeholder"):
        if names.get(node.name) in rows:
            # A budget asks of parameters whether they learn, which rows can say.
            units.setdefault(block_that_reads(node, names, SetsFates) or REST, []).append(node.name)
    return {block: parameters for block, parameters in units.items() if parameters}


class _Gathering:
    """A graph that is written with the nodes of its units."""

    def __init__(
        self, outlined: fx.GraphModule, names: Mapping[str, str], rows: Collection[str], dtype: torch.dtype | None,
        room: Room[ShardedUnit] | None,
    ) -> None:  # fmt: skip
        self.outlined, self.room = outlined, room
        self.root, self.graph, self.env = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
        places = {node.name: node for node in outlined.graph.find_nodes(op="placeholder")}
        for name, module in outlined.named_children():
            self.root.add_module(name, module)
        units = units_of_blocks(outlined, names, rows)
        self.parameters = {block: [places[name] for name in some] for block, some in units.items()}
        # With a number, as `a.b.0` and `a_b.0` may both be blocks.
        self.targets = {block: f"rows_of_{block.replace('.', '_')}_{i}" for i, block in enumerate(self.parameters)}
        sums = RunningSum()
        modules = dict[str, ShardedUnit]()
        for block, nodes in self.parameters.items():
            unit = ShardedUnit(dtype, sums, None if block == REST else room, [names[n.name] for n in nodes])
            self.root.add_module(self.targets[block], unit)
            modules[block] = unit
        self.calls = [n for n in outlined.graph.find_nodes(op="call_module") if block_of(n) in self.parameters]
        # A block that runs several times is there from its first call to its last one.
        self.first = {block_of(n): n for n in reversed(self.calls)}
        self.last = {block_of(n): n for n in self.calls}
        self.order = list(dict.fromkeys(map(block_of, self.calls)))
        self.order_of_backward = list(dict.fromkeys(map(block_of, reversed(self.calls))))
        for block in self.order:
            following, preceding = _after(self.order, block), _after(self.order_of_backward, block)
            modules[block].following = tuple(modules[x] for x in following)
            modules[block].preceding = tuple(modules[x] for x in preceding)
        self.units, self.placeholders = dict[str, fx.Node](), dict[fx.Node, fx.Node]()

    def result(self) -> fx.GraphModule:
        """Returns the graph with these nodes."""
        started = False
        for node in self.outlined.graph.nodes:
            if node.op != "placeholder" and not started:
                self._begin()
                started = True
            if node in self.calls:
                self._call(node)
            else:
                env = self.placeholders if isinstance(node.target, SetsFates) else self.env
                self.env[node] = copied(self.graph, node, env.__getitem__)
        return fx.GraphModule(self.root, self.graph)

    def _begin(self) -> None:
        """Starts the first gathers, and waits for the parameters outside of blocks."""
        self.units = {block: self.graph.get_attr(target) for block, target in self.targets.items()}
        self.placeholders = dict(self.env)
        if REST in self.units:
            self._start(REST, ())
        for i, block in enumerate(self.order if self.room is None else self.order[:1]):
            self._start(block, self.order[:i])
        if REST in self.units:
            self._arrive(REST, ())

    def _start(self, block: str, beside: Sequence[str]) -> None:
        rows = [self.placeholders[n] for n in self.parameters[block]]
        self.graph.call_method("start", (self.units[block], self._of(beside), *rows))

    def _arrive(self, block: str, beside: Sequence[str]) -> None:
        whole = self.graph.call_method("arrive", (self.units[block], self._of(beside)))
        for i, node in enumerate(self.parameters[block]):
            self.env[node] = self.graph.call_function(operator.getitem, (whole, i))
            self.env[node].meta = dict(node.meta)

    def _call(self, node: fx.Node) -> None:
        """Writes the call of a block after the gather of its parameters, and beside that of the next ones."""
        block = block_of(node)
        others = [other for other in self._running_at(node) if other != block]
        if node is self.first[block]:
            later = _after(self.order, block)[:1] if self.room is not None else ()
            self._arrive(block, [*others, *later])
            for following in later:
                self._start(following, [block, *others])
        call = self.env[node] = copied(self.graph, node, self.env.__getitem__)
        if self.room is None:
            return
        args: tuple[Any, ...] = self.units[block], call, self._of(others)
        if node is self.last[block]:
            before = self._of(_after(self.order_of_backward, block)[:1])
            self.env[node] = self.graph.call_method("leave", (*args, before))
        else:
            self.env[node] = self.graph.call_method("go_on", args)
        self.env[node].meta = {key: value for key, value in node.meta.items() if key == "val"}

    def _running_at(self, node: fx.Node) -> list[str]:
        """Returns the blocks that have begun at a call, and not ended."""
        place = {call: i for i, call in enumerate(self.calls)}
        return [b for b in self.order if place[self.first[b]] <= place[node] <= place[self.last[b]]]

    def _of(self, blocks: Sequence[str]) -> tuple[Any, ...]:
        return tuple(self.units[block] for block in blocks)


def _after(order: Sequence[str], block: str) -> Sequence[str]:
    """Returns the blocks of an order after one of them."""
    return order[order.index(block) + 1 :]
