"""Makes a size a plain number during capture where a model uses it as text or as a key.

A size in a graph is a symbol: `x[: n // 2]` is right for every n. `f"rows {n}"` and `self.cache[n]` are not: the text
and the key would be the same in all calls. So if the model's own code formats or hashes a size, the size becomes a
number, and the graph is right for calls of this size only. torch's own code still gets the texts of symbols.
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
    """A region in which sizes become numbers where the model's own code uses them as text or key."""
    with patched(torch.SymInt, {name: _method(name) for name in METHODS}):
        yield


def _method(name: str) -> Any:
    before, known = getattr(torch.SymInt, name), METHODS[name]

    def method(size: torch.SymInt, *args: Any) -> Any:
        if is_users(sys._getframe(1)) or (name == "__hash__" and size.node.maybe_as_int() is not None):
            return known(int(size), *args)  # type: ignore[operator]
        return before(size, *args)

    return method
