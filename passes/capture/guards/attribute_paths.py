"""A model's attributes that are not parameters, buffers or modules, and the objects that they lead to.

A graph has only input and output tensors. `attribute_writes.py` finds the attributes that a model writes, `guard.py`
those that it reads. If a call writes an attribute that held tensors before, the attribute is *opened*: its tensors
become inputs of the graph.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
import warnings
import weakref
from collections import ChainMap, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autotp.passes.capture.guards.comparison import DEEPEST, LARGEST, PLAIN, SYMBOLIC, Frozen

Slot = tuple[str, str]
"""The path of a module, and the name of an attribute."""
Path = tuple[Any, ...]
"""The path of a module, the name of an attribute, and the keys and indices that lead on from it."""

STATE = "_autotp"
"""The one attribute that autotp adds to each module of a parallel model."""
INTERNAL = frozenset({*vars(nn.Module()), STATE, "_is_torch_compile"})
"""Attributes of every module that belong to torch or autotp: tables of parameters and children, hooks, the mode."""
TABLES = "its tables"
"""In a path: the tables of a module's buffers and parameters."""
WHOLE: Any = object()
"""Stands for the key where a container is replaced as a whole."""


def spelled(path: Path, key: Any = None) -> str:
    """Returns a path as the user writes it: `h.0.losses`, `config.tau`."""
    keys = [*path[1:], *([] if key is None or key is WHOLE else [key])]
    return ".".join([part for part in (path[0], *map(str, keys)) if part])


def slot_of(path: Path) -> Slot:
    """Returns the attribute that a path starts with."""
    return path[0], path[1]


# ---- containers and their contents


def is_object(value: Any) -> bool:
    """True for an object of a class written in Python, whose attributes can be listed."""
    return hasattr(value, "__dict__") and not isinstance(value, CLOSED)


CLOSED = (
    nn.Module, Tensor, type, enum.Enum, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, functools.partial, *SYMBOLIC, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
"""Types with attributes that are not treated as containers."""


MIXED = (list, dict, set, deque, tuple)
"""Types that hold items; the user's subclasses of them may hold attributes, too."""
VIEWS = (types.MappingProxyType,)
"""Types that show the items of a dict that other code may change."""


@dataclass(frozen=True)
class Attribute:
    """A key: the attribute of this name, of an object that also holds items."""

    name: str

    def __str__(self) -> str:
        return self.name


class Tables(ChainMap[str, Any]):
    """The buffers and parameters of a module, by name."""


def key_of(value: Any) -> int:
    """Returns the `id` of a value; for a module that of its `__dict__`, because the exporter replaces modules."""
    return id(vars(value)) if isinstance(value, nn.Module) else id(value)


def is_internal(key: str) -> bool:
    """True for the name of an attribute that torch or autotp keeps on a module."""
    return key in INTERNAL or key.startswith("__")  # `fully_shard` uses such names.


def is_weight_list(module: nn.Module, key: str) -> bool:
    """True for a list in which torch's recurrent layers keep their weights; they rebuild it by themselves."""
    return isinstance(module, nn.RNNBase) and key.startswith("_flat_weight")


def is_container(value: Any) -> bool:
    """True for an object that a call may change in place."""
    return isinstance(value, (list, dict, set, deque)) or is_object(value)


def children(value: Any) -> list[tuple[Any, Any]]:
    """Returns the (key, value) pairs in a module's attributes, a container or a tuple."""
    if isinstance(value, nn.Module):
        attributes = [(key, item) for key, item in vars(value).items() if not is_internal(key)]
        if STATE in vars(value):  # Its `forward` runs the graph. What the user gave is in the state.
            attributes = [pair for pair in attributes if pair[0] != "forward"]
        return [pair for pair in attributes if not is_weight_list(value, pair[0])]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, (list, tuple, deque)):
        items = list(enumerate(value))
    elif isinstance(value, (dict, Tables, *VIEWS)):
        items = list(value.items())
    if isinstance(value, MIXED) and type(value) not in MIXED:  # The user's subclass: items and attributes.
        return [*items, *((Attribute(key), item) for key, item in getattr(value, "__dict__", {}).items())]
    return items or (list(vars(value).items()) if is_object(value) else [])


def is_opaque(value: Any) -> bool:
    """True for an object whose state cannot be listed: an array, an iterator, an object with `__slots__`."""
    plain = (
        *CLOSED,
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        tuple,
        torch.dtype,
        torch.device,
        torch.Generator,
    )
    return type(value) is not object and not (is_container(value) or isinstance(value, (*plain, *VIEWS)))


