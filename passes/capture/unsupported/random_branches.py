"""Decides comparisons of a random number whose result is certain, such as `torch.rand([]) < 0`.

During capture tensors have no values, so a branch on a tensor becomes a guard (`passes/capture/guards/values.py`). But
a number from [0, 1) is certainly below 1, and not below 0. Then there is nothing to compare in a call. The draw itself
stays in the graph, so that the stream of random numbers is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

COMPARISONS = {"lt": (True, True), "le": (True, False), "ge": (False, True), "gt": (False, False)}
"""Name -> (its result for a number below the bound, whether the bound itself is above every number)."""


class CertainComparisons(TorchFunctionMode):
    """A mode in which a comparison of `torch.rand([])` with a number is a bool if its result is certain."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `draw < 0` calls `__lt__`, `draw.lt(0)` calls `lt`. One by keyword is left to a guard.
        comparison = COMPARISONS.get(getattr(func, "__name__", "").strip("_"))
        if comparison is not None and len(args) == 2 and self._is_drawn(args[0]):
            says, strict = comparison
            below = is_below(args[1], strict)
            if below is not None:
                return below is says
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.dim() == 0:
            self.drawn.append((result, result._version))
        return result

    def _is_drawn(self, value: Any) -> bool:
        """True for a number that was drawn, and that nothing was written into since."""
        # `is`: `==` of tensors would be an operator of the graph.
        return any(value is number and number._version == version for number, version in self.drawn)


def is_below(bound: Any, strict: bool) -> bool | None:
    """True if every number of [0, 1) is below `bound`, False if none is, None otherwise or if `bound` is unknown."""
    if not isinstance(bound, int | float):
        return None
    if bound >= 1:
        return True
    return False if bound < 0 or (bound == 0 and strict) else None
