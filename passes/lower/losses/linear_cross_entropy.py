"""linear_cross_entropy: makes one operator of a head and its loss, if nothing else reads the logits.

    Before: y = reshape(to(linear(x, w), float32), [-1, 151936]); l = cross_entropy_loss(y, t)
    After:  e, z = linear_class_terms(w, reshape(x, [-1, 4096]), t, 0, 151936); l = mean(e - z)

The operator computes logits in chunks of rows, in forward and again in backward. Views of rows move to the input of the
head; casts, a bias, numbers that multiply logits, and a bound by tanh become arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.ops.losses.linear_cross_entropy import linear_class_terms, linear_loss_sum
from autotp.passes.builder import Builder, dtype_of_sums, fake_mode_of
from autotp.passes.lower.losses.vocab_parallel_loss import (
    MEAN,
    SUM,
    counted_rows,
    legal_classes,
    own_weight,
    reduced_loss,
)
from autotp.passes.plan.choose import Decision, carry
from autotp.passes.plan.infer_axes import Axes, visit
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import has, size_argument
from autotp.sharding.axis import Axis, is_major

aten = torch.ops.aten
LEAST = 2**14
"""The classes from which on logits are computed in chunks. Fewer are hardly more bytes than the head's input."""
VIEWS = Trait.RESHAPE | Trait.SLICE


@dataclass(frozen=True)
class Head:
    """The logits of a loss.

    Attributes:
        linear: the product that makes them.
        steps: the operators from this product to the loss, in order; nothing else reads their results.
        scale, cap, bias: as of `linear_class_terms`.
        leaf: the part of the classes that is cut; None if every rank has all classes.
    """

    linear: fx.Node
    steps: tuple[fx.Node, ...]
    scale: float
    cap: float
    bias: fx.Node | None
    leaf: Axis | None


def linear_cross_entropy(graph: fx.Graph, axes: Axes, decision: Decision) -> tuple[fx.Graph, Axes, Decision]:
    """Returns the graph with heads and losses in one operator, and its axes and cuts."""
    heads = heads_of(graph, axes, decision)
    if not heads:
        return graph, axes, decision
    builder, new_axes, new_decision = Builder(fake_mode_of(graph)), Axes(), Decision(chosen=decision.chosen)
    inside = {node: head for head in heads.values() for node in (head.linear, *head.steps)}
    for node in graph.nodes:
        builder.origin, last = node, len(builder.graph.nodes)
        if node in inside:
            # What has the rows of the logits stands for them.
            builder.env[node] = _rows(builder, node, node is inside[node].linear)
        elif node in heads:
            builder.env[node] = _loss(builder, node, heads[node])
        else:
            carry(builder.copy(node), node, axes, new_axes, decision, new_decision)
            continue
        leaf = (inside.get(node) or heads[node]).leaf
        for made in list(builder.graph.nodes)[last:]:
            visit(made, new_axes)
            bound = new_axes.bound.get(made)
            if leaf is not None and bound is not None and bound.cuttable(leaf) is not None:
                new_decision.cuts[made] = leaf
    return builder.graph, new_axes, new_decision


# ---- the logits of a loss


def heads_of(graph: fx.Graph, axes: Axes, decision: Decision) -> dict[fx.Node, Head]:
    """Returns the losses that can be computed with their heads -> the heads."""
    losses = (node for node in graph.nodes if has(node.target, Trait.CLASS_LOSS))
    heads = {loss: _head(loss, axes, decision) for loss in losses}
    return {loss: head for loss, head in heads.items() if head is not None}


def _head(loss: fx.Node, axes: Axes, decision: Decision) -> Head | None:
    args = arguments_of(loss)
    steps = _steps(args["self"], "label_smoothing" not in args)
    if steps is None or args["target"].meta["val"].is_floating_point():
        return None
    linear, *after = steps
    arithmetic = _arithmetic(after)
    if arithmetic is None or (arithmetic[1] and args.get("label_smoothing")):  # The mean of tanh is no product.
        return None
    leaf, weight = decision.cuts.get(linear), linear.args[1]
    factor = axes.bound[linear].cuttable(leaf) if leaf is not None else None
    by_class = factor is not None and set(factor.ins) == {1} and is_major(axes.of(weight)[0], leaf)  # type: ignore[arg-type]
    if not isinstance(weight, fx.Node) or leaf is not decision.cuts.get(loss) or (leaf is not None and not by_class):
        return None
    return Head(linear, tuple(after), *arithmetic, leaf)


