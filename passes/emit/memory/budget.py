"""budget: the operator of a graph that chooses the fates of all blocks for the sizes of a call.

    Before: y = block(x, w0); z = block(y, w1)
    After:  budget(x); y = block_0(x, w0); z = block_1(y, w1), and `budget` sets what block_0 and block_1 keep

It chooses once for each kind of call. Ranks of the same sizes choose alike: the choice depends on sizes and on the kind
of device alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from autotp.costs.hardware import Hardware, hardware_at
from autotp.costs.room import tensor_room
from autotp.costs.work import without_processes
from autotp.display.text_table import gib_text
from autotp.errors import Error
from autotp.ops.collectives import communicate
from autotp.ops.eager_mode import no_transform
from autotp.options import Memory, memory_limit
from autotp.passes.capture.autocast_regions import ambient_everywhere
from autotp.passes.emit.kept_values.fates import Fate
from autotp.passes.emit.kept_values.recomputed import Recomputed
from autotp.passes.emit.memory.block_table import without_collectives
from autotp.passes.emit.memory.choose import Choices, Chosen, choose_fates
from autotp.passes.emit.memory.graph_table import GraphTable, SetsFates, graph_table

FATES: tuple[Fate, ...] = ("recompute", "host", "bits")
GIGABYTE = 10**9
MOST = 64
"""The most kinds of calls whose choices are kept."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a graph may use.

    Attributes:
        memory: the option: bytes of the rank, or "50%".
        fixed: bytes that are there anyway: parameters, gradients, optimizer states.
        calls: the number of calls whose values are kept at a time: microbatches of a pipeline's stage.
        share: the part of the memory that is this graph's: a rank may have several stages.
        microbatches: of a step, over all replicas.
    """

    memory: int | str
    fixed: int = 0
    calls: int = 1
    share: float = 1.0
    microbatches: int = 1

    def limit(self, table: GraphTable, whole: Choices) -> float:
        """Returns the bytes that `measure` may return. whole: the choices under which all is kept"""
        limit = memory_limit(self.memory)
        return limit * table.kept(whole) if limit <= 1 else limit * self.share - self.fixed

    def measure(self, table: GraphTable, choices: Choices) -> float:
        """Returns the bytes of a choice: of a part of one microbatch; else of all that the rank needs at once."""
        kept = table.kept(choices)
        if memory_limit(self.memory) <= 1:
            return kept
        return self.calls * kept + table.peak(choices) - kept


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """What a budget did with the values of a call.

    Attributes:
        table: what the graph keeps.
        chosen: the choice.
        whole: the choice under which all is kept.
        allowance: what the graph may use.
        gigabyte: seconds of a microbatch that a gigabyte more would save.
        smallest: the smallest budget under which the graph fits, if it does not fit: bytes of the rank, or percent.
    """

    table: GraphTable
    chosen: Chosen
    whole: Choices
    allowance: Allowance
    gigabyte: float
    smallest: int

    @property
    def kept(self) -> int:
        """Bytes that a microbatch keeps for backward."""
        return self.table.kept(self.chosen.choices)

    @property
    def kept_without(self) -> int:
        """Bytes that it would keep without a budget."""
        return self.table.kept(self.whole)

    @property
    def needed(self) -> int:
        """Bytes of the rank at its fullest moment, as the budget counts them."""
        calls, choices = self.allowance.calls, self.chosen.choices
        return self.allowance.fixed + (calls - 1) * self.kept + self.table.peak(choices)


@dataclass(eq=False)
class Budget(SetsFates):
    """An operator without a result, with which a graph under a budget begins.

    Attributes:
        module: the graph, with a module for each call of a block.
        sources: placeholder of a parameter, buffer or constant -> a tensor like it, on any device.
        allowance: what the graph may use; its fixed bytes are those of a rank whose parameters are all frozen.
        learning: placeholder of a parameter -> the bytes of its gradient and states, which it has if it learns.
        device: the rank's device.
        groups: name of a process group -> the rank in it, and its size.
        even: whether all ranks have parameters of the same sizes.
        agrees: whether a call of other sizes is one of other sizes for each rank of the groups.
        latest: what was chosen for the last call.
    """

    module: fx.GraphModule
    sources: Mapping[str, Any]
    allowance: Allowance
    device: torch.device
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    even: bool = True
    learning: Mapping[str, int] = field(default_factory=dict)
    agrees: bool = False
    latest: MemoryChoice | None = None

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = "budget"
        self._choices: dict[Any, MemoryChoice] = {}
        self._now: Any = None

    def __call__(self, inputs: Sequence[Any], parameters: Sequence[Tensor]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return  # Without gradients nothing is kept, and a compilation has the fates of the calls before it.
        learns = tuple([x.requires_grad for x in parameters])
        sizes = tuple([(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in inputs])
        now = (sizes, learns, *ambient_everywhere())
        if now != self._now and no_transform(*(x for x in inputs if isinstance(x, Tensor))):
            self.choose(inputs, self.agrees, [name for name, x in zip(self.learning, learns, strict=True) if x])
            self._now = now

    def choose(
        self, inputs: Sequence[Any], agrees: bool = False, learners: Collection[str] | None = None
    ) -> MemoryChoice:
        """Sets and returns the fates for a call with these inputs; tensors may be on `meta`.

        Args:
            agrees: whether all ranks choose now, and none goes on if one of them has to stop.
            learners: the placeholders of the parameters that learn; by default those that did at capture.

        Raises:
            Error: the graph does not fit.
        """
        names = [n for n in self.learning if self.sources[n].requires_grad] if learners is None else learners
        sizes = tuple((tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in inputs)
        key = (sizes, frozenset(names), *ambient_everywhere())
        if key not in self._choices:
            self._choices[key] = self._chosen(inputs, agrees, frozenset(names))
            if len(self._choices) > MOST:
                del self._choices[next(iter(self._choices))]
        self.latest = self._choices[key]
        blocks = [self.module.get_submodule(call.target) for call in self.latest.table.calls]
        tables = [self.latest.table.tables[call.kind] for call in self.latest.table.calls]
        for block, table, choice in zip(blocks, tables, self.latest.chosen.choices, strict=True):
            if isinstance(block, Recomputed):
                block.use(table.of_operators(choice.fates))
        return self.latest

    def _chosen(self, inputs: Sequence[Any], agrees: bool, learners: frozenset[str]) -> MemoryChoice:
        device = hardware_at(self.device)
        fixed = self.allowance.fixed + sum(self.learning[name] for name in learners)
        allowance = replace(self.allowance, fixed=fixed)
        choice = choice_under(allowance, self.counted(inputs, device, learners), device)
        if needed := self._largest(choice.smallest) if agrees else choice.smallest:
            ranks = dist.get_world_size() if dist.is_initialized() else math.prod(n for _, n in self.groups.values())
            rows = next((x.shape[0] for x in inputs if isinstance(x, Tensor) and x.dim()), 1)
            raise too_small(allowance, needed, device, ranks, int(rows) * allowance.microbatches)
        return choice

    def _largest(self, number: int) -> int:
        """Returns the largest of the numbers of all ranks."""
        largest = torch.tensor(number, device=self.device)
        for group, (_, size) in self.groups.items():
            if size > 1:
                largest = communicate("all_reduce", largest, "max", group)
        return int(largest)

    def counted(
        self, inputs: Sequence[Any], device: Hardware, learners: Collection[str],
        stands_for: Callable[[Any], Any] = lambda operator: operator,
    ) -> GraphTable:  # fmt: skip
        """Returns the table of the graph for a call with these inputs, on fake tensors, or on `meta`.

        Args:
            learners: the placeholders of the parameters that learn.
            stands_for: returns what runs for an operator.
        """
        queue = iter(inputs)
        # A count reaches no other rank: it communicates over groups without processes.
        counted = {name: f"counted {name}" for name in self.groups}
        sizes = {counted[name]: size for name, (_, size) in self.groups.items()}
        ranks = {counted[name]: rank for name, (rank, _) in self.groups.items()}
        on_fake = nullcontext() if self.device.type == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
        with on_fake, without_processes(sizes, ranks):
            args = [
                self._fake(self.sources[node.name] if node.name in self.sources else next(queue))
                for node in self.module.graph.find_nodes(op="placeholder")
            ]
            for node, x in zip(self.module.graph.find_nodes(op="placeholder"), args, strict=True):
                if node.name in self.learning:
                    x.requires_grad_(node.name in learners)
            try:
                table = graph_table(self.module, args, self.sources, counted, device, stands_for)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise Error(
                    f"memory= counts bytes before a call, and `{error.func}` makes sizes of values",
                    fix='recompute="full"',
                    alternative='experts="width", if it is the rows of experts',
                ) from error
        return table if self.even else replace(table, tables=[*map(without_collectives, table.tables)])

    def _fake(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        shape = [int(n) for n in x.shape]
        empty = torch.empty_strided(shape, _strides(x, shape), dtype=x.dtype, device=self.device)
        return empty.requires_grad_(x.requires_grad)


def _strides(x: Tensor, shape: Sequence[int]) -> Sequence[int]:
    return x.stride() if all(type(n) is int for n in x.stride()) else torch.empty(shape, device="meta").stride()


def choice_under(allowance: Allowance, table: GraphTable, device: Hardware) -> MemoryChoice:
    """Returns what a budget does with the values of a graph; if nothing fits, the choice with the fewest bytes.

    Args:
        device: the kind of device; a CPU has no other memory to move values to.
    """
    allowed = FATES if device.is_gpu else ("recompute", "bits")
    whole = choose_fates(table, table.kept, float("inf"), device, ()).choices
    limit = allowance.limit(table, whole)

    def measure(choices: Choices) -> float:
        return allowance.measure(table, choices)

    chosen = choose_fates(table, measure, limit, device, allowed)
    more = choose_fates(table, measure, limit + GIGABYTE, device, allowed)
    return MemoryChoice(
        table=table, chosen=chosen, whole=whole, allowance=allowance, gigabyte=chosen.seconds - more.seconds,
        smallest=0 if chosen.fits else _smallest(allowance, chosen.least, table.kept(whole)),
    )  # fmt: skip


def _smallest(allowance: Allowance, least: int, whole: int) -> int:
    """Returns the smallest budget under which a graph fits: bytes of the rank, or percent."""
    if memory_limit(allowance.memory) <= 1:
        return -(-100 * least // max(whole, 1))
    return int(-(-(allowance.fixed + least) // allowance.share))


def too_small(allowance: Allowance, needed: int, device: Hardware, ranks: int, rows: int) -> Error:
    """Returns the error of a budget under which nothing fits, with the search for layouts that do.

    Args:
        needed: the smallest budget that would do: bytes of the rank, or percent.
        ranks: all ranks.
        rows: of the batch of a step, over all replicas.
    """
    search = f'autotp.search(model, gpus={ranks}, gpu="{device.name}", batch={rows}), which lists layouts that fit'
    shorter, fewer = (
        "shorter sequences, a smaller microbatch",
        "parameters in bfloat16, LoRA, zero=1 over replicas, autotp.low_memory (with state_bytes=2.03)",
    )
    limit = memory_limit(allowance.memory)
    if limit <= 1:
        return Error(
            f"memory={allowance.memory!r}: a microbatch keeps at least {needed}% of what it keeps without a budget",
            fix=f'memory="{needed}%"',
            # The part that has to stay differs from one size of inputs to another.
            alternative=f"a number of bytes, which is for inputs of all sizes; {shorter}, more ranks, or {search}",
        )
    # Where what stays from step to step is too much already, shorter sequences would not help.
    remedy = fewer if allowance.fixed > limit * allowance.share else shorter
    return Error(
        f"memory={gib_text(limit)}: this rank needs at least {gib_text(needed)}, of which {gib_text(allowance.fixed)} "
        "are parameters (with copies in the dtype of computation), gradients, optimizer states and buffers",
        fix=f'memory="{gib_text(needed).replace(" ", "")}"',
        alternative=f"{remedy}, more ranks, or {search}",
    )


def budget_on(memory: Memory, device: torch.device, sizes: Sequence[int]) -> Memory:
    """Returns a budget with the bytes that "auto" means on a device that is there. Else as `budget_within`."""
    return budget_within(memory, hardware_at(device), sizes) if memory == "auto" else memory


def budget_within(memory: Memory, device: Hardware, sizes: Sequence[int]) -> Memory:
    """Returns a budget with the bytes that "auto" means: what a device has for tensors, the same on each rank.

    Args:
        sizes: of the mesh's axes; neighbouring ranks are along the first.

    Raises:
        Error: a CPU has no memory of its own, or a device has none left for tensors.
    """
    if memory != "auto":
        return memory
    if not device.is_gpu:
        raise Error(
            'memory="auto" on a CPU, which shares its memory with other programs',
            fix='memory="24GiB", what this rank may use',
        )
    room = int(tensor_room(device, sizes))
    if room <= 1:
        raise Error(
            f'memory="auto": libraries and NCCL take all of the {gib_text(device.memory)} of {device.name}',
            fix="a device with more memory",
        )
    return room


def budget_of(module: fx.GraphModule) -> Budget | None:
    """Returns the budget of an emitted graph; None for one without."""
    return next((node.target for node in module.graph.nodes if isinstance(node.target, Budget)), None)
