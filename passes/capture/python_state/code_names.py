"""Class attributes and globals that the code of a model names.

    class Block(nn.Module):
        scale = 2                                     `Block.scale`: of a class
        def forward(self, x):
            return self.helper(x) * type(self).scale  `Block.helper`: of a class, a method
        def helper(self, x):
            return clamped(x, LIMIT)                  `clamped`, `LIMIT`: globals of Python

NOTE [What code names]
Python does not report assignments to classes and globals, so they are compared in each call. The names to compare are
found in the code: it starts with the attributes that forward reads, and follows the names in methods to further
methods. A user's function is a scope, too: its code, defaults and attributes, and the variables of enclosing functions,
which `nonlocal` and decorators set. Not seen are names that are composed at run time (`getattr(type(self),
f"act_{kind}")`) and names in torch's own code (but `torch.relu` in the user's code is). For transformers and
peft, only names in the methods of their modules are compared.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor, nn

from autotp.errors import Error
from autotp.model_library import library
from autotp.passes.capture.python_state.contents import Contents, changed_keys
from autotp.passes.capture.python_state.freeze import LARGEST, PLAIN, cells_of
from autotp.passes.capture.python_state.walk import GONE, everything, is_container

LIBRARIES = ("torch", "numpy", "autotp")
"""Packages whose code is not followed; libraries of models are a further case (`has_models_in`)."""
STANDARD = sysconfig.get_path("stdlib")
"""The folder of Python's own modules."""
SETTINGS = (
    list, dict, set, tuple, deque, ChainMap, UserDict, UserList, types.SimpleNamespace, Namespace, bytearray, array,
    np.ndarray, functools.partial, types.MethodType,
)  # fmt: skip
"""Types of Python and numpy whose contents may change, and their subclasses."""
OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")
"""Attributes of a function that can be assigned."""
IMPLIED = frozenset(
    f"__{name}__"
    for name in (
        *("call", "getattr", "getattribute", "getitem", "len", "iter", "next", "contains", "bool", "enter", "exit"),
        *("float", "int", "index", "eq", "lt", "le", "gt", "ge", "hash", "neg", "abs", "torch_function", "get"),
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    )
)
"""Methods that code calls without naming them."""
WRAPPED = (staticmethod, classmethod, functools.partialmethod, functools.cached_property)


@dataclass(frozen=True, eq=False)
class Scope:
    """A class, the globals of a module of Python, or a function.

    Attributes:
        title: its name for the user.
        table: its present values by name.
        kind: the class; None for globals and functions.
    """

    title: str
    table: Mapping[str, Any]
    kind: type | None = None

    def put(self, name: str, value: Any) -> None:
        """Gives a name a value; GONE deletes the name."""
        if self.kind is None:
            self.table.pop(name, None) if value is GONE else self.table.update({name: value})  # type: ignore[attr-defined]
        elif value is not GONE:
            setattr(self.kind, name, value)
        elif name in self.table:
            delattr(self.kind, name)


