"""arguments: compares the arguments of public functions with their annotations, so that a wrong one is an Error."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Collection, Mapping
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from autotp.errors import Error


def expect_arguments(function: Callable[..., Any], **arguments: Any) -> None:
    """Raises Error for the first of these arguments that is not what the function's annotation says.

    Where other ranks would wait for this one, call it within `agree`: an argument may be wrong on one rank only.

    Args:
        function: a public function.
        arguments: name of a parameter -> argument. `Any` takes everything.
    """
    hints = _hints(function)
    for name, value in arguments.items():
        if not _fits(value, hints[name]):
            text = repr(value) if isinstance(value, str | bytes | int | float | None) else f"a {type(value).__name__}"
            raise Error(f"{name} is {text[:200]}", expected=_text(hints[name]))


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a kind that an annotation names."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        # A text is checked as a path, too, where a path may stand.
        paths = [option for option in inner if (get_origin(option) or option) in (Path, os.PathLike)]
        return any(_fits(value, option) for option in (paths or inner))
    if origin is Literal:
        return any(type(value) is type(literal) and value == literal for literal in inner)
    if origin in _FITS:
        return _FITS[origin](value)
    if origin is Any or isinstance(origin, TypeVar):
        return True
    keyed = issubclass(origin, Collection) and bool(inner) and inner[0] is str
    return isinstance(value, origin) and (not keyed or all(isinstance(key, str) for key in value))


def _is_path(value: Any) -> bool:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return isinstance(path, str) and bool(path) and "\0" not in path


_FITS: Mapping[Any, Callable[[Any], bool]] = {
    Path: _is_path,
    os.PathLike: _is_path,
    int: lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    float: lambda value: isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1),
    bool: lambda value: isinstance(value, Integral | bool) and value in (0, 1),
    Callable: callable,  # What `get_origin` returns for a Callable with arguments.
    type: lambda value: isinstance(value, type),
    None: lambda value: value is None,
    type(None): lambda value: value is None,
}


def _text(hint: Any) -> str:
    """Returns an annotation as it is written in the function's signature, without the names of modules."""
    if get_args(hint) and get_origin(hint) in (Union, types.UnionType):
        return " | ".join(map(_text, get_args(hint)))
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint)).rpartition(".")[2]
