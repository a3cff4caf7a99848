"""depth: leaves out most blocks of a model before it is captured, and puts them back into what was counted.

Before: 80 blocks that are alike                      After: 4 blocks; the second stands for the second to the 78th

Two blocks are alike if their modules have the same classes, parameters and plain attributes, and if their graphs are
alike. The first and the last two are always captured: they have other neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

LEAST = 4
"""The blocks of a list that are captured."""
NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "idx", "index")
"""The names of attributes that only say which block a block is."""


def shorten(model: nn.Module) -> dict[str, int]:
    """Leaves LEAST blocks in each list of blocks that are alike; returns path of a list -> its number of blocks."""
    lengths: dict[str, int] = {}
    for path, blocks in list(model.named_modules()):
        # A list in a block of a shortened list stays as it is: it is a part of what is repeated.
        inside = any(path.startswith(f"{shortened}.") for shortened in lengths)
        if isinstance(blocks, nn.ModuleList) and len(blocks) > LEAST and not inside and _alike(blocks):
            lengths[path] = len(blocks)
            # Of the four, the last two stand for the model's last two: all blocks are alike, and so are their
            # neighbours.
            del blocks[LEAST:]
    return lengths


def _alike(blocks: nn.ModuleList) -> bool:
    first, *rest = [list(_signature(block)) for block in blocks]
    return all(signature == first for signature in rest)


def _signature(block: nn.Module) -> Iterator[Any]:
    for path, module in block.named_modules():
        tensors = {**module._parameters, **module._buffers}
        shapes = [(name, None if x is None else (x.shape, x.dtype, x.requires_grad)) for name, x in tensors.items()]
        # A plain attribute alone can make a block compute something else, such as the window of its attention.
        plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        yield path, type(module), shapes, {name: x for name, x in plain.items() if name not in NUMBERS}


def whole_order(captured: Sequence[str], lengths: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Returns name of a block of the whole model -> name of the captured block that it is like, in order."""
    return tuple((name, block) for block in captured for name in _stands_for(block, lengths))


def _stands_for(block: str, lengths: Mapping[str, int]) -> list[str]:
    """Returns the blocks of the whole model that a captured block stands for."""
    path, _, number = block.rpartition(".")
    if path not in lengths:
        return [block]
    place, count = int(number), lengths[path]
    if place == 1:
        return [f"{path}.{i}" for i in range(1, count - 2)]
    return [f"{path}.{place if place == 0 else place + count - LEAST}"]


def name_in_block(name: str, captured: str, block: str) -> str:
    """Returns the name of a captured block's parameter in another block."""
    return f"{block}{name.removeprefix(captured)}" if name.startswith(f"{captured}.") else name