def state_of_opaque(value: Any) -> Any:
    """Returns the state of an opaque object in a form that can be compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns that it will stop pickling iterators.
        return repr(Frozen({})(value)) if not isinstance(value, np.ndarray) else (value.shape, value.tobytes())


def hidden(value: Any, globals_too: bool = True) -> list[Any]:
    """Returns the objects that a function holds (closure, defaults, bound object), or that a weak reference refers to.

    Args:
        globals_too: whether containers count that the function reads as globals.
    """
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, value.keywords, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | None):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if _is_filled(cell)]
        named = [value.__globals__.get(name) for name in value.__code__.co_names] if globals_too else []
        containers = [item for item in named if isinstance(item, (list, dict, set, deque))]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*(cell.cell_contents for cell in cells), *defaults, *containers]
    return []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  Reading is the only test.
    except ValueError:
        return False
    return True


def below(value: Any, path: Path, visited: dict[int, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields a value and all values that it leads to, each once, with their paths; does not enter modules."""
    if key_of(value) in visited or type(value) in (*PLAIN, *SYMBOLIC) or len(visited) > LARGEST or len(path) > DEEPEST:
        return
    visited[key_of(value)] = value
    yield path, value
    for key, item in [] if isinstance(value, nn.Module) else children(value):
        yield from below(item, (*path, key), visited)


def everything(model: nn.Module) -> Iterator[tuple[Path, Any]]:
    """Yields all modules of a model and all values that their attributes lead to, each once, with their paths."""
    visited: dict[int, Any] = {}
    modules = list(model.named_modules())
    for path, module in modules:
        visited[key_of(module)] = module
        yield (path,), module
    for path, module in modules:
        for key, item in children(module):
            yield from below(item, (path, key), visited)


def reached(model: nn.Module, aside: Iterable[Any] = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the same as `everything`, and the objects that functions among these hold (`hidden`).

    Args:
        aside: values that are not among the model's attributes. Their path is empty.
    """
    visited: set[int] = set()
    for path, value in itertools.chain(everything(model), (((), current) for current in aside)):
        queue = [value]
        while queue and len(visited) < LARGEST:
            current = queue.pop()
            if key_of(current) not in visited:
                visited.add(key_of(current))
                yield path, current
                queue += hidden(current)


def found_at(modules: Mapping[str, nn.Module], path: Path) -> Any:
    """Returns the value at a path.

    Raises:
        LookupError: there is none.
    """
    value: Any = modules[path[0]]
    for key in path[1:]:
        if key == TABLES:
            value = Tables(value._buffers, value._parameters)
        elif isinstance(key, Attribute):
            value = vars(value)[key.name]
        elif isinstance(value, (list, tuple, dict, deque, Tables, *VIEWS)):
            value = value[key]
        elif key is not WHOLE:
            value = vars(value)[key]
    return value


def put_at(modules: Mapping[str, nn.Module], path: Path, value: Any) -> None:
    """Puts a value at a path; replaces tuples on the way by new tuples."""
    *holder_path, key = path
    holder: Any = found_at(modules, tuple(holder_path))
    if isinstance(key, Attribute):
        vars(holder)[key.name] = value
    elif isinstance(holder, tuple):
        items = [value if i == key else item for i, item in enumerate(holder)]
        put_at(modules, tuple(holder_path), type(holder)(*items) if hasattr(holder, "_fields") else tuple(items))
    elif isinstance(holder, (list, dict, deque)):
        holder[key] = value
    else:
        vars(holder)[key] = value


def values_at(model: nn.Module, slots: Collection[Slot], numbers: Collection[Path]) -> dict[Path, Any]:
    """Path -> value, for all tensors in some attributes and for the whole numbers at some paths."""
    modules, visited, values = dict(model.named_modules()), dict[int, Any](), dict[Path, Any]()
    weight_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, name in sorted(slot for slot in slots if slot[0] in modules):
        value = vars(modules[path]).get(name)
        inside = below(value, (path, name), visited)
        values |= {place: item for place, item in inside if isinstance(item, Tensor) and id(item) not in weight_ids}
    for place in sorted(numbers, key=str):
        try:
            values[place] = found_at(modules, place)
        except LookupError:
            continue
    return {place: item for place, item in values.items() if isinstance(item, Tensor) or type(item) is int}


def without_numbers(value: Any, numbers: Collection[Path]) -> Any:
    """Returns a value with the whole numbers at some paths, relative to the value, replaced by `int`."""
    if () in numbers and type(value) is int:
        return int
    inside = {path[0]: {p[1:] for p in numbers if p and p[0] == path[0]} for path in numbers if path}
    if isinstance(value, dict) and inside:
        return {key: without_numbers(item, inside.get(key, ())) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and inside:
        return [without_numbers(item, inside.get(i, ())) for i, item in enumerate(value)]
    if is_object(value) and inside:
        return type(value), {key: without_numbers(item, inside.get(key, ())) for key, item in vars(value).items()}
    return value
