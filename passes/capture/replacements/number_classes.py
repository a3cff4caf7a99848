"""Sizes and numbers that a model reads are Python's numbers to it, though a capture has symbols for them.

Before: size = x.shape[1] * 2; if isinstance(size, int): size = (size, size)      (not taken: a symbol is no int)
After:  the model's own code is told what it is told on one device: an int

Before: attention(q, k, v, is_causal=x.shape[1] > 1)      (no operator takes a symbol for a bool)
After:  the comparison is True or False, and the graph is right for calls in which it is the same
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autotp import torch_internals as internals
from autotp.source_location import calling_frame, is_users

CLASSES: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""Class of a symbol -> the class of what it stands for."""
IS_INSTANCE = builtins.isinstance


@contextmanager
def numbers_of_python() -> Iterator[None]:
    """A region in which code outside of torch and autotp sees numbers of Python in place of symbols.

    `isinstance` says that a symbol is a number, and a comparison of sizes is a bool.
    """
    with ExitStack() as stack:
        stack.enter_context(internals.IS_INSTANCE.replaced_by(_is_instance))
        for row in internals.COMPARES_NUMBERS:
            stack.enter_context(row.replaced_by(_decided(row.original())))
        yield


def _is_instance(value: Any, classes: Any, /) -> bool:
    if IS_INSTANCE(value, classes):
        return True
    stands_for = CLASSES.get(type(value))
    # `issubclass`, so that a truth value is an int, too, as it is in Python.
    return stands_for is not None and is_users(calling_frame()) and issubclass(stands_for, classes)


def _decided(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a comparison that gives the model's code a bool, unless the values of tensors decide it."""

    def decided(number: Any, other: Any) -> Any:
        answer = compare(number, other)
        is_decided = type(answer) is torch.SymBool and not free_unbacked_symbols(answer)
        # `bool` asks torch for the outcome, which becomes a condition of the graph.
        return bool(answer) if is_decided and is_users(calling_frame()) else answer

    return decided
