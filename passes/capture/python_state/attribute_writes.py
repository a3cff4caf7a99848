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
from autotp.passes.capture.python_state.code_names import Assignment
from autotp.passes.capture.python_state.contents import Contents
from autotp.passes.capture.python_state.freeze import PLAIN
from autotp.passes.capture.python_state.walk import (
    GONE,
    INTERNAL,
    Path,
    containers_among_globals,
    entries,
    everything,
    found_at,
    held,
    is_container,
    is_opaque,
    key_of,
    put,
    spelled,
    walk,
)
from autotp.passes.capture.pytree import flatten, is_node


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
        return spelled(self.path, *list(self.values)[:1])


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


@dataclass(frozen=True)
class AddedHook:
    """A forward hook that a call registers on the module at a path: only one of a library of models."""

    path: str
    hook: Any


AnyChange = Change | Write | AddedHook | Assignment
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The tables of a module with its hooks."""


class Before:
    """The contents of a model's attributes before a call.

    Attributes:
        places: `key_of` a value -> its path.
        contents: those of each module, container and opaque object that has a path, with the path.
        tables: path of a module -> name -> the contents of its tables of parameters, buffers, modules and hooks.
        aside: the contents of containers that only functions hold, and what holds them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.values = list(everything(model))  # Keeps objects alive that are compared by their `id`.
        self.places: dict[int, Path] = {key_of(value): path for path, value in self.values}
        entered = [(path, x) for path, x in self.values if isinstance(x, nn.Module) or is_container(x) or is_opaque(x)]
        self.contents = [(path, Contents(value)) for path, value in entered]
        names = ("_parameters", "_buffers", "_modules", *HOOKS)
        self.tables = {path: {x: Contents(vars(module)[x]) for x in names} for path, module in self.modules.items()}
        self.aside = [(where, Contents(value)) for where, value in _aside(model, self.values) if is_container(value)]
        for path, module in reversed(self.modules.items()):  # Of a tied tensor the first name stays.
            for name in ("_buffers", "_parameters"):
                self.places |= {id(x): (path, name, key) for key, x in vars(module)[name].items() if x is not None}

    def changes(self) -> list[tuple[Path, dict[Any, Any]]]:
        """Returns the containers that have changed: path and new values by key.

        Raises:
            Error: later calls cannot make one of the changes. All attributes are restored then.
        """
        self._expect_open()
        changes = []
        for path, contents in self.contents:
            if not contents.is_same():
                holder = contents.value
                values = {k: x for k, x in contents.changes().items() if not _is_own_method(holder, k, x)}
                changes += [(path, values)] if values else []
        for path, tables in self.tables.items():
            # A buffer of the same shape and dtype is written into by each call (`flatten._assigned`), and is no change
            # here.
            was = tables["_buffers"].then
            values = {key: now for key, now in self.modules[path]._buffers.items() if is_new(now, was.get(key))}
            changes += [((path, "_buffers"), values)] if values else []
        return changes

    def hooks_added(self) -> list[AddedHook]:
        """Returns the forward hooks that a library of models has registered for itself.

        Raises:
            Error: forward registers or removes another hook. All attributes are restored then.
        """
        added = []
        for path, tables in self.tables.items():
            for name in HOOKS:
                hooks = list(tables[name].changes().values())
                if any(x is GONE or name != "_forward_hooks" or not library().is_own_hook(x) for x in hooks):
                    self.restore()
                    raise Error(
                        f"forward registers or removes a hook on `{path or 'the model'}`: later calls would not do so",
                        fix="register the hook before autotp.parallelize",
                    )
                added += [AddedHook(path, hook) for hook in hooks]
        return added

    def at(self, path: Path) -> Any:
        """Returns the value that is now at a path."""
        return found_at(self.modules, path)

    def restore(self) -> None:
        """Restores the contents of all containers."""
        of_tables = (contents for tables in self.tables.values() for contents in tables.values())
        # Every container keeps its identity: its contents are put back, and no other object takes its place.
        for contents in (*(contents for _, contents in self.contents), *of_tables):
            contents.restore()
        for where, contents in self.aside:
            if not _is_loose(where, contents.value):
                contents.restore()

    def _expect_open(self) -> None:
        for path, tables in self.tables.items():
            for name in ("_parameters", "_modules"):
                # `self.part = None`, after `self.part = module`, leaves a name of nothing.
                new = {key: None if x is GONE else x for key, x in tables[name].changes().items()}
                if changed := [key for key, x in new.items() if x is not tables[name].then.get(key)]:
                    raise self._refused(f"`{spelled((path,), changed[0])}`, a parameter or module")
        for path, contents in self.contents:
            if is_opaque(contents.value) and not contents.is_same():
                raise self._refused(f"`{spelled(path)}`, a {type(contents.value).__name__}")
        for where, contents in self.aside:
            if not _is_loose(where, contents.value) and not contents.is_same():
                raise self._refused(f"a {type(contents.value).__name__} that {where} holds")

    def _refused(self, description: str) -> Error:
        self.restore()
        return Error(
            f"forward changes {description}, which a graph cannot do",
            fix="set an attribute of the module (`self.name = value`), which is put back after each call",
        )


