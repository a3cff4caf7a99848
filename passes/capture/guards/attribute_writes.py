"""Finds the attributes that a call writes, and writes them again after each call of the graph.

A model remembers (`self.prev = y.detach()`), counts (`self.n += 1`) and collects (`self.losses.append(aux)`). So the
attributes of its modules, and the lists, dicts and objects that they lead to, are compared before and after the
captured run. Each difference is a `Change`, which every later call makes, too: computed tensors are outputs of the
graph, and are put where the model put them.

NOTE [Containers]
Two modules may hold the same list. So a change belongs to a container (a module, list, dict, set or object), which is
found by the first path that leads to it, and is changed in place, as the model does.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from autotp.errors import Error
from autotp.model_library import library
from autotp.passes.capture.guards.attribute_paths import (
    INTERNAL,
    LARGEST,
    MIXED,
    TABLES,
    WHOLE,
    Attribute,
    Path,
    Tables,
    children,
    everything,
    found_at,
    hidden,
    is_container,
    is_opaque,
    key_of,
    spelled,
    state_of_opaque,
)
from autotp.passes.capture.guards.comparison import PLAIN
from autotp.passes.capture.pytree import flatten, is_node

GONE: Any = object()
"""Stands for the value of a key that is deleted."""


@dataclass(frozen=True)
class At:
    """Stands for the value at a path before the call."""

    path: Path


@dataclass(frozen=True)
class MethodAt:
    """Stands for a method of the object at a path.

    Attributes:
        path: the object's path.
        name: the method's name, if the object's class has it under this name.
        function: the method's function, if the class does not have it.
    """

    path: Path
    name: str
    function: Any = None

    @classmethod
    def of(cls, method: Any, path: Path) -> MethodAt:
        """Returns what stands for a bound method, whose object is at a path."""
        function = getattr(method, "__func__", None)
        in_class = function is None or getattr(type(method.__self__), method.__name__, None) is function
        return cls(path, method.__name__, None if in_class else function)

    def bound_to(self, owner: Any) -> Any:
        """Returns the method of another object. What an attribute of this object hides is not seen."""
        if isinstance(owner, nn.Module):
            return types.MethodType(self.function or getattr(type(owner), self.name), owner)
        return getattr(owner, self.name) if self.function is None else types.MethodType(self.function, owner)


@dataclass(frozen=True)
class Change:
    """The change of one container by a call.

    Attributes:
        path: the container's path.
        values: key -> leaves and structure of its new value, or GONE. The key of a set is WHOLE.
    """

    path: Path
    values: Mapping[Any, Any]

    def __str__(self) -> str:
        return spelled(self.path, next(iter(self.values), None))


@dataclass(frozen=True)
class Write:
    """A tensor of an attribute that a call writes into, in place.

    Attributes:
        path: the tensor's path.
        at: position of the output that has its new values.
    """

    path: Path
    at: int

    def __str__(self) -> str:
        return spelled(self.path)


class Before:
    """The contents of a model's attributes before a call."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, dict(model.named_modules())
        self.places: dict[int, Path] = {}
        self.kept: list[Any] = []  # Keeps objects alive that are compared by their `id`.
        self.was: list[tuple[Path, Any, Any]] = []
        self.opaque: list[tuple[Path, Any, Any]] = []
        for path, value in everything(model):
            self.places.setdefault(key_of(value), path)
            self.kept.append(value)
            if isinstance(value, nn.Module) or is_container(value):
                self.was.append((path, value, content_of(value)))
            elif is_opaque(value):
                self.opaque.append((path, value, state_of_opaque(value)))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            owner, _, key = name.rpartition(".")
            self.places[id(tensor)] = owner, TABLES, key
        self.tables = {path: _tables(module) for path, module in self.modules.items()}
        self.hooks = {path: _hooks(module) for path, module in self.modules.items()}
        self.aside = list(_aside(model, set(self.places)))

    def changes(self) -> list[tuple[Path, dict[Any, Any]]]:
        """Returns the containers that have changed: path and new values by key.

        Raises:
            Error: later calls cannot make one of the changes. All attributes are restored then.
        """
        self._expect_open()
        changes = []
        for path, value, content in self.was:
            now = content_of(value)
            if not same_content(now, content):
                values = {k: x for k, x in _difference(content, now).items() if not _is_own_method(value, k, x)}
                changes += [(path, values)] if values else []
        for path, module in self.modules.items():
            values = {key: now for key, now in module._buffers.items() if is_new(now, self.tables[path][1].get(key))}
            changes += [((path, TABLES), values)] if values else []
        return changes

    def hooks_added(self) -> list[tuple[str, Any]]:
        """Returns the forward hooks that a library of models has registered for itself: path of the module and hook.

        Raises:
            Error: forward registers or removes another hook. All attributes are restored then.
        """
        added = []
        for path, module in self.modules.items():
            for name, now in _hooks(module).items():
                was = self.hooks[path][name]
                hooks = [hook for key, hook in now.items() if key not in was]
                if was.keys() - now.keys() or any(
                    name != "_forward_hooks" or not library().is_own_hook(hook) for hook in hooks
                ):
                    self.restore()
                    raise Error(
                        f"forward registers or removes a hook on `{path or 'the model'}`: later calls would not do so",
                        fix="register the hook before autotp.parallelize",
                    )
                added += [(path, hook) for hook in hooks]
        return added

    def at(self, path: Path) -> Any:
        """Returns the value that is now at a path."""
        return found_at(self.modules, path)

    def restore(self) -> None:
        """Restores the contents of all containers."""
        for _, value, content in self.was:
            if not same_content(content_of(value), content):
                fill(value, content)
        for path, module in self.modules.items():
            for table, was in zip(
                (module._parameters, module._buffers, module._modules), self.tables[path], strict=True
            ):
                table.clear()
                table.update(was)
            for name, hooks in self.hooks[path].items():
                vars(module)[name].clear()
                vars(module)[name].update(hooks)
        for where, value, content in self.aside:
            loose = where.startswith(OF_FORWARD) and not any(isinstance(x, Tensor) for _, x in children(value))
            if not loose and not same_content(content_of(value), content):
                fill(value, content)

    def _expect_open(self) -> None:
        for path, module in self.modules.items():
            parameters, _, parts = self.tables[path]
            for table, was in ((module._parameters, parameters), (module._modules, parts)):
                names = [key for key in {**table, **was} if key_of(table.get(key)) != key_of(was.get(key))]
                if names:
                    raise _refused(f"`{spelled((path,), names[0])}`, a parameter or module", self.restore)
        for path, value, state in self.opaque:
            if state_of_opaque(value) != state:
                raise _refused(f"`{spelled(path)}`, a {type(value).__name__}", self.restore)
        for where, value, content in self.aside:
            loose = where.startswith(OF_FORWARD) and not any(isinstance(x, Tensor) for _, x in children(value))
            if not loose and not same_content(content_of(value), content):
                raise _refused(f"a {type(value).__name__} that {where} holds", self.restore)


