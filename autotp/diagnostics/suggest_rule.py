"""suggest_rule: proposes the rule of an operator, from runs on slices of its operands.

    op(x, by), [4 64] and [64]:   slices of x's rows give slices of the result                  -> a
                                  slices of x's columns and of `by` give slices of the result   -> b
    "a b, b -> a b"

For each length, every choice of one dimension of some operands is cut in two uneven parts. If the results of the parts,
one after another along a dimension, are the whole result, the dimensions share a name; so they do if the results add up
to the whole one, which then lacks the name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.passes.lower.prove_rules import prove_rule, tensor_difference
from autotp.rules.call import bound_arguments, positional_arguments, result_tensors
from autotp.rules.language import spell
from autotp.rules.registry import with_rule
from autotp.rules.table import overloads

Dims = Mapping[int, int]
"""Number of an operand or an output -> its dimension."""


def suggest_rule(op: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns a rule for `autotp.rule(op, ...)` that is true of these arguments.

    The operator runs on slices of the arguments: twice for each choice of dimensions of one length. What is true of
    them may be wrong for others: read the rule before you register it. A dimension that cannot be cut has `^`. autotp
    tests the registered rule again on the shapes of each model.

    Args:
        op: an operator, `torch.ops.lib.name`.
        args, kwargs: arguments of a call. Lengths that differ from each other, of at least 2, give the clearest rule;
            float64 the surest.

    Raises:
        Error: `op` is not an operator, or it writes into its operands; it does not run on the arguments; two runs on
            the same numbers differ; no dimension can be cut; or what is true of two parts is not true of each cut.

    Example:
        >>> @torch.library.custom_op("docs::scaled_rows", mutates_args=())
        ... def scaled_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ...     return x * scale
        >>> autotp.suggest_rule(torch.ops.docs.scaled_rows, torch.rand(4, 6), torch.rand(6))
        'a b, b -> a b'
    """
    try:
        if not isinstance(op, OpOverload | OpOverloadPacket):
            raise Error(f"{op!r} is not an operator", fix="torch.ops.mylib.myop")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return _suggested(_sliced(op, args, kwargs))
    except Error as error:
        raise error.within("suggest_rule") from None


def _sliced(op: OpOverload | OpOverloadPacket, args: Any, kwargs: Any) -> _SlicedCalls:
    """Returns the call of an operator, by the first of its overloads that runs on the arguments."""
    # `overloads` leaves out those that write, if the operator has others.
    targets = [overload for overload in overloads(op) if not overload._schema.is_mutable]
    if not targets:
        raise Error(f"{op} writes into its operands", fix="an operator that returns a new tensor")
    errors = list[Exception]()
    for overload in targets:
        try:
            return _SlicedCalls(overload, args, kwargs)
        except Exception as error:  # An operator may fail in any way.
            errors.append(error)
    got = f"{type(errors[0]).__name__}: {errors[0]}".splitlines()[0]
    raise Error(f"{op} does not run on these arguments", got=got, fix="arguments of a call that works") from errors[0]


def _suggested(trial: _SlicedCalls) -> str:
    op = trial.op
    if any(tensor_difference(a, b) for a, b in zip(trial.whole, trial.run({}), strict=True)):
        raise Error(f"two runs of {op} on the same numbers differ", fix="no rule: the operator then gets whole tensors")
    factors = _distinct(trial.factors())
    if not factors:
        raise Error(f"no dimension of {op} can be cut", fix="no rule: the operator then gets whole tensors")
    text = _text(trial, factors)
    with with_rule(op, text):
        problems = [problem for tp in (2, 3) for problem in prove_rule(op, *trial.call, tp)]
    if problems:
        raise Error(
            f"{text!r} is not true of each cut of these arguments",
            found=problems[0],
            fix="arguments whose lengths differ from each other",
        )
    return text