OF_FORWARD = "the module of"
"""Prefix for a global of Python. Writing values that are not tensors there is allowed, and happens in capture only."""


def _is_loose(where: str, value: Any) -> bool:
    return where.startswith(OF_FORWARD) and not any(isinstance(x, Tensor) for _, x in entries(value))


def _is_own_method(holder: Any, key: Any, value: Any) -> bool:
    """True for a module's own method, put into its attributes: reading the attribute gave the same before."""
    is_bound = isinstance(value, types.MethodType) and value.__self__ is holder and isinstance(holder, nn.Module)
    return is_bound and getattr(type(holder), key, None) is value.__func__


def is_new(now: Any, then: Any) -> bool:
    """True if a buffer was replaced by a tensor of another shape or dtype."""
    if now is then or now is None:
        return now is not then
    return then is None or now.shape != then.shape or now.dtype != then.dtype


def _aside(model: nn.Module, values: Sequence[tuple[Path, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields what functions among a model's attributes and hooks hold and no path leads to, and a text for the holder.

    Args:
        values: those that paths lead to.
    """
    visited = {key_of(value): value for _, value in values}
    # Code of the model first: a global that it reads is one also where another function holds it.
    holders = [(f"{OF_FORWARD} `{type(module).__name__}.forward`", type(module).forward) for module in model.modules()]
    holders += [(f"`{spelled(path)}`", value) for path, value in values if not isinstance(value, nn.Module)]
    for path, module in model.named_modules():
        visited |= {id(table): table for table in vars(module).values()}  # The handle of a hook leads to these.
        hooks = [hook for key in INTERNAL if key.endswith("_hooks") for hook in vars(module).get(key, {}).values()]
        holders += [(f"a hook on `{path or 'the model'}`", hook) for hook in hooks]
    for where, holder in holders:
        roots = [((), item) for item in (*held(holder), *containers_among_globals(holder))]
        yield from ((where, item) for _, item in walk(roots, "globals", visited))


# ---- new values as leaves, and writing them


def flatten_new_value(value: Any, places: Mapping[int, Path]) -> tuple[list[Any], Any]:
    """Returns leaves and structure of a new value.

    An object that existed before is a leaf `At` its path, a method of such an object a leaf `MethodAt`.

    Raises:
        Error: an object holds tensors, and torch cannot flatten it; or a function or object leads to the model that is
            captured, which is a copy, or to a tensor of the call.
    """

    # A set has no order by which a later call could tell its tensors apart.
    if isinstance(value, set) and any(isinstance(item, Tensor) for item in value):
        raise Error("a set holds tensors", fix="a list or a dict")

    def closed(item: Any) -> Any:
        if key_of(item) in places and type(item) not in PLAIN:
            return At(places[key_of(item)])
        owner = places.get(key_of(item.__self__)) if isinstance(item, METHODS) else None
        # The method is bound to the copy that is captured: a later call binds it to the model itself.
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
    for _, item in walk([((), value)], "held"):
        path = places.get(key_of(item))
        if isinstance(item, FakeTensor):
            return "a tensor of this call" if path is None else f"`{spelled(path)}`"
        if isinstance(item, nn.Module) and path is not None:
            return f"`{spelled(path)}`" if any(path) else "the model"
    return ""


def make_changes(
    changes: Sequence[AnyChange],
    modules: Mapping[str, nn.Module],
    leaf: Callable[[Any], Any],
    table: Callable[..., Any],
) -> None:
    """Makes the changes of a call on a model, except each `Write`.

    Args:
        leaf: maps a leaf to its value.
        table: returns where a module keeps an attribute of a name.
    """
    made: list[tuple[Any, Any, Any]] = []
    for change in changes:
        if isinstance(change, Assignment):
            change.assign()
        elif isinstance(change, AddedHook):
            hook_table = table(modules[change.path], "_forward_hooks")["_forward_hooks"]
            hook_table[RemovableHandle(hook_table).id] = change.hook
        if not isinstance(change, Change):
            continue
        holder = found_at(modules, change.path)
        for key, value in change.values.items():
            leaves = [] if value is GONE else [_then(x, modules, leaf) for x in value[0]]
            made.append((holder, key, GONE if value is GONE else pytree.tree_unflatten(leaves, value[1])))
    for holder, key, new_value in made:  # At the end: a leaf may be an old value at a path.
        put(holder, key, new_value)


def write_into(tensor: Tensor, value: Tensor) -> None:
    """Copies values into a tensor in place, as the model does. tensor, value: [...]"""
    if value is tensor:
        return
    if tensor.requires_grad or not value.requires_grad:
        # autograd refuses writes into a leaf that requires a gradient, unless gradients are off.
        with torch.set_grad_enabled(tensor.requires_grad and not tensor.is_leaf):
            tensor.copy_(value)
    else:
        tensor.copy_(value)


def _then(x: Any, modules: Mapping[str, nn.Module], leaf: Callable[[Any], Any]) -> Any:
    if isinstance(x, MethodAt):
        return x.bound_to(found_at(modules, x.path))
    return found_at(modules, x.path) if isinstance(x, At) else leaf(x)
