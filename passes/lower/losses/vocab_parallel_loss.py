"""vocab_parallel_loss: writes a class loss over cut classes by operators that can be cut; used by `decompose`.

    Before: cross_entropy(x, t)          After: e, z = class_terms(x, peak(x), t); mean(log(e) - z)

NOTE [Vocab-parallel loss]
With the classes cut, a maximum, a sum and a target logit for each token are reduced over ranks; the logits are never
exchanged (Megatron-LM, Shoeybi et al. 2019, section 3). The sum and the target logit are reduced in one collective.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autotp.ops.losses.cross_entropy import class_terms, peak
from autotp.passes.builder import Builder

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def cross_entropy(builder: Builder, args: dict[str, Any]) -> fx.Node:
    """Writes the cross-entropy of cut logits. args: those of `aten.cross_entropy_loss`, by name."""
    call, x, dim = builder.call, args["self"], _class_dim(args)
    top = call(peak, x, dim)
    # With a maximum in float32, differences and sums of 16-bit logits are in float32, too.
    top = builder.cast(top, torch.promote_types(top.meta["val"].dtype, torch.float32))
    if args["target"].meta["val"].is_floating_point():
        return builder.cast(_of_probabilities(builder, args, call(aten.sub.Tensor, x, top), dim), x.meta["val"].dtype)
    ignored, classes = legal_classes(builder, args)
    terms = call(class_terms, x, top, classes, dim, 0, builder.size(x, dim))
    lse = call(aten.log.default, call(aten.select.int, terms, 0, 0))
    loss = call(aten.sub.Tensor, lse, call(aten.select.int, terms, 0, 1))
    smooth = None
    if args["label_smoothing"]:
        every = _every(builder, call(aten.sub.Tensor, x, top), lse, args["weight"], dim)
        smooth = call(aten.mul.Tensor, every, args["label_smoothing"])
        smooth = call(aten.div.Tensor, smooth, builder.size(x, dim))
    return builder.cast(reduced_loss(builder, args, loss, smooth, ignored, classes), x.meta["val"].dtype)


def _of_probabilities(builder: Builder, args: dict[str, Any], z: fx.Node, dim: int) -> fx.Node:
    """Returns the cross-entropy of logits with probabilities as the target. z: logits minus the greatest of a row"""
    call, dtype = builder.call, z.meta["val"].dtype
    lse = call(aten.log.default, call(aten.sum.dim_IntList, call(aten.exp.default, z), [dim]))
    shares = shares_of_target(builder, args, builder.cast(args["target"], dtype), dim)
    every = call(aten.mul.Tensor, lse, call(aten.sum.dim_IntList, shares, [dim]))
    loss = call(aten.sub.Tensor, every, call(aten.sum.dim_IntList, call(aten.mul.Tensor, shares, z), [dim]))
    total = loss if args["reduction"] == NONE else call(aten.sum.default, loss)
    return mean_of_sum(builder, total, args, dtype) if args["reduction"] == MEAN else total


def shares_of_target(builder: Builder, args: dict[str, Any], target: fx.Node, dim: int) -> fx.Node:
    """Returns how much `-log p` of each class counts, where the target are probabilities. dim: that of the classes"""
    call, smoothing, shape = builder.call, args["label_smoothing"], target.meta["val"].shape
    if smoothing:
        # (1 - e) * loss of the target + e / classes * loss of every class, as torch.nn.CrossEntropyLoss documents it.
        target = call(aten.mul.Tensor, target, 1 - smoothing)
        every = call(aten.div.Tensor, call(aten.full_like.default, target, smoothing), builder.size(target, dim))
        target = call(aten.add.Tensor, target, every)
    if args["weight"] is None:
        return target
    after = len(shape) - 1 - dim % len(shape)
    weight = call(aten.view.default, args["weight"], [-1] + [1] * after) if after else args["weight"]
    return call(aten.mul.Tensor, target, weight)


def mean_of_sum(builder: Builder, total: fx.Node, args: dict[str, Any], dtype: torch.dtype) -> fx.Node:
    """Returns a class loss's mean, of its sum: by the rows, or by the weights of targets that are not ignored."""
    target = args["target"]
    if not target.meta["val"].is_floating_point():
        return builder.call(aten.div.Tensor, total, count(builder, args, dtype))
    dims = [d for d in range(target.meta["val"].dim()) if d != _class_dim(args)]
    for d in dims:
        total = builder.call(aten.div.Tensor, total, builder.size(target, d))
    return total


