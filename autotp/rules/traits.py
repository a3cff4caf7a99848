"""What passes ask of an operator: its traits in the table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from autotp.rules.row import Row, Trait
from autotp.rules.table import ROWS

UNKNOWN = Row()


def has(op: Any, traits: Trait) -> bool:
    """True for an operator that has this trait, or of several (`Trait.SAME | Trait.RESHAPE`) at least one."""
    return bool(ROWS.get(op, UNKNOWN).traits & traits)


def size_argument(op: Any) -> str:
    """The name of the argument that holds the sizes of an operator's result; "" where none does."""
    return ROWS.get(op, UNKNOWN).sizes


def each_channel() -> Iterator[tuple[Any, int]]:
    """The operators that work on each channel by itself, and how many dimensions are behind the channels."""
    return ((op, row.places) for op, row in ROWS.items() if row.places)


@cache
def in_place_of(op: Any) -> OpOverload | None:
    """The operator that writes over its first operand what `op` returns; None where torch has none."""
    if not isinstance(op, OpOverload):
        return None
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    return getattr(packet, op._overloadname, None)