def _steps(x: Any, logarithms: bool) -> list[fx.Node] | None:
    """Returns the operators from a product to the operand of a loss, in order; None if there is no such product.

    Args:
        logarithms: whether the operand has logarithms of probabilities.
    """
    if not isinstance(x, fx.Node) or x.meta["val"].dim() < 2:
        return None
    # A loss has the classes in dimension 1.
    steps, classes, are_last = list[fx.Node](), x.meta["val"].shape[1], x.meta["val"].dim() == 2
    while _is_read_once(x):
        steps.insert(0, x)
        value = x.meta["val"]
        if logarithms:
            dim = value.dim() - 1 if are_last else 1
            if x.target is not aten.log_softmax.int or arguments_of(x)["dim"] % value.dim() != dim:
                return None
            logarithms = False
        elif not are_last:
            if not _moves_classes(x):
                return None
            are_last = True
        elif x.target is aten.linear.default and len(x.args) == 2:
            return steps if _is_large(classes, value.shape[-1]) and _one_precision(steps) else None
        elif not _keeps_rows(x, classes):
            return None
        x = x.args[0]
        if not isinstance(x, fx.Node):
            return None
    return None


def _is_read_once(x: fx.Node) -> bool:
    """True if one operator reads a value's elements; its sizes can be read off the rows."""
    sizes = [user for user in x.users if user.target is aten.sym_size.int]
    readers = [user for user in x.users if user not in sizes]
    last = x.meta["val"].dim() - 1
    return len(readers) == 1 and readers[0].op != "output" and all(user.args[1] != last for user in sizes)


def _is_large(classes: Any, made: Any) -> bool:
    return isinstance(classes, int) and classes >= LEAST and isinstance(made, int) and made == classes


def _one_precision(steps: list[fx.Node]) -> bool:
    return len({dtype_of_sums(step.meta["val"].dtype) for step in steps}) == 1


def _moves_classes(x: fx.Node) -> bool:
    """True for an operator that moves the last dimension of logits to where a loss has the classes."""
    if not has(x.target, Trait.PERMUTE):
        return False
    n, target = x.meta["val"].dim(), x.target
    # Sizes that differ say where each dimension goes.
    dims = target(torch.empty(list(range(n)), device="meta"), *x.args[1:], **x.kwargs).shape  # type: ignore[operator]
    return list(dims) == [0, n - 1, *range(1, n - 1)]


def _keeps_rows(x: fx.Node, classes: Any) -> bool:
    """True for an operator on each logit by itself, or a view of rows."""
    if has(x.target, Trait.SAME):
        return not has(x.target, Trait.NO_GRADIENT)
    if has(x.target, VIEWS):
        values = x.args[0].meta["val"], x.meta["val"]  # type: ignore[union-attr]
        args, n = arguments_of(x), max(value.dim() for value in values)
        dims = [args[name] for name in ("dim", "end_dim") if name in args]
        whole = all(isinstance(v.shape[-1], int) and v.shape[-1] == classes for v in values)
        return whole and all(isinstance(dim, int) and dim % n < n - 1 for dim in dims)
    if x.target is aten.add.Tensor:
        return not x.kwargs and len(x.args) == 2 and _is_bias(x.args[1], x.args[0].meta["val"].dtype, classes)  # type: ignore[union-attr]
    if has(x.target, Trait.SCALE):
        return isinstance(x.args[1], int | float) and x.args[1] != 0
    return x.target is aten.tanh.default


def _is_bias(x: Any, dtype: torch.dtype, classes: int) -> bool:
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    vector = isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype == dtype
    return vector and isinstance(value.shape[0], int) and value.shape[0] == classes  # type: ignore[union-attr]


def _arithmetic(steps: list[fx.Node]) -> tuple[float, float, fx.Node | None] | None:
    """Returns scale, cap and bias of the logits; None if these cannot say what the operators compute."""
    inner, outer, bounded, bias = 1.0, 1.0, False, None
    for step in steps:
        if has(step.target, Trait.SUM):
            if bias is not None or bounded or inner != 1:
                return None
            bias = step.args[1]
        elif has(step.target, Trait.SCALE):
            number: Any = step.args[1]
            factor = 1 / number if step.target is aten.div.Tensor else number
            inner, outer = (inner, outer * factor) if bounded else (inner * factor, outer)
        elif step.target is aten.tanh.default:
            if bounded:
                return None
            bounded = True
    # outer * tanh(inner * y) = cap * tanh(scale * y / cap)
    return (inner * outer, outer, bias) if bounded else (inner, 0.0, bias)  # type: ignore[return-value]


# ---- the new operators


