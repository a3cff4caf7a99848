"""Writes what readers of logits compute by terms of each row, of which operators in chunks make several at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autotp.ops.losses.argmax import PLACES, linear_argmax_key
from autotp.ops.losses.linear_cross_entropy import linear_class_terms
from autotp.passes.builder import Builder, dtype_of_sums
from autotp.passes.lower.losses.logit_values import Affine, Exp, Logits, Lse, RowNumbers, RowReader, WeightedValue
from autotp.passes.lower.losses.vocab_parallel_loss import legal_classes
from autotp.rules.call import arguments_of
from autotp.rules.traits import draws, size_argument

aten = torch.ops.aten


@dataclass(frozen=True)
class Classes:
    """The class of each row. node: a loss, or a `gather` of one class"""

    index: fx.Node
    ignored: int | None


@dataclass(frozen=True)
class Mean:
    """The mean of a sum of logits with probabilities: `own_part * logits + other_part * other`."""

    own_part: float
    other: Logits | None = None
    other_part: float = 0.0


@dataclass(frozen=True)
class TermRequest:
    """What a reader needs of logits: the terms of their sum, and perhaps of a class, and of a mean."""

    logits: Logits
    classes: Classes | None = None
    mean: Mean | None = None


def requests_of(node: fx.Node, reader: RowReader) -> list[TermRequest] | None:
    """Returns what a reader needs; None if no operator makes it."""
    value = reader.value
    match reader.name:
        case "loss" | "pick":
            if reader.name == "loss":
                return [TermRequest(value.softmax_of, labels_of(node))]  # type: ignore[union-attr, arg-type]
            return [TermRequest(logits, labels_of(node)) for logits, _ in value.parts] + _of_rows(value)  # type: ignore[union-attr]
        case "lse":
            (logits, factor), *_ = value.parts  # type: ignore[union-attr]
            return [TermRequest(_times(logits, factor)), *_of_rows(value)]
        case "argmax":
            return []
    if isinstance(value, Affine):
        return None if any(logits.bounded for logits, _ in value.parts) else _of_rows(value)  # No sum of a product.
    exponent = value.of if isinstance(value, Exp) else value.probabilities.of
    if len(exponent.parts) != 1:
        return None
    own = _times(*exponent.parts[0])
    more = _of_rows(exponent)
    if isinstance(value, Exp):
        return [TermRequest(own), *more]
    mean = mean_of(own, value.of)
    return None if mean is None else [TermRequest(own, mean=mean), *more, *_of_rows(value.of)]


def labels_of(node: fx.Node) -> Classes:
    """Returns the classes that a loss or a `gather` reads."""
    args = arguments_of(node)
    return Classes(args["index"], None) if "index" in args else Classes(args["target"], args["ignore_index"])


def mean_of(own: Logits, value: Affine) -> Mean | None:
    """Returns the mean of a value with probabilities of logits; None if it is of more than two heads."""
    others = [(logits, number) for logits, number in value.parts if logits != own]
    own_part = sum(number for logits, number in value.parts if logits == own)
    if len(others) > 1:
        return None
    return Mean(own_part, *others[0]) if others else Mean(own_part) if own_part else None


def _of_rows(value: Any) -> list[TermRequest]:
    return [TermRequest(row.logits) for row, _ in value.rows if isinstance(row, Lse)]


def _times(logits: Logits, factor: float) -> Logits:
    return logits if factor == 1 else logits.times(factor)


class Terms:
    """The terms that a new graph has: each operator makes what several readers ask for, where it is known in time.

    Args:
        requests: of each reader, in their order.
        copy: copies an operator that is no value or reader.
    """

    def __init__(
        self, builder: Builder, requests: dict[fx.Node, list[TermRequest]], copy: Callable[[fx.Node], None]
    ) -> None:
        self.builder, self.call, self.copy, self.readers = builder, builder.call, copy, requests.keys()
        self.requests: dict[Logits, list[TermRequest]] = {}
        for request in (request for of_reader in requests.values() for request in of_reader):
            self.requests.setdefault(request.logits, []).append(request)
        self.inputs: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self.made: dict[Logits, list[tuple[TermRequest, fx.Node]]] = {}
        self.of_others: dict[Logits, fx.Node] = {}
        self.classes: dict[Classes, tuple[fx.Node, fx.Node | None]] = {}

    # ---- operands

    def input_of(self, linear: fx.Node, views: tuple[fx.Node, ...]) -> fx.Node:
        """Returns the input of a head with the rows that views of the logits have."""
        if (linear, views) not in self.inputs:
            if views:
                rows = self.input_of(linear, views[:-1])
                self.inputs[linear, views] = _viewed(self.builder, views[-1], rows)
            else:
                self.inputs[linear, views] = self.builder.env[linear.args[0]]  # type: ignore[index]
        return self.inputs[linear, views]

    def operands(self, logits: Logits) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """Returns weight, input and bias of a head; without a gradient if the logits have none."""
        linear, bias = logits.linear, logits.bias
        own = [self.builder.env[linear.args[1]], self.input_of(linear, logits.views)]  # type: ignore[index]
        own += [self.builder.env[bias]] if bias is not None else []
        if logits.detached:
            own = [self.call(aten.detach.default, operand) for operand in own]
        return own[0], own[1], own[2] if bias is not None else None

    def labels(self, classes: Classes) -> tuple[fx.Node, fx.Node | None]:
        """Returns the class of each row, and the mask of ignored rows of a loss."""
        if classes not in self.classes:
            index = self.builder.env[classes.index]
            if classes.ignored is None:
                self.classes[classes] = self.call(aten.select.int, index, -1, 0), None
            else:
                ignored, legal = legal_classes(self.builder, {"target": index, "ignore_index": classes.ignored})
                self.classes[classes] = legal, ignored
        return self.classes[classes]

    # ---- terms

    def lse(self, logits: Logits) -> fx.Node:
        """Returns the logarithm of the sum of exponentials: [*]"""
        return self._term(TermRequest(logits), 0)

    def picked(self, logits: Logits, classes: Classes) -> fx.Node:
        """Returns the logit of the class of each row: [*]"""
        return self._term(TermRequest(logits, classes), 1)

    def mean(self, logits: Logits, mean: Mean) -> fx.Node:
        """Returns a mean over classes: [*]"""
        request = TermRequest(logits, mean=mean)
        lse = self._term(request, 0)
        parts = (self.call(aten.sub.Tensor, self._term(request, i), lse) for i in (2, 3))
        return self.call(aten.sub.Tensor, *(self.call(aten.exp.default, part) for part in parts))

    def of_rows(self, value: Affine) -> fx.Node | None:
        """Returns the part of a value that is the same for all classes: [*]; None if there is none."""
        total: fx.Node | None = None
        for row, number in value.rows:
            term = self.lse(row.logits) if isinstance(row, Lse) else self._rows(row, value)
            total = self.plus(total, self.times(term, number))
        return total

    def _rows(self, rows: RowNumbers, value: Affine) -> fx.Node:
        node = self.call(aten.select.int, self.builder.env[rows.node], -1, 0)
        node = self.call(aten.detach.default, node) if rows.detached else node
        return self.builder.cast(node, dtype_of_sums(node.meta["val"].dtype))

    def plus(self, a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
        """Returns a sum; None is 0."""
        return (a if b is None else b) if a is None or b is None else self.call(aten.add.Tensor, a, b)

    def times(self, x: fx.Node, number: float) -> fx.Node:
        """Returns a product with a number."""
        if number == -1:
            return self.call(aten.neg.default, x)
        return x if number == 1 else self.call(aten.mul.Tensor, x, number)

    def _term(self, request: TermRequest, place: int) -> fx.Node:
        live = replace(request.logits, detached=False)
        if request.mean is None and request.logits != live and live in self.requests:
            return self.call(aten.detach.default, self._term(replace(request, logits=live), place))
        if request == TermRequest(request.logits) and request.logits in self.of_others:
            return self.call(aten.select.int, self.of_others[request.logits], 0, 4)
        return self.call(aten.select.int, self.terms(request), 0, place)

    def terms(self, request: TermRequest) -> fx.Node:
        """Returns the terms of logits, with at least what is requested: [2 *], [4 *] or [5 *]"""
        made = self.made.setdefault(request.logits, [])
        for known, terms in made:
            if request.classes in (None, known.classes) and request.mean in (None, known.mean):
                return terms
        requests = self.requests.get(request.logits, [])
        classes = request.classes or next((r.classes for r in requests if r.classes and self._has(r.classes)), None)
        mean = request.mean or next((r.mean for r in requests if r.mean and self._has(r.mean)), None)
        whole, terms = TermRequest(request.logits, classes, mean), self._new_terms(request.logits, classes, mean)
        made.append((whole, terms))
        if mean is not None and mean.other is not None and mean.other not in self.made:
            self.of_others.setdefault(mean.other, terms)
        return terms

    def _has(self, known: Classes | Mean) -> bool:
        """True if the new graph has what these classes, or the other head of a mean, are made of."""
        if isinstance(known, Classes):
            return self._copy_labels(known.index)
        return known.other is None or (known.other.linear, known.other.views) in self.inputs

    def _copy_labels(self, index: fx.Node) -> bool:
        """Copies what classes are computed of, if these are whole numbers; returns whether the new graph has them.

        A reader, such as `argmax`, is no copy: it is written where it stands.
        """
        if index in self.builder.env:
            return True
        value, is_call = index.meta.get("val"), index.op == "call_function" and not draws(index)
        is_call = is_call and index not in self.readers
        is_whole = (isinstance(value, torch.Tensor) and not value.is_floating_point()) or isinstance(
            value, int | torch.SymInt
        )
        if not (is_call and is_whole) or not all(self._copy_labels(operand) for operand in index.all_input_nodes):
            return False
        self.copy(index)
        return True

    def _new_terms(self, logits: Logits, classes: Classes | None, mean: Mean | None) -> fx.Node:
        weight, x, bias = self.operands(logits)
        more: list[Any] = []
        if mean is not None:
            more = [mean.own_part, mean.other_part]
            if mean.other is not None:
                weight2, x2, bias2 = self.operands(mean.other)
                more += [weight2, x2, mean.other.scale, mean.other.cap, bias2]
        labels = self.labels(classes)[0] if classes is not None else self._any_class(x)
        size = weight.meta["val"].shape[0]
        return self.call(linear_class_terms, weight, x, labels, 0, size, logits.scale, logits.cap, bias, *more)

    def _any_class(self, x: fx.Node) -> fx.Node:
        column = self.call(aten.select.int, x, -1, 0)
        return self.call(aten.zeros_like.default, column, dtype=torch.int64)


def _viewed(builder: Builder, view: fx.Node, rows: fx.Node) -> fx.Node:
    """Returns a view of a head's input, of the view of its logits."""
    name, args = size_argument(view.target), dict(builder.map(_other_arguments(view)))
    if name:
        args[name] = [*args[name][:-1], rows.meta["val"].shape[-1]]
    target: Any = view.target
    return builder.call(target, rows, *args.values())


