"""decompose: replaces an operator that mixes the cut factor, such as softmax, by operators that can be cut.

    Before: log_softmax(x, v)            After: z = x - peak(x); z - log(sum(exp(z)))
    Before: cross_entropy(x, t)          After: e, z = class_terms(x, peak(x), t); mean(log(e) - z)
    Before: mean(x, v)                   After: sum(x, v) / length

NOTE [Vocab-parallel loss]
With the classes cut, a maximum, a sum and a target logit for each token are reduced over ranks; the logits are never
exchanged (Megatron-LM, Shoeybi et al. 2019, section 3). The sum and the target logit are reduced in one collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autotp.ops.cross_entropy import class_terms, peak
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import Axes, visit
from autotp.rules.call import arguments_of

aten = torch.ops.aten
Expansion = Callable[[Builder, dict[str, Any]], fx.Node]
MEAN, SUM = 1, 2


def decompose(graph: fx.Graph, axes: Axes, decision: Decision) -> tuple[fx.Graph, Axes, Decision]:
    """Returns the graph with mixing operators decomposed where they are cut, and its axes and cuts."""
    builder, new_axes, new = Builder(fake_mode_of(graph)), Axes(), Decision(chosen=decision.chosen)
    for node in graph.nodes:
        builder.origin = node
        leaf = decision.cuts.get(node)
        expansion = EXPANSIONS.get(node.target) if leaf is not None and _mixes(node, axes, leaf) else None
        if leaf is None or expansion is None:
            carry(builder.copy(node), node, axes, new_axes, decision, new)
            continue
        last = len(builder.graph.nodes)
        builder.env[node] = expansion(builder, builder.map(arguments_of(node)))
        for made in list(builder.graph.nodes)[last:]:
            visit(made, new_axes)
            bound = new_axes.bound.get(made)
            if bound is not None and bound.cuttable(leaf) is not None:
                new.cuts[made] = leaf
    return builder.graph, new_axes, new


def _mixes(node: fx.Node, axes: Axes, leaf: Any) -> bool:
    factor = axes.bound[node].cuttable(leaf)
    return factor is not None and factor.mark == "!"


def carry(copy: fx.Node, node: fx.Node, old: Axes, axes: Axes, before: Decision, after: Decision) -> None:
    """Copies axes, rule and cuts of `node` to its copy in another graph."""
    if node in old.dims:
        axes.dims[copy] = old.dims[node]
    if node in old.bound:
        axes.bound[copy] = old.bound[node].renamed(copy)
    if node in before.cuts:
        after.cuts[copy] = before.cuts[node]
    if node in before.held:
        after.held[copy] = before.held[node]


def _centred(builder: Builder, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node]:
    """Returns `x` minus its maximum along `dim`, in at least float32, and the log of the sum of its exponentials."""
    if x.meta["val"].dtype in (torch.float16, torch.bfloat16):
        x = builder.call(aten.to.dtype, x, torch.float32)
    z = builder.call(aten.sub.Tensor, x, builder.call(peak, x, dim))
    total = builder.call(aten.sum.dim_IntList, builder.call(aten.exp.default, z), [dim], True)
    return z, builder.call(aten.log.default, total)


def _cast(builder: Builder, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return value if value.meta["val"].dtype == dtype else builder.call(aten.to.dtype, value, dtype)


def _log_softmax(builder: Builder, args: dict[str, Any]) -> fx.Node:
    z, lse = _centred(builder, _as(builder, args), args["dim"])
    return _cast(builder, builder.call(aten.sub.Tensor, z, lse), args["dtype"] or args["self"].meta["val"].dtype)


def _softmax(builder: Builder, args: dict[str, Any]) -> fx.Node:
    z, lse = _centred(builder, _as(builder, args), args["dim"])
    found = builder.call(aten.exp.default, builder.call(aten.sub.Tensor, z, lse))
    return _cast(builder, found, args["dtype"] or args["self"].meta["val"].dtype)


def _as(builder: Builder, args: dict[str, Any]) -> fx.Node:
    return _cast(builder, args["self"], args["dtype"]) if args["dtype"] is not None else args["self"]


def _mean(builder: Builder, args: dict[str, Any]) -> fx.Node:
    x = args["self"]
    dims = args.get("dim") or list(range(x.meta["val"].dim()))
    total = builder.call(aten.sum.dim_IntList, x, dims, args.get("keepdim", False), dtype=args["dtype"])
    for d in dims:
        length = x.meta["val"].shape[d]
        count = length if isinstance(length, int) else builder.call(aten.sym_size.int, x, d)
        total = builder.call(aten.div.Tensor, total, count)
    return total


def _cross_entropy(builder: Builder, args: dict[str, Any]) -> fx.Node:
    call, x, dim = builder.call, args["self"], _class_dim(args)
    top = call(peak, x, dim)
    top = _cast(builder, top, torch.promote_types(top.meta["val"].dtype, torch.float32))
    ignored, classes = _classes(builder, args)
    terms = call(class_terms, x, top, classes, dim, 0, x.meta["val"].shape[dim])
    lse = call(aten.log.default, call(aten.select.int, terms, 0, 0))
    own = call(aten.sub.Tensor, lse, call(aten.select.int, terms, 0, 1))
    smooth = None
    if args["label_smoothing"]:
        every = _every(builder, call(aten.sub.Tensor, x, top), lse, args["weight"], dim)
        smooth = call(aten.mul.Tensor, every, args["label_smoothing"] / x.meta["val"].shape[dim])
    return _cast(builder, _reduced(builder, args, own, smooth, ignored, classes), x.meta["val"].dtype)


def _nll(builder: Builder, args: dict[str, Any]) -> fx.Node:
    call, dim = builder.call, _class_dim(args)
    ignored, classes = _classes(builder, args)
    picked = call(aten.gather.default, args["self"], dim, call(aten.unsqueeze.default, classes, dim))
    own = call(aten.neg.default, call(aten.squeeze.dim, picked, dim))
    return _reduced(builder, args, own, None, ignored, classes)


def _class_dim(args: dict[str, Any]) -> int:
    return 1 if args["self"].meta["val"].dim() > 1 else 0


def _classes(builder: Builder, args: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    """Returns the mask of ignored targets, and the targets with class 0 in their place."""
    ignored = builder.call(aten.eq.Scalar, args["target"], args["ignore_index"])
    return ignored, builder.call(aten.masked_fill.Scalar, args["target"], ignored, 0)


def _every(builder: Builder, z: fx.Node, lse: fx.Node, weight: fx.Node | None, dim: int) -> fx.Node:
    """Returns `-sum over classes of weight * log p` for each row, where `z - lse` are the log-probabilities."""
    call, total = builder.call, z.meta["val"].shape[dim]
    if weight is not None:
        shape = [-1] + [1] * (z.meta["val"].dim() - 1 - dim)
        z = call(aten.mul.Tensor, z, call(aten.view.default, weight, shape))
        total = call(aten.sum.default, weight)
    return call(aten.sub.Tensor, call(aten.mul.Tensor, lse, total), call(aten.sum.dim_IntList, z, [dim]))


def _reduced(
    builder: Builder, args: dict[str, Any], loss: fx.Node, smooth: fx.Node | None, ignored: fx.Node, classes: fx.Node
) -> fx.Node:
    """Returns the class loss of torch's documentation: ignored targets, class weights, smoothing, three reductions.

    Args:
        loss: `-log p` of each row's class, before weights and ignored targets.
        smooth: the label-smoothing term of each row.
    """
    call, weight, dtype = builder.call, args["weight"], loss.meta["val"].dtype
    counted = _cast(builder, call(aten.logical_not.default, ignored), dtype)
    if weight is not None:
        column = call(aten.unsqueeze.default, weight, 1)
        own = call(aten.squeeze.dim, call(aten.embedding.default, column, classes), -1)
        loss, counted = call(aten.mul.Tensor, loss, own), call(aten.mul.Tensor, counted, own)
    if smooth is not None:
        loss = call(aten.add.Tensor, call(aten.mul.Tensor, loss, 1 - args["label_smoothing"]), smooth)
    loss = call(aten.masked_fill.Scalar, loss, ignored, 0)
    if args["reduction"] in (MEAN, SUM):
        loss = call(aten.sum.default, loss)
    return call(aten.div.Tensor, loss, call(aten.sum.default, counted)) if args["reduction"] == MEAN else loss


EXPANSIONS: dict[Any, Expansion] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss.default: _nll,
    aten.nll_loss_nd.default: _nll,
    aten.log_softmax.int: _log_softmax,
    aten.softmax.int: _softmax,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
}
