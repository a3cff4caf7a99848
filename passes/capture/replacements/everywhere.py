"""everywhere: something else in the place of a function of torch, by whatever name the code of a model calls it.

Before: torch.is_grad_enabled is another function; `from torch import is_grad_enabled` in a model's file is torch's own
After:  each global of Python that is torch's function is the other one
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

Pairs = Sequence[tuple[Any, Any]]
"""Pairs of an object, and of what stands for it."""


@contextmanager
def everywhere(pairs: Pairs, model: nn.Module | None = None) -> Iterator[None]:
    """A region in which the second object of each pair stands for the first one, in all modules of Python.

    It does so in the attributes of `model` and its submodules, too. A method has one place, its class: for these there
    is `patched` (`passes/capture/repeats/blocks.py`).
    """
    if not pairs:
        yield
        return
    instead = {id(before): (before, after) for before, after in pairs}
    tables = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    tables += [vars(part) for part in model.modules()] if model is not None else []
    names = [(table, name, *instead[id(x)]) for table in tables for name, x in list(table.items()) if id(x) in instead]
    for table, name, _, after in names:
        table[name] = after
    try:
        yield
    finally:
        for table, name, before, after in names:
            if table.get(name) is after:  # Unless the model has set it.
                table[name] = before
