"""block_table: what a block makes, operator by operator: its bytes, those that autograd keeps, and its price.

    Before: h = linear(x, w); g = gelu(h); y = linear(g, v)
    After:  h: 8 MB kept, 40 us, reads x; g: 8 MB kept, 5 us, reads h; y: 2 MB not kept, 40 us, reads g

The block runs on fake tensors of a call's sizes, so that the operators are those that the device would run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autotp.costs.hardware import Hardware
from autotp.costs.work import Work, nested_tensors
from autotp.groups.process_group import seat
from autotp.ops import collectives
from autotp.ops.async_linear import async_linear
from autotp.passes.capture.autocast_regions import enter_autocast
from autotp.passes.emit.bind import COMMUNICATING
from autotp.passes.emit.kept_values.exact_bits import is_exact
from autotp.passes.emit.kept_values.fates import Fate, Fates, SavedTensor, SavingRun
from autotp.passes.emit.kept_values.split import MASKS
from autotp.passes.emit.memory.live_bytes import live_bytes
from autotp.rules.call import operator_of
from autotp.rules.traits import draws

SMALLER = {torch.bool: 8, torch.int64: 2}
"""dtype -> how many times fewer bytes it takes in the fate "bits"."""


@dataclass(frozen=True, kw_only=True)
class BlockValue:
    """The memory that an operator of a block makes, with all that lies in it.

    Attributes:
        name: the name of the operator.
        node: the operator.
        reads: the values that it needs to run again.
        inputs: the inputs of the block that it needs.
        seconds: to run it again.
        flops: of the products in it.
        collectives: the number of collectives in it.
        made: bytes of its memory.
        kept: bytes that autograd keeps: of its memory, and internal to it, such as a log-sum-exp.
        smaller: the same in the fate "bits".
        seeds: whether the operator draws a mask again then.
        inside: whether autograd keeps none of its memory: only what is internal to it, or nothing.
        fixed: whether it cannot run again.
        others: the names of further operators that write into the memory or look at it, whose fate is the value's.
    """

    name: str
    node: fx.Node
    reads: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    seconds: float = 0.0
    flops: float = 0.0
    collectives: int = 0
    made: int = 0
    kept: int = 0
    smaller: int = 0
    seeds: bool = False
    inside: bool = False
    fixed: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """The values of a block for one call, in the order in which they are made.

    Attributes:
        values: by name.
        inputs: the inputs that autograd keeps.
        results: what the block returns: the value that it lies in, or the input; in order.
        live: the most bytes of what it makes that there are at once, in forward or backward, where all is kept.
    """

    values: Mapping[str, BlockValue]
    inputs: frozenset[str]
    results: tuple[str, ...]
    live: int = 0

    @cached_property
    def seconds(self) -> float:
        """Seconds of the block's forward."""
        return sum(value.seconds for value in self.values.values())

    def of_operators(self, fates: Fates) -> dict[str, Fate]:
        """Returns the fates with those of all operators that have to do with a value's memory."""
        return {name: fate for value, fate in fates.items() for name in (value, *self.values[value].others)}

    def after(self, fates: Fates) -> Kept:
        """Returns what is kept under these fates, and what backward then does beside."""
        dropped = {name for name in self.values if fates.get(name) == "recompute"}
        queue = [name for name in dropped if self.values[name].kept]
        again, boundary, inputs = set(queue), set[str](), set(self.inputs)
        while queue:
            value = self.values[queue.pop()]
            inputs.update(value.inputs)
            for name in value.reads:
                if name not in dropped:
                    boundary.add(name)
                elif name not in again:
                    again.add(name)
                    queue.append(name)
        kept, moved, masks, more = dict[str, int](), dict[str, int](), 0.0, 0
        for name, value in self.values.items():
            fate = fates.get(name, "keep")
            if name in dropped or not (value.kept or name in boundary):
                continue
            moved[name] = value.kept if fate == "host" else 0
            masks += value.seconds if fate == "bits" and value.seeds else 0.0
            kept[name] = 0 if fate == "host" else value.smaller if fate == "bits" else value.kept
            kept[name] += value.made * (name in boundary and value.inside)
            more += value.made * (name in boundary and value.inside)
        # In the table's order: sums of a set's order differ in the last digit from rank to rank, and so would choices.
        runs = tuple(value for name, value in self.values.items() if name in again)
        return Kept(
            kept=kept, inputs=frozenset(inputs), runs=runs, seconds=masks + sum(value.seconds for value in runs),
            moved=sum(moved.values()), live=self.live + more,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept of a call of a block.

    Attributes:
        kept: name of a value -> the bytes that stay on the device.
        inputs: the inputs of the block that stay.
        runs: the values that backward computes again.
        seconds: of what backward computes again, with masks that are drawn again.
        moved: bytes that go to the host and come back.
        live: the most bytes of what the block makes, and keeps for what runs again, that there are at once.
    """

    kept: Mapping[str, int]
    inputs: frozenset[str]
    runs: tuple[BlockValue, ...]
    seconds: float
    moved: int
    live: int

    @property
    def flops(self) -> float:
        """The floating-point operations of products that run again."""
        return sum(value.flops for value in self.runs)

    @cached_property
    def collectives(self) -> int:
        """The number of collectives that run again."""
        return sum(value.collectives for value in self.runs)


@dataclass
class _Row:
    """What is noted of a value while the block runs."""

    node: fx.Node
    reads: dict[str, None] = field(default_factory=dict)
    seconds: float = 0.0
    flops: float = 0.0
    collectives: int = 0
    memories: dict[int, int] = field(default_factory=dict)
    fixed: bool = False
    others: list[str] = field(default_factory=list)


class TableRun(SavingRun):
    """A run of a block that notes bytes and seconds of each value.

    Args:
        groups: name of a process group -> name of the group that it communicates over in this run.
        stands_for: returns what runs for an operator: on `meta` an operator does not know the device that it is for.
    """

    def __init__(
        self, module: fx.GraphModule, groups: Mapping[str, str], device: Hardware, stands_for: Callable[[Any], Any]
    ) -> None:
        super().__init__(module)
        self.device, self.groups, self.stands_for, self.rows = device, groups, stands_for, dict[str, _Row]()
        self.results: tuple[str, ...] = ()
        self.uneven = False
        self._nodes: dict[str, fx.Node] = {}
        # Numbers, such as sizes, read what their operands read.
        self.sources: dict[fx.Node, dict[str, None]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, and notes what it makes and reads."""
        with Work(self.device) as work:
            result = super().run_node(n)
        reads = {name: None for operand in n.all_input_nodes for name in self.sources[operand]}
        if n.op == "output":
            self.results = tuple(self.origins.get(x.name, "") for x in n.all_input_nodes)
            return result
        tensors = nested_tensors(result)
        maker = self.origins.get(n.name, n.name)
        self.sources[n] = {maker: None} if tensors else reads
        row = self.rows.setdefault(maker, _Row(n))
        row.reads.update({name: None for name in reads if name != maker})
        row.seconds += work.seconds
        row.flops += work.flops
        row.collectives += work.collectives
        row.fixed |= n.target is enter_autocast
        row.others += [n.name] * (n.name != maker)
        for x in tensors:
            row.memories.setdefault(self._memory_of(x), x.untyped_storage().nbytes())
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, over the groups of this run."""
        args, known = over_groups(args, self.groups), target in COMMUNICATING and args[1] in self.groups
        self.uneven |= known and is_uneven(target, args)
        return super().call_function(self.stands_for(target), args, kwargs)

    def table(self) -> BlockTable:
        """Returns the table of the block that ran."""
        rows, inputs = self.rows, {n.name for n in self.module.graph.find_nodes(op="placeholder")}  # type: ignore[union-attr, operator]
        self._nodes = {node.name: node for node in self.module.graph.nodes}  # type: ignore[union-attr]
        saved_by_value: dict[str, dict[int, SavedTensor]] = {}
        for saved in self.saved:
            maker = saved.origin or self.origins.get(saved.node, saved.node)
            saved_by_value.setdefault(maker, {})[saved.memory] = saved
        # Regions of autocast have an operator at each end: nothing between them may run without them.
        fixed = any(row.fixed for row in rows.values())
        values = {}
        for name, row in rows.items():
            if name in inputs:
                continue
            saves = saved_by_value.get(name, {}).values()
            values[name] = BlockValue(
                name=name, node=row.node, reads=tuple(x for x in row.reads if x not in inputs),
                inputs=tuple(x for x in row.reads if x in inputs), seconds=row.seconds, flops=row.flops,
                collectives=row.collectives, others=tuple(row.others), made=sum(row.memories.values()),
                kept=sum(x.bytes for x in saves), inside=all(x.origin is None for x in saves),
                smaller=sum(map(self._smaller, saves)), seeds=any(map(self._is_mask, saves)), fixed=fixed,
            )  # fmt: skip
        return BlockTable(values=values, inputs=frozenset(saved_by_value) & inputs, results=self.results)

    def _is_mask(self, saved: SavedTensor) -> bool:
        """True for a mask in whose place the random state before it is enough."""
        node = self._nodes[saved.node]
        return saved.origin is None and operator_of(node) in MASKS and draws(node)

    def _smaller(self, saved: SavedTensor) -> int:
        """Returns the bytes of a kept tensor in the fate "bits"."""
        exact = is_exact(saved, self._nodes[saved.node], self.geometries) and saved.index not in self.irregular
        return 0 if self._is_mask(saved) else -(-saved.bytes // (SMALLER.get(saved.dtype, 1) if exact else 1))


def without_collectives(table: BlockTable) -> BlockTable:
    """Returns the table with values whose collectives run once only.

    NOTE [Collectives that run again]
    Ranks with parts of other sizes choose otherwise, and a collective that one rank alone runs again waits for ever. So
    collectives run again only where all ranks have parts of the same sizes.
    """
    values = {name: replace(value, fixed=value.fixed or value.collectives > 0) for name, value in table.values.items()}
    return replace(table, values=values)


def is_uneven(target: Any, args: Sequence[Any]) -> bool:
    """True for a conjugate that cuts a dimension into parts of different lengths. (Others keep what is cut.)"""
    if target is async_linear:
        sizes = args[2:3]
    elif target in (collectives.scatter, collectives.gather, collectives.all_gather, collectives.reduce_scatter):
        sizes = [(args[2], args[3], *args[4:5])]
    else:
        return target in (collectives.all_to_all, collectives.halo, collectives.share)
    ranks = seat(args[1])[1]
    return any(cut is not None and cut[1] % (ranks * (cut[2] if len(cut) > 2 else 1)) for cut in sizes)


def over_groups(args: tuple[Any, ...], groups: Mapping[str, str]) -> tuple[Any, ...]:
    """Returns the arguments of an operator with names of process groups replaced."""
    return tuple(groups.get(x, x) if isinstance(x, str) else x for x in args)


def block_table(
    module: fx.GraphModule, args: Sequence[Any], groups: Mapping[str, str], device: Hardware,
    stands_for: Callable[[Any], Any] = lambda operator: operator,
) -> tuple[BlockTable, Any]:  # fmt: skip
    """Returns the table of a block for these arguments, which may be fake, and what it returns.

    Args:
        groups, stands_for: as for `TableRun`.
    """
    run = TableRun(module, groups, device, stands_for)
    with torch.enable_grad():
        result = run.run(*args)
    live = live_bytes(module, args, lambda operator, operands: (stands_for(operator), over_groups(operands, groups)))
    table = replace(run.table(), live=live)
    return without_collectives(table) if run.uneven else table, result
