"""walk: the one walk through the Python objects that a model leads to, and the paths of what it finds.

A graph has only input and output tensors. But a model has other attributes, and these hold lists, dicts, objects and
functions. `guard.py` compares those that forward reads, `attribute_writes.py` finds those that it writes, and a copy
for capture needs all. If a call writes an attribute that held tensors before, the attribute is *opened*: its tensors
become inputs of the graph.

NOTE [How objects are entered]

    an object                                leads to                               by the key
    a module                                 its attributes, without torch's own    the name
    a dict, or a view of one                 its values                             the key
    a list, tuple or deque                   its items                              the index
    a user's subclass of these               its items, and the dict of attributes  index or key; ATTRIBUTES
    an object of a class written in Python   its attributes                         the name
    a function                               its closure and its defaults           HELD
    a partial, a method, a weak reference    its function, arguments, object        HELD
    a slice                                  its numbers                            HELD

The keys make up a path, by which a value is read and written; `_buffers` is one of them. What is HELD has the path of
its holder. The walk comes to it last, so that all that has a path of its own is met by this. Sets are not entered.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autotp.passes.capture.python_state.freeze import DEEPEST, LARGEST, PLAIN, SYMBOLIC, cells_of

Slot = tuple[str, str]
"""The path of a module, and the name of an attribute."""
Path = tuple[Any, ...]
"""The path of a module, the name of an attribute, and the keys and indices that lead on from it."""

STATE = "_autotp"
"""The one attribute that autotp adds to each module of a parallel model."""
INTERNAL = frozenset({*vars(nn.Module()), STATE, "_is_torch_compile"})
"""Attributes of every module that belong to torch or autotp: tables of parameters and children, hooks, the mode."""
ATTRIBUTES = "its attributes"
"""The key of the `__dict__` of an object that also holds items."""
WHOLE: Any = object()
"""Stands for the key where a container is replaced as a whole."""
GONE: Any = object()
"""Stands for the value of a key that does not exist, or is deleted."""


def spelled(path: Path, *keys: Any) -> str:
    """Returns a path as the user writes it: `h.0.losses`, `config.tau`."""
    written = [str(key) for key in (*path[1:], *keys) if key is not WHOLE and key not in UNWRITTEN]
    return ".".join(filter(None, (path[0], *written)))


UNWRITTEN = ("_buffers", ATTRIBUTES)
"""Keys that a user does not write: `model.cache`, `items.note`."""


def slot_of(path: Path) -> Slot:
    """Returns the attribute that a path starts with."""
    return path[0], path[1]


# ---- kinds of objects

CLOSED = (
    nn.Module, Tensor, type, enum.Enum, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, functools.partial, *SYMBOLIC, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
"""Types with attributes that are not treated as containers."""
VIEWS = (types.MappingProxyType,)
"""Types that show the items of a dict that other code may change."""
CONTAINERS = (list, dict, set, deque)
"""Types whose items a call may change; the user's subclasses of them may hold attributes, too."""
LISTED = (*PLAIN, *CLOSED, *VIEWS, tuple, torch.Generator)
"""Types whose state is listed, or never changes, beside containers."""


def key_of(value: Any) -> int:
    """Returns the `id` of a value; for a module that of its `__dict__`, because the exporter replaces modules."""
    return id(vars(value)) if isinstance(value, nn.Module) else id(value)


def is_object(value: Any) -> bool:
    """True for an object of a class written in Python, whose attributes can be listed."""
    return hasattr(value, "__dict__") and not isinstance(value, CLOSED)


def is_container(value: Any) -> bool:
    """True for an object that a call may change in place."""
    return isinstance(value, CONTAINERS) or is_object(value)


def is_opaque(value: Any) -> bool:
    """True for an object whose state cannot be listed: an array, an iterator, an object with `__slots__`."""
    return type(value) is not object and not (is_container(value) or isinstance(value, LISTED))


def is_internal(key: str) -> bool:
    """True for the name of an attribute that torch or autotp keeps on a module."""
    return key in INTERNAL or key.startswith("__")  # `fully_shard` uses such names.


def is_weight_list(module: nn.Module, key: str) -> bool:
    """True for a list in which torch's recurrent layers keep their weights; they rebuild it by themselves."""
    return isinstance(module, nn.RNNBase) and key.startswith("_flat_weight")


# ---- how objects are entered


def entries(value: Any) -> list[tuple[Any, Any]]:
    """Returns the (key, value) pairs in a module's attributes, a container or a tuple."""
    if isinstance(value, nn.Module):
        attributes = [(key, item) for key, item in vars(value).items() if not is_internal(key)]
        if STATE in vars(value):  # Its `forward` runs the graph. What the user gave is in the state.
            attributes = [pair for pair in attributes if pair[0] != "forward"]
        return [pair for pair in attributes if not is_weight_list(value, pair[0])]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, (list, tuple, deque)):
        items = list(enumerate(value))
    elif isinstance(value, (dict, *VIEWS)):
        items = list(value.items())
    elif not isinstance(value, set):
        return list(vars(value).items()) if is_object(value) else []
    return [*items, (ATTRIBUTES, vars(value))] if hasattr(value, "__dict__") else items


