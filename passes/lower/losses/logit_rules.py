"""What operators make of values that are written with logits: another such value, or one number for each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from autotp.passes.builder import dtype_of_sums
from autotp.passes.lower.losses.logit_values import (
    Affine,
    Exp,
    Logits,
    Lse,
    Mixture,
    One,
    RowNumbers,
    RowReader,
    Shares,
    Value,
    WeightedValue,
)
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import has

aten = torch.ops.aten
VIEWS = Trait.RESHAPE | Trait.SLICE


def read(node: fx.Node, values: dict[fx.Node, Value]) -> Value | RowReader | None:
    """Returns what an operator makes of values; None if it is not known without their elements."""
    rule: Any = _loss if has(node.target, Trait.CLASS_LOSS) else RULES.get(node.target, _same)
    if rule in TWO:
        return rule(node, values)
    operand = values.get(node.args[0]) if node.args else None  # type: ignore[arg-type]
    others = [n for n in node.all_input_nodes if n in values and n is not node.args[0]]
    return None if operand is None or others else rule(node, operand)


def _is_last(node: fx.Node, dim: Any) -> bool:
    """True for the dimension of the classes. dim: a number, a list, or None for all"""
    n = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    dims = list(dim) if isinstance(dim, list | tuple) else [dim]
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % n == n - 1


# ---- one operand


def _same(node: fx.Node, value: Value) -> Value | None:
    """Returns what an operator makes that changes the dtype, or where an element stands."""
    if isinstance(value, Affine):
        return _moved(node, value) or _viewed(node, value)
    if isinstance(value, Exp):
        exponent = _viewed(node, value.of)
        return None if exponent is None else Exp(exponent)
    return value if has(node.target, Trait.SAME) and not has(node.target, Trait.NO_GRADIENT) else None


def _detached(node: fx.Node, value: Value) -> Value | None:
    if isinstance(value, Exp):
        return Exp(_without_gradient(value.of))
    if isinstance(value, WeightedValue):
        if isinstance(value.probabilities, Shares):
            return None
        return WeightedValue(Exp(_without_gradient(value.probabilities.of)), _without_gradient(value.of))
    return _without_gradient(value)


def _without_gradient(value: Affine) -> Affine:
    def of(row: Lse | RowNumbers | One) -> Lse | RowNumbers | One:
        if isinstance(row, Lse):
            return Lse(replace(row.logits, detached=True))
        return replace(row, detached=True) if isinstance(row, RowNumbers) else row

    parts = tuple((replace(logits, detached=True), number) for logits, number in value.parts)
    mixtures = tuple(
        (Mixture(_without_gradient(mixture.first), _without_gradient(mixture.second)), number)
        for mixture, number in value.mixtures
    )
    rows = tuple((of(row), number) for row, number in value.rows)
    return replace(value, parts=parts, rows=rows, mixtures=mixtures)


def _exp(node: fx.Node, value: Value) -> Value | None:
    return Exp(value) if isinstance(value, Affine) and not value.is_moved else None


def _log(node: fx.Node, value: Value) -> Value | None:
    return value.of if isinstance(value, Exp) else None


def _tanh(node: fx.Node, value: Value) -> Value | None:
    logits = value.logits if isinstance(value, Affine) else None
    if logits is None or logits.bounded:
        return None
    return Affine(((replace(logits, bounded=True, outer=1.0), 1.0),))


def _negated(node: fx.Node, value: Value) -> Value | None:
    return None if isinstance(value, Exp) else value.times(-1.0)


def _log_softmax(node: fx.Node, value: Value) -> Value | None:
    dim = arguments_of(node)["dim"]
    logits = value.softmax_of if isinstance(value, Affine) else None
    logits = None if logits is None else logits.cast(node.meta["val"].dtype)
    if logits is None or not isinstance(value, Affine):
        return None
    is_class = dim % node.meta["val"].dim() == 1 if value.is_moved else _is_last(node, dim)
    return Affine(((logits, 1.0),), ((Lse(logits), -1.0),), value.is_moved) if is_class else None


def _softmax(node: fx.Node, value: Value) -> Value | None:
    logarithms = _log_softmax(node, value)
    return Exp(logarithms) if isinstance(logarithms, Affine) and not logarithms.is_moved else None


def _lse(node: fx.Node, value: Value) -> RowReader | None:
    args = arguments_of(node)
    is_plain = isinstance(value, Affine) and not value.is_moved and len(value.parts) == 1
    return RowReader("lse", value, args["keepdim"]) if is_plain and _is_last(node, args["dim"]) else None


def _sum(node: fx.Node, value: Value, is_mean: bool = False) -> RowReader | None:
    args = arguments_of(node)
    if args.get("dtype") is not None or (isinstance(value, Affine) and value.is_moved):
        return None
    if "dim" not in args:
        return RowReader("sum", value, divisor="all" if is_mean else "", over_rows=True)
    if not _is_last(node, args["dim"]):
        return None
    return RowReader("sum", value, args["keepdim"], "classes" if is_mean else "")


def _argmax(node: fx.Node, value: Value) -> RowReader | None:
    args = arguments_of(node)
    logits = value.logits if isinstance(value, Affine) and not value.is_moved else None
    # The greatest of float32: other logits are in another order.
    if logits is None or node.args[0].meta["val"].dtype != torch.float32 or not _is_last(node, args["dim"]):  # type: ignore[union-attr]
        return None
    return RowReader("argmax", value, args["keepdim"])


def _pick(node: fx.Node, value: Value) -> RowReader | None:
    args = arguments_of(node)
    index = args["index"].meta["val"]
    shapes = list(index.shape), list(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    is_one = index.shape[-1:] == (1,) and shapes[0][:-1] == shapes[1][:-1]
    picked = isinstance(value, Affine) and not value.is_moved and _is_last(node, args["dim"]) and is_one
    return RowReader("pick", value, True) if picked else None


def _moved(node: fx.Node, value: Affine) -> Affine | None:
    """Returns logits whose classes an operator moves to where a loss has them."""
    if not has(node.target, Trait.PERMUTE) or value.is_moved:
        return None
    n, target = node.meta["val"].dim(), node.target
    # Sizes that differ say where each dimension goes.
    dims = target(torch.empty(list(range(n)), device="meta"), *node.args[1:], **node.kwargs).shape  # type: ignore[operator]
    return replace(value, is_moved=True) if list(dims) == [0, n - 1, *range(1, n - 1)] else None


def _viewed(node: fx.Node, value: Affine) -> Affine | None:
    """Returns logits of which an operator changes the dtype, or takes a view of rows."""
    if has(node.target, Trait.SAME):
        return None if has(node.target, Trait.NO_GRADIENT) else _cast(node, value)
    if value.is_moved or value.mixtures or not has(node.target, VIEWS):
        return None
    if any(isinstance(row, RowNumbers) for row, _ in value.rows):
        return None
    values = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    args, n = arguments_of(node), max(x.dim() for x in values)
    dims = [args[name] for name in ("dim", "end_dim") if name in args]
    sizes = {x.shape[-1] for x in values} if all(isinstance(x.shape[-1], int) for x in values) else set()
    if len(sizes) != 1 or not all(isinstance(dim, int) and dim % n < n - 1 for dim in dims):
        return None

    def of(logits: Logits) -> Logits:
        return replace(logits, views=(*logits.views, node))

    parts = tuple((of(logits), number) for logits, number in value.parts)
    rows = tuple((Lse(of(row.logits)) if isinstance(row, Lse) else row, number) for row, number in value.rows)
    return Affine(parts, rows)


def _cast(node: fx.Node, value: Affine) -> Affine | None:
    """Returns a value in the dtype of an operator's result: of another precision for logits alone."""
    logits = None if value.logits is None else value.logits.cast(node.meta["val"].dtype)
    return value if logits is None else replace(value, parts=((logits, 1.0),))


