"""graph_table: what a whole graph keeps for backward: the tables of its blocks, and what is kept between them.

Memory counts once: what a block returns and the next one keeps as its input is one value; views share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autotp.costs.hardware import Hardware
from autotp.costs.work import Work, nested_tensors
from autotp.passes.emit.kept_values.fates import SavingRun
from autotp.passes.emit.memory.block_table import BlockTable, block_table, over_groups
from autotp.passes.emit.memory.cheapest import Choice
from autotp.passes.emit.memory.live_bytes import LiveBytes, end_of, forget_gradient
from autotp.source_location import block_of


@dataclass(frozen=True, kw_only=True)
class BlockCallRow:
    """A call of a block.

    Attributes:
        target: the name of the call's module in the graph.
        block: the name of the block in the model.
        kind: the place of its table.
        inputs: name of an input -> number of its memory; without parameters, buffers and constants.
        results: name of a value -> number of the memory that others know of it.
    """

    target: str
    block: str
    kind: int
    inputs: Mapping[str, int]
    results: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class GraphTable:
    """What a graph keeps for one call.

    Attributes:
        calls: the calls of blocks, in order.
        tables: of each kind of block.
        outside: number of a memory that is kept between blocks -> the operator that keeps it.
        since: the same -> the number of calls before it.
        sizes: number of a memory -> its bytes.
        between: of the operators before each call and after the last one, the most bytes that they have at once beside
            what is kept: at the start of backward the gradient of the logits.
        placeholders: the number of the memory of each, in order; None for what is no tensor, or there anyway.
        returned: the numbers of the memory of the tensors that the graph returns, in order.
    """

    calls: Sequence[BlockCallRow]
    tables: Sequence[BlockTable]
    outside: Mapping[int, fx.Node]
    since: Mapping[int, int]
    sizes: Mapping[int, int]
    between: Sequence[int]
    placeholders: Sequence[int | None] = ()
    returned: Sequence[int] = ()

    def kept(self, choices: Sequence[Choice]) -> int:
        """Returns the bytes that are kept under a choice for each call."""
        return self.moments(choices)[-1][0]

    def peak(self, choices: Sequence[Choice]) -> int:
        """Returns the most bytes at once: what is kept, and what a block or the loss has beside it."""
        return max(most for _, most in self.moments(choices))

    @cached_property
    def _outside_of_call(self) -> Sequence[Sequence[int]]:
        rows: list[list[int]] = [[] for _ in range(len(self.calls) + 1)]
        for memory, place in self.since.items():
            rows[place].append(memory)
        return rows

    def moments(self, choices: Sequence[Choice]) -> list[tuple[int, int]]:
        """Returns, before each call and after the last one, the bytes that are kept, and the most bytes at once.

        While a call runs, in forward or in backward, what the calls before it keep is there, and its own.
        """
        shared, now, moments = set[int](), 0, list[tuple[int, int]]()

        def keep(memories: Collection[int]) -> int:
            new = set(memories) - shared
            shared.update(new)
            return sum(self.sizes[memory] for memory in new)

        for place, (call, choice) in enumerate(zip(self.calls, choices, strict=True)):
            now += keep(self._outside_of_call[place])
            before = now
            now += keep({call.inputs[name] for name in choice.after.inputs if name in call.inputs})
            moments.append((before, max(before + self.between[place], now + choice.after.live)))
            # A result that the block keeps, too, is that of its next reader.
            now += keep({memory for name, memory in call.results.items() if choice.after.kept.get(name)})
            now += sum(n for name, n in choice.after.kept.items() if name not in call.results)
        now += keep(self._outside_of_call[-1])
        return [*moments, (now, now + self.between[-1])]


class SetsFates:
    """The class of an operator that sets the fates of blocks, which a count leaves out.

    Attributes:
        reads_values: whether it reads the values of its operands: no, only their sizes, and which of them learn.
    """

    reads_values = False


class GraphRun(SavingRun):
    """A run of a graph that makes the table of each kind of block that it calls.

    Args:
        sources: the placeholders of parameters, buffers and constants, which are there anyway.
        groups, stands_for: as for `TableRun`.
    """

    def __init__(
        self, module: fx.GraphModule, sources: Collection[str], groups: Mapping[str, str], device: Hardware,
        stands_for: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        super().__init__(module)
        self.device, self.sources, self.groups, self.stands_for = device, sources, groups, stands_for
        self.calls: list[BlockCallRow] = []
        self.tables: list[BlockTable] = []
        self.sizes: dict[int, int] = {}
        self.held_memories: set[int] = set()
        self.between: list[int] = []
        self._live, self._saved_before, self._made_before = LiveBytes(), 0, 0
        self.placeholders: list[int | None] = []
        self.returned: list[int] = []
        self._known: dict[Any, tuple[int, Any]] = {}
        self._call: fx.Node | None = None
        self._calls_before: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, and notes the sizes of what it makes."""
        self._call, self._calls_before[n.name] = n, len(self.calls)
        with self._live if n.op == "call_function" else nullcontext():
            result = super().run_node(n)
        if n.op == "output":
            self.returned = [self._memory_of(x) for x in nested_tensors(result)]
            return result
        if n.op == "placeholder":
            is_value = isinstance(result, Tensor) and n.name not in self.sources
            self.placeholders.append(self._memory_of(result) if is_value else None)
            self._begin_between()
        for x in nested_tensors(result):
            memory = self._memory_of(x)
            self.sizes[memory] = x.untyped_storage().nbytes()
            if n.op == "placeholder" and n.name in self.sources:
                self.held_memories.add(memory)
                if x.requires_grad:
                    forget_gradient(x)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator."""
        if isinstance(target, SetsFates):
            return None
        return super().call_function(self.stands_for(target), over_groups(args, self.groups), kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a block returns; runs it if none that is alike has run."""
        self._end_between()
        module: Any = self.fetch_attr(target)
        inner = getattr(module, "inner", module)
        key = id(inner), tuple(map(_form, args))
        if key not in self._known:
            table, example = block_table(inner, args, self.groups, self.device, self.stands_for)
            self._known[key] = len(self.tables), example
            self.tables.append(table)
        kind, example = self._known[key]
        result = _like(example)
        assert self._call is not None
        names = [n.name for n in inner.graph.find_nodes(op="placeholder")]
        operands = {name: x for name, x in zip(names, args, strict=True) if isinstance(x, Tensor)}
        inputs = {name: self._memory_of(x) for name, x in operands.items()}
        returned = nested_tensors(result)
        results = {}
        for name, x in zip((r for r in self.tables[kind].results if r), returned, strict=False):
            self.sizes[self._memory_of(x)] = x.untyped_storage().nbytes()
            results[name] = self._memory_of(x)
        self.calls.append(
            BlockCallRow(
                target=str(target), block=block_of(self._call), kind=kind, results=results,
                inputs={name: memory for name, memory in inputs.items() if memory not in self.held_memories},
            )
        )  # fmt: skip
        self._begin_between()
        return result

    def _begin_between(self) -> None:
        self._live.start()
        self._saved_before, self._made_before = len(self.saved), len(self._memories)

    def _end_between(self) -> None:
        """Notes the most bytes of the operators since the last call, beside what they keep."""
        saved = {x.memory: x.bytes for x in self.saved[self._saved_before :] if x.memory >= self._made_before}
        self.between.append(max(0, self._live.most - sum(saved.values())))

    def go_back(self, result: Any) -> None:
        """Runs backward of the operators after the last call."""
        with self._live:
            if (end := end_of(result)) is not None:
                del result
                end.backward()
        self._end_between()

    def table(self) -> GraphTable:
        """Returns the table of the graph that ran."""
        nodes = {n.name: n for n in self.module.graph.nodes}  # type: ignore[union-attr]
        outside, since = dict[int, fx.Node](), dict[int, int]()
        for saved in self.saved:
            if saved.memory not in self.held_memories:
                self.sizes.setdefault(saved.memory, saved.bytes)
                outside.setdefault(saved.memory, nodes[saved.node])
                since.setdefault(saved.memory, self._calls_before[saved.node])
        return GraphTable(
            calls=self.calls, tables=self.tables, outside=outside, since=since, sizes=self.sizes,
            between=self.between, placeholders=self.placeholders, returned=self.returned,
        )  # fmt: skip


def graph_table(
    module: fx.GraphModule, args: Iterable[Any], sources: Collection[str], groups: Mapping[str, str], device: Hardware,
    stands_for: Callable[[Any], Any],
) -> GraphTable:  # fmt: skip
    """Returns the table of an emitted graph for these arguments, which may be fake.

    Args:
        sources, groups, stands_for: as for `GraphRun`.
    """
    run = GraphRun(module, sources, groups, device, stands_for)
    # Under a mode that keeps no tensor, operators write in place as they do without one.
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass(), Work(device):
        run.go_back(run.run(*args))
    return run.table()


def _form(x: Any) -> Any:
    """Returns all that the run of a block depends on, of one argument."""
    return (tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x


def _like(result: Any) -> Any:
    """Returns new tensors of the sizes of a block's results, which are no leaves of autograd."""
    if isinstance(result, tuple | list):
        return type(result)(map(_like, result))
    if not isinstance(result, Tensor):
        return result
    empty = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
    return empty.requires_grad_().clone() if result.requires_grad else empty
