"""State that belongs to one object of others: a process group, a model, an optimizer, a class of another library.

NOTE [State of the process]
What autotp notes while a program runs mostly belongs to such an object. It is kept here, beside the object, and goes
with it. A name is no key: after `destroy_process_group()` a later group has the name of an earlier one. State that
belongs to no object is a name of a module, and tests/test_attached.py lists these with a reason each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
_states: dict[type, WeakKeyDictionary[Any, Any]] = {}
"""Class of a state -> object -> its state of this class."""


def attached(owner: object, kind: type[T]) -> T:
    """Returns the state of this class that belongs to an object. The first call makes it, by `kind()`."""
    state = attached_if_any(owner, kind)
    return _states.setdefault(kind, WeakKeyDictionary()).setdefault(owner, kind()) if state is None else state


def attached_if_any(owner: object, kind: type[T]) -> T | None:
    """Returns the state of this class that belongs to an object; None if it has none."""
    by_owner = _states.get(kind)
    return None if by_owner is None else by_owner.get(owner)


def all_attached(kind: type[T]) -> list[tuple[Any, T]]:
    """Returns each living object that has a state of this class, with the state."""
    return [] if (by_owner := _states.get(kind)) is None else list(by_owner.items())


def attach(owner: object, state: T) -> T:
    """Makes `state` the object's state of its class, and returns it. A state that refers to its object keeps it."""
    _states.setdefault(type(state), WeakKeyDictionary())[owner] = state
    return state


def detach(owner: object, kind: type) -> None:
    """Forgets the state of this class that belongs to an object, if there is one."""
    if (by_owner := _states.get(kind)) is not None:
        by_owner.pop(owner, None)


class Marks(set[Hashable]):
    """What holds of an object, or was done with it, in words: `LOST in attached(group, Marks)`."""


class Counts(Counter[Hashable]):
    """What is counted for an object: `attached(group, Counts)["exchanges"] += 1`."""


def first_time(owner: object, what: Hashable) -> bool:
    """Marks an object; returns whether it did not have this mark."""
    marks = attached(owner, Marks)
    is_first = what not in marks
    marks.add(what)
    return is_first


# ---- what the host has read of tensors on a device: it waits for the device once


class HostValues:
    """Whole numbers that the host knows of tensors on a device; it forgets them with the tensor."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def keep(self, x: Tensor, values: list[int]) -> None:
        """Notes the numbers of a tensor. While code is compiled there are none."""
        if not torch.compiler.is_compiling():
            self._known[x] = _version(x), values

    def of(self, x: Tensor) -> list[int] | None:
        """Returns the numbers of a tensor, or of a part of a known one of one dimension.

        None if they are not known, or if it was written into since then.
        """
        if torch.compiler.is_compiling():
            return None
        version, values = self._known.get(x, (None, None))
        if values is None and x.dim() == 1 and x.is_contiguous() and not x.is_inference() and x._base is not None:
            version, values = self._known.get(x._base, (None, None))
            start = x.storage_offset() - x._base.storage_offset()
            values = values[start : start + len(x)] if values is not None and x._base.dim() == 1 else None
        return values if version == _version(x) else None

    def copied(self, x: Tensor, copy: Tensor) -> None:
        """Notes for a copy of a tensor what is known of the tensor."""
        if (values := self.of(x)) is not None:
            self.keep(copy, values)


def _version(x: Tensor) -> int:
    # A tensor of inference mode has no count of writes, and asking for it raises.
    return 0 if x.is_inference() else x._version


READ = HostValues()
"""The numbers in tensors that the host has read."""


def host_values(x: Tensor) -> list[int]:
    """Returns the numbers in a tensor of one dimension. Waits for the device if the host has not read them yet."""
    values = READ.of(x)
    if values is None:
        values = x.tolist()
        READ.keep(x, values)
    return values


def read_again(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the present numbers of tensors of one dimension; waits for a device once for all that are on it.

    `HostValues` notices no write through `x.data`, so what comes from outside is read in each call.
    """
    distinct = {id(x): x for x in tensors if not x.is_cpu}
    if distinct:
        parts = torch.cat(list(distinct.values())).cpu().split([len(x) for x in distinct.values()])
        for x, part in zip(distinct.values(), parts, strict=True):
            READ.keep(x, part.tolist())
    for x in tensors:
        if x.is_cpu:  # For the copy that goes to a device.
            READ.keep(x, x.tolist())
    return [host_values(x) for x in tensors]
