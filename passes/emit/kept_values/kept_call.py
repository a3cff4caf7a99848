"""kept_call: one call of a block whose kept values have fates, from forward until backward has read the last of them.

NOTE [A number in place of a tensor]
While the block runs, autograd gets a number for each tensor that it wants to keep and that is dropped. When backward
asks for the first one of a part, the part runs again (`split.py`). torch's `checkpoint` works alike, and follows each
tensor in Python; here a graph is known to ask for the same tensors in the same order.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotp.errors import Error
from autotp.ops.random_state import random_state_of, set_random_state
from autotp.passes.capture.autocast_regions import Autocast, ambient_everywhere
from autotp.passes.emit.kept_values.exact_bits import STORES
from autotp.passes.emit.kept_values.fates import Geometry, SavingRun
from autotp.passes.emit.kept_values.split import ReplayPart, Split
from autotp.passes.emit.kept_values.stores import HostCopy, Store, tensor_at

NO_RUN = -1
"""torch's number of a run of backward, outside of all runs."""
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

recomputations: list[ExitStack] = []
"""What the end of each recomputation that runs has to do: it may end before the last operator of its block."""


@contextmanager
def recomputation() -> Iterator[None]:
    """A region that computes a block again."""
    with ExitStack() as at_end:
        recomputations.append(at_end)
        try:
            yield
        finally:
            recomputations.pop()


