"""The settings of `generate` as text, which ranks compare before the first token.

A processor's values are not gathered. Ranks with different lists of tokens would mask different columns, and choose a
token that fits none of the lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from autotp.distributed.fingerprint import checksum
from autotp.passes.capture.python_state.freeze import freeze
from autotp.runtime.calls.call_consistency import compared_part

CLOCKS = ("initial_timestamp",)
"""Attributes with the time at which a criterion was made, which differs between ranks."""


def generation_settings(config: Any, parts: Iterable[Any]) -> list[Any]:
    """Returns values whose text is the same if a generation's settings, processors and criteria are the same.

    Of the user's processors and criteria only the classes are compared: they may hold a clock or a file, and all ranks
    use the first rank's results.
    """
    plain = bool | int | float | str | list | tuple | dict
    settings = sorted((key, repr(value)) for key, value in config.to_dict().items() if isinstance(value, plain))
    return [settings, [_part(part) for part in parts]]


def inputs_as_text(inputs: Mapping[str, Any]) -> list[str]:
    """Returns a text for each tensor among the inputs of a generation, with a checksum of its values."""
    return [f"{name} {compared_part(x)} {checksum(x)}" for name, x in inputs.items() if type(x) is Tensor]


def is_of_transformers(part: Any) -> bool:
    """Whether a processor or criterion is a class of transformers."""
    return type(part).__module__.startswith("transformers.generation.")


def holds_function(part: Any) -> bool:
    """Whether a processor or criterion asks a function of the user's, such as `prefix_allowed_tokens_fn`."""
    return any(callable(attribute) and not isinstance(attribute, nn.Module | type) for attribute in vars(part).values())


def _part(part: Any) -> Any:
    attributes = sorted(vars(part).items()) if is_of_transformers(part) else []
    return type(part).__qualname__, [(key, freeze(value, _shown)) for key, value in attributes if key not in CLOCKS]


def _shown(value: Any, freeze: Any) -> Any:
    """Returns what ranks compare of a setting: a tensor's checksum, a function's name, another object's class."""
    if isinstance(value, Tensor):
        return compared_part(value), checksum(value)
    is_container = type(value) in (list, tuple, dict, set, frozenset)
    return NotImplemented if is_container else getattr(value, "__qualname__", None) or compared_part(value)
