"""State that belongs to one object of others: a process group, a model, an optimizer, a class of another library.

NOTE [State of the process]
What autotp notes while a program runs mostly belongs to such an object. It is kept here, beside the object, and goes
with it. A name is no key: after `destroy_process_group()` a later group has the name of an earlier one. State that
belongs to no object is a name of a module, and tests/test_attached.py lists these with a reason each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

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