def _other_arguments(view: fx.Node) -> dict[str, Any]:
    return dict(list(arguments_of(view).items())[1:])


# ---- what readers compute


def read_rows(terms: Terms, node: fx.Node, reader: RowReader) -> fx.Node:
    """Writes what a reader, which is no loss, computes of logits."""
    builder, value, call = terms.builder, reader.value, terms.call
    dtype = node.meta["val"].dtype
    match reader.name:
        case "pick":
            total = terms.of_rows(value)  # type: ignore[arg-type]
            for logits, number in value.parts:  # type: ignore[union-attr]
                total = terms.plus(terms.times(terms.picked(logits, labels_of(node)), number), total)
        case "lse":
            (logits, factor), *_ = value.parts  # type: ignore[union-attr]
            total = terms.plus(terms.lse(_times(logits, factor)), terms.of_rows(value))  # type: ignore[arg-type]
        case "argmax":
            total = _argmax(terms, value.parts[0][0])  # type: ignore[union-attr]
        case _:
            total = _sum(terms, reader)
    assert total is not None
    total = builder.cast(total, dtype)
    return call(aten.unsqueeze.default, total, -1) if reader.keeps_dim else total


def _argmax(terms: Terms, logits: Logits) -> fx.Node:
    weight, x, bias = terms.operands(logits)
    key = terms.call(linear_argmax_key, weight, x, 0, logits.scale, logits.cap, bias)
    return place_in_graph(terms.builder, key)


