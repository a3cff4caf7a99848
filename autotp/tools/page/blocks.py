"""blocks: each kind of block once, as rows from top to bottom: layers, and conjugates with their bytes.

Before: 80 blocks that are alike, each a graph of 70 operators
After:  [{"kind": "layer", "name": "input_layernorm"}, {"kind": "sent", "forward": "all-gather", "backward":
        "reduce-scatter", "bytes": 134217728}, {"kind": "layer", "name": "self_attn.q_proj", "ops": ["linear"]}, ...]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from autotp.diagnostics.node_text import operator_text
from autotp.diagnostics.report import BACKWARD, FORWARD
from autotp.ops import collectives
from autotp.ops.coalesced import together
from autotp.passes.check.types import CONJUGATES, Typed
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, find
from autotp.source_location import block_of, layer_of
from autotp.tools.page.axes import PageAxes
from autotp.tools.page.subject import Subject

VIEWS = Trait.SAME | Trait.CAST | Trait.RESHAPE | Trait.PERMUTE | Trait.MOVABLE | Trait.SPLIT | Trait.SLICE
QUIET = ("getitem", "expand", "detach", "lift_fresh_copy", "arange", "apart")
"""Operators beside views that move no elements of activations."""
FEW = 6
"""The operators of a layer that are named."""


def block_data(subject: Subject, axes: PageAxes) -> list[dict[str, Any]]:
    """Returns each kind of block, in the order of the model; of the model's other operators those before and behind.

    Layers without a gradient, such as positions and masks, are left out.
    """
    regions, entries = regions_of(subject), list[dict[str, Any]]()
    for block, nodes in regions:
        like = [name for name, captured in subject.order if captured == block]
        # Axes that are met from here on are this block's: those of alike blocks share a name.
        axes.block = block
        rows = [row for row in _rows(nodes, block, subject, axes) if row["learns"] or row["kind"] == "sent"]
        twin = next(
            (entry for entry in entries if block and entry["block"] and _text(entry["rows"]) == _text(rows)), None
        )
        if twin is not None:
            twin["names"] += like
        elif rows:
            entries.append(
                {"block": block, "names": like, "rows": rows, "before": not any(entry["block"] for entry in entries)}
            )
    axes.block = ""
    for entry in entries:
        entry["count"] = len(entry["names"])
        entry["totals"] = _totals(entry["rows"])
    return entries


def regions_of(subject: Subject) -> list[tuple[str, list[fx.Node]]]:
    """Returns the operators before, in and behind blocks, each with the block's name, or ""."""
    regions: list[tuple[str, list[fx.Node]]] = []
    last = max((i for i, n in enumerate(subject.graph.nodes) if block_of(n)), default=-1)
    before, after = list[fx.Node](), list[fx.Node]()
    blocks: dict[str, list[fx.Node]] = {}
    for i, node in enumerate(subject.graph.nodes):
        if node.op == "call_function" and subject.types.get(node):
            block = _home(node)
            # What stands between two blocks, such as a mask, is drawn before all of them.
            home = blocks.setdefault(block, []) if block else before if i < last else after
            home.append(node)
    regions.append(("", before))
    regions.extend(blocks.items())
    regions.append(("", after))
    return regions


def _home(node: fx.Node) -> str:
    """Returns the block of an operator; a sum over ranks belongs to what it sums."""
    summed = node.target in (collectives.reduce, collectives.reduce_scatter)
    return block_of(node.all_input_nodes[0] if summed else node)


def _rows(nodes: Sequence[fx.Node], block: str, subject: Subject, axes: PageAxes) -> Iterator[dict[str, Any]]:
    """Yields the rows of some operators: runs of one layer, and conjugates."""
    run: dict[str, Any] = {}
    for node in nodes:
        name = layer_of(node).removeprefix(block).strip(".")
        if is_conjugate(node):
            if run and run["ops"]:
                yield _closed(run)
            run = {}
            yield sent_row(node, subject, axes)
            continue
        weights = weights_of(node, subject, axes, block)
        # A view or a cast at the border of two layers begins no row of its own.
        if not run or (run["name"] != name and (weights or not is_quiet(node))):
            if run and run["ops"]:
                yield _closed(run)
            run = {"kind": "layer", "name": name, "ops": [], "weights": []}
        run["weights"] += [w for w in weights if w not in run["weights"]]
        if not is_quiet(node):
            run["ops"].append(operator_text(node))
            run["value"] = axes.shape(subject.types[node][0])
            run["learns"] = node in subject.learning
    if run and run["ops"]:
        yield _closed(run)