# ---- several operands


def _scale(node: fx.Node, values: dict[fx.Node, Value]) -> Value | None:
    """Returns a product with a number, or of probabilities with another value."""
    a, b = node.args[:2]
    if node.target is aten.div.Tensor and isinstance(b, int | float) and b != 0:
        b = 1 / b
    elif node.target is not aten.mul.Tensor or node.kwargs:
        return None
    x, y = (values.get(n) if isinstance(n, fx.Node) else None for n in (a, b))
    if isinstance(b, int | float) and x is not None and b != 0:
        return None if isinstance(x, Exp) else x.times(float(b))
    if isinstance(x, Affine) and not isinstance(y, Affine):
        a, b, x, y = b, a, y, x
    if isinstance(y, Affine) and not y.is_moved and x is None and _is_of_classes(a, b):
        return WeightedValue(Shares(a), y)  # type: ignore[arg-type]
    if not _one_shape(a, b):
        return None
    return WeightedValue(x, y) if isinstance(x, Exp) and isinstance(y, Affine) and not y.is_moved else None


def _add(node: fx.Node, values: dict[fx.Node, Value]) -> Value | None:
    """Returns a sum or a difference: of logits with a bias, with a number of each row, or with other logits."""
    sign = -1.0 if node.target is aten.sub.Tensor else 1.0
    a, b = node.args[:2]
    if len(node.args) == 2 and not node.kwargs and isinstance(b, int | float) and isinstance(values.get(a), Affine):  # type: ignore[arg-type]
        return values[a].plus(Affine((), ((One(), 1.0),)), sign * b)  # type: ignore[index, union-attr]
    if len(node.args) != 2 or node.kwargs or not all(isinstance(x, fx.Node) for x in node.args):
        return None
    x, y = values.get(a), values.get(b)  # type: ignore[arg-type]
    if isinstance(x, Affine) and isinstance(y, Affine):
        total = x.logits.plus(y.logits) if x.logits is not None and y.logits is not None and sign == 1 else None
        if total is not None and _one_shape(a, b) and not (x.is_moved or y.is_moved):
            return Affine(((total, 1.0),))
        return x.plus(y, sign) if _one_shape(a, b) and x.is_moved == y.is_moved else None
    if not isinstance(x, Affine) or y is not None:
        return None
    logits, other = x.logits, b.meta["val"]  # type: ignore[union-attr]
    if logits is not None and _is_bias(b, a.meta["val"].dtype, a.meta["val"].shape[-1]) and not x.is_moved:  # type: ignore[union-attr]
        is_product = logits == replace(logits, bias=None, bounded=False, inner=1.0) and logits.cast_to is None
        return Affine(((replace(logits, bias=b), 1.0),)) if is_product and sign == 1 else None  # type: ignore[arg-type]
    shape = list(a.meta["val"].shape)  # type: ignore[union-attr]
    is_of_rows = isinstance(other, torch.Tensor) and list(other.shape) == [*shape[:-1], 1] and not x.is_moved
    return x.plus(Affine((), ((RowNumbers(b), 1.0),)), sign) if is_of_rows else None  # type: ignore[arg-type]