OF_FORWARD = "the module of"
"""Prefix for a global of Python. Writing values that are not tensors there is allowed, and happens in capture only."""


def _refused(description: str, restore: Callable[[], None]) -> Error:
    restore()
    return Error(
        f"forward changes {description}, which a graph cannot do",
        fix="set an attribute of the module (`self.name = value`), which is put back after each call",
    )


def content_of(value: Any) -> Any:
    """Returns keys and values of a container or module; the items of a set."""
    return frozenset(value) if isinstance(value, set) else tuple(children(value))


def keyed(value: Any) -> dict[Any, Any]:
    """Key -> value of a container or module; WHOLE -> items of a set."""
    return {WHOLE: set(value)} if isinstance(value, set) else dict(children(value))


def same_content(now: Any, then: Any) -> bool:
    """True if two contents have the same keys in the same order, each with the same object."""
    if isinstance(now, frozenset):
        return bool(now == then)
    return len(now) == len(then) and all(
        a[0] == b[0] and key_of(a[1]) == key_of(b[1]) for a, b in zip(now, then, strict=True)
    )


def _difference(then: Any, now: Any) -> dict[Any, Any]:
    """Key -> new value, for the keys of a container that changed."""
    if isinstance(now, frozenset):
        return {WHOLE: set(now)}
    before, after = dict(then), dict(now)
    return {
        int(key) if isinstance(key, torch.SymInt) else key: after.get(key, GONE)
        for key in {**before, **after}
        if key_of(after.get(key, GONE)) != key_of(before.get(key, GONE))
    }


