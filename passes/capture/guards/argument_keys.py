"""A value to compare with ==, for each plain argument that decides which graph a call runs.

A key is kept from one call to the next, so it holds an argument's contents, not an object that may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy


def argument_key(leaf: Any) -> Any:
    """Returns a plain argument as part of a key: all NaNs are equal; 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    return type(leaf), _content(leaf)


def _content(leaf: Any) -> Any:
    match leaf:
        case numpy.ndarray() if leaf.dtype.hasobject:
            return leaf.shape, tuple(map(argument_key, leaf.ravel().tolist()))
        case numpy.ndarray() | numpy.generic():
            return leaf.dtype.str, leaf.shape, leaf.tobytes()
        case float():
            return leaf if leaf == leaf and leaf else repr(leaf)
        case complex():
            return _content(leaf.real), _content(leaf.imag)
        case int() | str() | bytes() | None:
            return leaf
        case bytearray():
            return bytes(leaf)
        case set():
            return frozenset(leaf)
        case _:
            return Other(leaf)


@dataclass(frozen=True, eq=False)
class Other:
    """An argument of another class: equal to another if they are one object, or if their `==` returns True itself."""

    leaf: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Other):
            return False
        if self.leaf is other.leaf:
            return True
        try:
            return (self.leaf == other.leaf) is True
        except Exception:  # The user's `==` may raise anything, or compare element by element.
            return False

    def __hash__(self) -> int:
        return 0
