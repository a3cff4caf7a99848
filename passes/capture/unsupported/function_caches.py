"""Functions with `functools.lru_cache` that the code of a model names: what they keep is forgotten around a capture.

    @lru_cache
    def positions(n): return torch.arange(n) / n
    def forward(self, x): return x + positions(8)     in a capture `positions` would keep a tensor without values

The call after the capture would get that tensor. And a tensor that an earlier call has left would be a constant of the
graph: on the ranks that have made such a call only, and with its dtype, where `verify` computes in float64.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from autotp.passes.capture.python_state.code_names import LIBRARIES, named
from autotp.passes.capture.python_state.freeze import cells_of

CACHED = type(functools.lru_cache(lambda: None))


@contextmanager
def empty_caches(model: nn.Module) -> Iterator[None]:
    """A region that the model's functions enter, and leave, without what they have kept."""
    caches = [cache for name in named(model, ()) for cache in _caches(name.value)]
    _clear(caches)
    try:
        yield
    finally:
        _clear(caches)


def _caches(value: Any) -> list[Any]:
    """Returns the function itself, and those in a decorator around it."""
    # A decorator may hide the cached function in the closure of its own.
    inside = [value, *(cells_of(value).values() if isinstance(value, types.FunctionType) else ())]
    return [x for x in inside if isinstance(x, CACHED) and str(x.__module__).partition(".")[0] not in LIBRARIES]


def _clear(caches: list[Any]) -> None:
    for cache in caches:
        cache.cache_clear()