def _is_own_method(holder: Any, key: Any, value: Any) -> bool:
    """True for a module's own method, put into its attributes: reading the attribute gave the same before."""
    is_bound = isinstance(value, types.MethodType) and value.__self__ is holder and isinstance(holder, nn.Module)
    return is_bound and getattr(type(holder), key, None) is value.__func__


def fill(value: Any, content: Any) -> None:
    """Restores the contents of a container or module."""
    if isinstance(value, nn.Module):
        for key, _ in children(value):
            del vars(value)[key]
        vars(value).update(dict(content))
    elif isinstance(value, MIXED):
        _fill_items(value, content)
        if hasattr(value, "__dict__") and not isinstance(value, set):
            _refill(vars(value), {key.name: item for key, item in content if type(key) is Attribute})
    else:
        _refill(vars(value), dict(content))


def _fill_items(value: Any, content: Any) -> None:
    """Restores the items of a set, dict, list or deque; a tuple cannot have changed."""
    if isinstance(value, set):
        value.clear()
        value.update(content)
        return
    items = [pair for pair in content if type(pair[0]) is not Attribute]
    if isinstance(value, dict):
        value.clear()
        value.update(dict(items))
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(item for _, item in items)


def _refill(table: dict[str, Any], content: Mapping[str, Any]) -> None:
    table.clear()
    table.update(content)


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return dict(module._parameters), dict(module._buffers), dict(module._modules)


def _hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {name: dict(vars(module)[name]) for name in names}


def add_hooks(hooks: Sequence[tuple[str, Any]], modules: Mapping[str, nn.Module], table: Callable[..., Any]) -> None:
    """Adds forward hooks that a captured call registered.

    Args:
        hooks: path of a module and hook.
        table: returns where a module keeps an attribute of a name.
    """
    for path, hook in hooks:
        hook_table = table(modules[path], "_forward_hooks")["_forward_hooks"]
        hook_table[RemovableHandle(hook_table).id] = hook


def is_new(now: Any, then: Any) -> bool:
    """True if a buffer was replaced by a tensor of another shape or dtype."""
    if now is then or now is None:
        return now is not then
    return then is None or now.shape != then.shape or now.dtype != then.dtype


def _aside(model: nn.Module, known_ids: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the containers that functions among a model's attributes and hooks hold; no path leads to these."""
    visited: set[int] = set(known_ids)
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            functions = list(value.values()) if key in INTERNAL and key.endswith("_hooks") else [value]
            where = f"a hook on `{path or 'the model'}`" if key in INTERNAL else f"`{spelled((path,), key)}`"
            for function in functions:
                yield from _held(function, where, visited)
        yield from _held(type(module).forward, f"{OF_FORWARD} `{type(module).__name__}.forward`", visited)


def _held(value: Any, where: str, visited: set[int]) -> Iterator[tuple[str, Any, Any]]:
    queue = hidden(value)
    while queue and len(visited) < LARGEST:
        current = queue.pop()
        if (
            id(current) in visited
            or type(current) in PLAIN
            or isinstance(current, (nn.Module, Tensor, type, types.ModuleType))
        ):
            continue
        visited.add(id(current))
        if is_container(current):
            yield where, current, content_of(current)
        queue += [item for _, item in children(current)] + hidden(current)


# ---- new values as leaves, and writing them


def flatten_new_value(value: Any, places: Mapping[int, Path]) -> tuple[list[Any], Any]:
    """Returns leaves and structure of a new value.

    An object that existed before is a leaf `At` its path, a method of such an object a leaf `MethodAt`.

    Raises:
        Error: an object holds tensors, and torch cannot flatten it; or a function or object leads to the model that is
            captured, which is a copy, or to a tensor of the call.
    """

    if isinstance(value, set) and any(isinstance(item, Tensor) for item in value):
        raise Error("a set holds tensors", fix="a list or a dict")

    def closed(item: Any) -> Any:
        if key_of(item) in places and type(item) not in PLAIN:
            return At(places[key_of(item)])
        owner = places.get(key_of(item.__self__)) if isinstance(item, METHODS) else None
        return item if owner is None else MethodAt.of(item, owner)

    closed_value = pytree.tree_map(closed, value, is_leaf=lambda item: key_of(item) in places or is_node(item))
    leaves, spec = flatten(closed_value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, At, MethodAt)) and (part := _part_of_call(leaf, places)):
            raise Error(
                f"a {type(leaf).__name__} holds {part}, which is there only while the model is captured",
                fix="a method of the module (`self.name = self.method`), or make the function where it is called",
            )
    return leaves, spec


