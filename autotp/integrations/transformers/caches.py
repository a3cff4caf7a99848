"""Key-value caches of transformers as states of a call: their tensors, and what changes with each token.

Nothing here imports transformers before the user has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autotp.errors import Error

COUNTS = ("cumulative_length", "cumulative_length_int")
"""Attributes of a cache's layer that grow with each token."""


def is_state(x: Any) -> bool:
    """Whether an object is a key-value cache or a layer of one: it holds tensors, and a call changes it."""
    if "transformers.cache_utils" not in sys.modules:
        return False
    cls: Any = type(x)
    compiling = torch.compiler.is_compiling()  # Dynamo does not trace a function whose results are remembered.
    return _is_of_states(cls) if compiling else _remembered(cls)


def _is_of_states(cls: type) -> bool:
    caches = sys.modules["transformers.cache_utils"]
    names = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    return any(issubclass(cls, getattr(caches, name)) for name in names if hasattr(caches, name))


_remembered = lru_cache(_is_of_states)


def shown_attribute(name: str, value: Any) -> Any:
    """Returns an attribute of a cache in a form that pytree can flatten; a count as a tensor's size, so it can vary.

    Raises:
        Error: the cache moves its tensors to other devices, or quantizes them.
    """
    if (name == "offloading" and value) or name == "q_group_size":
        how = "offloaded" if name == "offloading" else "quantized"
        raise Error(f"a cache that is {how} cannot be cut", fix='cache_implementation="dynamic" or "static"')
    if name in COUNTS and isinstance(value, int | torch.SymInt):
        # [count], on one byte of memory.
        return torch.zeros((), dtype=torch.bool).expand(value)
    # A device is no leaf of a graph: `read_attribute` takes it from the cache's tensors.
    return None if isinstance(value, torch.device) else value


def rewrites(name: str) -> bool:
    """False for the name of an attribute that `shown_attribute` and `read_attribute` return as it is."""
    return name in (*COUNTS, "offloading", "q_group_size") or name.endswith("device")


def read_attribute(name: str, value: Any, among: Sequence[Any]) -> Any:
    """Returns the attribute that `shown_attribute` was given. among: all attributes of the cache, to find its device"""
    if name in COUNTS and isinstance(value, Tensor) and value.dim() == 1:
        return value.shape[0]
    if name.endswith("device"):
        tensors = chain(among, pytree.tree_iter(list(among)))  # Most caches have theirs at the top.
        return next((x.device for x in tensors if isinstance(x, Tensor) and x.dim() > 2), None)
    return value
