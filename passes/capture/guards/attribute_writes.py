"""Finds the attributes that a call writes, and writes them again after each call of the graph.

A model remembers (`self.prev = y.detach()`), counts (`self.n += 1`) and collects (`self.losses.append(aux)`). What its
modules hold, and lists, dicts and objects below, is looked at before and after. What is another then is a `Change`,
which every later call makes, too: computed tensors are outputs of the graph, put back in their places.

NOTE [Containers]
Two modules may hold one list. So what changes is a container, a module, list, dict, set or object, found by the first
path that leads to it; it is changed in place, as the model does.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autotp.errors import Error
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
from autotp.passes.capture.pytree import flatten

GONE: Any = object()
"""Stands for the value of a key that is deleted."""


@dataclass(frozen=True)
class At:
    """Stands for what lay at a place before the call."""

    path: Path


@dataclass(frozen=True)
class Change:
    """What a call does to one container.

    Attributes:
        path: where the container lies.
        values: key -> leaves and structure of its new value, or GONE. Of a list or set the key is WHOLE.
    """

    path: Path
    values: Mapping[Any, Any]

    def __str__(self) -> str:
        return spelled(self.path, next(iter(self.values), None))


@dataclass(frozen=True)
class Write:
    """A tensor of an attribute that a call writes into, in place.

    Attributes:
        path: where the tensor lies.
        at: position of the output that is written.
    """

    path: Path
    at: int

    def __str__(self) -> str:
        return spelled(self.path)


class Before:
    """What a model's attributes hold before a call."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, dict(model.named_modules())
        self.places: dict[int, Path] = {}
        self.kept: list[Any] = []  # What is known by its `id` lives on.
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
        self.aside = list(_aside(model, set(self.places)))

    def changes(self) -> list[tuple[Path, dict[Any, Any]]]:
        """The containers that are another now: where each lies, and its new values by key.

        Raises:
            Error: what changed cannot be put back by later calls; everything is as it was then.
        """
        self._expect_open()
        found = []
        for path, value, content in self.was:
            now = content_of(value)
            if not same_content(now, content):
                found.append((path, _difference(content, now)))
        for path, module in self.modules.items():
            new = {key: now for key, now in module._buffers.items() if is_new(now, self.tables[path][1].get(key))}
            found += [((path, TABLES), new)] if new else []
        return found

    def at(self, path: Path) -> Any:
        """What lies at a place now."""
        return found_at(self.modules, path)

    def restore(self) -> None:
        """Gives everything what it held."""
        for _, value, content in self.was:
            if not same_content(content_of(value), content):
                fill(value, content)
        for path, module in self.modules.items():
            for table, was in zip(
                (module._parameters, module._buffers, module._modules), self.tables[path], strict=True
            ):
                table.clear()
                table.update(was)
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
"""Of a global of Python: what is no tensor may be written there, once, as a line may be printed."""


def _refused(what: str, restore: Callable[[], None]) -> Error:
    restore()
    return Error(
        f"forward changes {what}, which a graph cannot do",
        fix="set an attribute of the module (`self.name = value`), which is put back after each call",
    )


def content_of(value: Any) -> Any:
    """What a container or module holds: keys and values."""
    return frozenset(value) if isinstance(value, set) else tuple(children(value))


def keyed(value: Any) -> dict[Any, Any]:
    """What a container or module holds, by key; a set by WHOLE."""
    return {WHOLE: set(value)} if isinstance(value, set) else dict(children(value))


def same_content(now: Any, then: Any) -> bool:
    """True if two contents have the same keys in the same order, each with the same object."""
    if isinstance(now, frozenset):
        return bool(now == then)
    return len(now) == len(then) and all(
        a[0] == b[0] and key_of(a[1]) == key_of(b[1]) for a, b in zip(now, then, strict=True)
    )


def _difference(then: Any, now: Any) -> dict[Any, Any]:
    """Key -> new value, of a container that changed."""
    if isinstance(now, frozenset):
        return {WHOLE: set(now)}
    before, after = dict(then), dict(now)
    return {
        int(key) if isinstance(key, torch.SymInt) else key: after.get(key, GONE)
        for key in {**before, **after}
        if key_of(after.get(key, GONE)) != key_of(before.get(key, GONE))
    }


