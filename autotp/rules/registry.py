"""The rules in use: those of the table, of model libraries, and those that users registered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from autotp.arguments import expect_arguments
from autotp.errors import Error
from autotp.rules import common as f
from autotp.rules.call import Call, bound_arguments, positional_arguments
from autotp.rules.language import STAR, Rule, parse
from autotp.rules.products import grouped_mm
from autotp.rules.row import Row
from autotp.rules.table import ROWS, overloads
from autotp.rules.traits import having

Operator = Callable[..., Any]

RULES: dict[Operator, f.RuleFunction] = {op: row.rule for op, row in ROWS.items() if row.rule is not None}

USER_RULES: set[Operator] = set()
"""Operators whose rule a user registered: each is tested on the shapes of each captured graph."""

_REFERENCES: dict[OpOverload, Callable[..., Any]] = {}
"""Operators whose kernel for CPUs is a function in plain torch."""


def add_rows(rows: Mapping[Operator, Row]) -> None:
    """Adds rows of other operators to the table: those of an extension, or of a library. A user's rules stay."""
    if rows.items() <= ROWS.items() and all(op in RULES for op, row in rows.items() if row.rule is not None):
        return  # Libraries add theirs in each capture.
    ROWS.update(rows)
    RULES.update({op: row.rule for op, row in rows.items() if row.rule is not None and op not in USER_RULES})
    having.cache_clear()


def loaded_operator(name: str) -> OpOverload | None:
    """Returns the default overload of an operator by a name such as `library::name`; None if it is not loaded."""
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return None if packet is None else packet.default


def rule(
    op: Operator,
    factors: str | f.RuleFunction,
    linear: f.Linear = (),
    reference: Callable[..., Any] | None = None,
) -> None:
    """Registers the rule of an operator of yours, so that autotp can cut the operator.

    The rule has one term for each tensor operand and one for each output; equal names are equal dimensions.

    Args:
        op: an operator: `torch.ops.lib.name` with all its overloads, or one overload.
        factors: the rule, such as "* i, o i -> * o": `*` means all dimensions before, `name^` a dimension that the
            operator needs whole; a name that is missing from the output is summed. Or a function that takes the call
            and returns a Rule.
        linear: in which operands the operator is linear, so that it may read a partial sum before it is reduced: "each"
            operand by itself, "all" operands together, or groups of operand positions.
        reference: computes the same in plain torch, from all arguments of the operator, where that has no kernel for
            CPUs. So `verify` and tests run without a GPU. On CPUs it takes the place of a function for all devices
            (a `triton_op`, or a `custom_op` without `device_types`), and not of a kernel for CPUs.

    Raises:
        Error: the text does not parse, `op` is not an operator, or it writes into its operands.

    Example:
        >>> @torch.library.custom_op("docs::scale_rows", mutates_args=())
        ... def scale_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ...     return x * scale  # x: [rows hidden], scale: [hidden]
        >>> scale_rows.register_fake(lambda x, scale: torch.empty_like(x))
        <function ...>
        >>> autotp.rule(torch.ops.docs.scale_rows, "* h, h -> * h")
    """
    if not isinstance(op, OpOverload | OpOverloadPacket):
        raise Error(f"{op!r} is not an operator", fix="torch.ops.mylib.myop").within("rule")
    try:
        expect_arguments(rule, factors=factors, linear=linear, reference=reference)
        if isinstance(factors, str):
            expect_rule(factors)
    except Error as error:
        raise error.within(f"rule({op})") from None
    # `overloads` leaves out those that write, so of an operator that only writes none is left.
    targets = overloads(op)
    if not targets or any(isinstance(overload, OpOverload) and overload._schema.is_mutable for overload in targets):
        raise Error(f"{op} writes into its operands", fix="an operator that returns a new tensor").within("rule")
    for overload in targets:
        RULES[overload] = f.fixed(factors, linear) if isinstance(factors, str) else factors
        USER_RULES.add(overload)
        if reference is not None and isinstance(overload, OpOverload):
            add_reference(overload, reference)


def expect_rule(factors: str) -> None:
    """Raises Error for a text that is no rule of a user's."""
    parse(factors)
    if "!" in factors:
        raise Error("`!` is for operators that autotp has a parallel form of", fix="`^`")


def has_user_rule(op: Operator) -> bool:
    """True for an operator whose rule a user wrote, and for such a call of opaque code."""
    return op in USER_RULES or getattr(op, "has_user_rule", False)


def add_reference(op: OpOverload, reference: Callable[..., Any]) -> None:
    """Makes a function in plain torch an operator's kernel for CPUs, unless it has one for CPUs alone."""
    if op not in _REFERENCES and op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU):
        return
    if op not in _REFERENCES:

        def kernel(*args: Any, **kwargs: Any) -> Any:
            # torch leaves out arguments that have their defaults.
            plain, named = positional_arguments(op, bound_arguments(op, args, kwargs))
            return _REFERENCES[op](*plain, **named)

        torch.library.impl(op.name(), "CPU")(kernel)
    _REFERENCES[op] = reference  # A notebook may register another one.


@contextmanager
def with_rule(op: Operator, factors: str) -> Iterator[None]:
    """A region in which an operator has this rule."""
    before = RULES.get(op)
    RULES[op] = f.fixed(factors, ())
    try:
        yield
    finally:
        RULES.pop(op)
        if before is not None:
            RULES[op] = before


@contextmanager
def without_rules(operators: Collection[Operator]) -> Iterator[None]:
    """A region in which these operators have no rules of the table or of a user: they get whole tensors."""
    before = {operator: RULES.pop(operator) for operator in operators}
    try:
        yield
    finally:
        RULES.update(before)


def rule_of(call: Call) -> Rule | None:
    """Returns the rule of a call, or None if autotp knows none.

    Raises:
        Error: the terms of a user's rule do not match the call's tensors and their dimensions.
    """
    function = _function_of(call.target)
    result = None if function is None else function(call)
    if result is not None and has_user_rule(call.target) and not _fits(result, call):
        shapes = [", ".join(str(list(t.shape)) for t in side) for side in (f.present(call), call.outputs)]
        raise Error(
            f"the rule of {call.target} does not fit",
            rule=str(result),
            shapes=" -> ".join(shapes),
            fix="one name for each dimension, or * for all dimensions before",
        )
    return result


def has_rule(op: Operator) -> bool:
    """True if there is a rule for some calls of an operator."""
    return _function_of(op) is not None


def _function_of(op: Operator) -> f.RuleFunction | None:
    return RULES.get(op) or getattr(op, "rule_function", None)  # The rule of a call of opaque code.


def is_grouped(op: Any) -> bool:
    """True for a product of groups of rows, each group with its own matrix."""
    return RULES.get(op) is grouped_mm


def _fits(rule: Rule, call: Call) -> bool:
    """True if there is a term for each tensor, and an expression for each of its dimensions."""
    tensors = (f.present(call), call.outputs)
    if (len(rule.ins), len(rule.outs)) != tuple(map(len, tensors)):
        return False
    pairs = zip((*rule.ins, *rule.outs), (*tensors[0], *tensors[1]), strict=True)
    return all(len(term) - 1 <= t.dim() if STAR in term else len(term) == t.dim() for term, t in pairs)


def unknown(call: Call) -> Rule:
    """Returns the rule that is assumed for an operator without a rule: it needs all operands whole."""
    return f.entire(call)
