"""row_sums: adds up rows in the operator of a head, if a graph only reads a sum of its terms, each times a number.

    Before: e, z = linear_class_terms(w, x, t, 0, v); l = sum(mul(e - z, m))        m: numbers of rows
    After:  l = linear_loss_sum(w, x, t, m, -m)

So forward knows the gradients but for one number, and backward does not compute logits again. It needs all classes on
one rank, and is done where it is the faster form (`priced_forms.py`). What multiplies each term is the derivative of
the sum by it, which the graph computes from the sum back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autotp.ops.losses.linear_cross_entropy import linear_class_terms, linear_loss_sum
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.lower.losses.priced_forms import is_faster_in_forward
from autotp.passes.plan.choose import Decision, carry
from autotp.passes.plan.infer_axes import Axes, visit
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import ONE, Size

aten = torch.ops.aten
SUMS = frozenset({aten.sum.default, aten.mean.default})
"""Sums of all elements, times a number of its own each."""


@dataclass(frozen=True)
class RowFactor:
    """What a row is multiplied by: a number times tensors of the old graph, and with 0 where masks are true.

    Attributes:
        tensors: (tensor, whether it divides): of the shape of the rows, or one number.
    """

    number: float = 1.0
    tensors: tuple[tuple[fx.Node, bool], ...] = ()
    masks: tuple[fx.Node, ...] = ()


@dataclass
class RowSum:
    """A sum of terms.

    Attributes:
        inside: the operators from the terms to the sum, of which only the sum is read.
        sizes: the sizes of rows that others read -> the dimension.
        factors: the place of a term -> the factors whose sum it is multiplied by.
        rest: values without terms that are added, and what they are multiplied by.
    """

    terms: fx.Node
    root: fx.Node
    inside: set[fx.Node]
    sizes: dict[fx.Node, int]
    factors: dict[int, list[RowFactor]] = field(default_factory=dict)
    rest: list[tuple[fx.Node, RowFactor]] = field(default_factory=list)


def sum_rows(graph: fx.Graph, axes: Axes, decision: Decision) -> tuple[fx.Graph, Axes, Decision]:
    """Returns the graph with sums in the operators of heads, and its axes and cuts."""
    sums = [row_sum for row_sum in row_sums_of(graph, decision) if is_faster_in_forward(row_sum.terms)]
    if not sums:
        return graph, axes, decision
    by_root = {row_sum.root: row_sum for row_sum in sums}
    sizes = {size: (row_sum, dim) for row_sum in sums for size, dim in row_sum.sizes.items()}
    inside = {node for row_sum in sums for node in row_sum.inside}
    builder, new_axes, new_decision = Builder(fake_mode_of(graph)), Axes(), Decision(chosen=decision.chosen)
    for node in graph.nodes:
        builder.origin, last = node, len(builder.graph.nodes)
        if node in by_root:
            builder.env[node] = _write(builder, by_root[node])
        elif node in sizes:
            row_sum, dim = sizes[node]
            builder.env[node] = builder.size(builder.env[arguments_of(row_sum.terms)["classes"]], dim)
        elif node not in inside:
            carry(builder.copy(node), node, axes, new_axes, decision, new_decision)
        for made in (made for made in list(builder.graph.nodes)[last:] if made not in new_axes.dims):
            visit(made, new_axes)
    return builder.graph, new_axes, new_decision


# ---- the derivative of a sum by the terms


def row_sums_of(graph: fx.Graph, decision: Decision) -> list[RowSum]:
    """Returns the sums that are all that is read of the terms of a head."""
    sums = [row_sum for node in graph.find_nodes(op="call_function", target=linear_class_terms)
            if (row_sum := _row_sum(node, decision)) is not None]  # fmt: skip
    # What is made of the terms of two heads is no sum of either.
    counts = Counter(node for row_sum in sums for node in (row_sum.root, *row_sum.inside))
    return [row_sum for row_sum in sums if all(counts[node] == 1 for node in (row_sum.root, *row_sum.inside))]


def _row_sum(terms: fx.Node, decision: Decision) -> RowSum | None:
    """Returns the sum that is all that is read of terms; None if there is no such sum, or the classes are cut."""
    # In float16 gradients that are not divided yet may be too large.
    is_half = terms.args[0].meta["val"].dtype == torch.float16  # type: ignore[union-attr]
    if is_half or decision.cuts.get(terms) is not None:
        return None
    inside, roots, order = {terms}, set[fx.Node](), [terms]
    rows = _shape(arguments_of(terms)["classes"])
    sizes, shapes = dict[fx.Node, int](), {rows}
    for node in order:
        if has(node.target, Trait.RESHAPE) and _shape(node.args[0]) in shapes:
            shapes.add(_shape(node))
        for user in node.users:
            if user.target is aten.sym_size.int and _shape(node) == rows:
                sizes[user] = user.args[1]  # type: ignore[assignment]
            elif user.target in SUMS and len(user.args) == 1 and not user.kwargs:
                roots.add(user)
            elif user not in inside:
                inside.add(user)
                order.append(user)
        if decision.cuts.get(node) is not None or node.op == "output" or len(order) > MOST:
            return None
    if len(roots) != 1:
        return None
    result = RowSum(terms, roots.pop(), inside, sizes)
    return result if _derive(result, shapes) else None


MOST = 64
"""The operators between terms and their sum, at most."""


def _shape(x: Any) -> tuple[Size, ...] | None:
    """Returns the sizes of a tensor, whose comparison assumes nothing about other calls; None for other values."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return tuple(map(Size.of, value.shape)) if isinstance(value, torch.Tensor) else None


