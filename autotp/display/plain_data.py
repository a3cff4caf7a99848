"""plain_data: results as numbers, texts, lists and dicts, for JSON: their attributes under their own names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

DATA_VERSION = 1
"""The version of the plain data of all results, and of what commands print with `--json`: it changes if a key gets
another meaning."""


def compared_fields(value: Any) -> dict[str, Any]:
    """Returns the attributes of a dataclass, without those that are no part of comparisons (`compare=False`)."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.compare}


def as_plain_data(value: Any) -> Any:
    """Returns a value as JSON has it. Units are those that the attributes' docstrings say.

    A dataclass is a dict of what its class lists in `DATA`: attributes, properties, and methods without arguments;
    without such a list, of the attributes that are compared. A named tuple is a dict, too. A number that JSON lacks is
    a text, `inf` or `nan`, and so is what has no other form, such as a dtype.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): as_plain_data(item) for key, item in value.items()}
        case tuple() | list() if not hasattr(value, "_asdict"):
            return [as_plain_data(item) for item in value]
        case tuple():
            return as_plain_data(value._asdict())  # type: ignore[attr-defined]
        case _ if is_dataclass(value):
            names: tuple[str, ...] = getattr(value, "DATA", ())
            return as_plain_data({name: _read(value, name) for name in names} or compared_fields(value))
        case _:
            return str(value).removeprefix("torch.")


def _read(value: Any, name: str) -> Any:
    attribute = getattr(value, name)
    return attribute() if callable(attribute) else attribute
