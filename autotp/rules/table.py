"""The table of operators: the rule and the traits of each. A new operator is one row here.

The rule is a factor string or a function of the call (`common.py` names the files); `row.py` explains the traits. An
operator that is not listed, or has no rule, is replicated, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from autotp.ops import channels, collectives, custom_vjp, dropout, lookup, placement_moves
from autotp.ops.attention import documents
from autotp.ops.attention.causal_rows import causal_rows
from autotp.ops.attention.products import attention
from autotp.ops.attention.zigzag import in_order, zigzag, zigzag_rows
from autotp.ops.experts import exchange
from autotp.ops.experts import rows as routing
from autotp.ops.grouped_mm import OPERATOR
from autotp.ops.losses import cross_entropy, ctc_loss
from autotp.ops.losses.argmax import argmax_key, linear_argmax_key
from autotp.ops.losses.linear_cross_entropy import linear_class_terms, linear_loss_sum
from autotp.ops.losses.linear_mixture import linear_mixture_sums
from autotp.rules import common as f
from autotp.rules import conjugates as c
from autotp.rules import indexing as i
from autotp.rules import products as p
from autotp.rules import views as v
from autotp.rules.row import Row
from autotp.rules.row import Trait as T

TORCH_ROWS: list[tuple[str, Row]] = [
    # Pointwise: each output element depends on the elements at the same place only.
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
        "addcdiv addcmul",
        Row(f.pointwise()),
    ),
    ("alias clone lift_fresh lift_fresh_copy", Row(f.pointwise("all"), T.SAME)),
    ("contiguous lift", Row(f.pointwise("all"), T.SAME | T.MAY_ALIAS)),
    ("detach", Row(f.pointwise("all"), T.SAME | T.NO_GRADIENT)),
    ("to type_as", Row(f.cast, T.SAME | T.CAST | T.MAY_ALIAS)),
    ("_to_copy", Row(f.cast, T.SAME | T.CAST)),
    ("conj_physical", Row(f.pointwise("all"), T.MAY_ALIAS)),
    ("complex conj imag neg negative positive real resolve_conj resolve_neg", Row(f.pointwise("all"))),
    ("mul.Tensor", Row(f.pointwise("each"), T.SCALE)),
    ("mul.Scalar multiply", Row(f.pointwise("each"))),
    ("add.Tensor sub.Tensor", Row(f.additive, T.SUM)),
    ("add.Scalar sub.Scalar subtract rsub", Row(f.additive)),
    ("div.Tensor", Row(f.divide, T.SCALE)),
    ("div.Scalar div.Tensor_mode div.Scalar_mode divide true_divide", Row(f.divide)),
    ("copy.default", Row(f.copy, T.ELEMENTWISE)),
    ("where.self where.ScalarSelf where.ScalarOther where.Scalar", Row(f.where)),
    ("masked_fill", Row(f.masked_fill)),
    ("dropout", Row(f.dropout, T.MAY_ALIAS)),
    (
        "alpha_dropout feature_dropout feature_alpha_dropout",
        Row(f.either("train", f.entire, f.pointwise("all")), T.MAY_ALIAS),
    ),
    ("glu", Row(f.gated)),
    ("prelu", Row(f.channelwise)),
    ("view_as_real", Row(f.fixed("* -> * k^", "all"))),
    ("view_as_complex", Row(f.fixed("* k^ -> *", "all"))),
    # Products.
    ("linear", Row(p.biased("* i, o i -> * o", "o"), T.PRODUCT | T.TAKES_BIAS)),
    ("bilinear", Row(f.fixed("* i^, * j^, o i^ j^, o -> * o"))),
    ("matmul bmm.default", Row(p.matmul, T.PRODUCT | T.BATCHED)),
    ("mm.default", Row(p.matmul, T.PRODUCT | T.TAKES_BIAS)),
    ("mm.dtype bmm.dtype mv dot vdot linalg_matmul", Row(p.matmul)),
    ("addmm.default", Row(p.added("m i, i n -> m n"), T.ADDED_PRODUCT)),
    ("addmm.dtype", Row(p.added("m i, i n -> m n"))),
    ("addbmm", Row(p.added("b m i, b i n -> m n"))),
    ("baddbmm.default", Row(p.added("b m i, b i n -> b m n"), T.ADDED_PRODUCT | T.BATCHED)),
    ("baddbmm.dtype", Row(p.added("b m i, b i n -> b m n"))),
    ("addr", Row(p.added("m, n -> m n"))),
    ("einsum", Row(p.einsum)),
    ("inner", Row(p.inner)),
    ("outer ger", Row(f.fixed("m, n -> m n", "each"))),
    ("linalg_vecdot", Row(f.paired("", "each"))),
    ("linalg_solve_triangular", Row(p.solved)),
    ("cdist", Row(f.fixed("* p k^, * r k^ -> * p r"))),
    ("scaled_dot_product_attention", Row(p.attention, T.ATTENTION, masked=p.has_mask, zigzag=p.zigzag_attention)),
    ("_grouped_mm", Row(p.grouped_mm)),
    # Views and movement.
    ("view.default", Row(v.view, T.RESHAPE, sizes="size")),
    ("_unsafe_view", Row(v.view, T.RESHAPE | T.MAY_ALIAS, sizes="size")),
    ("reshape", Row(v.view, T.RESHAPE | T.MOVABLE | T.MAY_ALIAS, sizes="shape")),
    ("unflatten", Row(v.view, T.RESHAPE, sizes="sizes")),
    ("flatten unsqueeze ravel", Row(v.view, T.RESHAPE)),
    ("atleast_1d.default atleast_2d.default atleast_3d.default", Row(v.view, T.RESHAPE | T.MAY_ALIAS)),
    ("view_as reshape_as", Row(v.view_as)),
    ("squeeze", Row(v.squeeze, T.RESHAPE)),
    ("expand broadcast_to", Row(v.expand, T.REPEAT, sizes="size")),
    ("expand_as", Row(v.expand, T.REPEAT)),
    ("broadcast_tensors", Row(v.broadcast_tensors)),
    ("permute", Row(v.reorder, T.PERMUTE | T.MOVABLE)),
    ("transpose", Row(v.reorder, T.PERMUTE | T.MOVABLE | T.SWAP)),
    ("t mT swapaxes swapdims", Row(v.reorder, T.PERMUTE | T.SWAP)),
    ("movedim moveaxis numpy_T", Row(v.reorder, T.PERMUTE)),
    ("adjoint mH matrix_H", Row(v.reorder)),  # These conjugate, too.
    ("slice.Tensor narrow.default", Row(v.slice_, T.SLICE)),
    ("select.int", Row(v.select)),
    ("split chunk tensor_split.sections tensor_split.indices", Row(v.split, T.SPLIT)),
    ("split_with_sizes", Row(v.split, T.SPLIT, sizes="split_sizes")),
    ("unsafe_split unsafe_split_with_sizes", Row(traits=T.MAY_ALIAS)),
    ("unbind", Row(v.unbind)),
    ("diagonal", Row(v.diagonal)),
    ("unfold", Row(v.unfold)),
    ("cat concat concatenate", Row(v.cat)),
    ("stack", Row(v.stack)),
    ("vstack row_stack", Row(v.stacked(0))),
    ("hstack column_stack", Row(v.stacked(1))),
    ("dstack", Row(v.stacked(2))),
    ("meshgrid", Row(v.meshgrid)),
    ("repeat tile", Row(v.repeat, T.REPEAT)),
    ("repeat_interleave.self_int", Row(v.repeat_interleave, T.REPEAT)),
    ("repeat_interleave.Tensor repeat_interleave.self_Tensor", Row(v.repeat_interleave)),
    ("pad constant_pad_nd", Row(v.pad)),
    ("slice_scatter", Row(v.updated_slice)),
    ("select_scatter", Row(v.updated_place)),
    ("flip roll", Row(f.along_dims)),
    ("fliplr", Row(f.along_fixed(1, linear="all"))),
    ("flipud", Row(f.along_fixed(0, linear="all"))),
    ("tril triu", Row(f.along_fixed(-2, -1, linear="all"))),
    # Reductions, and operators along a dimension.
    ("sum", Row(f.reduction(linear="all"))),
    ("nansum count_nonzero", Row(f.reduction())),
    ("mean", Row(f.reduction("!", linear="all"))),
    (
        "all amax amin aminmax any argmin kthvalue max.default max.dim median "
        "min.default min.dim mode nanmean nanmedian prod special_logsumexp std std_mean var var_mean",
        Row(f.reduction("^")),
    ),
    ("argmax", Row(f.argmax)),
    ("logsumexp.default", Row(f.reduction("!"), T.CLASSES)),
    ("linalg_vector_norm norm", Row(f.reduction("^"), T.NORM)),
    ("cosine_similarity pairwise_distance", Row(f.paired("^"))),
    ("softmax.int", Row(f.along_dim("!"), T.SOFTMAX)),
    ("log_softmax.int", Row(f.along_dim("!"), T.CLASSES)),
    ("_softmax _safe_softmax", Row(f.along_dim(), T.SOFTMAX)),
    ("_log_softmax special_softmax special_log_softmax", Row(f.along_dim())),
    ("cumsum", Row(f.along_dim(linear="all"))),
    ("cummax cummin cumprod logcumsumexp", Row(f.along_dim())),
    ("sort argsort", Row(f.along_dim(), T.SORT)),
    ("msort", Row(f.along_fixed(0))),
    ("topk diff", Row(f.resized)),
    ("layer_norm rms_norm", Row(f.norm, T.NORM)),
    # Creation.
    ("zeros new_zeros", Row(f.new_tensor, T.FILL | T.ZEROS, sizes="size")),
    ("ones full new_ones new_full", Row(f.new_tensor, T.FILL, sizes="size")),
    ("empty new_empty", Row(f.new_tensor, T.FILL | T.UNINITIALIZED, sizes="size")),
    ("scalar_tensor", Row(f.new_tensor)),
    ("zeros_like", Row(f.pointwise(), T.ELEMENTWISE | T.ZEROS)),
    ("ones_like full_like fill", Row(f.pointwise(), T.ELEMENTWISE)),
    ("zero native_dropout native_dropout_backward", Row(traits=T.ELEMENTWISE)),
    ("empty_like", Row(f.pointwise(), T.UNINITIALIZED)),
    ("empty_strided new_empty_strided empty_permuted", Row(traits=T.UNINITIALIZED)),
    # Elements depend on their place in the whole, which a rank that makes a part would have to know.
    ("arange linspace logspace eye tril_indices triu_indices histc nonzero_static", Row(f.entire)),
    ("rand randn randint rand_like randn_like randint_like bernoulli poisson normal", Row(f.entire, T.RANDOM_EACH)),
    ("cauchy exponential geometric log_normal normal_functional random uniform", Row(f.entire, T.RANDOM_EACH)),
    ("multinomial randperm", Row(f.entire)),
    # Lookups, updates and losses.
    ("embedding", Row(i.embedding, T.LOOKUP)),
    ("embedding_bag", Row(traits=T.LOOKUP)),
    ("one_hot", Row(i.one_hot)),
    ("gather", Row(i.gather)),
    ("scatter scatter_reduce", Row(i.scatter)),
    ("scatter_add", Row(i.scatter, T.ADDS_AT)),
    ("index_select", Row(i.index_select, T.ROWS)),
    ("index_copy", Row(i.index_update, T.UPDATE)),
    ("index_add", Row(i.index_update, T.ADDS_AT)),
    ("index_fill index_reduce", Row(i.index_update)),
    ("index", Row(i.index, T.ROWS | T.INDICES)),
    ("index_put", Row(i.index_put, T.INDICES)),
    ("searchsorted.Tensor bucketize.Tensor", Row(i.searched)),
    ("isin.Tensor_Tensor", Row(i.membership)),
    ("isin.Tensor_Scalar", Row(f.pointwise())),
    ("cross_entropy_loss nll_loss nll_loss_nd", Row(f.class_loss, T.CLASSES | T.CLASS_LOSS)),
    (
        "binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss "
        "margin_ranking_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss",
        Row(f.elementwise_loss),
    ),
    # Pooling and interpolation, which `canonicalize` replaces by `channels.by_channel`.
    (
        "avg_pool1d max_pool1d max_pool1d_with_indices adaptive_avg_pool1d adaptive_max_pool1d upsample_linear1d.vec "
        "upsample_nearest1d.vec",
        Row(places=1),
    ),
    (
        "avg_pool2d max_pool2d max_pool2d_with_indices adaptive_avg_pool2d adaptive_max_pool2d upsample_bilinear2d.vec "
        "upsample_bicubic2d.vec upsample_nearest2d.vec",
        Row(places=2),
    ),
    (
        "avg_pool3d max_pool3d max_pool3d_with_indices adaptive_avg_pool3d upsample_trilinear3d.vec "
        "upsample_nearest3d.vec",
        Row(places=3),
    ),
    # Assertions.
    (
        "_assert_tensor_metadata _assert_scalar _assert_async sym_constrain_range sym_constrain_range_for_size",
        Row(traits=T.ASSERTION),
    ),
]


def _rows() -> Iterator[tuple[OpOverload, Row]]:
    """Yields every overload in the table that graphs can contain, with its row.

    Overloads with named dimensions are left out; of operators with a rule also overloads that return no tensor.
    """
    for names, row in TORCH_ROWS:
        for name in names.split():
            packet, _, overload = name.partition(".")
            for op in overloads(getattr(torch.ops.aten, packet), overload):
                gives = str(op._schema).rpartition("->")[2]
                if (row.rule is None or "Tensor" in gives) and "Dimname" not in str(op._schema):
                    yield op, row


def overloads(op: Callable[..., Any], only: str = "") -> list[Any]:
    """Returns the overloads of an operator packet (only the overload `only`, if given), or the operator itself."""
    if not isinstance(op, OpOverloadPacket):
        return [op]
    candidates = [getattr(op, name) for name in op.overloads() if name == (only or name)]
    return [overload for overload in candidates if not overload._schema.is_mutable]


OWN_ROWS: dict[Callable[..., Any], Row] = {
    lookup.embedding: Row(f.fixed("v h, * -> * h", ((0,),)), T.UNSAVED | T.LOOKUP),
    lookup.gather: Row(f.parallel_gather),
    # No factor is passed through: this is what separates the axes of the result.
    placement_moves.apart: Row(f.entire),
    placement_moves.by_heads: Row(c.heads_in_parts),
    placement_moves.nearby: Row(c.with_positions_before),
    placement_moves.take: Row(c.another_length),
    placement_moves.place: Row(c.another_length),
    placement_moves.first: Row(c.whole_along),
    documents.ends_of_numbers: Row(c.ends_of_whole),
    collectives.copy: Row(c.one_for_one),
    collectives.reduce: Row(c.one_for_one),
    collectives.scatter: Row(c.another_length),
    collectives.gather: Row(c.another_length, T.JOIN),
    collectives.all_gather: Row(c.another_length, T.JOIN),
    collectives.reduce_scatter: Row(c.another_length),
    collectives.all_to_all: Row(c.two_other_lengths),
    collectives.halo: Row(c.with_positions_before),
    cross_entropy.peak: Row(f.parallel_peak, T.NO_GRADIENT),
    cross_entropy.class_terms: Row(f.parallel_class_terms, T.UNSAVED),
    linear_class_terms: Row(f.parallel_linear_class_terms, T.UNSAVED | T.HEAD),
    argmax_key: Row(f.parallel_argmax, T.NO_GRADIENT),
    linear_argmax_key: Row(f.parallel_linear_argmax, T.NO_GRADIENT | T.HEAD),
    linear_mixture_sums: Row(f.parallel_linear_mixture, T.UNSAVED | T.HEAD),
    linear_loss_sum: Row(f.whole_linear_loss_sum, T.UNSAVED | T.HEAD),
    dropout.exact_dropout: Row(f.dropout, T.RANDOM),
    dropout.fast_dropout: Row(f.dropout, T.RANDOM),
    dropout.exact_attention: Row(p.attention, T.RANDOM | T.ATTENTION),
    dropout.fast_attention: Row(p.attention, T.RANDOM | T.ATTENTION),
    causal_rows: Row(p.attention, T.ATTENTION),
    zigzag_rows: Row(p.attention, T.RANDOM | T.ATTENTION),
    dropout.fast_causal_rows: Row(p.attention, T.RANDOM | T.ATTENTION),
    dropout.fast_zigzag_rows: Row(p.attention, T.RANDOM | T.ATTENTION),
    zigzag: Row(c.whole_along),
    in_order: Row(c.whole_along, T.JOIN),
    attention: Row(traits=T.ATTENTION),
    channels.convolution: Row(p.convolution_rule),
    channels.conv_transpose: Row(p.conv_transpose_rule),
    channels.by_channel: Row(f.by_channel),
    channels.batch_norm: Row(f.batch_norm, T.NORM),
    channels.batch_norm_moving: Row(f.batch_norm, T.NORM),
    channels.group_norm: Row(f.group_norm, T.NORM),
    OPERATOR: Row(p.grouped_mm),
    ctc_loss.OPERATOR: Row(f.entire),
    ctc_loss.BACKWARD: Row(f.entire),
    routing.dispatch: Row(f.dispatched),
    routing.counts: Row(f.fixed("s^ -> e!")),
    routing.spread: Row(f.fixed("e *, e, (e n) -> (e n) *", ((0,),)), T.ROWS),
    routing.grouped_mm: Row(f.fixed("(e n) i, e i o, e -> (e n) o", ((0,), (1,)))),
    routing.chosen_mm: Row(f.fixed("r i, e^ i o, r -> r o", ((0,), (1,)))),
    custom_vjp.output: Row(f.exact("* -> *, *")),
    custom_vjp.kept: Row(f.pointwise(), T.NO_GRADIENT),
    custom_vjp.sent: Row(f.exact("*, * -> *")),
    custom_vjp.result: Row(f.pointwise()),
    routing.fill_slots: Row(f.fixed("s^ *, r -> r *", ((0,),)), T.ROWS),
    routing.combine: Row(f.fixed("r *, r, s^ -> s^ *", ((0,),))),
    # Experts are cut over `ep` already, so over another axis only what is inside of an expert is cut.
    exchange.own: Row(f.fixed("e^ * -> o^ *", ((0,),)), T.MAY_ALIAS),
    exchange.select_own: Row(f.fixed("e^ * -> o^ *", ((0,),)), T.MAY_ALIAS),
    exchange.exchange_counts: Row(f.fixed("s^ -> p^ r^ o^")),
    exchange.arrived_counts: Row(f.fixed("p^ r^ o^ -> o^")),
    exchange.arrival: Row(f.arriving),
    exchange.to_experts: Row(f.fixed("s^ *, p^ r^ o^, t^ -> t^ *", ((0,),))),
    exchange.to_rows: Row(f.fixed("t^ *, p^ r^ o^, t^ -> s^ *", ((0,),))),
}
"""Rows of autotp's own operators: parallel forms, conjugates, operators on channels, on rows of experts, marks."""

ROWS: dict[Callable[..., Any], Row] = dict(_rows()) | OWN_ROWS
"""Operator (an overload of torch, or a function of autotp) -> its row."""