def held(value: Any) -> list[Any]:
    """Returns the objects that a function, a partial, a method, a slice or a weak reference holds."""
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | None):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        return [*cells_of(value).values(), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return []


def containers_among_globals(value: Any) -> list[Any]:
    """Returns the containers that a function reads as globals."""
    names = value.__code__.co_names if isinstance(value, types.FunctionType) else ()
    return [item for item in map(value.__globals__.get, names) if isinstance(item, CONTAINERS)] if names else []


Extent = Literal["paths", "held", "globals"]
"""How far to walk: by keys only; also to what functions hold; also to containers that functions read as globals."""


def walk(
    roots: Iterable[tuple[Path, Any]], extent: Extent = "paths", visited: dict[int, Any] | None = None
) -> Iterator[tuple[Path, Any]]:
    """Yields values and all that they lead to, each once, with the path on which it was met first.

    Modules are not entered: those of a model have paths of their own. NOTE [How objects are entered]

    Args:
        roots: path and value where the walk begins.
        visited: `key_of` a value -> the value, for those that were met before; filled.
    """
    visited = {} if visited is None else visited
    stack, later, most = list(roots)[::-1], deque[tuple[Path, Any]](), len(visited) + LARGEST
    while (stack or later) and len(visited) < most:
        path, value = stack.pop() if stack else later.popleft()
        if type(value) in WITHOUT_CONTENTS or len(path) > DEEPEST or key_of(value) in visited:
            continue
        visited[key_of(value)] = value
        yield path, value
        below = () if isinstance(value, nn.Module) else entries(value)
        stack += [((*path, key), item) for key, item in reversed(below)]
        later += [(path, item) for item in held(value)] if extent != "paths" else []
        later += [(path, item) for item in containers_among_globals(value)] if extent == "globals" else []


WITHOUT_CONTENTS = frozenset({*PLAIN, *SYMBOLIC})


def everything(model: nn.Module, extent: Extent = "paths", aside: Iterable[Any] = ()) -> Iterator[tuple[Path, Any]]:
    """Yields all modules of a model and all values that their attributes lead to, each once, with their paths.

    Args:
        aside: further values to begin with, which are not among the model's attributes. Their path is empty.
    """
    modules = list(model.named_modules())
    yield from (((path,), module) for path, module in modules)
    roots = [((path, key), item) for path, module in modules for key, item in entries(module)]
    visited = {key_of(module): module for _, module in modules}
    yield from walk([*roots, *(((), value) for value in aside)], extent, visited)


# ---- what is at a path


def member(holder: Any, key: Any) -> Any:
    """Returns the value under a key of a module or container. Raises LookupError if there is none."""
    if key is WHOLE or key == ATTRIBUTES:
        return holder if key is WHOLE else vars(holder)
    return holder[key] if isinstance(holder, (list, tuple, dict, deque, *VIEWS)) else vars(holder)[key]


def found_at(modules: Mapping[str, nn.Module], path: Path) -> Any:
    """Returns the value at a path. Raises LookupError if there is none."""
    return functools.reduce(member, path[1:], modules[path[0]])


def put(holder: Any, key: Any, value: Any) -> None:
    """Puts a value under a key of a module or container; GONE removes the key, and the key after the last appends."""
    if key is WHOLE:
        holder.clear()
        holder.update(value)
    elif isinstance(holder, (list, deque)):
        if value is GONE:  # The keys that a list loses are its last ones.
            holder.pop()
        elif key == len(holder):
            holder.append(value)
        else:
            holder[key] = value
    else:
        table = holder if isinstance(holder, dict) else vars(holder)
        if value is GONE:
            table.pop(key, None)
        else:
            table[key] = value  # Not `update`: that of a Counter adds.


def put_at(modules: Mapping[str, nn.Module], path: Path, value: Any) -> None:
    """Puts a value at a path; replaces tuples on the way by new tuples."""
    *holder_path, key = path
    holder: Any = found_at(modules, tuple(holder_path))
    if isinstance(holder, tuple):
        items = [value if i == key else item for i, item in enumerate(holder)]
        put_at(modules, tuple(holder_path), type(holder)(*items) if hasattr(holder, "_fields") else tuple(items))
    else:
        put(holder, key, value)


def values_by_path(model: nn.Module, slots: Collection[Slot], numbers: Collection[Path]) -> dict[Path, Any]:
    """Path -> value, for all tensors in some attributes and for the whole numbers at some paths."""
    modules, values = dict(model.named_modules()), dict[Path, Any]()
    weight_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    roots = [(slot, vars(modules[slot[0]]).get(slot[1])) for slot in sorted(slots) if slot[0] in modules]
    values |= {path: x for path, x in walk(roots) if isinstance(x, Tensor) and id(x) not in weight_ids}
    for path in sorted(numbers, key=str):
        try:
            values[path] = found_at(modules, path)
        except LookupError:
            continue
    return {path: item for path, item in values.items() if isinstance(item, Tensor) or type(item) is int}