class Inside(MutableMapping[str, Any]):
    """The parts of a function: `OF_FUNCTIONS`, and the variables of enclosing functions, by name."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        named_cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        # `super()` makes this cell. It holds the class itself, which is a scope of its own.
        self.cells = {name: cell for name, cell in named_cells if name != "__class__"}

    def __getitem__(self, name: str) -> Any:
        if name in OF_FUNCTIONS:
            return getattr(self.function, name)
        try:
            return self.cells[name].cell_contents
        except ValueError:  # An empty cell.
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter((*OF_FUNCTIONS, *self.cells))

    def __len__(self) -> int:
        return len(OF_FUNCTIONS) + len(self.cells)


@dataclass(frozen=True)
class CodeName:
    """A name in a scope."""

    scope: Scope
    name: str

    def __str__(self) -> str:
        return f"{self.scope.title}.{self.name}"

    @property
    def value(self) -> Any:
        """Its present value."""
        return self.scope.table.get(self.name, GONE)


@dataclass(frozen=True)
class Assignment:
    """A name that a call sets, and its new, plain value."""

    name: CodeName
    value: Any

    def __str__(self) -> str:
        return str(self.name)

    def assign(self) -> None:
        """Sets the name."""
        self.name.scope.put(self.name.name, self.value)


@dataclass(frozen=True)
class Named:
    """The names that a model's code reads, scope by scope."""

    scopes: tuple[tuple[Scope, tuple[str, ...]], ...] = ()

    def __iter__(self) -> Iterator[CodeName]:
        return (CodeName(scope, name) for scope, names in self.scopes for name in names)

    def values(self) -> list[tuple[Any, ...]]:
        """Returns the present values, scope by scope."""
        return [tuple(map(scope.table.get, names)) for scope, names in self.scopes]

    def are(self, then: list[tuple[Any, ...]]) -> bool:
        """True if every name still has the same object as in `then`."""
        return all(
            all(map(is_, map(scope.table.get, names), values))
            for (scope, names), values in zip(self.scopes, then, strict=True)
        )


def is_followed(cls: type) -> bool:
    """True for a class whose attributes are compared in each call: the user's own, or one of a library of models."""
    module: Any = cls.__module__
    return not is_library(module) or (isinstance(module, str) and library().has_models_in(module.partition(".")[0]))


def is_library(module: Any) -> bool:
    """True for a module of Python whose code is a library's: Python's own, torch, numpy, autotp, or one of models.

    A user's file may have the name of one of Python's modules: `token.py`, a folder `test`. The class of functions that
    Cython compiled has a descriptor in place of a name.
    """
    if not isinstance(module, str):
        return True
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        file = getattr(sys.modules.get(package), "__file__", None)
        return file is None or file.startswith(STANDARD)
    return library().has_models_in(package) or (package in LIBRARIES and not module.startswith("autotp.models."))


def is_setting(value: Any) -> bool:
    """True for a value whose contents may change."""
    cls = type(value)
    if isinstance(value, types.BuiltinMethodType):
        return is_setting(value.__self__)  # A method of a dict, such as `OPTIONS.get`.
    return isinstance(value, (Tensor, *SETTINGS)) or not is_library(cls.__module__)


def named(model: nn.Module, read: Collection[str], class_of: Any = type) -> Named:
    """Returns the names that a model's code reads.

    Args:
        read: names of attributes that forward reads.
        class_of: returns the class whose code a module runs.
    """
    return _followed(model, read, class_of).named()


def _followed(model: nn.Module, read: Collection[str], class_of: Any = type) -> _Following:
    """Returns the names that a model's code reads, and the classes, globals and functions that it leads to."""
    search = _Following(set(read) | {"forward"} | IMPLIED, frozenset(read))
    for module in model.modules():
        search.add_class(class_of(module))
    for _, value in everything(model, "held"):
        if isinstance(value, types.FunctionType):
            search.add_function(value)
        elif isinstance(value, type) and not is_library(value.__module__):
            search.add_class(value)
        elif not isinstance(value, (nn.Module, type)):
            search.add_class(type(value))
    search.follow()
    return search