METHODS = (types.MethodType, types.BuiltinMethodType)


def _part_of_call(value: Any, places: Mapping[int, Path]) -> str:
    """Returns what a function or object leads to: a part of the model, or a tensor of the call; else an empty text."""
    visited, queue = set[int](), [value]
    while queue and len(visited) < LARGEST:
        current = queue.pop()
        if id(current) in visited or type(current) in PLAIN:
            continue
        visited.add(id(current))
        if isinstance(current, FakeTensor):
            return "a tensor of this call" if key_of(current) not in places else f"`{spelled(places[key_of(current)])}`"
        if isinstance(current, nn.Module) and key_of(current) in places:
            return f"`{spelled(places[key_of(current)])}`" if any(places[key_of(current)]) else "the model"
        if not isinstance(current, (nn.Module, Tensor)):
            queue += [item for _, item in children(current)] + hidden(current, globals_too=False)
    return ""


def apply_changes(changes: Sequence[Change], modules: Mapping[str, nn.Module], leaf: Callable[[Any], Any]) -> None:
    """Makes the changes of a call on a model.

    Args:
        leaf: maps a leaf to its value.
    """
    made: list[tuple[Any, Any, Any]] = []
    for change in changes:
        holder = found_at(modules, change.path)
        for key, value in change.values.items():
            leaves = [] if value is GONE else [_then(x, modules, leaf) for x in value[0]]
            made.append((holder, key, GONE if value is GONE else pytree.tree_unflatten(leaves, value[1])))
    for holder, key, new_value in made:  # At the end: a leaf may be an old value at a path.
        _write(holder, key, new_value)


def write_into(tensor: Tensor, value: Tensor) -> None:
    """Copies values into a tensor in place, as the model does. tensor, value: [...]"""
    if value is tensor:
        return
    if tensor.requires_grad or not value.requires_grad:
        with torch.set_grad_enabled(tensor.requires_grad and not tensor.is_leaf):
            tensor.copy_(value)
    else:
        tensor.copy_(value)


def _then(x: Any, modules: Mapping[str, nn.Module], leaf: Callable[[Any], Any]) -> Any:
    if isinstance(x, MethodAt):
        return x.bound_to(found_at(modules, x.path))
    return found_at(modules, x.path) if isinstance(x, At) else leaf(x)


def _write(holder: Any, key: Any, new_value: Any) -> None:
    if isinstance(key, Attribute):
        _write_into_table(vars(holder), key.name, new_value)
    elif isinstance(holder, set):
        holder.clear()
        holder.update(new_value)
    elif isinstance(holder, (list, deque)):
        _write_item(holder, key, new_value)
    else:
        _write_into_table(holder if isinstance(holder, (dict, Tables)) else vars(holder), key, new_value)


def _write_into_table(table: Any, key: Any, new_value: Any) -> None:
    if new_value is GONE:
        table.pop(key, None)
    else:
        table[key] = new_value


def _write_item(holder: Any, key: int, new_value: Any) -> None:
    """Writes an item of a list. Its keys come in order: a key at the end appends, and GONE removes the last item."""
    if new_value is GONE:
        holder.pop()
    elif key == len(holder):
        holder.append(new_value)
    else:
        holder[key] = new_value
