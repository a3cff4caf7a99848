"""Writes what readers of logits compute by terms of each row, of which operators in chunks make several at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import fx

from autotp.ops.losses.argmax import PLACES, linear_argmax_key
from autotp.ops.losses.linear_cross_entropy import linear_class_terms
from autotp.ops.losses.linear_mixture import linear_mixture_sums
from autotp.passes.builder import Builder, dtype_of_sums
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
    WeightedValue,
)
from autotp.passes.lower.losses.term_requests import ALL, Classes, Mean, TermRequest, is_soft, labels_of, mean_of
from autotp.passes.lower.losses.vocab_parallel_loss import legal_classes, shares_of_target
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has, size_argument

aten = torch.ops.aten


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
        for request in (request for of_logits in [*self.requests.values()] for request in of_logits):
            # One operator has the terms of both, of which some are detached.
            if request.logits.detached and (live := replace(request.logits, detached=False)) in self.requests:
                self.requests[live].append(replace(request, logits=live))
        self.inputs: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self.made: dict[Logits, list[tuple[TermRequest, fx.Node]]] = {}
        self.of_second_heads: dict[Logits, fx.Node] = {}
        self.shares_made: dict[tuple[Shares, fx.Node, torch.dtype], fx.Node] = {}
        self.classes: dict[Classes, tuple[fx.Node, fx.Node | None]] = {}
        self.mixtures: dict[Mixture, fx.Node] = {}

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

    def operands(self, logits: Logits) -> list[fx.Node | None]:
        """Returns weight, input, bias and what is added of a head; without a gradient if the logits have none."""
        weight, x = self._product(logits.linear, logits, 1.0)
        bias = None if logits.bias is None else self.builder.env[logits.bias]
        added = [self._product(linear, logits, number) for linear, number in logits.added]
        low = [
            each[0] if len(each) == 1 else self.call(aten.cat.default, list(each), -1)
            for each in zip(*added, strict=True)
        ]
        operands = [weight, x, bias, *(low or (None, None))]
        if logits.detached:
            operands = [None if x is None else self.call(aten.detach.default, x) for x in operands]
        return operands

    def _product(self, linear: fx.Node, logits: Logits, number: float) -> tuple[fx.Node, fx.Node]:
        """Returns the weight and the input of a product, times a number."""
        return self.builder.env[linear.args[1]], self.times(self.input_of(linear, logits.views), number)  # type: ignore[index]

    def shares(self, shares: Shares, logits: Logits) -> fx.Node:
        """Returns a number for each class, perhaps of each row: [v] or [* v]"""
        key = shares, logits.linear, logits.dtype
        if key not in self.shares_made:
            self.shares_made[key] = self._new_shares(shares.node, logits)
        return self.shares_made[key]

    def _new_shares(self, node: fx.Node | None, logits: Logits) -> fx.Node:
        call, weight = self.call, self.builder.env[logits.linear.args[1]]  # type: ignore[index]
        dtype, classes = logits.dtype, weight.meta["val"].shape[0]
        if node is not None and not has(node.target, Trait.CLASS_LOSS):
            return self.builder.env[node]
        args = {} if node is None else self.builder.map(arguments_of(node))
        if node is not None and is_soft(node):
            n, target = args["target"].meta["val"].dim(), args["target"]
            target = target if n < 3 else call(aten.permute.default, target, [0, *range(2, n), 1])
            return shares_of_target(self.builder, args, self.builder.cast(target, dtype), -1)
        shares = call(aten.ones_like.default, call(aten.select.int, weight, 1, 0), dtype=dtype)
        if node is not None:
            shares = self.times(shares, args["label_smoothing"] / classes)
        return shares if args.get("weight") is None else call(aten.mul.Tensor, shares, args["weight"])

    def sum_of_shares(self, shares: Shares, logits: Logits) -> fx.Node:
        """Returns the sum of shares over classes: [] or [*]"""
        return self.call(aten.sum.dim_IntList, self.shares(shares, logits), [-1])

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
        return self._term(request, 2)

    def of_rows(self, value: Affine) -> fx.Node | None:
        """Returns the part of a value that is the same for all classes: [*]; None if there is none."""
        total: fx.Node | None = None
        for row, number in value.rows:
            if not isinstance(row, One):
                term = self.lse(row.logits) if isinstance(row, Lse) else self._rows(row, value)
                total = self.plus(total, self.times(term, number))
        constant = dict(value.rows).get(One(), 0.0)
        if not constant:
            return total
        if total is None:
            return self.call(aten.full_like.default, self.lse(Logits.times(*value.parts[0])), constant)
        return self.call(aten.add.Tensor, total, constant)

    def of_mixture(self, mixture: Mixture, head: Logits) -> fx.Node:
        """Returns the sum over classes of the probabilities of a head of a mixture times its logarithms: [*]"""
        heads = [terms.softmax_of for terms in (mixture.first, mixture.second)]
        if mixture not in self.mixtures:
            self.mixtures[mixture] = self._new_mixture(mixture, *heads)  # type: ignore[arg-type]
        return self.call(aten.select.int, self.mixtures[mixture], 0, heads.index(head))

    def _new_mixture(self, mixture: Mixture, head: Logits, second_head: Logits) -> fx.Node:
        (weight, x, bias, *low), second = self.operands(head), self.operands(second_head)
        lses = [self.lse(logits) for logits in (head, second_head)]
        shares = [self.of_rows(terms) for terms in (mixture.first, mixture.second)]
        shares = [self.call(aten.zeros_like.default, lses[0]) if share is None else share for share in shares]
        parts = 0.0, 0.0, *second[:2], second_head.scale, second_head.cap, second[2], None
        more = [head.scale, head.cap, bias, *parts, *low, *second[3:], head.cast_to]
        more = without_defaults(linear_mixture_sums, more)
        return self.call(linear_mixture_sums, weight, x, *lses, *shares, *more)

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
        has_second = request.mean is not None and request.mean.second is not None
        if request.logits != live and live in self.requests and not has_second:
            return self.call(aten.detach.default, self._term(replace(request, logits=live), place))
        if request == TermRequest(request.logits) and request.logits in self.of_second_heads:
            return self.call(aten.select.int, self.of_second_heads[request.logits], 0, 3)
        return self.call(aten.select.int, self.terms(request), 0, place)

    def terms(self, request: TermRequest) -> fx.Node:
        """Returns the terms of logits, with at least what is requested: [2 *], [3 *] or [4 *]"""
        made = self.made.setdefault(request.logits, [])
        for known, terms in made:
            if request.classes in (None, known.classes) and request.mean in (None, known.mean):
                return terms
        requests = self.requests.get(request.logits, [])
        classes = request.classes or next((r.classes for r in requests if r.classes and self._has(r.classes)), None)
        mean = request.mean or next((r.mean for r in requests if r.mean and self._has(r.mean)), None)
        whole, terms = TermRequest(request.logits, classes, mean), self._new_terms(request.logits, classes, mean)
        made.append((whole, terms))
        if mean is not None and mean.second is not None and mean.second not in self.made:
            self.of_second_heads.setdefault(mean.second, terms)
        return terms

    def _has(self, known: Classes | Mean) -> bool:
        """True if the new graph has what these classes, or the second head of a mean, are made of."""
        if isinstance(known, Classes):
            return self._copy_labels(known.index)
        node, second = None if known.shares is None else known.shares.node, known.second
        has_shares = node is None or all(n in self.builder.env for n in self._operands_of(node))
        return has_shares and (
            second is None or all((linear, second.views) in self.inputs for linear in second.linears)
        )

    def _operands_of(self, node: fx.Node) -> list[fx.Node]:
        """Returns what shares are made of, but logits."""
        if not has(node.target, Trait.CLASS_LOSS):
            return [node]
        args = arguments_of(node)
        return [n for n in (args["target"], args["weight"]) if isinstance(n, fx.Node)]

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
        weight, x, bias, *low = self.operands(logits)
        labels = self.labels(classes)[0] if classes is not None else self.any_class(x)  # type: ignore[arg-type]
        size = weight.meta["val"].shape[0]  # type: ignore[union-attr]
        mean = mean or Mean(0.0)
        second = [None] * 5 if mean.second is None else self.operands(mean.second)
        scales = (1.0, 0.0) if mean.second is None else (mean.second.scale, mean.second.cap)
        shares = None if mean.shares is None else self.shares(mean.shares, logits)
        parts = mean.first_part, mean.second_part, *second[:2], *scales, second[2]
        more = [logits.scale, logits.cap, bias, *parts, shares, *low, *second[3:], logits.cast_to]
        return self.call(linear_class_terms, weight, x, labels, 0, size, *without_defaults(linear_class_terms, more))

    def any_class(self, x: fx.Node) -> fx.Node:
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


def write_reader(terms: Terms, node: fx.Node, reader: RowReader) -> fx.Node:
    """Writes what a reader, which is no loss, computes of logits."""
    builder, value, call = terms.builder, reader.value, terms.call
    dtype = node.meta["val"].dtype
    match reader.name:
        case "pick":
            total, classes = terms.of_rows(value), labels_of(node)  # type: ignore[arg-type]
            assert classes is not None
            for logits, number in value.parts:  # type: ignore[union-attr]
                total = terms.plus(terms.times(terms.picked(logits, classes), number), total)
        case "lse":
            (logits, factor), *_ = value.parts  # type: ignore[union-attr]
            total = terms.plus(terms.lse(logits.times(factor)), terms.of_rows(value))  # type: ignore[arg-type]
        case "argmax":
            total = _argmax(terms, value.parts[0][0])  # type: ignore[union-attr]
        case _:
            total = _sum(terms, reader)
    assert total is not None
    total = builder.cast(total, dtype)
    return call(aten.unsqueeze.default, total, -1) if reader.keeps_dim else total


def without_defaults(target: Callable[..., Any], arguments: list[Any]) -> list[Any]:
    """Returns the arguments of a head from `scale` to the last one that is no default; at least to its bias."""
    defaults = [parameter.default for parameter in signature(target).parameters.values()][-len(arguments) :]
    number = len(arguments)
    while number > 3 and arguments[number - 1] == defaults[number - 1]:
        number -= 1
    return arguments[:number]


def _argmax(terms: Terms, logits: Logits) -> fx.Node:
    weight, x, bias, *low = terms.operands(logits)
    more = [logits.scale, logits.cap, bias, *low, logits.cast_to]
    key = terms.call(linear_argmax_key, weight, x, 0, *without_defaults(linear_argmax_key, more))
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
        case WeightedValue(Shares() as shares):
            first = value.of.parts[0][0]
            classes = first.linear.meta["val"].shape[-1]
            total = terms.mean(first, mean_of(first, value.of, shares))  # type: ignore[arg-type]
            if (rows := terms.of_rows(value.of)) is not None:
                total = terms.plus(total, call(aten.mul.Tensor, rows, terms.sum_of_shares(shares, first)))
        case WeightedValue(Exp(exponent)):
            first, classes = Logits.times(*exponent.parts[0]), exponent.parts[0][0].linear.meta["val"].shape[-1]
            mean = mean_of(first, value.of)
            assert mean is not None
            sums = terms.plus(terms.mean(first, mean), terms.of_rows(value.of))
            for mixture, number in value.of.mixtures:
                sums = terms.plus(sums, terms.times(terms.of_mixture(mixture, first), number))
            probability = _probability(terms, value.probabilities)  # type: ignore[arg-type]
            total = sums if probability is None else call(aten.mul.Tensor, sums, probability)
    if total is None:
        total = call(aten.ones_like.default, terms.lse(Logits.times(*value.of.parts[0])))  # type: ignore[union-attr]
    divisor: list[Any] = [classes] if reader.divisor in ("classes", "all") else []
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
    lse = terms.lse(Logits.times(*exponent.parts[0]))
    return terms.call(aten.exp.default, terms.plus(lse, terms.of_rows(exponent)))


def _sum_of_logits(terms: Terms, value: Affine) -> fx.Node | None:
    total, rows = None, terms.of_rows(value)
    for logits, number in value.parts:
        total = terms.plus(total, terms.times(terms.mean(logits, ALL), number))
    size = value.parts[0][0].linear.meta["val"].shape[-1]
    return terms.plus(total, None if rows is None else terms.times(rows, size))
