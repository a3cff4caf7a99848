"""Finds the blocks of a model that have the same structure as other blocks, and watches their classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from autotp.passes.capture.repeats.comparison import structure
from autotp.torch_internals import set_until_undone

Blocks = Mapping[int, tuple[nn.Module, int]]
"""`id` of a block's `__dict__` -> the block, and the number of its kind: blocks of a kind have the same structure."""


def blocks_of(model: nn.Module) -> Blocks:
    """Returns the outermost numbered modules that have a sibling of the same structure."""
    kinds: list[Any] = []
    blocks = {}
    for block in _alike(model):
        block_structure = structure(block)
        if block_structure not in kinds:
            kinds.append(block_structure)
        blocks[id(block.__dict__)] = block, kinds.index(block_structure)
    return blocks


def differing(blocks: Blocks) -> set[tuple[int, str, str]]:
    """Returns (kind, module, attribute) of the integers that differ between blocks of a kind."""
    values_by_place: dict[tuple[int, str, str], set[int]] = {}
    for block, block_kind in blocks.values():
        for path, module in block.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    values_by_place.setdefault((block_kind, path, name), set()).add(value)
    return {place for place, values in values_by_place.items() if len(values) > 1}


def parts_of(block: nn.Module) -> list[int]:
    """Returns the `id` of each module in a block; they differ if a module is replaced."""
    return [id(part) for part in block.modules()]


def definer(cls: Any) -> Any:
    """Returns the class that defines the forward of a class."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


@contextmanager
def patched(owner: Any, names: Mapping[str, Any]) -> Iterator[None]:
    """A region in which a class, or a module of Python, has other attributes."""
    with ExitStack() as stack:
        for name, value in names.items():
            stack.callback(set_until_undone(owner, name, value))
        yield


def _alike(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost numbered modules that have a sibling of the same structure."""
    inside: set[nn.Module] = set()
    for parent in model.modules():
        # Numbered modules inside of a block are parts of it.
        if parent in inside:
            continue
        beside = [child for name, child in parent.named_children() if name.isdigit()]
        structures = [structure(child) for child in beside] if len(beside) > 1 else []
        for child, form in zip(beside, structures, strict=False):
            if structures.count(form) > 1 and next(child.parameters(), None) is not None and is_ordinary(child):
                inside.update(child.modules())
                yield child


def is_ordinary(block: nn.Module) -> bool:
    """True for modules whose forward is that of their class, written in Python."""
    odd = (torch.jit.ScriptModule, fx.GraphModule)
    custom = any(type(module).__getattribute__ is not nn.Module.__getattribute__ for module in block.modules())
    # A forward in the module's own `__dict__` hides that of the class, which `Repeats` replaces.
    return not custom and not any(isinstance(module, odd) or "forward" in vars(module) for module in block.modules())