def place_in_graph(builder: Builder, key: fx.Node) -> fx.Node:
    """Writes `place_of_key`."""
    lower = builder.call(aten.bitwise_and.Scalar, key, PLACES - 1)
    return builder.call(aten.bitwise_xor.Scalar, lower, PLACES - 1)


def _sum(terms: Terms, reader: RowReader) -> fx.Node:
    builder, value, call = terms.builder, reader.value, terms.call
    match value:
        case Affine():
            total = _sum_of_logits(terms, value)
            classes = value.parts[0][0].linear.meta["val"].shape[-1]
        case Exp():
            total, classes = _probability(terms, value), value.of.parts[0][0].linear.meta["val"].shape[-1]
        case WeightedValue():
            exponent = value.probabilities.of
            own, classes = _times(*exponent.parts[0]), exponent.parts[0][0].linear.meta["val"].shape[-1]
            mean = mean_of(own, value.of)
            assert mean is not None
            sums = terms.plus(terms.mean(own, mean), terms.of_rows(value.of))
            probability = _probability(terms, value.probabilities)
            total = sums if probability is None else call(aten.mul.Tensor, sums, probability)
    if total is None:
        total = call(aten.ones_like.default, terms.lse(_times(*value.of.parts[0])))  # type: ignore[union-attr]
    divisor: list[Any] = [classes] if reader.divisor else []
    if reader.over_rows:
        dims = range(total.meta["val"].dim()) if reader.divisor else ()
        divisor += [builder.size(total, dim) for dim in dims]
        total = call(aten.sum.default, total)
    for size in divisor:
        total = call(aten.div.Tensor, total, size)
    return total


