"""Plain data to JSON and back: the state of a schedule, of a scaler, or of an optimizer's options.

Reading it can make nothing but these values, whatever a file says: no class is looked up by a name, no code is run.
A JSON object with the key "" stands for what JSON has not: {"": "tuple", "of": [0.9, 0.95]}.
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
SHOWN = 60  # characters of where a value is
NAMES = {kind: name for name, kind in {**SEQUENCES, **MAPPINGS}.items()}


DEEPEST = 100  # values within values; what reads JSON has an end, too
LONGEST = 4000  # digits: Python reads no number of more than 4,300 from a text


def encode(value: Any, at: str, keep: Callable[[Tensor], str], depth: int = 0) -> Any:
    """The value as JSON has it.

    Args:
        at: what it is, for the error.
        keep: takes a tensor that is in it; what it returns, a key, is written in its place.

    Raises:
        Error: there is something else in it; says where.
    """
    kind = type(value)
    if depth > DEEPEST:
        raise Error(f"{at[:SHOWN]}... is nested more than {DEEPEST} deep, or holds itself", fix=PLAIN)
    if kind is int and abs(value) >= 10**LONGEST:
        raise Error(f"{at} is a number of more than {LONGEST:,} digits", fix="its str()")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(item, f"{at}[{i}]", keep, depth + 1) for i, item in enumerate(value)]
    if kind in NAMES and _is_object(value):
        return {key: encode(item, f"{at}[{key!r}]", keep, depth + 1) for key, item in value.items()}
    if kind in NAMES:
        more = {"longest": value.maxlen} if kind is deque else {}
        return {KIND: NAMES[kind], "of": _items(value, at, keep, depth + 1), **more}
    if kind in (Tensor, nn.Parameter) and _has_elements(value):
        learns = {"learns": value.requires_grad} if kind is nn.Parameter else {}
        return {KIND: "parameter" if learns else "tensor", "of": keep(value.detach()), **learns}
    if (array := _array(value)) is not None:
        return {KIND: "array", "of": keep(array), "scalar": kind is not numpy.ndarray}
    if (text := _text(value)) is not None:
        return {KIND: text[0], "of": text[1]}
    raise Error(
        f"{at} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        fix=PLAIN,
    )


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value that JSON stands for.

    Args:
        tensor: of a key, the tensor that was kept under it.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, RuntimeError: it is not what `encode` makes.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    kind, of = value[KIND], value["of"]
    if kind == "deque":
        return deque(decode(of, tensor), value.get("longest"))
    if kind == "parameter":
        return nn.Parameter(tensor(of), value["learns"])
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(of, tensor))
    if kind in MAPPINGS:
        return MAPPINGS[kind]({decode(key, tensor): decode(item, tensor) for key, item in of})
    if kind == "array":
        found = tensor(of).numpy()
        return found[()] if value["scalar"] else found
    return tensor(of) if kind == "tensor" else READERS[kind](of)


def _is_object(value: Any) -> bool:
    """Whether JSON has such a dict."""
    return type(value) is dict and all(type(key) is str and key != KIND for key in value)


def _has_elements(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory one by one, as a file has them."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not tensor.is_nested and not tensor.is_meta


def _array(value: Any) -> Tensor | None:
    """The elements of an array or number of numpy; None of what would come back as something else."""
    kind = type(value)
    if kind is not numpy.ndarray and not (isinstance(value, numpy.generic) and value.dtype.type is kind):
        return None
    if value.dtype.kind not in "biufc" or not value.dtype.isnative:
        return None
    try:
        return torch.from_numpy(numpy.array(value, order="C"))
    except TypeError:  # torch has no such dtype.
        return None


def _items(value: Any, at: str, keep: Callable[[Tensor], str], depth: int) -> list[Any]:
    if isinstance(value, Mapping):
        pairs = value.items()
        return [
            [encode(key, f"a key of {at}", keep, depth), encode(x, f"{at}[{key!r}]", keep, depth)] for key, x in pairs
        ]
    # Sets have no order of their own: the same one on all ranks.
    items: Iterable[Any] = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    return [encode(item, f"{at}[{i}]", keep, depth) for i, item in enumerate(items)]


def _text(value: Any) -> tuple[str, Any] | None:
    """What else a value may be, and how it is written."""
    if type(value) is bytes:
        return "bytes", base64.b64encode(value).decode()
    if type(value) is complex:
        return "complex", [value.real, value.imag]
    if type(value) is torch.dtype:
        return "dtype", name_of(value)
    return ("device", str(value)) if type(value) is torch.device else None


def name_of(dtype: torch.dtype) -> str:
    """As `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ValueError: torch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return found


READERS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda parts: complex(*parts),
    "dtype": dtype_of,
    "device": torch.device,
}
