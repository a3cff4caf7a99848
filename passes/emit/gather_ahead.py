"""gather_ahead: gathers the parameters of which replicas keep rows one block ahead, and drops them behind their block.

    Before: b = block(x, w0); c = block(b, w1)                                        w0, w1: the whole parameters
    After:  h_0.start(w0); v0, = h_0.arrive(); h_1.start(w1); b = h_0.leave(block(x, v0), (), h_1)      w0, w1: rows
            v1, = h_1.arrive(); c = h_1.leave(block(b, v1), (h_0,), None)

Backward gathers again, one block ahead in the other direction, and sums the gradients of each block when its backward
has ended (`sharded_unit.py`). What blocks share, and what the graph reads outside of blocks, is gathered first, in
one unit that stays for the whole step.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autotp.passes.builder import copied
from autotp.passes.emit.attach_parameters import block_that_reads
from autotp.passes.emit.sharded_unit import RunningSum, ShardedUnit
from autotp.source_location import block_of

REST = "rest"
"""The name of the unit of all that is in no block's unit."""


def gather_ahead(
    outlined: fx.GraphModule,
    names: Mapping[str, str],
    rows: Collection[str],
    dtype: torch.dtype | None,
    ahead: int | None = 1,
    stays: bool = False,
) -> fx.GraphModule:
    """Returns an outlined graph that takes rows of some parameters, and gathers them.

    Args:
        outlined: from `outline`; the result uses its submodules.
        names: placeholder name -> name of the parameter.
        rows: the names of the parameters that come as rows.
        dtype: as for `ShardedUnit`.
        ahead: for how many blocks parameters are gathered while one computes; None: for all, and all stay for the step.
        stays: whether backward follows forward at once: the last block's parameters then stay for it.
    """
    return _Gathering(outlined, names, rows, dtype, ahead, stays).result()


class _Gathering:
    """A graph that is written with the nodes of its units."""

    def __init__(
        self, outlined: fx.GraphModule, names: Mapping[str, str], rows: Collection[str], dtype: torch.dtype | None,
        ahead: int | None, stays: bool,
    ) -> None:  # fmt: skip
        self.outlined, self.stays, self.frees = outlined, stays, ahead is not None
        self.root, self.graph, self.env = nn.Module(), fx.Graph(), dict[fx.Node, fx.Node]()
        self.parameters: dict[str, list[fx.Node]] = {REST: []}
        for node in outlined.graph.find_nodes(op="placeholder"):
            if names.get(node.name) in rows:
                self.parameters.setdefault(block_that_reads(node, names) or REST, []).append(node)
        for name, module in outlined.named_children():
            self.root.add_module(name, module)
        self.parameters = {block: nodes for block, nodes in self.parameters.items() if nodes}
        # With a number, as `a.b.0` and `a_b.0` may both be blocks.
        self.targets = {block: f"rows_of_{block.replace('.', '_')}_{i}" for i, block in enumerate(self.parameters)}
        sums = RunningSum()
        for block, nodes in self.parameters.items():
            unit = ShardedUnit(dtype, sums, self.frees and block != REST, [names[n.name] for n in nodes])
            self.root.add_module(self.targets[block], unit)
        self.calls = [n for n in outlined.graph.find_nodes(op="call_module") if block_of(n) in self.parameters]
        # A block that runs several times is there from its first call to its last one.
        self.first = {block_of(n): n for n in reversed(self.calls)}
        self.last = {block_of(n): n for n in self.calls}
        self.order = list(dict.fromkeys(map(block_of, self.calls)))
        self.order_of_backward = list(dict.fromkeys(map(block_of, reversed(self.calls))))
        self.ahead = len(self.order) if ahead is None else ahead
        self.units: dict[str, fx.Node] = {}

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
                self.env[node] = copied(self.graph, node, self.env.__getitem__)
        return fx.GraphModule(self.root, self.graph)

    def _begin(self) -> None:
        """Starts the first gathers, and waits for the parameters outside of blocks."""
        self.units = {block: self.graph.get_attr(target) for block, target in self.targets.items()}
        self.rows = {block: [self.env[n] for n in nodes] for block, nodes in self.parameters.items()}
        for block in [REST, *self.order[: self.ahead]]:
            self._start(block)
        if REST in self.units:
            self._arrive(REST)

    def _start(self, block: str) -> None:
        if block in self.units:
            self.graph.call_method("start", (self.units[block], *self.rows[block]))

    def _arrive(self, block: str) -> None:
        whole = self.graph.call_method("arrive", (self.units[block],))
        for i, node in enumerate(self.parameters[block]):
            self.env[node] = self.graph.call_function(operator.getitem, (whole, i))
            self.env[node].meta = dict(node.meta)

    def _call(self, node: fx.Node) -> None:
        """Writes the call of a block between the gather of its parameters and their end."""
        block = block_of(node)
        if node is self.first[block]:
            self._arrive(block)
            for later in _after(self.order, block, self.ahead)[self.ahead - 1 :]:
                self._start(later)
        call = self.env[node] = copied(self.graph, node, self.env.__getitem__)
        if not self.frees:
            return
        if node is not self.last[block]:
            self.env[node] = self.graph.call_method("go_on", (self.units[block], call))
        else:
            before = tuple(self.units[other] for other in _after(self.order_of_backward, block, self.ahead))
            after = [self.units[other] for other in _after(self.order_of_backward[::-1], block, 1)]
            args: tuple[Any, ...] = self.units[block], call, before, after[0] if after else None
            stays = self.stays and not after
            self.env[node] = self.graph.call_method("leave", (*args, True) if stays else args)
        self.env[node].meta = {key: value for key, value in node.meta.items() if key == "val"}


def _after(order: Sequence[str], block: str, count: int) -> Sequence[str]:
    """Returns the next blocks of an order."""
    place = order.index(block) + 1
    return order[place : place + count]
