"""rows: a batch may be computed in parts where no row of it depends on another. The axes show whether that is so.

Before: x = norm(x, w); m = mean(x, [0]); y = sub(x, m)
After:  an Error that names `mean`: it has the batch's axis in what it reads, and not in what it gives

NOTE [Two batches that are one]
`b x s` of one input and `b x s` of another may be read side by side, of which the model does not say that they are one.
They are as long as each other, and both are divided along the batch: where that is outermost in both, they go together.
(A mean of all there is has been multiplied by the rows it is of: `totals.py`.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from autotp.axis import Axis, find, leaves, touches
from autotp.call import draws, operator_name, outputs_of
from autotp.errors import Error
from autotp.passes.axes import Axes, named_dims
from autotp.passes.totals import is_mean, symbols
from autotp.rule import names
from autotp.source import line_of

PASSED_ON = {f"aten::{name}" for name in ("unsqueeze", "view", "reshape", "expand", "to", "_to_copy", "clone")}
"""What leaves numbers what they are."""


def batched(inputs: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[str]:
    """The inputs that are a batch: their first dimension is as long as that of the first."""
    return [name for name, shape in zip(inputs, shapes, strict=True) if shape and shape[0] == shapes[0][0]]


def expect_rows(graph: fx.Graph, axes: Axes, inputs: Collection[str]) -> None:
    """Raises Error where a row depends on others, of a graph whose loss is a sum over the batch.

    Args:
        inputs: names of the placeholders of what is a batch.
    """
    rows = {node for node in graph.nodes if node.op == "placeholder" and node.name in inputs}
    picked = _picked(graph, rows)
    batch = {find(leaf) for node in (*rows, *picked) for leaf in leaves(axes.of(node)[0])}
    sums: set[fx.Node] = set()
    for node in graph.nodes:
        before = set(node.all_input_nodes)
        if node.op != "call_function" or not outputs_of(node) or not before & (rows | sums):
            continue
        scalar = all(value.dim() == 0 for value in outputs_of(node))
        if before & sums and (not scalar or before & rows):
            _refuse(node, "gives each row what the batch sums up to")
        by_row = node in picked or (scalar and is_mean(node)) or _is_of_rows(node, batch, axes, scalar)
        if before & rows and not by_row:
            _refuse(node, "mixes the rows of the batch")
        (sums if scalar else rows).add(node)


def _picked(graph: fx.Graph, inputs: Collection[fx.Node]) -> set[fx.Node]:
    """What is picked of each row by the numbers of rows, as `x[arange(batch), last]`.

    Raises:
        Error: they do anything else, where the numbers of a part of the batch, from 0 again, are others.
    """
    rows = {symbol for node in inputs for symbol in symbols(node.meta["val"].shape[0])}
    numbers, picked = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        counts = operator_name(node) == "aten::arange" and any(
            symbols(n.meta["val"]) & rows for n in node.all_input_nodes
        )
        if counts or (_keeps(node) and node.args[0] in numbers):
            numbers.add(node)
        elif numbers & set(node.all_input_nodes) and outputs_of(node):
            if not _picks(node, numbers):
                _refuse(node, "computes with the numbers of rows")
            picked.add(node)
    return picked


def _keeps(node: fx.Node) -> bool:
    """True for what leaves numbers what they are, and along the first dimension."""
    return operator_name(node) in PASSED_ON and _length(node) == _length(node.args[0])


def _picks(node: fx.Node, numbers: Collection[fx.Node]) -> bool:
    """True for `x[numbers, ...]` that has one of each row of `x`, in order."""
    if operator_name(node) != "aten::index":
        return False
    x: Any = node.args[0]
    at: Any = node.args[1][0]  # type: ignore[index]
    counted, others = at, set(node.all_input_nodes) - {at}
    while counted in numbers and operator_name(counted) in PASSED_ON:
        counted = counted.args[0]
    from_0 = counted in numbers and counted.target is torch.ops.aten.arange.default
    return from_0 and not others & set(numbers) and _length(x) == _length(at) == _length(node)


def _length(node: Any) -> Any:
    """Of the first dimension, as an expression."""
    shape = node.meta["val"].shape
    return None if not shape else shape[0] if isinstance(shape[0], int) else shape[0].node.expr


def _is_of_rows(node: fx.Node, batch: Collection[Axis], axes: Axes, added: bool) -> bool:
    """True if each row of what an operator gives is made of that row alone; or, if `added`, if it sums rows up."""
    bound = axes.bound.get(node)
    if bound is None:  # It picks one of several results.
        return True
    marks = {name.name: name.mark for term in bound.rule.ins for expr in term for name in names(expr)}
    named = [pair for row in named_dims(bound.rule, bound.dims[0]) for pair in row]
    along = {name for name, axis in named if name and _has(axis, batch)}
    for factor in bound.factors:
        if not _has(factor.axis, batch) and factor.name not in along:
            continue
        apart = factor.mark == "^" and marks.get(factor.name, "") == ""  # NOTE [Two batches that are one]
        lead = all(next(leaves(axis)) in batch for name, axis in named if name == factor.name)
        by_row = factor.mark == "" or (factor.mark == "!" and draws(node))
        if not (by_row or (apart and lead)) or len(factor.outs) != (0 if added else len(bound.rule.outs)):
            return False
    return True


def _has(axis: Axis, batch: Collection[Axis]) -> bool:
    return any(touches(axis, leaf) for leaf in batch)


def _refuse(node: fx.Node, what: str) -> None:
    raise Error(
        f"`{node.target}` {what}, which cannot be computed in parts",
        at=line_of(node),
        **{"try": "dp=1, pp=1, microbatches=1"},
    )