class _SlicedCalls:
    """An operator, and a call of it whose operands are cut.

    Attributes:
        call: its arguments and keyword arguments, in the order of the schema: that of the terms of a rule.
    """

    def __init__(self, op: OpOverload, args: Any, kwargs: Any) -> None:
        self.op = op
        op(*args, **kwargs)  # Raises for arguments that the schema does not have.
        self.call = positional_arguments(op, bound_arguments(op, args, kwargs))
        self.leaves, self.spec = pytree.tree_flatten(self.call)
        self.operands = [x for x in self.leaves if isinstance(x, Tensor)]
        self.whole = self.run({})

    def run(self, slices: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
        """Returns the outputs, with these tensors in place of operands."""
        numbers = itertools.count()
        leaves = [slices.get(next(numbers), x) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return result_tensors(self.op(*args, **kwargs))

    def factors(self) -> Iterator[tuple[Dims, Dims]]:
        """Yields the dimensions of operands that can be cut together, with those of the outputs that then are cut."""
        sizes = dict.fromkeys(n for x in self.operands for n in x.shape if n > 1)
        for size in sizes:
            choices = [[None, *(d for d, n in enumerate(x.shape) if n == size)] for x in self.operands]
            for choice in itertools.product(*choices):
                operands = {i: d for i, d in enumerate(choice) if d is not None}
                outputs = self._outputs(operands, size) if operands else None
                if outputs is not None:
                    yield operands, outputs

    def _outputs(self, operands: Dims, size: int) -> Dims | None:
        """Returns which dimensions of the outputs are cut where those of operands are; None where none fits."""
        first = size // 3 or 1
        parts = []
        for start, length in ((0, first), (first, size - first)):
            slices = {i: self.operands[i].narrow(d, start, length) for i, d in operands.items()}
            try:
                parts.append(self.run(slices))
            except Exception:  # An operator may fail on a slice in any way.
                return None
        outputs = {}
        for o, whole in enumerate(self.whole):
            pair = [part[o] for part in parts]
            fitting = [d for d, n in enumerate(whole.shape) if n == size and _is_cut(whole, pair, d)]
            if fitting:
                outputs[o] = fitting[0]
            elif not (_summable(whole, pair) and not tensor_difference(whole, pair[0] + pair[1])):
                return None
        return outputs


def _is_cut(whole: Tensor, parts: Sequence[Tensor], dim: int) -> bool:
    rest = [[n for d, n in enumerate(x.shape) if d != dim] for x in (whole, *parts)]
    if any(x.dim() != whole.dim() for x in parts) or rest[0] != rest[1] or rest[0] != rest[2]:
        return False
    return not tensor_difference(whole, torch.cat(list(parts), dim))


def _summable(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    return whole.dtype != torch.bool and all(x.shape == whole.shape and x.dtype == whole.dtype for x in parts)


def _distinct(factors: Iterator[tuple[Dims, Dims]]) -> list[tuple[Dims, Dims]]:
    """Returns factors that share no dimension: of two, the one that cuts more outputs."""
    disjoint = list[tuple[Dims, Dims]]()
    for operands, outputs in sorted(factors, key=lambda factor: -len(factor[1])):
        used_dims = [(set(o.items()), set(r.items())) for o, r in disjoint]
        if not any(operands.items() & o or outputs.items() & r for o, r in used_dims):
            disjoint.append((operands, outputs))
    return disjoint


def _text(trial: _SlicedCalls, factors: Sequence[tuple[Dims, Dims]]) -> str:
    """Returns the rule in the language of rules: names in the order in which their dimensions come."""
    letters = itertools.chain("abcdefghijklmnopqrstuvwxyz", (f"n{i}" for i in itertools.count()))
    names = dict[tuple[str, int, int], str]()
    for i, x in enumerate(trial.operands):
        for d in range(x.dim()):
            factor = next((factor for factor in factors if factor[0].get(i) == d), None)
            places = [("in", i, d)] if factor is None else [("in", *place) for place in factor[0].items()]
            places += [] if factor is None else [("out", *place) for place in factor[1].items()]
            if ("in", i, d) not in names:
                names |= dict.fromkeys(places, next(letters) + "^" * (factor is None))
    for o, x in enumerate(trial.whole):
        for d in range(x.dim()):
            if ("out", o, d) not in names:
                names["out", o, d] = f"{next(letters)}^"
    sides = (("in", trial.operands), ("out", trial.whole))
    return spell(*([[names[side, i, d] for d in range(x.dim())] for i, x in enumerate(xs)] for side, xs in sides))