def nll(builder: Builder, args: dict[str, Any]) -> fx.Node:
    """Writes the negative log-likelihood of cut log-probabilities. args: those of `aten.nll_loss`, by name."""
    call, dim = builder.call, _class_dim(args)
    ignored, classes = legal_classes(builder, args)
    picked = call(aten.gather.default, args["self"], dim, call(aten.unsqueeze.default, classes, dim))
    loss = call(aten.neg.default, call(aten.squeeze.dim, picked, dim))
    return reduced_loss(builder, args, loss, None, ignored, classes)


def _class_dim(args: dict[str, Any]) -> int:
    return 1 if args["self"].meta["val"].dim() > 1 else 0


def legal_classes(builder: Builder, args: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    """Returns the mask of ignored targets, and the targets with class 0 in their place. args: those of a class loss"""
    ignored = builder.call(aten.eq.Scalar, args["target"], args["ignore_index"])
    # Class 0 is a legal index, and the loss of such a row is masked later.
    return ignored, builder.call(aten.masked_fill.Scalar, args["target"], ignored, 0)


def _every(builder: Builder, z: fx.Node, lse: fx.Node, weight: fx.Node | None, dim: int) -> fx.Node:
    """Returns `-sum over classes of weight * log p` for each row, where `z - lse` are the log-probabilities."""
    call, total = builder.call, builder.size(z, dim)
    if weight is not None:
        shape = [-1] + [1] * (z.meta["val"].dim() - 1 - dim)
        z = call(aten.mul.Tensor, z, call(aten.view.default, weight, shape))
        total = call(aten.sum.default, weight)
    # sum of w * (lse - z) over classes = lse * sum of w - sum of w * z
    return call(aten.sub.Tensor, call(aten.mul.Tensor, lse, total), call(aten.sum.dim_IntList, z, [dim]))


def reduced_loss(
    builder: Builder, args: dict[str, Any], loss: fx.Node, smooth: fx.Node | None, ignored: fx.Node, classes: fx.Node
) -> fx.Node:
    """Returns the class loss of torch's documentation: ignored targets, class weights, smoothing, three reductions.

    Args:
        loss: `-log p` of each row's class, before weights and ignored targets.
        smooth: the label-smoothing term of each row.
    """
    call, dtype = builder.call, loss.meta["val"].dtype
    row_weights = own_weight(builder, args["weight"], classes)
    counted = counted_rows(builder, ignored, row_weights, dtype)
    if row_weights is not None:
        loss = call(aten.mul.Tensor, loss, row_weights)
    if smooth is not None:
        # (1 - e) * loss of the class + e / classes * loss of every class, as torch.nn.CrossEntropyLoss documents it.
        loss = call(aten.add.Tensor, call(aten.mul.Tensor, loss, 1 - args["label_smoothing"]), smooth)
    loss = call(aten.masked_fill.Scalar, loss, ignored, 0)
    if args["reduction"] in (MEAN, SUM):
        loss = call(aten.sum.default, loss)
    return call(aten.div.Tensor, loss, call(aten.sum.default, counted)) if args["reduction"] == MEAN else loss


def own_weight(builder: Builder, weight: fx.Node | None, classes: fx.Node) -> fx.Node | None:
    """Returns the weight of each row's class; None without weights."""
    if weight is None:
        return None
    # An embedding and no index, because it has a parallel form where the weights are cut along the classes.
    column = builder.call(aten.unsqueeze.default, weight, 1)
    return builder.call(aten.squeeze.dim, builder.call(aten.embedding.default, column, classes), -1)


def counted_rows(builder: Builder, ignored: fx.Node, row_weights: fx.Node | None, dtype: torch.dtype) -> fx.Node:
    """Returns for each row how much it counts in a mean: its weight, or 1; 0 if it is ignored."""
    counted = builder.cast(builder.call(aten.logical_not.default, ignored), dtype)
    return counted if row_weights is None else builder.call(aten.mul.Tensor, counted, row_weights)


def count(builder: Builder, args: dict[str, Any], dtype: torch.dtype) -> fx.Node:
    """Writes the divisor of a class loss's mean: the weights of the targets that are not ignored, added up."""
    ignored, classes = legal_classes(builder, args)
    row_weights = own_weight(builder, args["weight"], classes)
    return builder.call(aten.sum.default, counted_rows(builder, ignored, row_weights, dtype))
