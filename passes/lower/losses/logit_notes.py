"""What a plan says of logits: how many bytes a head in chunks has at a time, and what reads logits that stay whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autotp.display.text_table import bytes_text
from autotp.ops.losses import chunks
from autotp.ops.losses.linear_cross_entropy import has_many_chunks, linear_loss_sum
from autotp.passes.builder import ancestors, dtype_of_sums
from autotp.passes.lower.losses.priced_forms import forms_of
from autotp.passes.lower.losses.row_sums import row_sums_of
from autotp.passes.plan.choose import Decision
from autotp.rules.call import arguments_of, operator_name
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.source_location import layer_of, line_of


def logit_notes(
    before: fx.Graph, after: fx.Graph, decision: Decision, refused: Mapping[fx.Node, fx.Node], tp: int
) -> dict[str, str]:
    """Returns the lines of a plan.

    Args:
        before, after: the graph, and that with heads and readers of their logits in one operator.
        decision: the cuts of `after`.
        refused: a head -> the first operator that needs its logits, or the head itself.
        tp: the ranks along which classes may be cut.
    """
    loss = {"loss": "with its head in chunks of rows: logits are never whole"} if after is not before else {}
    lines = [*_in_chunks(after, decision, tp), *_whole(refused)]
    return loss | ({"logits": "; ".join(dict.fromkeys(lines))} if lines else {})


def _in_chunks(graph: fx.Graph, decision: Decision, tp: int) -> Iterator[str]:
    live, summed = ancestors([graph.output_node()]), {row_sum.terms for row_sum in row_sums_of(graph, decision)}
    for node in graph.nodes:
        if node not in live or not has(node.target, Trait.HEAD) or has(node.target, Trait.NO_GRADIENT):
            continue
        args = arguments_of(node)
        weights = [args[name] for name in ("weight", "second_weight") if args.get(name) is not None]
        rows, parts = _count(args.get("classes", args.get("lse"))), tp if decision.cuts.get(node) is not None else 1
        logits = sum(rows * weight.meta["val"].shape[0] / parts for weight in weights)
        itemsize = dtype_of_sums(weights[0].meta["val"].dtype).itemsize
        least = min(logits, chunks.CHUNK) * itemsize
        text = f"{bytes_text(least)} of {layer_of(node) or 'a head'} at a time, of {bytes_text(logits * itemsize)}"
        is_long = any(has_many_chunks(w.meta["val"].dtype, rows * w.meta["val"].shape[0]) for w in weights)
        if node.target is linear_loss_sum and not is_long:
            text += f", gradients in forward{_prices(node)}"
        elif logits > chunks.CHUNK:
            flops = sum(2 * rows * _count(weight) / parts for weight in weights)
            text += f", again in backward for {flops / 1e9:,.0f} GFLOP"
            text += _prices(node) if node in summed else ""
        yield text


def _prices(node: fx.Node) -> str:
    """Returns the prices of the form that a pass chose, and of the other one."""
    forms = dict(zip(("with gradients in forward", "with logits again in backward"), forms_of(node), strict=True))
    (_, price), (name, other_price) = list(forms.items())[:: 1 if node.target is linear_loss_sum else -1]
    texts = [f"{form.seconds * 1e3:,.3g} ms and {bytes_text(form.bytes)}" for form in (price, other_price)]
    return f" (predicted for {price.rows:,} rows: {texts[0]} kept, or {texts[1]} {name})"


def _whole(refused: Mapping[fx.Node, fx.Node]) -> Iterator[str]:
    for linear, reader in refused.items():
        size = bytes_text(_count(linear) * linear.meta["val"].dtype.itemsize)
        yield f"{size} of {layer_of(linear) or 'a head'} are whole: {_reason(linear, reader)}"


def _reason(linear: fx.Node, reader: fx.Node) -> str:
    if reader is linear:
        return "its weight is cut along its input"
    return (
        "the model returns them" if reader.op == "output" else f"{operator_name(reader)} reads them, {line_of(reader)}"
    )


def _count(node: Any) -> int:
    """Returns the elements of a tensor at the sizes of capture."""
    sizes = node.meta["val"].shape
    return math.prod(n if isinstance(n, int) else _hint(n) for n in sizes)


def _hint(size: torch.SymInt) -> int:
    hint = size.node.hint
    return hint if hint is not None else 1
