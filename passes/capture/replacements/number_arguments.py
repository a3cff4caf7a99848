"""A whole number among the arguments, as the length of a tensor without elements.

Before: step(x, 7): a graph for the number 7
After:  step(x, a tensor of [9, 0]): a graph in which the number is a size, as `x.shape[1]` is one

The exporter has symbols for lengths, and guards for what a model asks of them. So a number needs no machinery of its
own. (A length of 0 or 1 is a constant to the exporter, so the number is not the length itself.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHIFT = 2
"""The length of a number 0."""


class NumberArgument(Tensor):
    """Stands for a number among the arguments. [the number + SHIFT, 0]"""


def is_countable(leaf: Any) -> bool:
    """True for an argument that a length can stand for."""
    return type(leaf) is int and 0 <= leaf < 2**31


def as_length(number: int, device: torch.device) -> Tensor:
    """Returns what stands for a number that is countable."""
    return torch.empty((number + SHIFT, 0), device=device).as_subclass(NumberArgument)


def as_number(leaf: Any, tensor: Any) -> Any:
    """Returns the number that the model gets for an argument.

    Args:
        leaf: the argument of the call.
        tensor: what the exporter has in its place.
    """
    return tensor.shape[0] - SHIFT if isinstance(leaf, NumberArgument) else tensor
