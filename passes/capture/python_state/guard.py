"""Guard: checks in each call that the attributes have the values with which a graph was captured.

NOTE [When a graph is still right]
If forward reads `self.drop.p` or `self.config.tau`, the graph depends on the value. So each attribute that forward
reads is noted, with its value: plain values, containers and objects by their contents, functions with their closures,
tensors by identity (or by their kind, if the attribute is opened and they are inputs: `walk.py`). Attributes
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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotp import torch_internals as internals
from autotp.distributed.cut_tensors.sharded_tensor import Sharded
from autotp.passes.capture.python_state.code_names import CodeName, Named, is_library, settings_in
from autotp.passes.capture.python_state.contents import unchanged, version_of
from autotp.passes.capture.python_state.freeze import Itself, diff, freeze, without_number
from autotp.passes.capture.python_state.walk import (
    ATTRIBUTES,
    GONE,
    VIEWS,
    Path,
    Slot,
    is_container,
    is_internal,
    is_opaque,
    is_weight_list,
    slot_of,
    spelled,
    walk,
)
from autotp.source_location import calling_frame, is_users

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
ASK_FOR_OTHERS = (("autotp.passes.capture.repeats.repeats", "get"), ("torch.nn.modules.module", "__dir__"))
"""Functions that read `__dict__` for their caller: `dir(module)`, too."""
KEYS = "__dict__"
"""The name of the slot that stands for the names of a module's attributes: code that reads `__dict__` sees these."""


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
    """Returns an attribute of a module or its class; GONE for parameters, buffers, modules and methods."""
    if name == KEYS:
        return frozenset(key for key in vars(module) if not is_internal(key))
    if name in vars(module):
        return vars(module)[name]
    if any(name in table for table in (module._parameters, module._buffers, module._modules)):
        return GONE  # `structure` compares these.
    class_value = next((vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)), GONE)
    return GONE if hasattr(type(class_value), "__get__") else class_value


SettingPlace = Slot | CodeName


class Changed(NamedTuple):
    """An attribute or a name that has another value now, and the keys that lead to the first difference in it."""

    place: SettingPlace
    keys: tuple[Any, ...]

    def __str__(self) -> str:
        path = (str(self.place),) if isinstance(self.place, CodeName) else self.place
        return f"`{spelled(path, *self.keys)}`"


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
        self.numbers: dict[SettingPlace, set[Path]] = {}
        for path in numbers:
            self.numbers.setdefault(slot_of(path), set()).add(tuple(key for key in path[2:] if key != ATTRIBUTES))
        self.paths = {id(vars(module)): path for path, module in modules.items()}
        places: list[SettingPlace] = [*sorted(slots), *named]
        self.forms = {place: self._form(place) for place in places}
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
        if any(self._form(slot) != self.forms[slot] for slot in self.written):
            return False
        same = all(map(operator.is_, map(dict.get, self.tables, self.names, repeat(GONE)), self.objects))
        same = same and self.named.are(self.of_names)
        if not same or not all(is_same() for is_same in self.contents):
            # Most often the first new object has another value. Where all values are equal, the new objects are
            # compared from now on.
            if any(self._form(place) != self.forms[place] for place in self._others()) or self.changed():
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

    def changed(self) -> list[Changed]:
        """Returns the attributes and names whose values have changed."""
        differences = ((place, diff(form, self._form(place))) for place, form in self.forms.items())
        return [Changed(place, keys) for place, keys in differences if keys is not None]

    def holds_tensors(self, slot: Slot) -> bool:
        """True if an attribute now leads to tensors."""
        return any(isinstance(value, Tensor) for _, value in walk([(slot, self._now(slot))]))

    def _now(self, place: SettingPlace) -> Any:
        if isinstance(place, CodeName):
            return place.value
        module = self.modules.get(place[0])
        return GONE if module is None else self.look(module, place[1])

    def _form(self, place: SettingPlace) -> Any:
        """Returns the present value in a form that can be compared; of numbers that are inputs only that they are."""
        form = freeze(self._now(place), self._opened_form if place in self.opened else self._own_form)
        for path in self.numbers.get(place, ()):
            form = without_number(form, path)
        return form

    def _own_form(self, value: Any, freeze: Callable[[Any], Any]) -> Any:
        """Returns the form of a module, a tensor, a weak reference or a class of the user's."""
        if isinstance(value, nn.Module) and id(vars(value)) in self.paths:
            return nn.Module, self.paths[id(vars(value))]
        if isinstance(value, Tensor):
            return Itself(value), version_of(value)
        if isinstance(value, weakref.ref):
            return weakref.ref, freeze(value())
        if _is_setting(value):
            own = {name: x for name, x in vars(value).items() if not (hasattr(type(x), "__get__") or name[:2] == "__")}
            return Itself(value), freeze(own)
        return NotImplemented

    def _opened_form(self, value: Any, freeze: Callable[[Any], Any]) -> Any:
        """Returns the same; of tensors, which are inputs, only what selects a graph."""
        if isinstance(value, Tensor):
            return Tensor, value.dim(), value.dtype, value.cut if isinstance(value, Sharded) else None, value.layout
        return self._own_form(value, freeze)

    def _is_attribute(self, slot: Slot) -> bool:
        """True for an attribute that is no parameter, buffer or module; `structure` compares those."""
        module = self.modules.get(slot[0])
        tables = () if module is None else (module._parameters, module._buffers, module._modules)
        return module is not None and not any(slot[1] in table for table in tables)

    def _objects(self) -> list[Any]:
        return list(map(dict.get, self.tables, self.names, repeat(GONE)))

    def _contents(self) -> list[Callable[[], bool]]:
        """Returns for each object with contents a function that is True while it holds the same objects."""
        values = [self._now(slot) for slot in self.slots if slot not in self.opened]
        values += [name.value for name in settings_in(self.named)]
        return [unchanged(value) for _, value in walk([((), value) for value in values], "held") if _may_change(value)]


def _may_change(value: Any) -> bool:
    return is_container(value) or isinstance(value, (Tensor, *VIEWS)) or is_opaque(value) or _is_setting(value)


def _is_setting(value: Any) -> bool:
    return isinstance(value, type) and not is_library(value.__module__)
