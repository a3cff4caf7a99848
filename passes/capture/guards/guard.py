"""Guard: checks in each call that the attributes have the values with which a graph was captured.

NOTE [When a graph is still right]
If forward reads `self.drop.p` or `self.config.tau`, the graph depends on the value. So each attribute that forward
reads is noted, with its value: plain values, containers and objects by their contents, functions with their closures,
tensors by identity (or by their kind, if the attribute is opened and they are inputs: `attribute_paths.py`). Attributes
of classes and globals that its code names are noted, too (`code_names.py`). Each call first checks that all of these
are the same objects and hold the same objects; values are compared only where an object differs. The state of classes
written in C cannot be seen.

NOTE [Compiled calls]
Dynamo would trace each of these comparisons. Compiled calls compare `Tree.version` only, which counts assignments to
modules.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from autotp import torch_internals as internals
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.passes.capture.guards.attribute_paths import (
    MIXED,
    VIEWS,
    Path,
    Slot,
    below,
    hidden,
    is_container,
    is_internal,
    is_opaque,
    is_weight_list,
    spelled,
    state_of_opaque,
    without_numbers,
)
from autotp.passes.capture.guards.attribute_writes import content_of, same_content
from autotp.passes.capture.guards.code_names import CodeName, Named, is_library, settings_in
from autotp.passes.capture.guards.comparison import Frozen
from autotp.source_location import calling_frame, is_users

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
ASK_FOR_OTHERS = (("autotp.passes.capture.repeats.repeats", "get"), ("torch.nn.modules.module", "__dir__"))
"""Functions that read `__dict__` for their caller: `dir(module)`, too."""
KEYS = "__dict__"
"""The name of the slot that stands for the names of a module's attributes: code that reads `__dict__` sees these."""
MISSING: Any = object()
"""Stands for the value of an attribute that does not exist."""


class Reads:
    """The attributes that are read while a model is captured."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(vars(module)): path for path, module in model.named_modules()}
        self.seen: set[tuple[int, str]] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A region in which each read of a module's attribute is noted."""
        note, get = self.seen.add, internals.READS_ATTRIBUTE.original()

        def read(module: nn.Module, name: str) -> Any:
            table = get(module, "__dict__")
            if name != "__dict__":
                note((id(table), name))
            elif is_users(_asking(calling_frame())):
                for key in (KEYS, *table):
                    note((id(table), key))
            return get(module, name)

        with internals.READS_ATTRIBUTE.replaced_by(read):
            yield

    def slots(self, repeats: Sequence[tuple[nn.Module, nn.Module]] = ()) -> frozenset[Slot]:
        """Returns the attributes that were read.

        Args:
            repeats: pairs of a captured block and a later block that repeats it: the second counts as reading the same.

        A `forward` that is set on a module counts as read.
        """
        reads = {(self.paths[table_id], name) for table_id, name in self.seen if table_id in self.paths}
        modules = dict(self.model.named_modules())
        reads = {(path, name) for path, name in reads if not is_weight_list(modules[path], name)}
        slots = {slot for slot in reads if slot[1] == KEYS or not is_internal(slot[1])}
        for first, later in repeats:
            start, to = self.paths[id(vars(first))], self.paths[id(vars(later))]
            inside = [(path, name) for path, name in slots if path == start or path.startswith(f"{start}.")]
            slots |= {(to + path[len(start) :], name) for path, name in inside}
        hooks = {(path, name) for path, module in self.model.named_modules() for name in HOOKS if vars(module)[name]}
        return frozenset(slots | hooks | {(path, "forward") for path in self.paths.values()})


def _asking(frame: types.FrameType) -> types.FrameType:
    """Returns the frame that reads an attribute, behind the `__getattribute__` that also notes reads for repeats."""
    while frame.f_back is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) in ASK_FOR_OTHERS:
        frame = frame.f_back
    return frame


Look = Callable[[nn.Module, str], Any]


