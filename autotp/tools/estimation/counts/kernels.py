"""kernels: joins pointwise operators that follow one another, as torch.compile and Megatron-LM's fused kernels do.

Before: a = add(x, b); c = dropout(a); y = add(c, r)       9 tensors read or written
After:  y = add+dropout+add(x, b, r)                       4 tensors, and the mask

What a later kernel or backward reads is still written. A softmax takes part as their last operator, and its gradient as
their first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from autotp.costs.operators import Op, Touch
from autotp.tools.estimation.counts.record import Record

SOFTMAX_GRADIENT = "_softmax_backward_data"


def narrowed(record: Record, products: torch.dtype | None, exchange: float) -> Record:
    """Returns the record with other numbers: `Practice.products` and `Practice.exchange`."""
    if products is None and exchange == 1:
        return record
    ops = []
    for op in record.ops:
        if op.kind == "product" and op.dtype.itemsize == 2 and products is not None:
            op = replace(op, dtype=products)
        elif op.axis == "ep" and op.dtype.is_floating_point:
            op = replace(op, size=round(op.size * exchange))
        ops.append(op)
    return replace(record, ops=tuple(ops))


def fused(record: Record) -> Record:
    """Returns the record with pointwise operators joined to kernels."""
    last_read: dict[int, int] = {}
    for i, op in enumerate(record.ops):
        last_read.update((touch.memory, i) for touch in op.reads)
    # Backward or another piece reads these, so a kernel writes them, even if no later operator of the piece reads them.
    stays = {*record.kept, *record.sent_memory}
    places: dict[int, int] = {}  # Place of an operator -> its new place, for waits.
    made: list[Op] = []
    group: list[int] = []

    def close() -> None:
        if group:
            made.append(_joined([record.ops[i] for i in group], group[-1], last_read, stays))
            group.clear()

    for i, op in enumerate(record.ops):
        joins = op.kind in ("pointwise", "softmax") and _follows(op, [record.ops[k] for k in group])
        starts = op.kind == "pointwise" or op.name == SOFTMAX_GRADIENT
        if not joins:
            close()
        if joins or starts:
            group.append(i)
            if op.kind == "softmax" and op.name != SOFTMAX_GRADIENT:
                close()
        else:
            places[i] = len(made)
            made.append(replace(op, waits=places.get(op.waits, -1)))
    close()
    return replace(record, ops=tuple(made))


def _follows(op: Op, group: Sequence[Op]) -> bool:
    """True if an operator reads what the group makes, or reads the same, in the same phase."""
    touched = {touch.memory for member in group for touch in (*member.writes, *member.reads)}
    return bool(group) and op.phase == group[0].phase and any(touch.memory in touched for touch in op.reads)


def _joined(ops: Sequence[Op], end: int, last_read: dict[int, int], stays: Collection[int]) -> Op:
    made = {touch.memory for op in ops for touch in op.writes}
    reads, writes = dict[int, Touch](), dict[int, Touch]()
    written: set[int] = set()
    for op in ops:
        # What the kernel itself has made is in registers; what several of its operators read is read once.
        reads.update((t.memory, t) for t in op.reads if t.memory not in written and t.memory not in reads)
        writes.update((t.memory, t) for t in op.writes)
        written |= {t.memory for t in op.writes}
    live_writes = [t for m, t in writes.items() if m in stays or last_read.get(m, end + 1) > end]
    assert made == set(writes)
    names = "+".join(op.name for op in ops)
    return replace(ops[-1], name=names, kind="pointwise", reads=tuple(reads.values()), writes=tuple(live_writes))