def _rows(builder: Builder, node: fx.Node, is_product: bool) -> fx.Node:
    """Returns the head's input with the rows that a step of the logits has."""
    operand: Any = node.args[0]
    rows: fx.Node = builder.env[operand]
    if is_product or not has(node.target, VIEWS):
        return rows
    name, args = size_argument(node.target), dict(builder.map(arguments_of(node)))
    if name:
        args[name] = [*args[name][:-1], rows.meta["val"].shape[-1]]
    target: Any = node.target
    return builder.call(target, rows, *list(args.values())[1:])


def _loss(builder: Builder, node: fx.Node, head: Head) -> fx.Node:
    """Writes a class loss of the logits of a head. node: the loss in the old graph"""
    call, args = builder.call, builder.map(arguments_of(node))
    x, weight = args["self"], builder.map(head.linear.args[1])
    bias = builder.env[head.bias] if head.bias is not None else None
    ignored, classes = legal_classes(builder, args)
    smoothing, dtype = args.get("label_smoothing"), weight.meta["val"].dtype
    # In float16 gradients that are not divided yet may be too large.
    if head.leaf is None and args["reduction"] in (MEAN, SUM) and dtype != torch.float16:
        total_loss = _summed(builder, head, args, [weight, x, bias], ignored, classes)
        return builder.cast(total_loss, node.meta["val"].dtype)
    terms = call(
        linear_class_terms, weight, x, classes, 0, weight.meta["val"].shape[0], head.scale, head.cap, bias,
    )  # fmt: skip
    lse = call(aten.select.int, terms, 0, 0)
    loss = call(aten.sub.Tensor, lse, call(aten.select.int, terms, 0, 1))
    smooth = None
    if smoothing:
        total, logits = _every(builder, x, weight, bias, head.scale, args["weight"])
        every = call(aten.sub.Tensor, call(aten.mul.Tensor, lse, total), logits)
        smooth = call(aten.mul.Tensor, every, smoothing / weight.meta["val"].shape[0])
    return builder.cast(reduced_loss(builder, args, loss, smooth, ignored, classes), node.meta["val"].dtype)


def _summed(
    builder: Builder, head: Head, args: dict[str, Any], operands: list[Any], ignored: fx.Node, classes: fx.Node
) -> fx.Node:
    """Writes a sum or a mean over rows of which this rank has all classes. operands: weight, x and bias"""
    call, smoothing, (weight, x, bias) = builder.call, args.get("label_smoothing"), operands
    counted = counted_rows(builder, ignored, own_weight(builder, args["weight"], classes), _sum_dtype(weight))
    of_sum = of_class = counted
    if smoothing:
        # (1 - e) * loss of the class + e / classes * loss of every class, as torch.nn.CrossEntropyLoss documents it.
        part, rows = smoothing / weight.meta["val"].shape[0], counted_rows(builder, ignored, None, _sum_dtype(weight))
        total, logits = _every(builder, x, weight, bias, head.scale, args["weight"])
        of_class = call(aten.mul.Tensor, counted, 1 - smoothing)
        of_sum = call(aten.add.Tensor, of_class, call(aten.mul.Tensor, call(aten.mul.Tensor, rows, total), part))
    loss = call(linear_loss_sum, weight, x, classes, of_sum, of_class, head.scale, head.cap, bias)
    if smoothing:
        every = call(aten.sum.default, call(aten.masked_fill.Scalar, logits, ignored, 0))
        loss = call(aten.sub.Tensor, loss, call(aten.mul.Tensor, every, part))
    return call(aten.div.Tensor, loss, call(aten.sum.default, counted)) if args["reduction"] == MEAN else loss


def _sum_dtype(weight: fx.Node) -> torch.dtype:
    return dtype_of_sums(weight.meta["val"].dtype)


def _every(
    builder: Builder, x: fx.Node, weight: fx.Node, bias: fx.Node | None, scale: float, each: fx.Node | None
) -> tuple[Any, fx.Node]:
    """Returns the sum over classes of `each`, and of `each * logits` for each row: a product with one vector."""
    call, total = builder.call, weight.meta["val"].shape[0]
    if each is None:
        column = call(aten.sum.dim_IntList, weight, [0])
    else:
        total = call(aten.sum.default, each)
        column = call(aten.matmul.default, builder.cast(each, weight.meta["val"].dtype), weight)
    logits = builder.cast(call(aten.matmul.default, x, column), _sum_dtype(weight))
    if bias is not None:
        constant = call(aten.sum.default, bias if each is None else call(aten.mul.Tensor, bias, each))
        logits = call(aten.add.Tensor, logits, constant)
    return total, call(aten.mul.Tensor, logits, scale)
