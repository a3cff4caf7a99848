"""The table of operators: what autotp knows of each. A new operator is one line here.

The rule is a factor string or a function of the call (`families.py`). An operator that is not listed is
replicated, and the plan says so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from autotp import families as f
from autotp import parallel
from autotp.call import Call
from autotp.errors import Error
from autotp.rule import Rule, parse

Operator = Callable[..., Any]

_TABLE: list[tuple[str, f.RuleFunction]] = [
    # Pointwise: nothing but the element at the same place.
    (
        "abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp "
        "clamp_max clamp_min copysign cos cosh deg2rad digamma elu eq erf erfc erfinv exp exp2 expm1 float_power floor "
        "floor_divide fmax fmin fmod frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite "
        "isinf isnan ldexp le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and "
        "logical_not logical_or logical_xor logit lt maximum minimum mish nan_to_num ne nextafter pow reciprocal relu "
        "relu6 remainder round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink  sqrt "
        "square tan tanh threshold trunc xlogy __and__ __or__ __xor__ addcdiv addcmul",
        f.pointwise(),
    ),
    ("alias clone contiguous detach lift_fresh_copy neg positive", f.pointwise("all")),
    ("mul", f.pointwise("each")),
    ("add sub", f.additive),
    ("div true_divide", f.divide),
    ("to type_as _to_copy", f.cast),
    ("where", f.where),
    ("masked_fill.Scalar", f.masked_fill),
    ("dropout", f.dropout),
    # Contractions.
    ("linear", f.linear),
    ("matmul mm bmm mv dot", f.matmul),
    ("einsum", f.einsum),
    ("scaled_dot_product_attention", f.attention),
    ("outer", f.fixed("m, n -> m n", "each")),
    # Views and movement.
    ("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as", f.view),
    ("permute", f.permute),
    ("transpose t", f.transpose),
    ("numpy_T", f.reverse),
    ("expand expand_as", f.expand),
    ("slice narrow", f.slice_),
    ("select", f.select),
    ("split split_with_sizes chunk tensor_split", f.split),
    ("unbind", f.unbind),
    ("cat concat", f.cat),
    ("stack", f.stack),
    ("flip roll", f.along_dims),
    ("tril triu", f.along_last_two),
    # Reductions.
    ("sum", f.reduction(linear="all")),
    ("mean", f.reduction("!", linear="all")),
    ("amax", f.maximum),
    ("amin prod any all argmax argmin max.dim min.dim median.dim var std norm logsumexp", f.reduction("^")),
    ("softmax log_softmax", f.along_dim("!")),
    ("cumsum", f.along_dim(linear="all")),
    ("cumprod sort argsort", f.along_dim()),
    ("layer_norm rms_norm", f.norm),
    # Creation.
    ("zeros ones empty full new_zeros new_ones new_empty new_full scalar_tensor", f.filled),
    ("zeros_like ones_like empty_like full_like", f.pointwise()),
    ("arange linspace eye tril_indices triu_indices", f.enumerated),
    # Lookups and losses.
    ("embedding", f.fixed("v! h, * -> * h", ((0,),))),
    ("gather", f.gather),
    ("index_select", f.index_select),
    ("index", f.index),
    ("cross_entropy_loss nll_loss nll_loss_nd", f.class_loss),
]


def _rows() -> Iterator[tuple[OpOverload, f.RuleFunction]]:
    for names, function in _TABLE:
        for name in names.split():
            packet, _, overload = name.partition(".")
            for op in overloads(getattr(torch.ops.aten, packet), overload):
                yield op, function


def overloads(op: Operator, only: str = "") -> list[Any]:
    """The overloads of an operator packet (only the one called `only`, if given), or the operator itself."""
    if not isinstance(op, OpOverloadPacket):
        return [op]
    found = [getattr(op, name) for name in op.overloads() if name == (only or name)]
    return [one for one in found if not one._schema.is_mutable]


PARALLEL: dict[Operator, f.RuleFunction] = {
    parallel.embedding: f.fixed("v h, * -> * h", ((0,),)),
    parallel.gather: f.parallel_gather,
    parallel.peak: f.parallel_peak,
}
"""The rules of our own parallel forms, which lowered graphs call."""

RULES: dict[Operator, f.RuleFunction] = dict(_rows()) | PARALLEL

USER_RULES: set[Operator] = set()
"""Operators whose rule a user registered: proved on the spot, on the example that the graph gives."""


def rule(op: Operator, factors: str | f.RuleFunction, linear: f.Linear = ()) -> None:
    """Registers what is true of an operator of yours, so that autotp can cut it.

        autotp.rule(torch.ops.mylib.scale, "b h, h -> b h")

    Args:
        op: an operator (`torch.ops.lib.name`, all its overloads, or one of them).
        factors: the factor string, in the language of `autotp/rule.py`, or a function of the call that returns a Rule.
        linear: `"each"` operand by itself, `"all"` operands together, or groups of operand positions in which
            the operator is linear; only there may a partial sum enter before it is reduced.

    Raises:
        Error: the string does not parse, or `op` is no operator.
    """
    if not callable(op):
        raise Error(f"{op!r} is no operator", **{"try": "torch.ops.mylib.myop"}).within("rule")
    try:
        if isinstance(factors, str):
            parse(factors)
    except Error as error:
        raise error.within(f"rule({op})") from None
    for one in overloads(op):
        RULES[one] = f.fixed(factors, linear) if isinstance(factors, str) else factors
        USER_RULES.add(one)


def rule_of(call: Call) -> Rule | None:
    """The rule of a call, or None where autotp knows none."""
    function = RULES.get(call.target)
    return None if function is None else function(call)


def unknown(call: Call) -> Rule:
    """What is assumed of an operator without a rule: it needs all of everything."""
    tensors = [t for t in call.operands if t is not None]
    terms = [" ".join(f"x{i}_{j}^" for j in range(t.dim())) for i, t in enumerate(tensors)]
    outs = [" ".join(f"y{i}_{j}^" for j in range(t.dim())) for i, t in enumerate(call.outputs)]
    return Rule.of(f"{', '.join(terms)} -> {', '.join(outs)}")


SIZE_ARGUMENTS = {
    "aten.view": "size", "aten.reshape": "shape", "aten._unsafe_view": "size", "aten.expand": "size",
    "aten.unflatten": "sizes", "aten.zeros": "size", "aten.ones": "size", "aten.empty": "size",
    "aten.full": "size", "aten.new_zeros": "size", "aten.new_ones": "size", "aten.new_empty": "size",
    "aten.new_full": "size", "aten.split_with_sizes": "split_sizes",
}  # fmt: skip
"""The argument that holds an operator's sizes, which become local ones where the operator is cut."""

GETITEM = operator.getitem
