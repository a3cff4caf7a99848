"""freeze: a value in a form that can be compared, hashed and kept, while the value itself may change.

NOTE [Frozen values]

    a value                            its frozen form
    1, "a", torch.float32              class and value: 1, 1.0 and True differ, 0.0 and -0.0, too; all NaNs are equal
    a list, dict, set or array         class and contents
    a function, a method               its code, and what it holds
    a tensor, a module, C code         `Itself`: equal to the same object only
    any other object                   class, and what pickle would keep of it

A caller may decide otherwise for some values (`special`): a tensor by its shape or by a checksum, a module by its path,
an object of the user's by its `==`.
"""

from __future__ import annotations

import copyreg
import enum
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
LARGEST, DEEPEST = 10_000, 50
"""Limits of searches: the number of values, and the depth. Beyond them a value is equal to itself only."""
AROUND = "around"
"""The form of a value inside of itself."""

Special = Callable[[Any, Callable[[Any], Any]], Any]
"""Returns the form of a value, with a function that freezes what is inside; NotImplemented where nothing is special."""


class Form(NamedTuple):
    """The frozen contents of a container or object.

    Attributes:
        kind: its class.
        items: pairs of a frozen key, index or attribute name, and a frozen value.
    """

    kind: Any
    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, eq=False, repr=False)
class Itself:
    """Equal to another if both are of one object. Keeps the object alive: another one could get its `id`."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} {id(self.value)}>"  # Not its text: a tensor's is long.


@dataclass(frozen=True, eq=False)
class Equal:
    """Equal to another if they are of one object, or if the `==` of their objects returns True itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Equal):
            return False
        if self.value is other.value:
            return True
        try:
            return (self.value == other.value) is True
        except Exception:  # The user's `==` may raise anything, or compare element by element.
            return False

    def __hash__(self) -> int:
        # Objects that are equal need one hash, and a user's `__hash__` may be missing, or not agree with `==`.
        return 0


def freeze(value: Any, special: Special | None = None) -> Any:
    """Returns a value in a form that can be compared, hashed and kept. NOTE [Frozen values]"""
    return Freezer(special)(value)


def freeze_argument(value: Any) -> Any:
    """Returns the frozen form of an argument that is no tensor: that of a user's object is its `==`."""
    return freeze(value, _by_equality)


def _by_equality(value: Any, freeze: Callable[[Any], Any]) -> Any:
    by_contents = type(value) in (list, tuple, dict, set, bytearray) or isinstance(value, (np.ndarray, np.generic))
    return NotImplemented if by_contents else (type(value), Equal(value))


class Freezer:
    """Freezes values; an object among several values is frozen once, as it is then.

    Args:
        special: the values that have a form of their own.
    """

    def __init__(self, special: Special | None = None) -> None:
        self.special = special
        self.forms: dict[int, tuple[Any, Any]] = {}  # With the object, which keeps its `id`.
        self.count = self.depth = 0

    def __call__(self, value: Any) -> Any:
        self.count += 1
        cls = type(value)
        if cls in PLAIN:
            return cls, _plain(value)
        if id(value) not in self.forms:
            self.forms[id(value)] = AROUND, value
            self.depth += 1
            self.forms[id(value)] = self._form_of(value), value
            self.depth -= 1
        return self.forms[id(value)][0]

    def _form_of(self, value: Any) -> Any:
        if self.depth > DEEPEST or self.count > LARGEST:
            return _itself(value)
        if self.special is not None and (form := self.special(value, self)) is not NotImplemented:
            return form
        if isinstance(value, (type, enum.Enum)):
            return type(value), value
        if isinstance(value, SYMBOLIC):
            return type(value), value.node.expr
        if isinstance(value, (nn.Module, Tensor, types.ModuleType)):
            return _itself(value)
        return self._code(value) if isinstance(value, CODE) else self._contents(value)

    def _code(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            return types.MethodType, self(value.__func__), self(value.__self__)
        if isinstance(value, types.FunctionType):
            held = list(cells_of(value).values()), value.__defaults__, value.__kwdefaults__, vars(value)
            return types.FunctionType, Itself(value.__code__), *map(self, held)
        if isinstance(value.__self__, (list, dict, set, deque)):  # `options.get`
            return types.BuiltinMethodType, value.__name__, self(value.__self__)
        return Itself(value)

    def _contents(self, value: Any) -> Any:
        cls = type(value)
        if cls in (tuple, list):
            return self._form(cls, enumerate(value))
        if cls in (dict, types.MappingProxyType):
            return self._form(cls, value.items())
        if cls in (set, frozenset):
            # A set has no order, and its items may have classes that `<` does not compare.
            return cls, tuple(sorted(map(self, value), key=repr))
        if cls is bytearray:
            return cls, bytes(value)
        # The bytes of an array of objects are addresses.
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            return cls, value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, np.ndarray):
            return cls, value.shape, self(value.ravel().tolist())
        return self._pickled(value)

    def _form(self, kind: Any, items: Iterable[tuple[Any, Any]]) -> Form:
        return Form(kind, tuple([(self(key), self(item)) for key, item in items]))

    def _pickled(self, value: Any) -> Any:
        """Returns the form of an object by the parts that pickle would keep."""
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # The user's `__reduce_ex__` may raise anything.
            return Itself(value)
        if not isinstance(parts, tuple):
            return Itself(value)
        made_by, arguments, state, items, pairs = (*parts, None, None, None)[:5]
        entries: list[tuple[Any, Any]] = []
        if made_by is not copyreg.__newobj__ or len(arguments) > 1:  # type: ignore[attr-defined]
            entries += [("", made_by), ("", arguments)]
        tables = state if isinstance(state, tuple) else (state,)  # A class with `__slots__` has two.
        if all(table is None or type(table) is dict for table in tables):
            entries += [pair for table in tables if table is not None for pair in table.items()]
        else:
            entries += [("", state)]
        return self._form(type(value), [*entries, *enumerate(items or ()), *(pairs or ())])


CODE = (types.MethodType, types.FunctionType, types.BuiltinFunctionType)


def _itself(value: Any) -> Itself:
    """Returns the form of a value by identity. A module is its `__dict__`: the exporter makes other modules with it."""
    return Itself(object.__getattribute__(value, "__dict__") if isinstance(value, nn.Module) else value)


def cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Name -> value of each variable of enclosing functions that a function reads, and that has a value."""
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # The enclosing function has not set it yet.
            continue
    return cells


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and value else repr(value)
    return (_plain(value.real), _plain(value.imag)) if isinstance(value, complex) else value


def diff(before: Any, after: Any) -> tuple[Any, ...] | None:
    """Returns the keys that lead to the first difference of two frozen values; None if they are equal."""
    if before == after:
        return None
    if not (isinstance(before, Form) and isinstance(after, Form) and before.kind is after.kind):
        return ()
    then, now = dict(before.items), dict(after.items)
    for key in {**then, **now}:
        if (inside := diff(then.get(key), now.get(key))) is not None:
            return (key[1], *inside) if key[0] in (str, int) else ()
    return ()  # The order of a dict.


def without_number(form: Any, path: tuple[Any, ...]) -> Any:
    """Returns a frozen value in which the whole number at a path may be any."""
    if not path:
        return int if isinstance(form, tuple) and form[0] is int else form
    if not isinstance(form, Form):
        return form
    key = freeze(path[0])
    return Form(form.kind, tuple([(k, without_number(x, path[1:]) if k == key else x) for k, x in form.items]))
