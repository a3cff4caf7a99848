"""contents: the objects that a module, a container or a class holds: compared by identity, and put back.

`freeze.py` compares values, at any depth, and takes long. This compares which objects one object holds. As long as all
objects on a walk hold the same ones, nothing has changed.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autotp.passes.capture.python_state.freeze import freeze
from autotp.passes.capture.python_state.walk import (
    ATTRIBUTES,
    CONTAINERS,
    GONE,
    WHOLE,
    entries,
    is_object,
    is_opaque,
    key_of,
)


def contents_of(value: Any) -> dict[Any, Any]:
    """Key -> value of what an object holds; WHOLE -> what is compared with ==: the items of a set, an opaque state."""
    if isinstance(value, set):
        return {WHOLE: frozenset(value)}
    if isinstance(value, Tensor):
        return {WHOLE: version_of(value)}
    if isinstance(value, weakref.ref):
        return {"referent": value()}
    if isinstance(value, type):
        return dict(vars(value))
    if not is_opaque(value):
        return dict(entries(value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns that it will stop pickling iterators.
        return {WHOLE: freeze(value)}


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Returns how often a tensor was written into, and where its values are: `x.data = y` counts as no write.

    0 for inference tensors, which do not count, and for tensors without memory of their own.
    """
    real = type(tensor) is Tensor and tensor.layout is torch.strided
    real = real and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr() if real else 0


class Contents:
    """What an object holds at one time."""

    def __init__(self, value: Any) -> None:
        self.value, self.then = value, contents_of(value)

    def is_same(self) -> bool:
        """True if the object still holds the same objects under the same keys, in the same order."""
        now = contents_of(self.value)
        return list(now) == list(self.then) and not changed_keys(self.then, now)

    def changes(self) -> dict[Any, Any]:
        """Key -> new value, for the keys that changed."""
        now = contents_of(self.value)
        return {key: set(x) if isinstance(x, frozenset) else x for key, x in changed_keys(self.then, now).items()}

    def restore(self) -> None:
        """Makes a container or module hold what it held; the state of an opaque object stays."""
        if not (is_opaque(self.value) or self.is_same()):
            _fill(self.value, self.then)


def changed_keys(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> dict[Any, Any]:
    """Key -> new value or GONE, for each key under which there is another object now."""
    return {
        int(key) if isinstance(key, torch.SymInt) else key: now.get(key, GONE)
        for key in {**then, **now}
        if not _are_one(then.get(key, GONE), now.get(key, GONE), key)
    }


def _are_one(then: Any, now: Any, key: Any) -> bool:
    return bool(then == now) if key is WHOLE else key_of(then) == key_of(now)


def _fill(value: Any, contents: Mapping[Any, Any]) -> None:
    """Makes an object hold these contents; a tuple cannot have changed, and a dict of attributes is restored itself."""
    items = {key: item for key, item in contents.items() if key != ATTRIBUTES}
    if isinstance(value, (set, list, deque)):
        value.clear()
        value.update(contents[WHOLE]) if isinstance(value, set) else value.extend(items.values())
    elif not isinstance(value, tuple):
        table = value if isinstance(value, dict) else vars(value)
        for key, _ in entries(value):  # Of a module, those that torch keeps stay.
            table.pop(key, None)
        for key, item in items.items():  # Not `update`: that of a Counter adds.
            table[key] = item


def unchanged(value: Any) -> Callable[[], bool]:
    """Returns a function that is True while an object holds the same objects: fast for the most frequent kinds."""
    # The class itself: a subclass may hold attributes beside its items.
    if type(value) is list:
        items = list(value)
        return lambda: len(value) == len(items) and all(map(operator.is_, value, items))
    if type(value) is not dict and (isinstance(value, (*CONTAINERS, tuple)) or not is_object(value)):
        return Contents(value).is_same
    table = value if type(value) is dict else vars(value)
    keys, values = list(table), list(table.values())
    return lambda: len(table) == len(keys) and all(map(operator.is_, table, keys)) and all(
        map(operator.is_, table.values(), values)
    )  # fmt: skip
