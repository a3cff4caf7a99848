"""Finds the blocks of a model that have the same structure as other blocks, and watches their classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from autotp.passes.capture.guards.comparison import structure

Blocks = Mapping[int, tuple[nn.Module, int]]
"""`id` of a block's attributes -> the block, and the number of its kind: those of one kind have one structure."""


def blocks_of(model: nn.Module) -> Blocks:
    """The outermost numbered modules that have one of the same structure beside them."""
    kinds: list[Any] = []
    found = {}
    for block in _alike(model):
        its = structure(block)
        if its not in kinds:
            kinds.append(its)
        found[id(block.__dict__)] = block, kinds.index(its)
    return found


def differing(blocks: Blocks) -> set[tuple[int, str, str]]:
    """(kind, module, attribute) of the integers that are not the same in all blocks of a kind."""
    found: dict[tuple[int, str, str], set[int]] = {}
    for block, kind in blocks.values():
        for path, module in block.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    found.setdefault((kind, path, name), set()).add(value)
    return {place for place, values in found.items() if len(values) > 1}


def parts_of(block: nn.Module) -> list[int]:
    """The `id` of each module that it has: others may be put in their place."""
    return [id(part) for part in block.modules()]


def definer(kind: Any) -> Any:
    """The class that a class has its forward from."""
    return next(base for base in kind.__mro__ if "forward" in vars(base))


@contextmanager
def patched(kind: Any, names: Mapping[str, Any]) -> Iterator[None]:
    """A region in which a class, or a module of Python, has other attributes.

    They are set past its metaclass: the class of a part of a parallel model passes on what is set on it (`module.py`).
    """
    put, delete = (type.__setattr__, type.__delattr__) if isinstance(kind, type) else (setattr, delattr)
    before, done = dict(vars(kind)), list[str]()
    try:
        for name, value in names.items():
            put(kind, name, value)
            done.append(name)
        yield
    finally:
        for name in done:
            if name in before:
                put(kind, name, before[name])
            else:
                delete(kind, name)


def _alike(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost numbered modules that have one of the same structure beside them."""
    inside: set[nn.Module] = set()
    for parent in model.modules():
        if parent in inside:
            continue
        beside = [child for name, child in parent.named_children() if name.isdigit()]
        structures = [structure(child) for child in beside] if len(beside) > 1 else []
        for child, its in zip(beside, structures, strict=False):
            if structures.count(its) > 1 and next(child.parameters(), None) is not None and _is_ordinary(child):
                inside.update(child.modules())
                yield child


def _is_ordinary(block: nn.Module) -> bool:
    """True for Python's own modules that compute what their class says."""
    odd = (torch.jit.ScriptModule, fx.GraphModule)
    own = any(type(module).__getattribute__ is not nn.Module.__getattribute__ for module in block.modules())
    return not own and not any(isinstance(module, odd) or "forward" in vars(module) for module in block.modules())
