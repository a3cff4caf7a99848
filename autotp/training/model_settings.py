"""model_settings: the attributes that a model was built with. A checkpoint is refused by a model with others.

Before: GPT(GPTConfig(n_head=4, ...))
After:  {"h.*.attn.n_head": 4, "h.*.ln_1.eps": 1e-05, "h.*.mlp.act": "GELU", ...}
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

NOT_OF_THE_MODEL = (
    "training", "name_or_path", "transformers_version", "architectures", "generation_config", "gradient_checkpointing",
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "dtype", "torch_dtype",
)  # fmt: skip
"""Attributes that may differ between two copies of the same model."""
PLAIN_TYPES = (bool, int, float, str)
LONGEST_VALUE = 200  # The most characters of a value that is kept; of a longer value a checksum is kept.
DEEPEST_OBJECT = 4  # The most levels of nested objects that are read.


def model_settings(model: nn.Module) -> dict[str, Any]:
    """Returns the plain public attributes of a model's modules and configurations, and the modules' classes.

    Numbers in module names become `*`: the entry is one value where all these modules have the same, else a list.
    Values without a stable name (lambdas, tensors) are left out, and dropout rates, too: another rate does not make
    another model.
    """
    entries: dict[str, list[Any]] = {}
    visited: set[int] = set()
    for name, module in model.named_modules():
        # The 3 of `h.3.attn`, but not the 1 of `ln_1`.
        path = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        entries.setdefault(path, []).append(type(module).__name__)
        for key, value in _entries_within({} if isinstance(module, _DropoutNd) else vars(module), path, visited, 0):
            entries.setdefault(key, []).append(value)
    return {key: values[0] if values.count(values[0]) == len(values) else values for key, values in entries.items()}


def differing_settings(saved: Mapping[str, Any], current: Mapping[str, Any], changed: Collection[str]) -> list[str]:
    """Returns a text for each attribute that both models have with different values, except those in `changed`."""
    names = [key for key in saved if key in current and not {key, key.rpartition(".")[2]} & set(changed)]
    pairs = ((key, json.dumps(saved[key]), json.dumps(current[key])) for key in names)
    return [f"`{key or 'model'}` is {_short(a)} there, and {_short(b)} here" for key, a, b in pairs if a != b]


def _entries_within(
    attributes: Mapping[Any, Any], path: str, visited: set[int], depth: int
) -> Iterator[tuple[str, Any]]:
    """Yields the plain values among an object's attributes or a dict's items, and among the objects that these hold."""
    for name, value in attributes.items():
        if not isinstance(name, str) or name.startswith("_") or name in NOT_OF_THE_MODEL:
            continue
        if not ("drop" in name and _is_rate(value)):
            yield from _entries_of(value, f"{path}.{name}" if path else name, visited, depth)


def _entries_of(value: Any, key: str, visited: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yields the entries of one value: the value if it is plain, else those of its items or attributes."""
    if isinstance(value, Enum | torch.dtype):
        yield key, str(value)
    elif _is_plain(value) or isinstance(value, list | tuple | set | frozenset | range):
        # The order of a set differs between processes.
        value = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        if value is None or (plain := _kept(list(value) if isinstance(value, range) else value)) is not None:
            yield key, value if value is None else plain
        elif depth < DEEPEST_OBJECT and not _is_plain(value):
            for i, item in enumerate(value[:LONGEST_VALUE]):
                yield from _entries_of(item, f"{key}.{i}", visited, depth + 1)
    elif isinstance(value, partial):
        yield from _entries_of([value.func, *value.args], key, visited, depth + 1)
        yield from _entries_within(value.keywords, key, visited, depth + 1)
    elif hasattr(value, "__qualname__"):
        # `<lambda>` and `<locals>` do not name one function.
        yield from [] if "<" in value.__qualname__ else [(key, value.__qualname__)]
    elif not isinstance(value, Tensor | nn.Module) and id(value) not in visited and depth < DEEPEST_OBJECT:
        visited.add(id(value))
        yield from _entries_within(_attributes(value), key, visited, depth + 1)


def _attributes(value: Any) -> Mapping[Any, Any]:
    """Returns a dict's items, or an object's attributes, with those of `__slots__`."""
    if isinstance(value, Mapping):
        return value
    slots = [name for base in type(value).__mro__ for name in _names(base.__dict__.get("__slots__", ()))]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _names(slots: Any) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else slots


def _is_rate(value: Any) -> bool:
    """Whether a value may be a dropout rate, or a list of them; another rate does not make another model."""
    rates = value if isinstance(value, list | tuple) else [value]
    return value is None or all(isinstance(x, int | float) and 0 <= x <= 1 for x in rates)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in PLAIN_TYPES


def _kept(value: Any) -> Any:
    """Returns a value as it is kept: a long one as its checksum. None if some item of it is not plain."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
    return value if len(text) <= LONGEST_VALUE else f"{len(text)} characters, crc32 {zlib.crc32(text.encode()):08x}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