def _probability(terms: Terms, value: Exp) -> fx.Node | None:
    """Returns the sum of the exponentials of logits; None if it is 1, as they are probabilities."""
    exponent = value.of
    if exponent.logarithms_of is not None:
        return None
    lse = terms.lse(_times(*exponent.parts[0]))
    return terms.call(aten.exp.default, terms.plus(lse, terms.of_rows(exponent)))


def _sum_of_logits(terms: Terms, value: Affine) -> fx.Node | None:
    total, rows = None, terms.of_rows(value)
    for logits, number in value.parts:
        _, sums = weighted_sum(terms.builder, *terms.operands(logits), logits.scale, None)
        total = terms.plus(total, terms.times(sums, number))
    size = value.parts[0][0].linear.meta["val"].shape[-1]
    return terms.plus(total, None if rows is None else terms.times(rows, size))


def weighted_sum(
    builder: Builder, weight: fx.Node, x: fx.Node, bias: fx.Node | None, scale: float, each: fx.Node | None
) -> tuple[Any, fx.Node]:
    """Returns the sum over classes of `each`, and of `each * logits` for each row: a product with one vector."""
    call, total = builder.call, weight.meta["val"].shape[0]
    if each is None:
        column = call(aten.sum.dim_IntList, weight, [0])
    else:
        total = call(aten.sum.default, each)
        column = call(aten.matmul.default, builder.cast(each, weight.meta["val"].dtype), weight)
    logits = builder.cast(call(aten.matmul.default, x, column), dtype_of_sums(weight.meta["val"].dtype))
    if bias is not None:
        constant = call(aten.sum.default, bias if each is None else call(aten.mul.Tensor, bias, each))
        logits = call(aten.add.Tensor, logits, constant)
    return total, call(aten.mul.Tensor, logits, scale)
