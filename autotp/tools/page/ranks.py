"""ranks: the grid of ranks: what each holds of each parameter, and its memory at the fullest moment by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autotp.display.text_table import folded
from autotp.sharding.layout import Layout
from autotp.source_location import block_in
from autotp.tools.page.axes import PageAxes
from autotp.tools.page.subject import Subject


def rank_data(subject: Subject, axes: PageAxes, blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sizes of the grid, the devices of a node, the parameters, and each pipeline rank's blocks and memory.

    Rank numbers are those of `distribute`: tensor-parallel ranks are neighbours, then come parts of sequences, then
    replicas, then stages.

    Args:
        blocks: what `block_data` returned: of alike blocks, the parameters of one are listed.
    """
    estimate = subject.estimate
    layout = None if estimate is None else estimate.layout
    parameters = _parameters(subject, axes, {block["block"] for block in blocks} | {""})
    return {
        "tp": subject.program.tp,
        "cp": subject.program.options.cp,
        "dp": 1 if layout is None else layout.dp,
        "pp": 1 if layout is None else layout.pp,
        "zero": 0 if layout is None else layout.zero,
        "node": 0 if estimate is None else estimate.device.node,
        "parameters": parameters,
        "stages": _stages(subject, blocks),
        "limit": None if estimate is None else estimate.device.memory,
        "even": all(len(row["shapes"]) == 1 for row in parameters),
    }


def _parameters(subject: Subject, axes: PageAxes, drawn: Collection[str]) -> list[dict[str, Any]]:
    """Returns the parameters of the drawn blocks, and those outside of blocks, with what each rank holds."""
    nodes = {subject.names[n.name]: n for n in subject.graph.nodes if n.name in subject.names}
    captured, rows = {like for _, like in subject.order}, []
    for name, layout in subject.program.layouts.items():
        block = block_in(name) if block_in(name) in captured else ""
        if block not in drawn or name not in nodes or nodes[name] not in subject.types:
            continue
        axes.block = block
        value = axes.shape(subject.types[nodes[name]][0])
        short, size = name.removeprefix(f"{block}."), _itemsize(subject, name)
        shares = _shares(layout, subject.program.tp)
        rows.append({"name": short, "block": block, "value": value, "itemsize": size, **shares})
    axes.block = ""
    return rows


def _itemsize(subject: Subject, name: str) -> int:
    """Returns the bytes of an element of a parameter, in the model's own dtype."""
    if subject.estimate is not None:
        parameters = subject.estimate.source.model.parameters
        return parameters[name].itemsize if name in parameters else 4
    place = next(place for place, key in subject.names.items() if key == name)
    return next(n.meta["val"].dtype.itemsize for n in subject.graph.nodes if n.name == place)


def _shares(layout: Layout, tp: int) -> dict[str, Any]:
    """Returns the shape and the elements that each rank holds; one entry where all are alike."""
    shapes = [list(map(int, layout.local_shape(rank))) for rank in range(tp)]
    is_even = all(shape == shapes[0] for shape in shapes)
    listed = shapes[:1] if is_even else shapes
    return {"shapes": listed, "elements": list(map(math.prod, listed)), "whole": list(map(int, layout.shape))}


def _stages(subject: Subject, blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each pipeline rank its blocks, its parameters outside of blocks, and its memory in bytes by kind."""
    estimate = subject.estimate
    kind_of = {name: block["block"] for block in blocks for name in block["names"]}
    if estimate is None:
        names, captured = [name for name, _ in subject.order], {like for _, like in subject.order}
        outside = [name for name in subject.program.layouts if block_in(name) not in captured]
        return [{"rank": 0, **_held(names, kind_of), "outside": outside, "memory": {}}]
    pieces = {piece.name: piece for piece in estimate.source.pieces(estimate.layout.micro_batch).pieces}
    rows = []
    for rank, memory in enumerate(estimate.memory):
        names = [n for home, stage in zip(estimate.homes, estimate.stages, strict=True) if home == rank for n in stage]
        outside = [p for n in names for p in pieces[n].parameters if not n or not p.startswith(f"{n}.")]
        kinds = {category: round(size) for category, size in memory.kinds.items() if size}
        rows.append({
            "rank": rank, **_held(names, kind_of), "outside": list(dict.fromkeys(outside)), "memory": kinds,
            "total": round(memory.total), "reserved": round(memory.reserved),
        })  # fmt: skip
    return rows


def _held(names: Sequence[str], kind_of: Mapping[str, str]) -> dict[str, Any]:
    """Returns blocks as text, such as `layers.{0-19}`, and how many of each kind there are."""
    rows = folded([(name, ()) for name in names if name])
    counts = Counter(kind_of[name] for name in names if name in kind_of)
    return {"blocks": ", ".join(name for name, *_ in rows), "counts": dict(counts)}
