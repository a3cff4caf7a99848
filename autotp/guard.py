"""Which attributes of a model a graph was captured with, and whether they are still the same.

NOTE [When a graph is still right]
A forward that reads `self.drop.p` or `self.config.tau` has decided by it what the graph computes. So each attribute
that it reads is noted, with its value: plain values, containers and objects by what they hold, functions with their
closures, tensors by their identity (of an attribute that is opened, `attributes.py`, by their kind: they are inputs).
What is set on a module is counted (`Tree.version`), and what lies in containers is looked at in each call: only where
either shows a change are values compared. What cannot be seen: a global of Python, state behind a class of C.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autotp.alike import Frozen
from autotp.attributes import (
    Path,
    Slot,
    below,
    hidden,
    is_container,
    is_internal,
    is_opaque,
    spelled,
    state_of_opaque,
    without_numbers,
)
from autotp.blocks import patched
from autotp.changes import content_of, same_content
from autotp.sharded import Sharded
from autotp.source import is_users

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
MISSING: Any = object()
"""Stands for the value of an attribute that is not there."""


class Reads:
    """The attributes that are read while a model is captured."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(vars(module)): path for path, module in model.named_modules()}
        self.seen: set[tuple[int, str]] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A region in which attributes that are read are noted."""
        note, get = self.seen.add, nn.Module.__getattribute__

        def read(module: nn.Module, name: str) -> Any:
            table = get(module, "__dict__")
            if name != "__dict__":
                note((id(table), name))
            elif is_users(sys._getframe(1)):
                for key in table:
                    note((id(table), key))
            return get(module, name)

        with patched(nn.Module, {"__getattribute__": read}):
            yield

    def slots(self, same: Sequence[tuple[nn.Module, nn.Module]] = ()) -> frozenset[Slot]:
        """What was read: of a block that is said to do what another did (`same`), what that one read.

        A `forward` that is set on a module counts as read.
        """
        found = {(self.paths[at], name) for at, name in self.seen if at in self.paths and not is_internal(name)}
        for first, later in same:
            start, to = self.paths[id(vars(first))], self.paths[id(vars(later))]
            inside = [(path, name) for path, name in found if path == start or path.startswith(f"{start}.")]
            found |= {(to + path[len(start) :], name) for path, name in inside}
        hooks = {(path, name) for path, module in self.model.named_modules() for name in HOOKS if vars(module)[name]}
        return frozenset(found | hooks | {(path, "forward") for path in self.paths.values()})


Look = Callable[[nn.Module, str], Any]


def looked_up(module: nn.Module, name: str) -> Any:
    """The value of an attribute that is no parameter, buffer, module, nor a method of the class."""
    if name in vars(module):
        return vars(module)[name]
    if any(name in table for table in (module._parameters, module._buffers, module._modules)):
        return MISSING  # Which these are, and where, is compared by itself.
    found = next((vars(kind)[name] for kind in type(module).__mro__ if name in vars(kind)), MISSING)
    return MISSING if hasattr(type(found), "__get__") else found


class _Values(Frozen):
    """Values to compare, of tensors among what is opened their kinds."""

    def __init__(self, modules: Mapping[str, nn.Module], opened: bool) -> None:
        super().__init__({id(vars(module)): path for path, module in modules.items()})
        self.opened = opened

    def _object(self, value: Any) -> Any:
        if isinstance(value, Tensor) and self.opened:
            cut = value.cut if isinstance(value, Sharded) else None
            return "tensor", value.dim(), value.dtype, cut, value.layout
        if isinstance(value, Tensor):
            return *self._itself(value), version_of(value)
        return super()._object(value)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, type) and is_users_class(value) and id(value) not in self.seen:
            self.seen[id(value)] = "around"
            held = [(name, self(one)) for name, one in vars(value).items() if not hasattr(type(one), "__get__")]
            self.seen[id(value)] = id(value), [pair for pair in held if not pair[0].startswith("__")]
            self.kept.append(value)
        if isinstance(value, type) and id(value) in self.seen:
            return self.seen[id(value)]
        return super().__call__(value)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written into; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def is_users_class(kind: type) -> bool:
    """True for a class whose attributes may be settings."""
    return kind.__module__.split(".")[0] not in ("builtins", "torch", "numpy", "typing", "collections", "transformers")


@dataclass
class Guard:
    """The values of attributes that a graph was captured with.

    Attributes:
        slots: the attributes that were read.
        opened: those of which the tensors are inputs.
        numbers: where whole numbers lie that are inputs.
        look: finds the value of an attribute.
        values: of each what it was, as something to compare.
        written: those that calls write, which are compared each time.
        contents: containers below the others, with what they hold.
        version: of the tree, when all was compared last.
    """

    slots: frozenset[Slot]
    opened: frozenset[Slot]
    numbers: frozenset[Path]
    written: frozenset[Slot]
    modules: Mapping[str, nn.Module]
    look: Look
    version: int
    kept: list[Any] = field(default_factory=list)
    values: dict[Slot, Any] = field(default_factory=dict)
    contents: list[Callable[[], bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = {slot: self._value(slot, keep=True) for slot in sorted(self.slots)}
        self._remember()

    def holds(self, version: int) -> bool:
        """True if all attributes are what they were."""
        if any(self._value(slot) != self.values[slot] for slot in self.written & self.slots):
            return False
        if version == self.version and (torch.compiler.is_compiling() or all(same() for same in self.contents)):
            return True
        if self.changed():
            return False
        self.version = version
        self._remember()
        return True

    def changed(self) -> list[Slot]:
        """The attributes that are another now."""
        return [slot for slot in sorted(self.slots) if self._value(slot) != self.values[slot]]

    def holds_tensors(self, slot: Slot) -> bool:
        """True if there are tensors below an attribute now."""
        return any(isinstance(value, Tensor) for _, value in below(self._now(slot), slot, {}))

    def _now(self, slot: Slot) -> Any:
        module = self.modules.get(slot[0])
        return MISSING if module is None else self.look(module, slot[1])

    def _value(self, slot: Slot, keep: bool = False) -> Any:
        now = without_numbers(self._now(slot), {path[2:] for path in self.numbers if path[:2] == slot})
        values = _Values(self.modules, slot in self.opened)
        if keep:
            self.kept.append(values)  # What is compared by its `id` lives on.
        return values(now)

    def _remember(self) -> None:
        seen: dict[int, Any] = {}
        self.contents = []
        for slot in sorted(self.slots - self.written - self.opened):
            now = self._now(slot)
            known = slot[1] == "forward" and id(now) in seen
            if now is not MISSING and slot[1] not in vars(self.modules[slot[0]]) and not known:
                self.contents.append(self._is_still(slot, now))  # A class has it, and nobody counts what is set there.
            if slot[1] == "forward":
                seen[id(now)] = now  # Once for each class.
                continue
            queue = [now]
            while queue:
                for _, value in below(queue.pop(), slot, seen):
                    if is_container(value) or isinstance(value, Tensor) or is_opaque(value) or _is_setting(value):
                        self.contents.append(_unchanged(value))
                    queue += hidden(value)

    def _is_still(self, slot: Slot, then: Any) -> Callable[[], bool]:
        return lambda: self._now(slot) is then


def _is_setting(value: Any) -> bool:
    return isinstance(value, type) and is_users_class(value)


def _unchanged(value: Any) -> Callable[[], bool]:
    """A function that is True as long as a container holds the same objects, a tensor the same numbers."""
    if isinstance(value, Tensor):
        version = version_of(value)
        return lambda: version_of(value) == version
    if is_opaque(value):
        state = state_of_opaque(value)
        return lambda: bool(state_of_opaque(value) == state)
    if isinstance(value, type):
        names = dict(vars(value))
        return lambda: dict(vars(value)) == names
    if isinstance(value, (list, set, dict)):
        then = list(value.items() if isinstance(value, dict) else value)
    if isinstance(value, set):
        return lambda: value == set(then)
    if isinstance(value, list):
        return lambda: len(value) == len(then) and all(map(operator.is_, value, then))
    table = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if table is None:
        content = content_of(value)
        return lambda: same_content(content_of(value), content)
    keys, values = list(table), list(table.values())
    return lambda: len(table) == len(keys) and all(map(operator.is_, table, keys)) and all(
        map(operator.is_, table.values(), values)
    )  # fmt: skip


def explained(slots: Sequence[Slot]) -> str:
    """Attributes, as the user writes them."""
    return ", ".join(f"`{spelled((path,), name)}`" for path, name in slots)
