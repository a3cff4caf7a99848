"""The rules that hold: those of the table, of model libraries, and those that users registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from autotp.errors import Error
from autotp.model_library import rule_function_of
from autotp.rules import common as f
from autotp.rules.call import Call
from autotp.rules.language import STAR, Rule, parse
from autotp.rules.products import grouped_mm
from autotp.rules.table import ROWS, overloads

Operator = Callable[..., Any]

RULES: dict[Operator, f.RuleFunction] = {op: row.rule for op, row in ROWS.items() if row.rule is not None}

USER_RULES: set[Operator] = set()
"""Operators whose rule a user registered: proved on the spot, on the example that the graph gives."""


def rule(op: Operator, factors: str | f.RuleFunction, linear: f.Linear = ()) -> None:
    """Registers what is true of an operator of yours, so that autotp can cut it.

        autotp.rule(torch.ops.mylib.scale, "b h, h -> b h")

    Args:
        op: an operator (`torch.ops.lib.name`, all its overloads, or one of them).
        factors: the factor string, in the language of `autotp/rules/language.py`, or a function of the call that
        returns a Rule. linear: `"each"` operand by itself, `"all"` operands together, or groups of operand positions in
        which
            the operator is linear; only there may a partial sum enter before it is reduced.

    Raises:
        Error: the string does not parse, or `op` is no operator.
    """
    if not isinstance(op, OpOverload | OpOverloadPacket):
        raise Error(f"{op!r} is no operator", fix="torch.ops.mylib.myop").within("rule")
    try:
        if isinstance(factors, str):
            parse(factors)
            if "!" in factors:
                raise Error("`!` is for operators that autotp has a parallel form of", fix="`^`")
    except Error as error:
        raise error.within(f"rule({op})") from None
    found = overloads(op)
    if not found or any(isinstance(one, OpOverload) and one._schema.is_mutable for one in found):
        raise Error(f"{op} writes into its operands", fix="an operator that returns a new tensor").within("rule")
    for one in found:
        RULES[one] = f.fixed(factors, linear) if isinstance(factors, str) else factors
        USER_RULES.add(one)


def rule_of(call: Call) -> Rule | None:
    """The rule of a call, or None where autotp knows none.

    Raises:
        Error: a user's rule has not the terms, or a term not the dimensions, that the call has.
    """
    function = _function_of(call.target)
    found = None if function is None else function(call)
    if found is not None and call.target in USER_RULES and not _fits(found, call):
        shapes = [", ".join(str(list(t.shape)) for t in side) for side in (f.present(call), call.outputs)]
        raise Error(f"the rule of {call.target} does not fit", rule=str(found), shapes=" -> ".join(shapes))
    return found


def _function_of(op: Operator) -> f.RuleFunction | None:
    return RULES.get(op) or rule_function_of(getattr(op, "_name", "").removesuffix(".default"))


def is_grouped(op: Any) -> bool:
    """True for a product of groups of rows, each with a matrix of its own."""
    return callable(op) and _function_of(op) is grouped_mm


def _fits(rule: Rule, call: Call) -> bool:
    """True if there is a term for each tensor, and an expression for each of its dimensions."""
    tensors = (f.present(call), call.outputs)
    if (len(rule.ins), len(rule.outs)) != tuple(map(len, tensors)):
        return False
    pairs = zip((*rule.ins, *rule.outs), (*tensors[0], *tensors[1]), strict=True)
    return all(len(term) - 1 <= t.dim() if STAR in term else len(term) == t.dim() for term, t in pairs)


def unknown(call: Call) -> Rule:
    """What is assumed of an operator without a rule: it needs all of everything."""
    return f.whole(call)
