"""Counts the rows that choose each expert, on the device: nothing waits until somebody reads a count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autotp.ops.experts.rows import row_counts, slots_of_expert


def load_of_choice(chosen: Tensor, number: int, grouped: bool, capacity: float | None = None) -> Tensor:
    """Returns how many rows chose each expert, and how many of all these were dropped.

    Args:
        chosen, number, grouped, capacity: as for `dispatch`.

    Returns:
        [number + 1], int64
    """
    counts = row_counts(chosen, number, grouped, 0, number)
    slots = slots_of_expert(len(chosen), number, capacity) if capacity is not None else len(chosen)
    return torch.cat([counts, (counts - slots).clamp(min=0).sum(0, keepdim=True)])


def load_of_ends(ends: Tensor) -> Tensor:
    """Returns the same for groups of rows, of which none is dropped. ends: [experts] where each group ends."""
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    return torch.cat([counts, counts.new_zeros(1)])


class LoadNotes:
    """The last operator of a graph whose layers count their rows: notes the counts of calls that are trained.

    A call without gradients notes nothing, so an evaluation leaves no trace. Nor does what backward computes again: the
    operator stands outside of all blocks.

    Attributes:
        names: the modules of the experts, in the order of the counts.
        calls: for each call the counts of each module, [experts + 1], as from `load_of_choice`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.calls = tuple(names), list[tuple[Tensor, ...]]()
        self.__name__ = self.__qualname__ = "load_notes"

    def __call__(self, *counts: Tensor) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.calls.append(counts)
