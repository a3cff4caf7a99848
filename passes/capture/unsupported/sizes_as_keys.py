"""Makes sizes plain numbers where a model uses them as text or as a key, during capture.

A size of a graph is a symbol: `x[: n // 2]` is right for all. `f"rows {n}"` and `self.cache[n]` are not: a text and a
key are there once for all calls. So a size that the model's own code writes out, or looks up, becomes the number that
it is in this call, and the graph is for calls of this size. torch's own code asks for texts of symbols, and gets these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autotp.passes.capture.repeats.blocks import patched
from autotp.source_location import is_users

METHODS = {"__hash__": hash, "__str__": str, "__repr__": repr, "__format__": format}


@contextmanager
def known_sizes() -> Iterator[None]:
    """A region in which sizes that the model's own code uses so are numbers."""
    with patched(torch.SymInt, {name: _method(name) for name in METHODS}):
        yield


def _method(name: str) -> Any:
    before, known = getattr(torch.SymInt, name), METHODS[name]

    def method(size: torch.SymInt, *args: Any) -> Any:
        if is_users(sys._getframe(1)) or (name == "__hash__" and size.node.maybe_as_int() is not None):
            return known(int(size), *args)  # type: ignore[operator]
        return before(size, *args)

    return method
