"""Functions of a graph that computes two halves of a batch one after the other (`two_halves`), and their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autotp.passes.builder import PART
from autotp.rules.call import Call
from autotp.rules.common import letters
from autotp.rules.language import Rule, spell
from autotp.rules.row import Row, Trait
from autotp.sharding.partition import chunk_sizes


def halves(x: Tensor, dim: int, block: int = 1) -> tuple[Tensor, Tensor]:
    """Returns the halves of a dimension; the first has the odd block. x: [... n ...] -> [... n/2 ...] each

    Args:
        block: positions that stay together.
    """
    first, second = chunk_sizes(x.shape[dim] // block, 2)
    a, b = x.split_with_sizes([first * block, second * block], dim)
    return a, b


def joined(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Returns two halves as one tensor. [... n/2 ...] each -> [... n ...]"""
    return torch.cat([a, b], dim)


def half_of(node: fx.Node) -> int | None:
    """Returns which half of the batch an operator computes, 0 or 1; None if it computes all of it."""
    return node.meta[PART][0] if PART in node.meta else None


def _divided(call: Call) -> Rule:
    """`dim` has other lengths, and is needed whole."""
    names, dim = letters(call.operands[0].dim()), call.dim()
    before, a, b = ([*names[:dim], name, *names[dim + 1 :]] for name in ("x^", "y^", "z^"))
    return Rule.of(spell([before], [a, b]), "all")


def _joined(call: Call) -> Rule:
    """The inverse."""
    names, dim = letters(call.operands[0].dim()), call.dim()
    a, b, after = ([*names[:dim], name, *names[dim + 1 :]] for name in ("x^", "y^", "z^"))
    return Rule.of(spell([a, b], [after]), "all")


ROWS: dict[Callable[..., Any], Row] = {halves: Row(_divided), joined: Row(_joined, Trait.JOIN)}
"""The rows of these functions for the table of operators."""