def _closed(run: dict[str, Any]) -> dict[str, Any]:
    ops = list(dict.fromkeys(run["ops"]))
    touched = {n for weight in run["weights"] for n in weight["value"]["axes"]} | set(run["value"]["axes"])
    return {**run, "ops": ops[:FEW], "more": max(0, len(ops) - FEW), "axes": sorted(touched)}


def is_quiet(node: fx.Node) -> bool:
    """True for views and casts, which a reader of a block need not see."""
    return has(node.target, VIEWS) or any(operator_text(node).startswith(name) for name in QUIET)


def is_conjugate(node: fx.Node) -> bool:
    """True for an operator that communicates, forward or backward."""
    return node.target in CONJUGATES or node.target is together


def weights_of(node: fx.Node, subject: Subject, axes: PageAxes, block: str) -> list[dict[str, Any]]:
    """Returns the parameters that a node reads, also through a conjugate: name in the block, and shape."""
    weights = []
    for read in node.all_input_nodes:
        while read.op == "call_function" and (is_conjugate(read) or read.target is operator.getitem):
            place: Any = read.args[1] if read.target is operator.getitem else 0
            source = read.all_input_nodes[0] if read.target is operator.getitem else read
            read = source.all_input_nodes[place] if is_conjugate(source) else source
        if read.name in subject.names and read in subject.types:
            name = subject.names[read.name].removeprefix(f"{block}.")
            weights.append({"name": name, "value": axes.shape(subject.types[read][0])})
    return weights


def sent_row(node: fx.Node, subject: Subject, axes: PageAxes) -> dict[str, Any]:
    """Returns a conjugate: its collectives forward and backward, and the bytes of the whole tensor that each moves."""
    name = operator_text(node)
    typed = subject.types[node]
    read = [t for operand in node.all_input_nodes for t in subject.types.get(operand, ())]
    # The whole tensor is what an all-gather returns, and what a reduce-scatter reads.
    size = max(sum(value_bytes(t, subject) for t in typed), sum(value_bytes(t, subject) for t in read[: len(typed)]))
    touched = axes.touched(*(axis for t in typed for axis in t.dims), *_moved(node, subject))
    learns = node in subject.learning
    names = [subject.names[operand.name] for operand in node.all_input_nodes if operand.name in subject.names]
    return {
        "kind": "sent", "name": name, "forward": FORWARD.get(name, ""), "value": axes.shape(typed[0]), "axes": touched,
        "backward": BACKWARD.get(name, "") if learns else "", "bytes": size, "of": names, "learns": learns,
    }  # fmt: skip


def _moved(node: fx.Node, subject: Subject) -> Iterator[Axis | None]:
    """Yields the axes that a conjugate sums or joins over: the cuts of what it reads, and of what reads it."""
    for operand in node.all_input_nodes:
        yield from (t.leaf for t in subject.types.get(operand, ()))
        for source in operand.all_input_nodes:
            yield from (t.leaf for t in subject.types.get(source, ()))
    for user in node.users:
        yield from (t.leaf for t in subject.types.get(user, ()))


def value_bytes(typed: Typed, subject: Subject) -> int:
    """Returns the bytes of a whole value."""
    return typed.dtype.itemsize * math.prod(subject.length(find(axis).size) for axis in typed.dims)


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the number of collectives and their bytes, forward and backward."""
    totals = {}
    for side in ("forward", "backward"):
        sends = [row for row in rows if row["kind"] == "sent" and row[side]]
        kinds = {name: sum(row[side] == name for row in sends) for name in sorted({row[side] for row in sends})}
        totals[side] = {"kinds": kinds, "bytes": sum(row["bytes"] for row in sends)}
    return totals


def _text(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns what rows of alike blocks share: all but the numbers of axes and the names of parameters."""
    return [(row["kind"], row["name"], str(row.get("ops")), row.get("bytes"), _sizes(row["value"])) for row in rows]


def _sizes(value: dict[str, Any]) -> list[list[str]]:
    return [[cell["text"] for cell in dim] for dim in value["dims"]]
