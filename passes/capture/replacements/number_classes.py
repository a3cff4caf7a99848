"""Sizes and numbers that a model reads are Python's numbers to it, though a capture has symbols for them.

Before: size = x.shape[1] * 2; if isinstance(size, int): size = (size, size)      (not taken: a symbol is no int)
After:  the model's own code is told what it is told on one device: an int
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autotp.source_location import is_users

CLASSES: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""Class of a symbol -> the class of what it stands for."""
IS_INSTANCE = builtins.isinstance


@contextmanager
def numbers_of_python() -> Iterator[None]:
    """A region in which `isinstance` says to code outside of torch and autotp that a symbol is a number of Python."""
    with patch.object(builtins, "isinstance", _is_instance):
        yield


def _is_instance(value: Any, classes: Any, /) -> bool:
    if IS_INSTANCE(value, classes):
        return True
    stands_for = CLASSES.get(type(value))
    return stands_for is not None and is_users(sys._getframe(1)) and issubclass(stands_for, classes)
