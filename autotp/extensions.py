"""Values of options that a package beside the kernel adds, such as `overlap="batch"`: the passes that run for them.

The kernel knows no such package by name. `register_value` notes a value; what it adds is loaded when a user chooses
it. Where the package is deleted, nobody registers the value, and the check of options refuses it as any wrong value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a value of an option adds.

    Attributes:
        passes: name of a pass of the compiler -> the passes (`autotp.compiler.Pass`) that run behind it.
        expect: raises Error for options that the value cannot be combined with.
    """

    passes: Mapping[str, Sequence[Any]]
    expect: Callable[[Any], None]


@dataclass(frozen=True)
class _Registered:
    load: Callable[[], Extension]
    optional: tuple[str, ...]


_REGISTERED: dict[tuple[str, str], _Registered] = {}
"""(Name of an option, value) -> what adds it."""


def register_value(option: str, value: str, load: Callable[[], Extension], optional: tuple[str, ...] = ()) -> None:
    """Adds a value of an option, before `autotp.options` is loaded. `load` runs when the value is first chosen.

    Args:
        optional: the names of its passes that `without` may leave out.
    """
    _REGISTERED[option, value] = _Registered(cache(load), optional)


def values_of(option: str) -> tuple[str, ...]:
    """Returns the values of an option that were added."""
    return tuple(value for name, value in _REGISTERED if name == option)


def optional_passes() -> tuple[str, ...]:
    """Returns the names of all passes of extensions that can be left out."""
    return tuple(name for added in _REGISTERED.values() for name in added.optional)


def chosen_extensions(options: object) -> list[Extension]:
    """Returns the extensions whose values a user has chosen, loaded."""
    return [added.load() for (name, value), added in _REGISTERED.items() if getattr(options, name) == value]