def fill(value: Any, content: Any) -> None:
    """Gives a container or module what it held."""
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
    """Gives what holds items those that it held; a tuple has them for good."""
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


def is_new(now: Any, then: Any) -> bool:
    """True for a buffer in the place of another that had another shape or dtype."""
    if now is then or now is None:
        return now is not then
    return then is None or now.shape != then.shape or now.dtype != then.dtype


def _aside(model: nn.Module, known: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Containers that functions hold, which the model's attributes are or its hooks: nobody puts these back."""
    seen: set[int] = set(known)
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            functions = list(value.values()) if key in INTERNAL and key.endswith("_hooks") else [value]
            where = f"a hook on `{path or 'the model'}`" if key in INTERNAL else f"`{spelled((path,), key)}`"
            for one in functions:
                yield from _held(one, where, seen)
        yield from _held(type(module).forward, f"{OF_FORWARD} `{type(module).__name__}.forward`", seen)


def _held(value: Any, where: str, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    queue = hidden(value)
    while queue and len(seen) < LARGEST:
        one = queue.pop()
        if id(one) in seen or type(one) in PLAIN or isinstance(one, (nn.Module, Tensor, type, types.ModuleType)):
            continue
        seen.add(id(one))
        if is_container(one):
            yield where, one, content_of(one)
        queue += [item for _, item in children(one)] + hidden(one)


# ---- as leaves, and put back


def opened(value: Any, places: Mapping[int, Path]) -> tuple[list[Any], Any]:
    """The leaves and the structure of a new value; what was there before is a leaf `At` its place.

    Raises:
        Error: an object that holds tensors and that torch cannot take apart.
    """

    if isinstance(value, set) and any(isinstance(item, Tensor) for item in value):
        raise Error("a set holds tensors", fix="a list or a dict")

    def closed(one: Any) -> Any:
        return At(places[key_of(one)]) if key_of(one) in places and type(one) not in PLAIN else one

    known = pytree.tree_map(closed, value, is_leaf=lambda one: key_of(one) in places)
    leaves, spec = flatten(known)
    return leaves, spec


def apply(changes: Sequence[Change], modules: Mapping[str, nn.Module], leaf: Callable[[Any], Any]) -> None:
    """Makes the changes of a call on a model.

    Args:
        leaf: what a leaf stands for.
    """
    made: list[tuple[Any, Any, Any]] = []
    for change in changes:
        holder = found_at(modules, change.path)
        for key, value in change.values.items():
            leaves = [] if value is GONE else [_then(x, modules, leaf) for x in value[0]]
            made.append((holder, key, GONE if value is GONE else pytree.tree_unflatten(leaves, value[1])))
    for holder, key, new in made:  # At the end: a leaf may be what lay at a place before.
        _write(holder, key, new)


def write_into(tensor: Tensor, value: Tensor) -> None:
    """Gives a tensor the values of another, as the model does in place. tensor, value: [...]"""
    if value is tensor:
        return
    if tensor.requires_grad or not value.requires_grad:
        with torch.set_grad_enabled(tensor.requires_grad and not tensor.is_leaf):
            tensor.copy_(value)
    else:
        tensor.copy_(value)


def _then(x: Any, modules: Mapping[str, nn.Module], leaf: Callable[[Any], Any]) -> Any:
    if not isinstance(x, At):
        return leaf(x)
    return found_at(modules, x.path)


def _write(holder: Any, key: Any, new: Any) -> None:
    if isinstance(key, Attribute):
        _write_into_table(vars(holder), key.name, new)
    elif isinstance(holder, set):
        holder.clear()
        holder.update(new)
    elif isinstance(holder, (list, deque)):
        _write_item(holder, key, new)
    else:
        _write_into_table(holder if isinstance(holder, (dict, Tables)) else vars(holder), key, new)


def _write_into_table(table: Any, key: Any, new: Any) -> None:
    if new is GONE:
        table.pop(key, None)
    else:
        table[key] = new


def _write_item(holder: Any, key: int, new: Any) -> None:
    """Keys of a list come in order: those behind its end are appended, and GONE are the last."""
    if new is GONE:
        holder.pop()
    elif key == len(holder):
        holder.append(new)
    else:
        holder[key] = new
