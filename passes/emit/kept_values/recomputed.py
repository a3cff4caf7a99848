"""Recomputed: a block of which backward computes some values again, or has them in another form."""

from __future__ import annotations

import gc
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.ops.eager_mode import no_transform
from autotp.ops.random_state import random_state_of
from autotp.passes.capture.autocast_regions import ambient_everywhere
from autotp.passes.emit.kept_values.checkpointed import Checkpointed, checkpointed
from autotp.passes.emit.kept_values.fates import Fates, SavingRun
from autotp.passes.emit.kept_values.kept_call import KeptCall, Pattern, pattern_of
from autotp.passes.emit.kept_values.split import Operators, Split, split_block


class Recomputed(nn.Module):
    """A graph whose kept values have fates: NOTE [Whose fate a kept tensor has].

    On inputs of new sizes it first runs operator by operator, which tells what autograd saves.

    Args:
        known: takes what is known of sizes and fates, for all calls of blocks that share a graph.

    Attributes:
        inner: the graph.
        fates: of its operators; with none of them it runs as it is.
        ends_early: whether backward leaves out operators that run again for nobody.
    """

    def __init__(
        self, inner: fx.GraphModule, fates: Fates | None = None, known: dict[Hashable, Any] | None = None
    ) -> None:
        super().__init__()
        names = [node.name for node in inner.graph.nodes if node.op not in ("placeholder", "output")]
        self.inner = inner
        self.operators = Operators.of(inner.graph)
        self.draws = bool(self.operators.drawing)
        self.ends_early = True
        self._known, self._names = {} if known is None else known, names
        self.use(dict.fromkeys(names, "recompute") if fates is None else fates)

    def use(self, fates: Fates) -> None:
        """Sets the fates for the calls that follow."""
        self.fates = fates
        key = id(self.inner), frozenset(fates.items())
        if key not in self._known:
            # In a tuple, so that it is no second block. Where everything runs again, it is one call for torch.
            whole = all(fates.get(name) == "recompute" for name in self._names)
            compilable = (Checkpointed(self.inner) if whole else checkpointed(self.inner, fates),)
            self._known[key] = {}, {}, compilable
        self._patterns: dict[Hashable, Pattern]
        self._splits: dict[Hashable, Split]
        self._patterns, self._splits, self._compilable = self._known[key]

    def forward(self, *args: Any) -> Any:
        """Runs the graph. Under transforms of torch.func, which do not support recomputation, everything is kept."""
        if not self.fates:
            return self.inner(*args)
        if torch.compiler.is_compiling():
            return self.compilable(*args)
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not torch.is_grad_enabled() or not no_transform(*tensors):
            return self.inner.forward(*args)
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        device = next((x.device for x in tensors if not x.is_cpu), torch.device("cpu"))
        sizes = [(x.requires_grad, x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else x for x in args]
        memories = [x.untyped_storage()._cdata for x in tensors]
        # Which inputs share memory decides which of them a kept tensor is a view of.
        shared = [] if len(set(memories)) == len(memories) else map(memories.index, memories)
        key = (device, *sizes, *shared, *ambient_everywhere())
        pattern = self._patterns.get(key)
        if pattern is None:
            return self._first_run(key, args, device)
        call = KeptCall(pattern, args, device, outer)
        try:
            result, read_values = pattern.split.forward(call, *args)
        finally:
            call.leave()
        call.end(read_values)
        return result

    @property
    def compilable(self) -> Checkpointed | fx.GraphModule:
        """Returns the block for compiled code."""
        return self._compilable[0]

    def _first_run(self, key: Hashable, args: Sequence[Any], device: torch.device) -> Any:
        """Runs the graph on inputs of new sizes, and notes what autograd saves."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        run = _FirstRun(self.inner, device, self.operators.drawing)
        versions = {i: x._version for i, x in enumerate(args) if isinstance(x, Tensor)}
        result = run.run(*args)
        structure = tuple((x.node, x.origin, x.memory, x.bytes > 0, x.dtype) for x in run.saved)
        short = all(size < 2**31 for geometry in run.geometries.values() for size in geometry.shape)
        known = (structure, *sorted(run.learns), *sorted(run.irregular), *sorted(run.origins.items()), short)
        if known not in self._splits:
            self._splits[known] = split_block(self.inner, self.operators, run, self.fates, self.ends_early)
            gc.collect(1)  # fx leaves a circle that has the frames around, and so the tensors of this call.
        self._patterns[key] = pattern = pattern_of(self._splits[known], run)
        call = KeptCall(pattern, args, device, outer)
        call.versions = [versions[i] for i in call.inputs if i in versions]
        run.end(call)
        return result


class _Cell:
    """Stands for a tensor that autograd saves in a first run, until it is known what happens with it."""

    def __init__(self, tensor: Tensor) -> None:
        self.packed: Any = tensor
        self.call: KeptCall | None = None


class _FirstRun(SavingRun):
    """The first run of a block on inputs of some sizes."""

    def __init__(self, module: fx.GraphModule, device: torch.device, drawing: Collection[str]) -> None:
        super().__init__(module, keeps_all=True)
        self.device, self.drawing = device, drawing
        self.cells: list[_Cell] = []
        self.states: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, and notes the random state before it if it draws."""
        if n.name in self.drawing:
            self.states[n.name] = random_state_of(self.device)
        return super().run_node(n)

    def pack(self, x: Tensor) -> _Cell:
        """Notes a tensor that autograd saves."""
        cell = _Cell(super().pack(x))
        self.cells.append(cell)
        return cell

    def unpack(self, packed: _Cell) -> Tensor:
        """Returns the tensor of a cell. (Backward may begin in the block: of what a custom operator computes.)"""
        if packed.call is None:
            tensor: Tensor = packed.packed
            return tensor
        return packed.call.unpack(packed.packed)

    def end(self, call: KeptCall) -> None:
        """Hands everything to a call, as it would have it from a later run."""
        read_values = [self.env[node] for node in call.pattern.split.read_values]
        hooked = set(call.pattern.split.saved)
        for i, cell in enumerate(self.cells):
            cell.packed = call.pack(cell.packed) if i in hooked else call.kept(cell.packed)
            cell.call = call
        call.states = [self.states[name] for name in call.pattern.split.states]
        call.end(read_values)
        # autograd has this object in its hooks for as long as the call.
        self.env, self.cells, self.states, self.args_iter = {}, [], {}, iter(())