class NamedBefore:
    """The values of the names in a model's code before a run of the model.

    Attributes:
        scopes: each with its values: all of a class; of a Python module those that code names.
        contents: containers in classes, and their contents.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = {cls for module in model.modules() for cls in type(module).__mro__ if not is_library(cls.__module__)}
        search = _followed(model, {name for cls in kinds for name in vars(cls)})
        classes = [scope for cls, scope in search.classes.items() if not is_library(cls.__module__)]
        scopes = [(scope, list(scope.table)) for scope in classes]
        scopes += [(scope, list(names)) for scope, names in search.elsewhere() if not is_library(scope.title)]
        self.scopes = [(scope, {n: scope.table.get(n, GONE) for n in names if _is_own(n)}) for scope, names in scopes]
        class_names = [CodeName(scope, name) for scope in classes for name in scope.table if name in search.names]
        settings = [setting for setting in class_names if _is_own(setting.name) and is_setting(setting.value)]
        self.contents = [(setting, Contents(setting.value)) for setting in settings if is_container(setting.value)]

    def _changed(self) -> list[tuple[CodeName, Any, Any]]:
        """Returns each name that has another object now, with the old and the new object."""
        changed = []
        for scope, then in self.scopes:
            # A class may get new names during the run. Of a module of Python, which others write into, only the code's
            # names count.
            names = {*then, *(filter(_is_own, scope.table) if scope.kind is not None else ())}
            now = {name: scope.table.get(name, GONE) for name in names}
            pairs = sorted(changed_keys(then, now).items())
            changed += [(CodeName(scope, name), then.get(name, GONE), value) for name, value in pairs]
        return changed

    def changes(self) -> list[Assignment]:
        """Returns the names that were set.

        Raises:
            Error: a name was set to a value that is not plain, or the contents of a class attribute changed.
        """
        inside = [setting for setting, contents in self.contents if not contents.is_same()]
        changed = self._changed()
        odd = inside + [name for name, _, now in changed if now is not GONE and type(now) not in PLAIN]
        if odd:
            description = "an attribute of its class" if odd[0].scope.kind is not None else "a global of Python"
            raise Error(
                f"forward changes `{odd[0]}`, {description}, which a graph cannot do",
                fix="set an attribute of the module (`self.name = value`), which is put back after each call",
            )
        return [Assignment(name, now) for name, _, now in changed]

    def restore(self) -> None:
        """Restores all values and contents."""
        for name, was, _ in self._changed():
            Assignment(name, was).assign()
        for _, contents in self.contents:
            contents.restore()


@dataclass
class _Following:
    """The state of the search: the names found so far, and the code that they lead to."""

    names: set[str]
    read: frozenset[str]
    classes: dict[type, Scope] = field(default_factory=dict)
    globals: dict[int, tuple[Scope, set[str]]] = field(default_factory=dict)
    modules: dict[int, Scope] = field(default_factory=dict)
    functions: dict[int, types.FunctionType] = field(default_factory=dict)
    todo: list[types.FunctionType] = field(default_factory=list)

    def add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if base not in self.classes and (is_followed(base) or "forward" in vars(base)):
                self.classes[base] = Scope(base.__qualname__.rpartition("<locals>.")[2], base.__dict__, base)
                # The metaclass, whose `__call__` and properties a use of the class runs.
                self.add_class(type(base))

    def add_function(self, function: types.FunctionType) -> None:
        if id(function) not in self.functions and len(self.functions) < LARGEST:
            self.functions[id(function)] = function
            self.todo.append(function)

    def follow(self) -> None:
        """Goes from names to code and from code to names until there are no new ones."""
        count = -1
        while count != (count := len(self.names) + len(self.classes) + len(self.functions)):
            for cls, scope in list(self.classes.items()):
                if is_followed(cls):
                    for name in scope.table.keys() & self.names:
                        self._add_code(scope.table[name])
            for module in [module for module in self.modules.values() if not is_library(module.title)]:
                for name in module.table.keys() & self.names:
                    self._add_value(module.table[name])
            while self.todo:
                self._read(self.todo.pop())

    def _add_code(self, value: Any) -> None:
        """Follows the value of a class attribute."""
        if isinstance(value, property):
            for part in (value.fget, value.fset):
                self._add_code(part)
        elif isinstance(value, WRAPPED):
            self._add_code(getattr(value, "__func__", None) or getattr(value, "func", None))
        elif isinstance(value, types.FunctionType):
            self.add_function(value)
        elif isinstance(value, CALLED):
            self._add_code(called_by(value))

    def _add_value(self, value: Any) -> None:
        """Follows the value of a global, if it is the user's own."""
        if isinstance(value, types.FunctionType) and not is_library(value.__module__ or ""):
            self.add_function(value)
        elif isinstance(value, CALLED):
            self._add_value(called_by(value))
        elif isinstance(value, type) and not is_library(value.__module__):
            self.add_class(value)
        elif isinstance(value, types.ModuleType):
            self.modules.setdefault(id(value), Scope(value.__name__, vars(value)))
        elif not isinstance(value, (type, types.ModuleType)) and not is_library(type(value).__module__):
            self.add_class(type(value))

    def _read(self, function: types.FunctionType) -> None:
        names, of_globals = _names_in(function.__code__)
        users = not is_library(function.__module__ or "")
        self.names |= names
        table = function.__globals__
        scope = self.globals.setdefault(id(table), (Scope(str(table.get("__name__", "?")), table), set()))
        for name in of_globals:
            # A name that is not there yet may be set before a later call. That of a builtin counts where the module
            # hides it.
            if name in table or name not in vars(sys.modules["builtins"]):
                scope[1].add(name)
                if users and name in table:
                    self._add_value(table[name])
        for value in cells_of(function).values():
            self._add_code(value)
            self._add_value(value)

    def named(self) -> Named:
        """Returns the names found."""
        class_scopes = []
        own_names = [vars(cls).keys() & self.names for cls in self.classes if not is_library(cls.__module__)]
        somewhere = self.read.union(*own_names)  # A subclass may be given such a name later, and hide that of its base.
        for cls, scope in self.classes.items():
            relevant_names = self.names if is_followed(cls) else {"forward"}
            present_names = set[str]().union(*map(vars, cls.__mro__), () if is_library(cls.__module__) else somewhere)
            class_scopes.append((scope, tuple(sorted(filter(_is_own, relevant_names & present_names)))))
        return Named(tuple((scope, names) for scope, names in (*class_scopes, *self.elsewhere()) if names))

    def elsewhere(self) -> Iterator[tuple[Scope, tuple[str, ...]]]:
        """Yields the names in functions, and in modules of Python."""
        for function in self.functions.values():
            if not is_library(function.__module__ or ""):
                title = f"{function.__module__}.{function.__qualname__.rpartition('<locals>.')[2]}"
                inside = Inside(function)
                yield Scope(title, inside), tuple(inside)
        for scope, names in self.globals.values():
            yield scope, tuple(sorted(names))
        for scope in self.modules.values():
            yield scope, tuple(sorted(filter(_is_own, scope.table.keys() & self.names)))