def _derive(row_sum: RowSum, shapes: set[Any]) -> bool:
    """Fills in factors; returns False for an operator that is not linear, or of another shape than these."""
    by_node: dict[fx.Node, list[RowFactor]] = {row_sum.root.all_input_nodes[0]: [RowFactor()]}
    in_order = [node for node in row_sum.root.graph.nodes if node in row_sum.inside]
    for node in reversed(in_order):
        factors = by_node.pop(node, [])
        if node is row_sum.terms:
            return not factors and not by_node
        if node.target is aten.select.int and node.args[:2] == (row_sum.terms, 0):
            row_sum.factors.setdefault(node.args[2], []).extend(factors)
            continue
        if row_sum.terms in node.all_input_nodes or _shape(node) not in shapes:
            return False
        for factor in factors:
            steps = _steps(node, factor, row_sum)
            if steps is None:
                return False
            for operand, of_operand in steps:
                if operand in row_sum.inside:
                    by_node.setdefault(operand, []).append(of_operand)
                else:
                    row_sum.rest.append((operand, of_operand))
    return False


def _steps(node: fx.Node, factor: RowFactor, row_sum: RowSum) -> list[tuple[fx.Node, RowFactor]] | None:
    """Returns what an operator's operands are multiplied by in the sum; None if it is not known."""
    args = list(arguments_of(node).values())
    number, tensors, masks = factor.number, factor.tensors, factor.masks
    if node.target is aten.neg.default:
        return [(args[0], RowFactor(-number, tensors, masks))]
    if has(node.target, Trait.SAME | Trait.RESHAPE) and not has(node.target, Trait.NO_GRADIENT):
        return [(args[0], factor)]
    if node.target is aten.masked_fill.Scalar and args[2] == 0 and _shape(args[1]) == _shape(node):
        return [(args[0], RowFactor(number, tensors, (*masks, args[1])))]
    operands = args[:2]
    if node.kwargs or len(node.args) != 2 or not has(node.target, Trait.SUM | Trait.SCALE):
        return None
    if has(node.target, Trait.SUM):
        if not all(_has_all_rows(operand, node) for operand in operands):
            return None
        sign = -1 if node.target is aten.sub.Tensor else 1
        return [(operands[0], factor), (operands[1], RowFactor(sign * number, tensors, masks))]
    divides = node.target is aten.div.Tensor
    if operands[0] not in row_sum.inside and not divides:
        operands.reverse()
    rows, other = operands
    if rows not in row_sum.inside or other in row_sum.inside:
        return None
    if isinstance(other, int | float):
        scaled = number / other if divides and other else number * other
        return None if divides and not other else [(rows, RowFactor(scaled, tensors, masks))]
    if _shape(other) != () and not _has_all_rows(other, node):
        return None
    return [(rows, RowFactor(number, (*tensors, (other, divides)), masks))]


def _has_all_rows(operand: Any, node: fx.Node) -> bool:
    """True if an operand is as large as the result; sizes of two inputs have symbols of their own, also where equal."""
    sizes, of_result = _shape(operand), _shape(node)
    if sizes is None or of_result is None or len(sizes) != len(of_result):
        return False
    return all(a == b or ONE not in (a, b) for a, b in zip(sizes, of_result, strict=True))


# ---- the new operator


def _write(builder: Builder, row_sum: RowSum) -> fx.Node:
    """Writes a sum, with the operators that compute what the terms are multiplied by."""
    args, call = builder.map(arguments_of(row_sum.terms)), builder.call
    dtype, classes = row_sum.terms.meta["val"].dtype, args["classes"]
    numbers: dict[RowFactor, fx.Node] = {}

    def sum_of(factors: Sequence[RowFactor]) -> fx.Node:
        total: fx.Node | None = None
        for factor in factors:
            if factor not in numbers:
                numbers[factor] = _rows_of(builder, factor, classes, dtype)
            total = numbers[factor] if total is None else call(aten.add.Tensor, total, numbers[factor])
        return call(aten.full_like.default, classes, 0, dtype=dtype) if total is None else total

    # The first two are always read.
    places = [i for i in range(4) if i < 2 or i in row_sum.factors]
    of_terms = [sum_of(row_sum.factors.get(i, [])) if i in places else None for i in range(4)]
    more = {name: value for name, value in args.items() if name not in ("weight", "x", "classes", "start", "size")}
    total = call(linear_loss_sum, args["weight"], args["x"], classes, *of_terms, *more.values())
    for value, factor in row_sum.rest:
        rows = builder.cast(_in_rows(builder, builder.env[value], classes), dtype)
        product = call(aten.mul.Tensor, rows, sum_of([factor]))
        total = call(aten.add.Tensor, total, call(aten.sum.default, product))
    if row_sum.root.target is aten.mean.default:
        for dim in range(classes.meta["val"].dim()):
            total = call(aten.div.Tensor, total, builder.size(classes, dim))
    return builder.cast(total, row_sum.root.meta["val"].dtype)


def _rows_of(builder: Builder, factor: RowFactor, classes: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Writes what a row is multiplied by: [*]"""
    call = builder.call
    result = call(aten.full_like.default, classes, factor.number, dtype=dtype)
    for tensor, divides in factor.tensors:
        result = call(
            aten.div.Tensor if divides else aten.mul.Tensor, result, _in_rows(builder, builder.env[tensor], classes)
        )
    for mask in factor.masks:
        result = call(aten.masked_fill.Scalar, result, _in_rows(builder, builder.env[mask], classes), 0)
    return builder.cast(result, dtype)


def _in_rows(builder: Builder, x: fx.Node, classes: fx.Node) -> fx.Node:
    """Returns a value with the sizes of the rows; one number stays."""
    if _shape(x) in ((), _shape(classes)):
        return x
    sizes = [builder.size(classes, dim) for dim in range(classes.meta["val"].dim())]
    return builder.call(aten.reshape.default, x, sizes)
