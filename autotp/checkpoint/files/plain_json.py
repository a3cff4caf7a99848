"""Converts plain data to JSON and back: the state of a schedule or a scaler, and an optimizer's options.

Reading can make only these values, whatever a file contains: no class is looked up by name, and no code is run.
A JSON object with the key "" stands for a value that JSON does not have: {"": "tuple", "of": [0.9, 0.95]}.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from autotp.errors import Error

KIND = ""
SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "size": torch.Size}
MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
PLAIN = "a state_dict() of tensors, numbers, texts, and lists, tuples, sets and dicts of these"
PLACE_LENGTH = 60  # The most characters of a value's place in an error.
KIND_NAMES = {cls: name for name, cls in {**SEQUENCES, **MAPPINGS}.items()}


MOST_LEVELS = 100  # The most levels of nested values; the JSON reader has a limit, too.
MOST_DIGITS = 4000  # The most digits of a number: Python reads at most 4,300.


def encode(value: Any, place: str, keep: Callable[[Tensor], str], depth: int = 0) -> Any:
    """Returns a value in the form of JSON.

    Args:
        place: the name of the value in the error.
        keep: stores a tensor of the value, and returns the key that is written in its place.

    Raises:
        Error: the value contains an object of another kind; says where.
    """
    cls = type(value)
    if depth > MOST_LEVELS:
        raise Error(f"{place[:PLACE_LENGTH]}... is nested more than {MOST_LEVELS} deep, or holds itself", fix=PLAIN)
    if cls is int and abs(value) >= 10**MOST_DIGITS:
        raise Error(f"{place} is a number of more than {MOST_DIGITS:,} digits", fix="its str()")
    if value is None or cls in (bool, int, float, str):
        return value
    if cls is list:
        return [encode(item, f"{place}[{i}]", keep, depth + 1) for i, item in enumerate(value)]
    if cls in KIND_NAMES and _is_object(value):
        return {key: encode(item, f"{place}[{key!r}]", keep, depth + 1) for key, item in value.items()}
    if cls in KIND_NAMES:
        more = {"longest": value.maxlen} if cls is deque else {}
        return {KIND: KIND_NAMES[cls], "of": _items(value, place, keep, depth + 1), **more}
    if cls in (Tensor, nn.Parameter) and _has_elements(value):
        learns = {"learns": value.requires_grad} if cls is nn.Parameter else {}
        return {KIND: "parameter" if learns else "tensor", "of": keep(value.detach()), **learns}
    if (array := _array(value)) is not None:
        return {KIND: "array", "of": keep(array), "scalar": cls is not numpy.ndarray}
    if (text := _text(value)) is not None:
        return {KIND: text[0], "of": text[1]}
    raise Error(
        f"{place} is a {cls.__module__}.{cls.__qualname__}, which a checkpoint cannot hold",
        fix=PLAIN,
    )


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Returns the value that `encode` was given.

    Args:
        tensor: returns the tensor that was kept under a key.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, RuntimeError: `value` is not a result of `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    tag, of = value[KIND], value["of"]
    if tag == "deque":
        return deque(decode(of, tensor), value.get("longest"))
    if tag == "parameter":
        return nn.Parameter(tensor(of), value["learns"])
    if tag in SEQUENCES:
        return SEQUENCES[tag](decode(of, tensor))
    if tag in MAPPINGS:
        return MAPPINGS[tag]({decode(key, tensor): decode(item, tensor) for key, item in of})
    if tag == "array":
        array = tensor(of).numpy()
        # The index () makes a number of an array without dimensions.
        return array[()] if value["scalar"] else array
    return tensor(of) if tag == "tensor" else READERS[tag](of)


def _is_object(value: Any) -> bool:
    """Whether a dict is a JSON object as it is: its keys are texts, and none is `KIND`."""
    return type(value) is dict and all(type(key) is str and key != KIND for key in value)


def _has_elements(tensor: Tensor) -> bool:
    """Whether a tensor is dense, so that a file can have its elements one after the other."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not tensor.is_nested and not tensor.is_meta


def _array(value: Any) -> Tensor | None:
    """Returns the elements of a numpy array or number; None if reading would not return an equal value."""
    cls = type(value)
    if cls is not numpy.ndarray and not (isinstance(value, numpy.generic) and value.dtype.type is cls):
        return None
    # torch has neither texts, objects and times, nor the other order of bytes.
    if value.dtype.kind not in "biufc" or not value.dtype.isnative:
        return None
    try:
        return torch.from_numpy(numpy.array(value, order="C"))
    except TypeError:  # torch has no such dtype.
        return None


def _items(value: Any, place: str, keep: Callable[[Tensor], str], depth: int) -> list[Any]:
    if isinstance(value, Mapping):
        pairs = value.items()
        return [
            [encode(key, f"a key of {place}", keep, depth), encode(x, f"{place}[{key!r}]", keep, depth)]
            for key, x in pairs
        ]
    # A set has no order, and all ranks must write the same.
    items: Iterable[Any] = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    return [encode(item, f"{place}[{i}]", keep, depth) for i, item in enumerate(items)]


def _text(value: Any) -> tuple[str, Any] | None:
    """Returns (kind, text) for bytes, complex numbers, dtypes and devices; None for other values."""
    if type(value) is bytes:
        return "bytes", base64.b64encode(value).decode()
    if type(value) is complex:
        return "complex", [value.real, value.imag]
    if type(value) is torch.dtype:
        return "dtype", dtype_name(value)
    return ("device", str(value)) if type(value) is torch.device else None


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of this name.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype


READERS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda parts: complex(*parts),
    "dtype": dtype_of,
    "device": torch.device,
}
