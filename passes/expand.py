"""expand: an operator that is cut along a factor it mixes becomes operators that a cut goes through.

    Before: log_softmax(x, v)            After: z = x - peak(x); z - log(sum(exp(z)))
    Before: cross_entropy(x, t)          After: z, lse as above; mean(lse - gather(z, t))
    Before: mean(x, v)                   After: sum(x, v) / length

NOTE [Vocab-parallel loss]
With the classes cut, `peak`, `sum` and `gather` each give one number a token that is reduced over ranks; the logits
are never exchanged (Megatron-LM, Shoeybi et al. 2019, section 3). Gradients follow from the primitives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autotp.builder import Builder, fake_mode_of
from autotp.call import bind
from autotp.parallel import peak
from autotp.passes.axes import Axes, visit
from autotp.passes.plan import Decision

aten = torch.ops.aten
Expansion = Callable[[Builder, dict[str, Any]], fx.Node]
MEAN, SUM = 1, 2


def expand(graph: fx.Graph, axes: Axes, decision: Decision) -> tuple[fx.Graph, Axes, Decision]:
    """The graph with its mixing operators spelled out where they are cut, and the axes and cuts of the new one."""
    builder, new_axes, new = Builder(fake_mode_of(graph)), Axes(), Decision(chosen=decision.chosen)
    for node in graph.nodes:
        builder.origin = node
        leaf = decision.cuts.get(node)
        expansion = EXPANSIONS.get(node.target) if leaf is not None and _mixes(node, axes, leaf) else None
        if leaf is None or expansion is None:
            carry(builder.copy(node), node, axes, new_axes, decision, new)
            continue
        last = len(builder.graph.nodes)
        builder.env[node] = expansion(builder, builder.map(bind(node)))
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
    """What was known of `node` is known of its copy."""
    if node in old.dims:
        axes.dims[copy] = old.dims[node]
    if node in old.bound:
        axes.bound[copy] = old.bound[node].renamed(copy)
    if node in before.cuts:
        after.cuts[copy] = before.cuts[node]
    if node in before.held:
        after.held[copy] = before.held[node]


def _centred(builder: Builder, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node]:
    """`x` minus its maximum along `dim`, in float32 at least, and the log of the sum of its exponentials."""
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
    x = args["self"]
    dim = 1 if x.meta["val"].dim() > 1 else 0
    z, lse = _centred(builder, x, dim)
    logp = _LogProbabilities(builder, z, builder.call(aten.squeeze.dim, lse, dim), dim)
    loss = _picked_loss(builder, logp, args, args["label_smoothing"])
    return _cast(builder, loss, x.meta["val"].dtype)


def _nll(builder: Builder, args: dict[str, Any]) -> fx.Node:
    dim = 1 if args["self"].meta["val"].dim() > 1 else 0
    return _picked_loss(builder, _LogProbabilities(builder, args["self"], None, dim), args, 0.0)


class _LogProbabilities:
    """Log-probabilities as `z - lse`, of which only what is asked for is computed."""

    def __init__(self, builder: Builder, z: fx.Node, lse: fx.Node | None, dim: int) -> None:
        self.builder, self.z, self.lse, self.dim = builder, z, lse, dim

    def less_lse(self, value: fx.Node, times: Any = 1) -> fx.Node:
        """`times * lse - value`: minus log-probabilities, of one class or summed over `times` classes."""
        call = self.builder.call
        if self.lse is None:
            return call(aten.neg.default, value)
        lse = self.lse if isinstance(times, int) and times == 1 else call(aten.mul.Tensor, self.lse, times)
        return call(aten.sub.Tensor, lse, value)

    def minus_at(self, classes: fx.Node) -> fx.Node:
        """`-log p[class]`, one a row."""
        call = self.builder.call
        at = call(aten.unsqueeze.default, classes, self.dim)
        return self.less_lse(call(aten.squeeze.dim, call(aten.gather.default, self.z, self.dim, at), self.dim))

    def minus_all(self, weight: fx.Node | None) -> fx.Node:
        """`-sum over classes of weight * log p`, one a row."""
        call = self.builder.call
        if weight is None:
            return self.less_lse(call(aten.sum.dim_IntList, self.z, [self.dim]), self.z.meta["val"].shape[self.dim])
        shape = [-1] + [1] * (self.z.meta["val"].dim() - 1 - self.dim)
        weighed = call(aten.mul.Tensor, self.z, call(aten.view.default, weight, shape))
        return self.less_lse(call(aten.sum.dim_IntList, weighed, [self.dim]), call(aten.sum.default, weight))


def _picked_loss(builder: Builder, logp: _LogProbabilities, args: dict[str, Any], smoothing: float) -> fx.Node:
    """The class loss of torch's documentation: ignored targets, class weights, smoothing, the three reductions."""
    call, weight, target = builder.call, args["weight"], args["target"]
    ignored = call(aten.eq.Scalar, target, args["ignore_index"])
    classes = call(aten.masked_fill.Scalar, target, ignored, 0)
    loss = logp.minus_at(classes)
    counted = _cast(builder, call(aten.logical_not.default, ignored), loss.meta["val"].dtype)
    if weight is not None:
        column = call(aten.unsqueeze.default, weight, 1)
        own = call(aten.squeeze.dim, call(aten.embedding.default, column, classes), -1)
        loss, counted = call(aten.mul.Tensor, loss, own), call(aten.mul.Tensor, counted, own)
    if smoothing:
        n_classes = logp.z.meta["val"].shape[logp.dim]
        smooth = call(aten.mul.Tensor, logp.minus_all(weight), smoothing / n_classes)
        loss = call(aten.add.Tensor, call(aten.mul.Tensor, loss, 1 - smoothing), smooth)
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