class Handed(NamedTuple):
    """A tensor that hooks around the call have: what they returned for it, and whether it has a gradient."""

    packed: Any
    learns: bool


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How a block runs on inputs of some sizes.

    Attributes:
        split: its graphs.
        geometries: number -> where the tensor lies in its memory, or behind the start of an input or output; None if
            it is all of it.
        read_values: for each value that parts read its policy, the number of its memory, and where it lies there.
        blanks: the tensors with any values that parts read, and whether they have a gradient.
        readers: number of a memory that is kept in another form -> how many tensors backward reads in it.
    """

    split: Split
    geometries: tuple[Geometry | None, ...]
    read_values: tuple[tuple[str, int, Geometry] | None, ...]
    blanks: tuple[tuple[Geometry, bool], ...]
    readers: dict[int, int]


def pattern_of(split: Split, run: SavingRun) -> Pattern:
    """Returns how a block runs on inputs of the sizes that a run of it has had."""
    saved = [run.saved[i] for i in split.saved]
    by_output = {number for part in split.parts for number in part.by_output}
    geometries, readers = list[Geometry | None](), Counter[int]()
    for number, (x, source) in enumerate(zip(saved, split.sources, strict=True)):
        whole = x.origin is not None and run.outputs[x.memory][2] == x.geometry
        placed = number in by_output or (source is not None and source[0] == "input")
        # An output, or an input, may begin at another place of its memory in another call.
        start = run.outputs[x.memory][2].offset if placed and x.origin is not None else 0
        geometries.append(None if whole and placed else x.geometry._replace(offset=x.geometry.offset - start))
        if source is not None and source[0] == "store":
            readers[x.memory] += 1
    stored = {x.memory: policy for x, policy in zip(saved, split.policies, strict=True) if policy in ("host", "bits")}
    read_values = list[tuple[str, int, Geometry] | None]()
    for node in split.read_values:
        memory = run.memories.get(node.name, -1)
        read_values.append((stored[memory], memory, run.geometries[node.name]) if memory in stored else None)
        readers[memory] += memory in stored
    blanks = tuple((run.geometries[name], name in run.learns) for name in split.blanks)
    return Pattern(
        split=split, geometries=tuple(geometries), read_values=tuple(read_values), blanks=blanks, readers=dict(readers)
    )


class KeptCall:
    """What is kept of one call of a block.

    Attributes:
        values: number -> the tensor, in the run of backward that has computed it; None for one that it has got.
        runs: for each part the run of backward that has computed it.
        stores: number of a memory -> its copy in another form.
        flat: number of such a memory -> the run of backward that has it, how many tensors in it the run has yet to
            read, and the memory.
        taken: what hooks around the call have handed back: the run of backward, and the tensor.
        before: returns the call before this one that has copies on the host, if it is still there.
    """

    def __init__(self, pattern: Pattern, args: Sequence[Any], device: torch.device, outer: Hooks | None) -> None:
        self.pattern, self.device, self.outer = pattern, device, outer
        split = pattern.split
        self.inputs: dict[int, Any] = {i: args[i] for i in split.inputs}
        # autograd compares them for the tensors that it keeps, and it does not keep these.
        self.versions = [x._version for x in self.inputs.values() if isinstance(x, Tensor)]
        self.autocast = ambient_everywhere()
        self.numbers, self.is_open = count(), False
        self.states: list[Tensor] = []
        self.read_values: tuple[Any, ...] = ()
        self.read_versions: list[int] = []
        self.values: list[Tensor | None] = [None] * len(split.sources)
        self.runs = [NO_RUN] * len(split.parts)
        self.stores: dict[int, Store] = {}
        self.flat: dict[int, tuple[int, int, Tensor]] = {}
        self.taken: dict[int, tuple[int, Tensor]] = {}
        self.before: Callable[[], KeptCall | None] = _nothing
        self.entered = NO_RUN

    # ---- forward

    def enter(self) -> None:
        """From here on autograd gets what `pack` returns."""
        # `next(numbers, tensor)` needs no Python frame.
        push_hooks(partial(next, self.numbers) if self.pattern.split.numbers_only else self.pack, self.unpack)
        self.is_open = True

    def leave(self) -> None:
        """From here on autograd keeps what it wants."""
        if self.is_open:
            pop_hooks()
            self.is_open = False

    def note_state(self) -> None:
        """Notes the random state for an operator."""
        self.states.append(random_state_of(self.device))

    def pack(self, x: Tensor) -> Any:
        """Returns what autograd gets in place of a tensor: a number, or the tensor with its version."""
        number, split = next(self.numbers), self.pattern.split
        policy = split.policies[number] if number < len(split.policies) else "kept"
        if policy == "kept":
            return self.kept(x)
        if policy in ("host", "bits"):
            source = split.sources[number]
            assert source is not None
            self._store(policy, source[1], x)
        return number

    def kept(self, x: Tensor) -> tuple[Any, int | None]:
        """Returns a tensor with its version; with hooks around the call, what they return."""
        # Without its history: it may be the output of the operator whose memory of autograd has this tuple.
        return (x.detach(), x._version) if self.outer is None else (self.outer[0](x), None)

    def _store(self, policy: str, memory: int, x: Tensor) -> None:
        if memory in self.stores:
            return
        if policy == "host":
            self.stores[memory] = HostCopy(x)
            if self.before is _nothing:
                self.before = _latest.get(self.device, _nothing)
                _latest[self.device] = weakref.ref(self)
        else:
            self.stores[memory] = STORES[x.dtype](x)

    def end(self, read_values: Sequence[Any]) -> None:
        """Holds what backward will read, at the end of forward.

        Raises:
            Error: autograd has kept another number of tensors than when the block ran first.
        """
        expected = len(self.pattern.split.sources)
        # The numbers count from 0, so the next one is how many there were.
        if (number := next(self.numbers)) != expected:
            raise Error(f"a block keeps {number} tensors, and {expected} when it ran first", fix='recompute="none"')
        stored = list[Any]()
        for x, learns, place in zip(read_values, self.pattern.split.learns, self.pattern.read_values, strict=True):
            if place is not None:
                with torch.no_grad():
                    self._store(place[0], place[1], x.detach())
                stored.append(None)
            else:
                # Without its history, which has this call: memory of autograd in a circle would stay for ever.
                stored.append(_apart(x, learns))
        self.read_values = tuple(stored)
        self.read_versions = _versions(self.read_values)
        if self.outer is not None:
            self.inputs = {i: self._handed(arrived(x)) for i, x in self.inputs.items()}
            self.read_values = tuple(map(self._handed, self.read_values))

    def _handed(self, x: Any) -> Any:
        """Returns what the hooks around the call have in place of a tensor."""
        return Handed(self.outer[0](x), x.requires_grad) if self.outer is not None and isinstance(x, Tensor) else x

    # ---- backward

    def unpack(self, packed: Any) -> Tensor:
        """Returns a tensor that autograd wanted."""
        if type(packed) is not int:
            return self._unchanged(packed)
        source, run = self.pattern.split.sources[packed], torch._C._current_graph_task_id()
        if self.stores and (run != self.entered or run == NO_RUN):
            self._enter_backward(run)
        assert source is not None
        origin, place = source
        if origin == "part":
            # In another backward (`retain_graph`), and for a tensor that was handed out before, the part runs again.
            if run != self.runs[place] or run == NO_RUN or self.values[packed] is None:
                self._replay(self.pattern.split.parts[place])
                self.runs[place] = run
            value, self.values[packed] = self.values[packed], None  # Its memory is free when backward has used it.
            assert value is not None
            return value
        if origin == "store":
            geometry = self.pattern.geometries[packed]
            assert geometry is not None
            return tensor_at(self._flat(place, run), *geometry)
        self._expect_unchanged()
        return _at(self._taken(self.inputs[place]), self.pattern.geometries[packed])

    def _unchanged(self, packed: tuple[Any, int | None]) -> Tensor:
        value, version = packed
        if self.outer is not None:
            return self.outer[1](value)
        if value._version != version:
            raise RuntimeError(CHANGED + "a value of a block that has been kept for backward")
        tensor: Tensor = value
        return tensor

    def _enter_backward(self, run: int) -> None:
        """Begins the copies from the host that this block reads, and those of the block whose backward comes next."""
        self.entered = run
        before = self.before()
        for call in (self, before) if before is not None else (self,):
            for store in call.stores.values():
                store.begin()

    def _flat(self, memory: int, run: int) -> Tensor:
        """Returns memory that was kept in another form; it stays until all tensors in it have been read."""
        last, readers, flat = self.flat.pop(memory, (NO_RUN, 0, None))
        if flat is None or run != last or run == NO_RUN:
            with torch.no_grad():
                readers, flat = self.pattern.readers[memory], self.stores[memory].flat()
        if readers > 1 and run != NO_RUN:
            self.flat[memory] = run, readers - 1, flat
        return flat

    def _taken(self, x: Any) -> Any:
        """Returns the tensor that the hooks around the call have."""
        if not isinstance(x, Handed) or self.outer is None:
            return x
        # Once in a run: torch's checkpoint refuses to hand out a tensor twice.
        run = torch._C._current_graph_task_id()
        if self.taken.get(id(x), (NO_RUN, None))[0] != run or run == NO_RUN:
            self.taken[id(x)] = run, self.outer[1](x.packed)
        return self.taken[id(x)][1].detach().requires_grad_(x.learns)

    def _expect_unchanged(self) -> None:
        if self.outer is not None:
            return
        inputs = [x._version for x in self.inputs.values() if isinstance(x, Tensor)]
        if inputs != self.versions or _versions(self.read_values) != self.read_versions:
            raise RuntimeError(CHANGED + "an input or a parameter of a block that backward computes again")

    def _replay(self, part: ReplayPart) -> None:
        """Runs a part again, and notes the tensors that autograd wants."""
        self._expect_unchanged()
        saved: list[Tensor] = []
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad(), self._as_in_forward(part), recomputation():
            inputs = [self.inputs[i] for i in part.inputs]
            read_values = [self._read_value(i) for i in part.read_values]
            if self.outer is not None:
                inputs = list(map(self._taken, inputs))
            push_hooks(saved.append, _never)
            try:
                results = part.run(self, *inputs, *read_values)
            finally:
                pop_hooks()
        if len(saved) != len(part.by_hook):
            raise Error(
                f"a block that backward computes again keeps {len(saved)} tensors, and {len(part.by_hook)} in forward",
                fix='recompute="none"',
            )
        for number, x in zip(part.by_hook, saved, strict=True):
            if number < 0:
                continue
            geometry = self.pattern.geometries[number]
            if geometry is not None and (x.shape != geometry.shape or x.stride() != geometry.stride):
                raise Error(
                    f"a block that backward computes again keeps a tensor of sizes {tuple(x.shape)}, and one of "
                    f"{tuple(geometry.shape)} in forward",
                    fix='recompute="none"',
                )
            self.values[number] = x
        saved.clear()  # The graph of this run has it in its hooks, and some of the tensors have the graph.
        for number, x in zip(part.by_output, results, strict=True):
            self.values[number] = _at(x, self.pattern.geometries[number])

    def _read_value(self, place: int) -> Any:
        stored = self.pattern.read_values[place]
        if stored is None:
            return self._taken(self.read_values[place])
        flat = self._flat(stored[1], torch._C._current_graph_task_id())
        return tensor_at(flat, *stored[2]).requires_grad_(self.pattern.split.learns[place])

    def set_state(self, place: int) -> None:
        """Sets the random state that an operator had in forward."""
        set_random_state(self.device, self.states[place])

    def blank(self, place: int) -> Tensor:
        """Returns a tensor with any values, on which an operator draws its mask again."""
        (dtype, shape, stride, _), learns = self.pattern.blanks[place]
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device, requires_grad=learns)

    @contextmanager
    def _as_in_forward(self, part: ReplayPart) -> Iterator[None]:
        """A region with the autocast of forward, after which the random state is as before."""
        now = ambient_everywhere()
        with ExitStack() as regions:
            if now != self.autocast:
                # First off where it is on now, then on as it was in forward.
                for settings in (*(Autocast(region.device) for region in now), *self.autocast):
                    regions.enter_context(settings.on())
            if part.draws:
                regions.callback(set_random_state, self.device, random_state_of(self.device))
            yield


CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation: "


def _nothing() -> None:
    return None


_latest: dict[torch.device, Callable[[], KeptCall | None]] = {}
"""Device -> returns the last call with copies on the host; its backward comes after that of the next such call."""


def _never(_: Any) -> Tensor:
    """Stands for a hook: nobody has a backward of the second run of a graph."""
    raise AssertionError


def _apart(x: Any, learns: bool) -> Any:
    """Returns a value of a graph without its history; or the several values of an operator."""
    if isinstance(x, Tensor):
        return x.detach().requires_grad_(learns) if learns else x.detach()
    return type(x)(_apart(item, learns) for item in x) if type(x) in (tuple, list) else x


def _versions(values: Sequence[Any]) -> list[int]:
    return [x._version for x in values if isinstance(x, Tensor)]


def _at(x: Tensor, geometry: Geometry | None) -> Tensor:
    x = x.detach()
    if geometry is None:
        return x
    return x.as_strided(geometry.shape, geometry.stride, int(x.storage_offset()) + geometry.offset)


def arrived(x: Any) -> Any:
    """Returns an operand of a block, once it has its values: a node that makes it later has `wait_for_value`."""
    wait_for_value = getattr(getattr(x, "grad_fn", None), "wait_for_value", None)
    if wait_for_value is not None:
        with torch.no_grad():
            wait_for_value(x)
    return x