def _mixture(node: fx.Node, values: dict[fx.Node, Value]) -> Value | None:
    """Returns the logarithms of a mixture of two heads, each with factors of rows."""
    x, y = (values.get(n) for n in node.args[:2])  # type: ignore[arg-type]
    if not isinstance(x, Affine) or not isinstance(y, Affine) or not _one_shape(*node.args[:2]):
        return None
    is_of_heads = all(terms.softmax_of is not None and not terms.is_moved for terms in (x, y))
    return Affine((), mixtures=((Mixture(x, y), 1.0),)) if is_of_heads else None


def _divergence(node: fx.Node, values: dict[fx.Node, Value]) -> Value | RowReader | None:
    """Returns `kl_div`: probabilities of the target times the difference of logarithms."""
    args = arguments_of(node)
    of, target = values.get(args["self"]), values.get(args["target"])
    target = Exp(target) if args["log_target"] and isinstance(target, Affine) else target
    if not isinstance(of, Affine) or not isinstance(target, Exp) or of.is_moved or target.of.is_moved:
        return None
    if not _one_shape(args["self"], args["target"]):
        return None
    product = WeightedValue(target, target.of.plus(of, -1.0))
    divisor = {0: None, 1: "all", 2: ""}[args["reduction"]]
    return product if divisor is None else RowReader("sum", product, divisor=divisor, over_rows=True)


def _loss(node: fx.Node, values: dict[fx.Node, Value]) -> RowReader | None:
    """Returns a class loss: of classes or of probabilities, which a tensor or another head has."""
    args = arguments_of(node)
    value, target = values.get(args["self"]), values.get(args["target"])
    if not isinstance(value, Affine) or not (value.is_moved or args["self"].meta["val"].dim() == 2):
        return None
    logits = value.softmax_of if "label_smoothing" in args else value.logarithms_of
    if target is None:
        return RowReader("loss", value) if logits is not None else None
    if logits is None or not isinstance(target, Exp) or value.is_moved or args["weight"] or args["label_smoothing"]:
        return None
    logarithms = Affine(((logits, -1.0),), ((Lse(logits), 1.0),))
    divisor, over_rows = {0: ("", False), 1: ("rows", True), 2: ("", True)}[args["reduction"]]
    return RowReader("sum", WeightedValue(target, logarithms), divisor=divisor, over_rows=over_rows)


def _is_of_classes(shares: Any, value: Any) -> bool:
    """True for a tensor of real numbers with the shape of a value, or with one number for each class."""
    given = shares.meta["val"] if isinstance(shares, fx.Node) else None
    if not isinstance(given, torch.Tensor) or not given.is_floating_point():
        return False
    return _one_shape(shares, value) or _is_bias(shares, given.dtype, value.meta["val"].shape[-1])


def _one_shape(a: Any, b: Any) -> bool:
    return isinstance(a, fx.Node) and isinstance(b, fx.Node) and list(a.meta["val"].shape) == list(b.meta["val"].shape)


def _is_bias(x: Any, dtype: torch.dtype, classes: int) -> bool:
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    vector = isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype == dtype
    return vector and isinstance(value.shape[0], int) and value.shape[0] == classes  # type: ignore[union-attr]


RULES: dict[Any, Callable[[fx.Node, Any], Value | RowReader | None]] = {
    aten.detach.default: _detached,
    aten.exp.default: _exp,
    aten.log.default: _log,
    aten.tanh.default: _tanh,
    aten.neg.default: _negated,
    aten.log_softmax.int: _log_softmax,
    aten.softmax.int: _softmax,
    aten.logsumexp.default: _lse,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: partial(_sum, is_mean=True),
    aten.mean.default: partial(_sum, is_mean=True),
    aten.argmax.default: _argmax,
    aten.gather.default: _pick,
    aten.mul.Tensor: _scale,
    aten.div.Tensor: _scale,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _add,
    aten.logaddexp.default: _mixture,
    aten.kl_div.default: _divergence,
}
TWO = _scale, _add, _mixture, _divergence, _loss
"""Rules of operators of which each operand may be a value."""


def has_precision(node: fx.Node, logits: Logits) -> bool:
    """True if the sums of an operator with this result are in the dtype of these logits."""
    return dtype_of_sums(node.meta["val"].dtype) == logits.dtype