def _is_own(name: str) -> bool:
    """False for a name that Python itself uses."""
    return not name.startswith("__") or name in IMPLIED


CALLED = (functools.partial, types.MethodType, functools._lru_cache_wrapper)


def called_by(value: Any) -> Any:
    """Returns the function that a partial, a bound method or a cached function calls."""
    return next(getattr(value, name) for name in ("func", "__func__", "__wrapped__") if hasattr(value, name))


@functools.cache
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of the attributes and of the globals that code reads."""
    attributes, of_globals = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"):
            of_globals.add(step.argval)
        elif "ATTR" in step.opname or "METHOD" in step.opname:
            attributes.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for names, nested_names in zip((attributes, of_globals), _names_in(constant), strict=True):
                names |= nested_names
        elif type(constant) is str and constant.isidentifier():
            attributes.add(constant)  # `getattr(self, "scale")`
    return frozenset(attributes), frozenset(of_globals)


def settings_in(names: Iterable[CodeName]) -> list[CodeName]:
    """Returns the names whose contents may change, from user code only: libraries keep caches and loggers there."""
    user_names = [name for name in names if not is_library(_module_of(name.scope))]
    return [name for name in user_names if is_setting(name.value)]


def _module_of(scope: Scope) -> str:
    return scope.title if scope.kind is None else scope.kind.__module__
