"""A model's attributes that are not parameters, buffers or modules, and the objects below them.

A graph knows tensors that come in and tensors that go out. What a model writes besides is in `attribute_writes.py`,
what it reads in `guard.py`. An attribute that a call writes and that holds tensors before is *opened*: these are
inputs.
"""

from __future__ import annotations

import enum
import functools
import types
import warnings
import weakref
from collections import ChainMap, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autotp.passes.capture.guards.comparison import PLAIN, SYMBOLIC, Frozen

Slot = tuple[str, str]
"""The path of a module, and the name of an attribute."""
Path = tuple[Any, ...]
"""The path of a module, an attribute, and the keys and places below."""

STATE = "_autotp"
"""The one attribute that each module of a parallel model has besides its own."""
INTERNAL = frozenset({*vars(nn.Module()), STATE, "_is_torch_compile"})
"""What each module has of torch's and of autotp's own: the tables of what is in it, its hooks, its mode."""
LARGEST, DEEPEST = 10_000, 50
"""So many values of a model's attributes are looked at, and those no deeper."""
TABLES = "its tables"
"""In a path: buffers and parameters of a module, which are no attributes."""
WHOLE: Any = object()
"""Stands for the key of a container that is written whole."""


def spelled(path: Path, key: Any = None) -> str:
    """A place as the user writes it: `h.0.losses`, `config.tau`."""
    keys = [*path[1:], *([] if key is None or key is WHOLE else [key])]
    return ".".join([part for part in (path[0], *map(str, keys)) if part])


def slot_of(path: Path) -> Slot:
    """The attribute that a place lies below."""
    return path[0], path[1]


# ---- what is in what


def is_object(value: Any) -> bool:
    """True for an object of a class written in Python, whose attributes lie open."""
    return hasattr(value, "__dict__") and not isinstance(value, CLOSED)


CLOSED = (
    nn.Module, Tensor, type, enum.Enum, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, functools.partial, *SYMBOLIC, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
"""What has attributes, and is none the less no container."""


MIXED = (list, dict, set, deque, tuple)
"""What holds items, and, of a class of the user's own, attributes besides."""
VIEWS = (types.MappingProxyType,)
"""What shows the items of a dict, which others may change."""


@dataclass(frozen=True)
class Attribute:
    """A key: the attribute of this name, of what holds items besides."""

    name: str

    def __str__(self) -> str:
        return self.name


class Tables(ChainMap[str, Any]):
    """Buffers and parameters of a module."""


def key_of(value: Any) -> int:
    """What a value is known by: its `id`; of a module, for which the exporter puts others, that of its attributes."""
    return id(vars(value)) if isinstance(value, nn.Module) else id(value)


def is_internal(key: str) -> bool:
    """True for what torch or autotp keeps on a module."""
    return key in INTERNAL or key.startswith("__")  # `fully_shard` keeps its own under such names.


def is_container(value: Any) -> bool:
    """True for what a call may change in place."""
    return isinstance(value, (list, dict, set, deque)) or is_object(value)


def children(value: Any) -> list[tuple[Any, Any]]:
    """What lies in a module's attributes, a container or a tuple, by key."""
    if isinstance(value, nn.Module):
        weights = isinstance(value, nn.RNNBase)  # Of which torch keeps lists, made anew where others are put in.
        held = [(key, item) for key, item in vars(value).items() if not is_internal(key)]
        return [pair for pair in held if not (weights and pair[0].startswith("_flat_weight"))]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, (list, tuple, deque)):
        items = list(enumerate(value))
    elif isinstance(value, (dict, Tables, *VIEWS)):
        items = list(value.items())
    if isinstance(value, MIXED) and type(value) not in MIXED:  # The user's own kind of list: it may hold both.
        return [*items, *((Attribute(key), item) for key, item in getattr(value, "__dict__", {}).items())]
    return items or (list(vars(value).items()) if is_object(value) else [])


def is_opaque(value: Any) -> bool:
    """True for an object whose state lies not open: an array, an iterator, an object with `__slots__`."""
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
    return not (is_container(value) or isinstance(value, (*plain, *VIEWS)))


def state_of_opaque(value: Any) -> Any:
    """The state of such an object, as something to compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python will not pickle iterators for ever.
        return repr(Frozen({})(value)) if not isinstance(value, np.ndarray) else (value.shape, value.tobytes())


def hidden(value: Any, globals_too: bool = True) -> list[Any]:
    """What a function holds of its surroundings, or what a weak reference refers to."""
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
        containers = [one for one in named if isinstance(one, (list, dict, set, deque))]
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*(cell.cell_contents for cell in cells), *given, *containers]
    return []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  Nothing else tells.
    except ValueError:
        return False
    return True


def below(value: Any, path: Path, seen: dict[int, Any]) -> Iterator[tuple[Path, Any]]:
    """A value and all that lies below, each once, with where it lies; modules below are not entered."""
    if key_of(value) in seen or type(value) in (*PLAIN, *SYMBOLIC) or len(seen) > LARGEST or len(path) > DEEPEST:
        return
    seen[key_of(value)] = value
    yield path, value
    for key, item in [] if isinstance(value, nn.Module) else children(value):
        yield from below(item, (*path, key), seen)


def everything(model: nn.Module) -> Iterator[tuple[Path, Any]]:
    """All modules of a model, and what lies below their attributes, each once, with where it lies."""
    seen: dict[int, Any] = {}
    modules = list(model.named_modules())
    for path, module in modules:
        seen[key_of(module)] = module
        yield (path,), module
    for path, module in modules:
        for key, item in children(module):
            yield from below(item, (path, key), seen)


def reached(model: nn.Module) -> Iterator[tuple[Path, Any]]:
    """As `everything`, and what functions among it hold of their surroundings."""
    seen: set[int] = set()
    for path, value in everything(model):
        queue = [value]
        while queue and len(seen) < LARGEST:
            one = queue.pop()
            if key_of(one) not in seen:
                seen.add(key_of(one))
                yield path, one
                queue += hidden(one)


def found_at(modules: Mapping[str, nn.Module], path: Path) -> Any:
    """What lies at a place.

    Raises:
        LookupError: nothing does.
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
    """Puts a value at a place; a tuple on the way is made anew."""
    *way, key = path
    holder: Any = found_at(modules, tuple(way))
    if isinstance(key, Attribute):
        vars(holder)[key.name] = value
    elif isinstance(holder, tuple):
        items = [value if i == key else item for i, item in enumerate(holder)]
        put_at(modules, tuple(way), type(holder)(*items) if hasattr(holder, "_fields") else tuple(items))
    elif isinstance(holder, (list, dict, deque)):
        holder[key] = value
    else:
        vars(holder)[key] = value


def values_at(model: nn.Module, slots: Collection[Slot], numbers: Collection[Path]) -> dict[Path, Any]:
    """The tensors below some attributes, and whole numbers at some places, by where they lie."""
    modules, seen, found = dict(model.named_modules()), dict[int, Any](), dict[Path, Any]()
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, name in sorted(slot for slot in slots if slot[0] in modules):
        value = vars(modules[path]).get(name)
        inside = below(value, (path, name), seen)
        found |= {at: it for at, it in inside if isinstance(it, Tensor) and id(it) not in known}
    for at in sorted(numbers, key=str):
        try:
            found[at] = found_at(modules, at)
        except LookupError:
            continue
    return {at: it for at, it in found.items() if isinstance(it, Tensor) or type(it) is int}


def without_numbers(value: Any, numbers: Collection[Path]) -> Any:
    """A value with `int` in the place of the whole numbers at some places in it, which are relative to it."""
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
