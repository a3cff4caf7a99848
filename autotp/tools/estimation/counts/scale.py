"""scale: the record of a microbatch of many rows, from those of two rows and of three.

Before: mm [1024 x 64 x 64] with two rows, mm [1536 x 64 x 64] with three      After: mm [4096 x 64 x 64] with eight

All sizes of a record are of the form `a + b rows`: what each row needs, and what parameters and masks need once.
(One row is another case: some copies of tensors with one row are views.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotp.costs.operators import Op, Touch
from autotp.tools.estimation.counts.pieces import PieceReads
from autotp.tools.estimation.counts.record import Record, Value


def scaled(two: Record, three: Record, rows: int) -> Record | None:
    """Returns the record of `rows` rows; None if the two records are not of the same operators.

    Args:
        two, three: the records of two rows and of three.
    """
    if [_kind(op) for op in two.ops] != [_kind(op) for op in three.ops] or set(two.kept) != set(three.kept):
        return None

    def line(a: Any, b: Any) -> Any:
        return a + (b - a) * (rows - 2)

    def touches(a: Sequence[Touch], b: Sequence[Touch]) -> tuple[Touch, ...]:
        return tuple(Touch(x.memory, line(x.bytes, y.bytes)) for x, y in zip(a, b, strict=True))

    def op(a: Op, b: Op) -> Op:
        return replace(
            a, shape=tuple(map(line, a.shape, b.shape)), flops=line(a.flops, b.flops), size=line(a.size, b.size),
            reads=touches(a.reads, b.reads), writes=touches(a.writes, b.writes),
        )  # fmt: skip

    return replace(
        two,
        ops=tuple(map(op, two.ops, three.ops)),
        kept={memory: line(n, three.kept[memory]) for memory, n in two.kept.items()},
        bytes={memory: line(n, three.bytes.get(memory, n)) for memory, n in two.bytes.items()},
        sent=tuple(_scaled_value(a, b, rows) for a, b in zip(two.sent, three.sent, strict=True)),
    )


def scaled_reads(two: PieceReads, three: PieceReads, rows: int) -> PieceReads:
    """Returns what a piece reads for a microbatch of `rows` rows. two, three: the same for two rows and for three"""
    values = ((_scaled_value(a, b, rows), reads) for (a, reads), (b, _) in zip(two[1], three[1], strict=True))
    return two[0], tuple(values)


def _scaled_value(two: Value, three: Value, rows: int) -> Value:
    return replace(two, shape=tuple(a + (b - a) * (rows - 2) for a, b in zip(two.shape, three.shape, strict=True)))


def _kind(op: Op) -> Any:
    """Returns what two records have in common for an operator: all but its sizes."""
    # With the same numbers of memory: else the bytes of one tensor would grow with those of another.
    return op.name, op.phase, op.dtype, op.axis, op.waits, [t.memory for t in (*op.reads, *op.writes)]
