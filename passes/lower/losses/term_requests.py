"""What readers of logits need of them: terms of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.passes.lower.losses.logit_values import (
    Affine,
    Exp,
    Logits,
    Lse,
    RowReader,
    Shares,
    Value,
    WeightedValue,
)
from autotp.rules.call import arguments_of


@dataclass(frozen=True)
class Classes:
    """The class of each row. node: a loss, or a `gather` of one class"""

    index: fx.Node
    ignored: int | None


@dataclass(frozen=True)
class Mean:
    """The sum over classes of probabilities, or of shares, times `first_part * logits + second_part * second`."""

    first_part: float
    second: Logits | None = None
    second_part: float = 0.0
    shares: Shares | None = None


@dataclass(frozen=True)
class TermRequest:
    """What a reader needs of logits: the terms of their sum, and perhaps of a class, and of a mean."""

    logits: Logits
    classes: Classes | None = None
    mean: Mean | None = None


def requests_of(node: fx.Node, reader: RowReader) -> list[TermRequest] | None:
    """Returns what a reader needs; None if no operator makes it."""
    value = reader.value
    if _has_mixtures(value) and _of_mixtures(value) is None:
        return None
    match reader.name:
        case "loss" | "pick":
            if reader.name == "loss":
                shares = Mean(-1.0, shares=Shares(node)) if has_shares(node) else None
                return [TermRequest(value.softmax_of, labels_of(node), shares)]  # type: ignore[union-attr, arg-type]
            return [TermRequest(logits, labels_of(node)) for logits, _ in value.parts] + _of_rows(value)  # type: ignore[union-attr]
        case "lse":
            (logits, factor), *_ = value.parts  # type: ignore[union-attr]
            return [TermRequest(logits.times(factor)), *_of_rows(value)]
        case "argmax":
            return []
    if isinstance(value, Affine):
        return [*(TermRequest(logits, mean=ALL) for logits, _ in value.parts), *_of_rows(value)]
    if isinstance(value, WeightedValue) and isinstance(value.probabilities, Shares):
        first = value.of.parts[0][0]
        mean = mean_of(first, value.of, value.probabilities)
        return None if mean is None else [TermRequest(first, mean=mean), *_of_rows(value.of)]
    exponent = value.of if isinstance(value, Exp) else value.probabilities.of  # type: ignore[union-attr]
    if len(exponent.parts) != 1:
        return None
    first = Logits.times(*exponent.parts[0])
    more = _of_rows(exponent)
    if isinstance(value, Exp):
        return [TermRequest(first), *more]
    mean = mean_of(first, value.of)
    if mean is None:
        return None
    return [TermRequest(first, mean=mean), *more, *_of_rows(value.of), *(_of_mixtures(value) or [])]


ALL = Mean(1.0, shares=Shares(None))
"""The sum of logits over all classes."""


def is_soft(node: fx.Node) -> bool:
    """True for a loss whose target are probabilities."""
    target = arguments_of(node).get("target")
    return target is not None and target.meta["val"].is_floating_point()


def has_shares(node: fx.Node) -> bool:
    """True for a loss that reads the logits of every class."""
    return is_soft(node) or bool(arguments_of(node).get("label_smoothing"))


def labels_of(node: fx.Node) -> Classes | None:
    """Returns the classes that a loss or a `gather` reads; None for probabilities."""
    args = arguments_of(node)
    if is_soft(node):
        return None
    return Classes(args["index"], None) if "index" in args else Classes(args["target"], args["ignore_index"])


def mean_of(first: Logits, value: Affine, shares: Shares | None = None) -> Mean | None:
    """Returns the mean of a value with probabilities of logits, or with shares; None for more than two heads."""
    seconds = [(logits, number) for logits, number in value.parts if logits != first]
    first_part = sum(number for logits, number in value.parts if logits == first)
    if len(seconds) > 1:
        return None
    second, second_part = seconds[0] if seconds else (None, 0.0)
    return Mean(first_part, second, second_part, shares) if first_part or seconds else None


def _has_mixtures(value: Value | Shares) -> bool:
    match value:
        case Affine():
            return bool(value.mixtures)
        case Exp():
            return bool(value.of.mixtures)
        case WeightedValue():
            return bool(value.of.mixtures) or _has_mixtures(value.probabilities)
    return False


def _of_mixtures(value: Value) -> list[TermRequest] | None:
    """Returns what the mixtures need that probabilities of one of their heads multiply; None for other mixtures."""
    if not isinstance(value, WeightedValue) or not isinstance(value.probabilities, Exp):
        return None
    of, requests = value.probabilities.of.softmax_of, list[TermRequest]()
    for mixture, _ in value.of.mixtures:
        heads = mixture.first, mixture.second
        if of is None or of not in [terms.softmax_of for terms in heads]:
            return None
        requests += [request for terms in heads for request in (TermRequest(terms.softmax_of), *_of_rows(terms))]  # type: ignore[arg-type]
    return requests


def _of_rows(value: Any) -> list[TermRequest]:
    return [TermRequest(row.logits) for row, _ in value.rows if isinstance(row, Lse)]
