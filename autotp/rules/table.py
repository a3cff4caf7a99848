"""The table of operators, one row for each: its rule. A new operator is one line here.

The rule is a factor string or a function of the call (`common.py` names the files). An operator that is not
listed is replicated, and the plan says so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from autotp.errors import Error
from autotp.model_library import rule_function_of
from autotp.ops import channels, custom_vjp
from autotp.ops import experts as routing
from autotp.ops import parallel_forms as parallel
from autotp.ops.grouped_mm import OPERATOR
from autotp.rules import common as f
from autotp.rules import indexing as i
from autotp.rules import products as p
from autotp.rules import views as m
from autotp.rules.call import Call
from autotp.rules.language import STAR, Rule, parse

Operator = Callable[..., Any]

_TABLE: list[tuple[str, f.RuleFunction]] = [
    # Pointwise: nothing but the element at the same place.
    (
        "abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan "
        "atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor "
        "ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad digamma elu eq erf erfc erfinv "
        "exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu greater "
        "greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose "
        "isfinite isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma "
        "log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor "
        "logit lt max.other maximum min.other minimum mish mvlgamma nan_to_num ne nextafter not_equal polar "
        "polygamma pow rad2deg reciprocal relu relu6 remainder round rsqrt selu sgn sigmoid sign signbit silu "
        "sin sinc sinh softplus softshrink special_entr special_erf special_erfc special_erfcx special_erfinv "
        "special_exp2 special_expit special_expm1 special_gammaln special_i0 special_i0e special_i1 "
        "special_i1e special_log1p special_log_ndtr special_logit special_multigammaln special_ndtr "
        "special_ndtri special_polygamma special_psi special_round special_sinc special_xlog1py special_xlogy "
        "special_zeta sqrt square tan tanh threshold trunc xlogy __and__ __lshift__ __or__ __rshift__ __xor__ "
        "addcdiv addcmul fill",
        f.pointwise(),
    ),
    (
        "alias clone complex conj conj_physical contiguous detach imag lift lift_fresh lift_fresh_copy neg "
        "negative positive real resolve_conj resolve_neg",
        f.pointwise("all"),
    ),
    ("mul multiply", f.pointwise("each")),
    ("add sub subtract rsub", f.additive),
    ("div divide true_divide", f.divide),
    ("to type_as _to_copy", f.cast),
    ("copy.default", f.copy),
    ("where.self where.ScalarSelf where.ScalarOther where.Scalar", f.where),
    ("masked_fill", f.masked_fill),
    ("dropout", f.dropout),
    ("alpha_dropout feature_dropout feature_alpha_dropout", f.either("train", f.whole, f.pointwise("all"))),
    ("glu", f.gated),
    ("prelu", f.channelwise),
    ("view_as_real", f.fixed("* -> * k^", "all")),
    ("view_as_complex", f.fixed("* k^ -> *", "all")),
    # Products.
    ("linear", p.biased("* i, o i -> * o", "o")),
    ("bilinear", f.fixed("* i^, * j^, o i^ j^, o -> * o")),
    ("matmul mm bmm mv dot vdot linalg_matmul", p.matmul),
    ("addmm", p.added("m i, i n -> m n")),
    ("addbmm", p.added("b m i, b i n -> m n")),
    ("baddbmm", p.added("b m i, b i n -> b m n")),
    ("addr", p.added("m, n -> m n")),
    ("einsum", p.einsum),
    ("inner", p.inner),
    ("outer ger", f.fixed("m, n -> m n", "each")),
    ("linalg_vecdot", f.paired("", "each")),
    ("cdist", f.fixed("* p k^, * r k^ -> * p r")),
    ("scaled_dot_product_attention", p.attention),
    ("_grouped_mm", p.grouped_mm),
    # Views and movement.
    ("view.default reshape _unsafe_view flatten unflatten unsqueeze ravel", m.view),
    ("atleast_1d.default atleast_2d.default atleast_3d.default", m.view),
    ("view_as reshape_as", m.view_as),
    ("squeeze", m.squeeze),
    ("expand expand_as broadcast_to", m.expand),
    ("broadcast_tensors", m.broadcast_tensors),
    ("permute transpose t adjoint mH mT matrix_H numpy_T movedim moveaxis swapaxes swapdims", m.reorder),
    ("slice.Tensor narrow.default", m.slice_),
    ("select.int", m.select),
    ("split split_with_sizes chunk tensor_split.sections tensor_split.indices", m.split),
    ("unbind", m.unbind),
    ("diagonal", m.diagonal),
    ("unfold", m.unfold),
    ("cat concat concatenate", m.cat),
    ("stack", m.stack),
    ("vstack row_stack", m.stacked(0)),
    ("hstack column_stack", m.stacked(1)),
    ("dstack", m.stacked(2)),
    ("meshgrid", m.meshgrid),
    ("repeat tile", m.repeat),
    ("repeat_interleave", m.repeat_interleave),
    ("pad constant_pad_nd", m.pad),
    ("slice_scatter", m.updated_slice),
    ("select_scatter", m.updated_place),
    ("flip roll", f.along_dims),
    ("fliplr", f.along_fixed(1, linear="all")),
    ("flipud", f.along_fixed(0, linear="all")),
    ("tril triu", f.along_fixed(-2, -1, linear="all")),
    # Reductions, and what works along a dimension.
    ("sum", f.reduction(linear="all")),
    ("nansum count_nonzero", f.reduction()),
    ("mean", f.reduction("!", linear="all")),
    (
        "all amax amin aminmax any argmax argmin kthvalue linalg_vector_norm logsumexp max.default max.dim median "
        "min.default min.dim mode nanmean nanmedian norm prod special_logsumexp std std_mean var var_mean",
        f.reduction("^"),
    ),
    ("cosine_similarity pairwise_distance", f.paired("^")),
    ("softmax.int log_softmax.int", f.along_dim("!")),
    ("_softmax _log_softmax _safe_softmax special_softmax special_log_softmax", f.along_dim()),
    ("cumsum", f.along_dim(linear="all")),
    ("cummax cummin cumprod logcumsumexp sort argsort", f.along_dim()),
    ("msort", f.along_fixed(0)),
    ("topk diff", f.resized),
    ("layer_norm rms_norm", f.norm),
    # Creation.
    ("zeros ones empty full new_zeros new_ones new_empty new_full scalar_tensor", f.filled),
    ("zeros_like ones_like empty_like full_like", f.pointwise()),
    ("arange linspace logspace eye tril_indices triu_indices histc", f.whole),
    (
        "bernoulli cauchy exponential geometric log_normal multinomial normal normal_functional poisson rand rand_like "
        "randint randint_like randn randn_like random randperm uniform",
        f.whole,
    ),
    # Lookups, updates and losses.
    ("embedding", i.embedding),
    ("one_hot", i.one_hot),
    ("gather", i.gather),
    ("scatter scatter_add scatter_reduce", i.scatter),
    ("index_select", i.index_select),
    ("index_add index_copy index_fill index_reduce", i.index_update),
    ("index", i.index),
    ("index_put", i.index_put),
    ("searchsorted.Tensor bucketize.Tensor", i.searched),
    ("isin.Tensor_Tensor", i.membership),
    ("isin.Tensor_Scalar", f.pointwise()),
    ("cross_entropy_loss nll_loss nll_loss_nd", f.class_loss),
    (
        "binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss "
        "margin_ranking_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss",
        f.elementwise_loss,
    ),
]


def _rows() -> Iterator[tuple[OpOverload, f.RuleFunction]]:
    """Every overload of the table that graphs can hold: those on tensors, without names for dimensions."""
    for names, function in _TABLE:
        for name in names.split():
            packet, _, overload = name.partition(".")
            for op in overloads(getattr(torch.ops.aten, packet), overload):
                if "Tensor" in str(op._schema).rpartition("->")[2] and "Dimname" not in str(op._schema):
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
    parallel.apart: f.whole,
    parallel.peak: f.parallel_peak,
    parallel.class_terms: f.parallel_class_terms,
    channels.convolution: p.convolution,
    channels.conv_transpose: p.conv_transpose,
    channels.by_channel: f.by_channel,
    channels.batch_norm: f.batch_norm,
    channels.batch_norm_moving: f.batch_norm,
    channels.group_norm: f.group_norm,
    OPERATOR: p.grouped_mm,
    routing.dispatch: f.dispatched,
    routing.counts: f.fixed("s^ -> e!"),
    routing.spread: f.fixed("e *, e, (e n) -> (e n) *", ((0,),)),
    routing.grouped_mm: f.fixed("(e n) i, e i o, e -> (e n) o", ((0,), (1,))),
    custom_vjp.output: f.exact("* -> *, *"),
    custom_vjp.kept: f.pointwise(),
    custom_vjp.sent: f.exact("*, * -> *"),
    custom_vjp.result: f.pointwise(),
    routing.combine: f.fixed("r *, r, s^ -> s^ *", ((0,),)),
}
"""The rules of our own operators: parallel forms, which lowered graphs call, and those on rows that chose experts."""

RULES: dict[Operator, f.RuleFunction] = dict(_rows()) | PARALLEL

USER_RULES: set[Operator] = set()
"""Operators whose rule a user registered: proved on the spot, on the example that the graph gives."""


def rule(op: Operator, factors: str | f.RuleFunction, linear: f.Linear = ()) -> None:
    """Registers the rule of an operator of yours, so that autotp can cut the operator.

    The rule has one term for each tensor operand and one for each output; equal names are equal dimensions.

    Args:
        op: an operator: `torch.ops.lib.name` with all its overloads, or one overload.
        factors: the rule, such as "* i, o i -> * o": `*` means all dimensions before, `name^` a dimension that the
            operator needs whole; a name that is missing from the output is summed. Or a function that takes the call
            and returns a Rule.
        linear: where the operator is linear, so that a partial sum may enter before it is reduced: "each" operand by
            itself, "all" operands together, or groups of operand positions.

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
    return callable(op) and _function_of(op) is p.grouped_mm


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


SIZE_ARGUMENTS = {
    "aten.view": "size", "aten.reshape": "shape", "aten._unsafe_view": "size", "aten.expand": "size",
    "aten.broadcast_to": "size",
    "aten.unflatten": "sizes", "aten.zeros": "size", "aten.ones": "size", "aten.empty": "size",
    "aten.full": "size", "aten.new_zeros": "size", "aten.new_ones": "size", "aten.new_empty": "size",
    "aten.new_full": "size", "aten.split_with_sizes": "split_sizes",
}  # fmt: skip
"""The argument that holds an operator's sizes, which become local ones where the operator is cut."""

GETITEM = operator.getitem