def looked_up(module: nn.Module, name: str) -> Any:
    """Returns an attribute of a module or its class; MISSING for parameters, buffers, modules and methods."""
    if name == KEYS:
        return sorted(key for key in vars(module) if not is_internal(key))
    if name in vars(module):
        return vars(module)[name]
    if any(name in table for table in (module._parameters, module._buffers, module._modules)):
        return MISSING  # `structure` compares these.
    class_value = next((vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)), MISSING)
    return MISSING if hasattr(type(class_value), "__get__") else class_value


class _Values(Frozen):
    """Turns values into a form that can be compared; tensors of opened attributes by their kinds."""

    def __init__(self, modules: Mapping[str, nn.Module], opened: bool) -> None:
        super().__init__({id(vars(module)): path for path, module in modules.items()})
        self.opened = opened

    def _object(self, value: Any) -> Any:
        if isinstance(value, Tensor) and self.opened:
            cut = value.cut if isinstance(value, Sharded) else None
            return "tensor", value.dim(), value.dtype, cut, value.layout
        if isinstance(value, Tensor):
            return *self._itself(value), version_of(value)
        if isinstance(value, weakref.ref):
            return "weak", self(value())
        if isinstance(value, types.MappingProxyType):
            return "proxy", [(self(key), self(item)) for key, item in value.items()]
        return super()._object(value)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, type) and not is_library(value.__module__) and id(value) not in self.seen:
            self.seen[id(value)] = "around"
            members = [(name, self(item)) for name, item in vars(value).items() if not hasattr(type(item), "__get__")]
            self.seen[id(value)] = id(value), [pair for pair in members if not pair[0].startswith("__")]
            self.kept.append(value)
        if isinstance(value, type) and id(value) in self.seen:
            return self.seen[id(value)]
        return super().__call__(value)


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Returns how often a tensor was written into, and where its values are: `x.data = y` counts as no write.

    0 for inference tensors, which do not count, and for tensors without memory of their own.
    """
    real = type(tensor) is Tensor and tensor.layout is torch.strided
    real = real and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr() if real else 0


SettingPlace = Slot | CodeName


class Guard:
    """The values of attributes, and of names in code, with which a graph was captured.

    Args:
        slots: the attributes that were read.
        opened: attributes whose tensors are inputs.
        numbers: paths of the whole numbers that are inputs.
        written: attributes that calls write. Their values are compared in each call, and those of opened attributes:
            user code may change a container in place.
        modules: the modules by path.
        look: returns the value of an attribute.
        table: returns the dict in which a module keeps an attribute of this name.
        named: the names that the model's code reads.
        version: the version of the tree.
    """

    def __init__(
        self,
        slots: frozenset[Slot],
        opened: frozenset[Slot],
        numbers: frozenset[Path],
        written: frozenset[Slot],
        modules: Mapping[str, nn.Module],
        look: Look,
        table: Look,
        named: Named,
        version: int,
    ) -> None:
        self.opened, self.modules, self.look = opened, modules, look
        self.written = (written | opened) & slots | {slot for slot in slots if slot[1] == KEYS}
        self.named, self.version = named, version
        self.numbers: dict[Slot, set[Path]] = {}
        for path in numbers:
            self.numbers.setdefault((path[0], path[1]), set()).add(path[2:])
        self.kept: list[Any] = []
        self.values: dict[SettingPlace, Any] = {slot: self._value(slot, keep=True) for slot in sorted(slots)}
        self.values |= {name: self._value(name, keep=True) for name in named}
        # For speed, each call compares the objects of all slots with `map`, in loops of C.
        self.slots = [slot for slot in sorted(slots - self.written) if self._is_attribute(slot)]
        self.tables = [table(modules[path], name) for path, name in self.slots]
        self.names = [name for _, name in self.slots]
        self.objects, self.of_names = self._objects(), named.values()
        self.contents = self._contents()

    def holds(self, version: int) -> bool:
        """True if all values are unchanged."""
        if torch.compiler.is_compiling():  # NOTE [Compiled calls]
            return version == self.version
        if any(self._value(slot) != self.values[slot] for slot in self.written):
            return False
        unchanged = all(map(operator.is_, map(dict.get, self.tables, self.names, repeat(MISSING)), self.objects))
        unchanged = unchanged and self.named.are(self.of_names)
        if not unchanged or not all(is_same() for is_same in self.contents):
            if any(self._value(place) != self.values[place] for place in self._others()) or self.changed():
                return False
            self.objects, self.of_names, self.contents = self._objects(), self.named.values(), self._contents()
        self.version = version
        return True

    def _others(self) -> list[SettingPlace]:
        """Returns the places that have another object now; most often its value differs, too."""
        slots = zip(self.slots, self.objects, self._objects(), strict=True)
        names = zip(self.named, chain(*self.of_names), chain(*self.named.values()), strict=True)
        places: list[SettingPlace] = [slot for slot, then, now in slots if now is not then]
        return places + [name for name, then, now in names if now is not then]

    def changed(self) -> list[SettingPlace]:
        """Returns the places whose values have changed."""
        return [place for place in self.values if self._value(place) != self.values[place]]

    def holds_tensors(self, slot: Slot) -> bool:
        """True if an attribute now leads to tensors."""
        return any(isinstance(value, Tensor) for _, value in below(self._now(slot), slot, {}))

    def _now(self, place: SettingPlace) -> Any:
        if isinstance(place, CodeName):
            return place.value
        module = self.modules.get(place[0])
        return MISSING if module is None else self.look(module, place[1])

    def _value(self, place: SettingPlace, keep: bool = False) -> Any:
        now = self._now(place)
        if place in self.numbers:
            now = without_numbers(now, self.numbers[place])
        values = _Values(self.modules, place in self.opened)
        if keep:
            self.kept.append(values)  # Keeps objects alive that are compared by their `id`.
        return values(now)

    def _is_attribute(self, slot: Slot) -> bool:
        """True for an attribute that is no parameter, buffer or module; `structure` compares those."""
        module = self.modules.get(slot[0])
        tables = () if module is None else (module._parameters, module._buffers, module._modules)
        return module is not None and not any(slot[1] in table for table in tables)

    def _objects(self) -> list[Any]:
        return list(map(dict.get, self.tables, self.names, repeat(MISSING)))

    def _contents(self) -> list[Callable[[], bool]]:
        """Returns for each container a function that is True while the container holds the same objects."""
        visited: dict[int, Any] = {}
        checks = []
        values = [self._now(slot) for slot in self.slots if slot not in self.opened]
        values += [name.value for name in settings_in(self.named)]
        for value in values:
            queue = [value]
            while queue:
                for _, item in below(queue.pop(), ("", ""), visited):
                    if is_container(item) or isinstance(item, (Tensor, *VIEWS)) or is_opaque(item) or _is_setting(item):
                        checks.append(_unchanged(item))
                    queue += hidden(item, globals_too=False)  # `named` has the globals.
        return checks


def _is_setting(value: Any) -> bool:
    return isinstance(value, type) and not is_library(value.__module__)


def _unchanged(value: Any) -> Callable[[], bool]:
    """Returns a function that is True while a container holds the same objects, or a tensor the same numbers."""
    if isinstance(value, Tensor):
        version = version_of(value)
        return lambda: version_of(value) == version
    if isinstance(value, weakref.ref):
        referent = value()
        return lambda: value() is referent
    if is_opaque(value):
        state = state_of_opaque(value)
        return lambda: bool(state_of_opaque(value) == state)
    if isinstance(value, type):
        names = dict(vars(value))
        return lambda: dict(vars(value)) == names
    if isinstance(value, set):
        items = frozenset(value)
        return lambda: bool(value == items)
    if type(value) is list:
        then = list(value)
        return lambda: len(value) == len(then) and all(map(operator.is_, value, then))
    table = value if type(value) is dict else getattr(value, "__dict__", None)
    if table is None or isinstance(value, (*VIEWS, *MIXED)):
        content = content_of(value)
        return lambda: same_content(content_of(value), content)
    keys, values = list(table), list(table.values())
    return lambda: len(table) == len(keys) and all(map(operator.is_, table, keys)) and all(
        map(operator.is_, table.values(), values)
    )  # fmt: skip


def spelled_places(places: Sequence[SettingPlace]) -> str:
    """Returns attributes and names as the user writes them."""
    return ", ".join(
        f"`{place if isinstance(place, CodeName) else spelled((place[0],), place[1])}`" for place in places
    )
