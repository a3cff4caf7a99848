"""Makes a size a plain number during capture where a model uses it as text or as a key.

A size in a graph is a symbol: `x[: n // 2]` is right for every n. `f"rows {n}"` and `self.cache[n]` are not: the text
and the key would be the same in all calls. So if the model's own code formats or hashes a size, the size becomes a
number, and the graph is right for calls of this size only. torch's own code still gets the texts of symbols.

A function with `functools.lru_cache` is no such place: it would keep symbols, and give them to a later call with an
equal number (einops keeps shapes so). It never finds a symbol among its keys, so that it computes anew.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import opcode
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from autotp import torch_internals as internals
from autotp.source_location import calling_frame, is_users

NEVER_EQUAL = itertools.count(sys.hash_info.modulus // 2)
"""Hashes that no number of a size has, each once."""
METHODS = {"__hash__": hash, "__str__": str, "__repr__": repr, "__format__": format}


@contextmanager
def known_sizes() -> Iterator[None]:
    """A region in which sizes become numbers where the model's own code uses them as text or key."""
    with ExitStack() as stack:
        for row in internals.SIZES_AS_TEXT:
            stack.enter_context(row.replaced_by(_method(row)))
        yield


def _method(row: internals.Replaced) -> Any:
    name, before, convert = row.name, row.original(), METHODS[row.name]

    def method(size: torch.SymInt, *args: Any) -> Any:
        frame = calling_frame()
        if name == "__hash__" and is_users(frame) and _calls_cached(frame):
            return next(NEVER_EQUAL)
        if is_users(frame) or (name == "__hash__" and size.node.maybe_as_int() is not None):
            return convert(int(size), *args)  # type: ignore[operator]
        return before(size, *args)

    return method


def _calls_cached(frame: FrameType) -> bool:
    """True if a frame is at a call, and its code names a function with `functools.lru_cache`."""
    code = frame.f_code
    # At a call the hash is that of an argument. At any other place the model itself uses the size as a key.
    if not opcode.opname[code.co_code[frame.f_lasti]].startswith("CALL"):
        return False
    named = {**frame.f_globals, **frame.f_locals}
    values = [named[name] for name in (*code.co_names, *code.co_freevars, *code.co_varnames) if name in named]
    inside = (inspect.getattr_static(value, name, None) for value in values for name in code.co_names)
    return any(isinstance(value, functools._lru_cache_wrapper) for value in itertools.chain(values, inside))
