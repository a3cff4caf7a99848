"""whole: what stayed whole on every rank, why, and what would change it."""

from __future__ import annotations

from typing import Any

from autotp.display.text_table import folded
from autotp.source_location import block_in
from autotp.tools.estimation.counts.depth import name_in_block
from autotp.tools.page.subject import Subject

CHANGES = {
    "tp=1: weights are whole": "tp=2 or more",
    "has no rule": 'a rule: autotp.rule(torch.ops.library.name, "* h, h -> * h")',
    "no rule: replicated": 'a rule: autotp.rule(torch.ops.library.name, "* h, h -> * h")',
    "its size depends on values": "sizes that do not depend on values, such as a mask in place of an index",
    "the norm needs the whole width": "nothing: it is small. sequence_parallel=True divides the norm's activations",
    "a small table": "nothing: a lookup by position needs all its rows, and it is small",
    "every rank needs all of its result": "nothing: a part of it would be gathered again at once",
    "would send more than it saves": "a larger axis, or fewer elements sent for each of its weights",
    "its reader is cut along another axis": "nothing: an operator is cut along one axis",
    "every rank uses it after the sum over ranks": "nothing: a bias behind the sum is small, and read by all",
    "are cut along their other one": "sequence_parallel=True: it divides the work",
    "less than half a percent": "sequence_parallel=True: it divides the work",
    "needs the whole of its axis": "nothing: this operator needs all of it",
    "in another way": "a view that keeps its axis in one piece",
    "no product has its axis": "nothing: it is small, and no weight has its axis",
    "has another reader": "a copy of the weight for its other reader",
    "one element cannot be divided": "nothing: it is one number",
    "unused with these inputs": "example_inputs=, with inputs that use it",
}
"""A reason, or a part of it -> what would change it."""


def change_of(reason: str, sequence_parallel: bool) -> str:
    """Returns what would cut a parameter that stays whole for a reason."""
    change = next((text for part, text in CHANGES.items() if part in reason), "")
    if sequence_parallel and "sequence_parallel=True" in change:
        return "nothing: it is small, and its work is already divided along the sequence"
    return change


def whole_data(subject: Subject) -> list[dict[str, Any]]:
    """Returns the rows of what stayed whole; layers that are alike are one row."""
    along = subject.plan.along_sequence is not None
    likes: dict[str, list[str]] = {}
    for name, captured in subject.order:
        likes.setdefault(captured, []).append(name)
    rows = []
    for row in subject.plan.whole:
        block = block_in(row.name)
        # The plan is of captured blocks, each of which stands for those that are like it.
        for name in likes.get(block, [""]) if not row.operator else [""]:
            name_of_layer = name_in_block(row.name, block, name) if name else row.name
            shape, why, place = row.cells()
            rows.append((name_of_layer, (shape, why, place, change_of(row.reason, along))))
    return [dict(zip(("name", "shape", "why", "at", "change"), cells, strict=True)) for cells in folded(rows)]
