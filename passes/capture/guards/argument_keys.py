"""A value to compare with ==, for each plain argument that decides which graph a call runs.

A key is kept from one call to the next: it holds what an argument contained, not an object that may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy


def plain(leaf: Any) -> Any:
    """A plain argument as part of a key, in which undefined numbers are the same, and 1, 1.0 and True are not."""
    return type(leaf), _content(leaf)


def _content(leaf: Any) -> Any:
    match leaf:
        case numpy.ndarray() if leaf.dtype.hasobject:
            return leaf.shape, tuple(map(plain, leaf.ravel().tolist()))
        case numpy.ndarray() | numpy.generic():
            return leaf.dtype.str, leaf.shape, leaf.tobytes()
        case float():
            return leaf if leaf == leaf else "nan"
        case int() | str() | bytes() | complex() | None:
            return leaf
        case bytearray():
            return bytes(leaf)
        case set():
            return frozenset(leaf)
        case _:
            return Other(leaf)


@dataclass(frozen=True, eq=False)
class Other:
    """An argument of another class: the same as a second if it is that object, or if == says so and nothing else."""

    leaf: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Other):
            return False
        if self.leaf is other.leaf:
            return True
        try:
            return (self.leaf == other.leaf) is True
        except Exception:  # of any kind: it is another's `==`, which may well be for elements
            return False

    def __hash__(self) -> int:
        return 0
