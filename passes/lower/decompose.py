"""decompose: replaces an operator that mixes the cut factor, such as softmax, by operators that can be cut.

    Before: log_softmax(x, v)            After: z = x - peak(x); z - log(sum(exp(z)))
    Before: mean(x, v)                   After: sum(x, v) / length

The losses are in `vocab_parallel_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autotp.ops.losses.cross_entropy import peak
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.lower.vocab_parallel_loss import cross_entropy, nll
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import Axes, visit
from autotp.rules.call import arguments_of

aten = torch.ops.aten
Expansion = Callable[[Builder, dict[str, Any]], fx.Node]


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


def _log_softmax(builder: Builder, args: dict[str, Any]) -> fx.Node:
    z, lse = _centred(builder, _as(builder, args), args["dim"])
    return builder.cast(builder.call(aten.sub.Tensor, z, lse), args["dtype"] or args["self"].meta["val"].dtype)


def _softmax(builder: Builder, args: dict[str, Any]) -> fx.Node:
    z, lse = _centred(builder, _as(builder, args), args["dim"])
    found = builder.call(aten.exp.default, builder.call(aten.sub.Tensor, z, lse))
    return builder.cast(found, args["dtype"] or args["self"].meta["val"].dtype)


def _as(builder: Builder, args: dict[str, Any]) -> fx.Node:
    return builder.cast(args["self"], args["dtype"]) if args["dtype"] is not None else args["self"]


def _mean(builder: Builder, args: dict[str, Any]) -> fx.Node:
    x = args["self"]
    dims = args.get("dim") or list(range(x.meta["val"].dim()))
    total = builder.call(aten.sum.dim_IntList, x, dims, args.get("keepdim", False), dtype=args["dtype"])
    for d in dims:
        length = x.meta["val"].shape[d]
        count = length if isinstance(length, int) else builder.call(aten.sym_size.int, x, d)
        total = builder.call(aten.div.Tensor, total, count)
    return total


EXPANSIONS: dict[Any, Expansion] = {
    aten.cross_entropy_loss.default: cross_entropy,
    aten.nll_loss.default: nll,
    aten.nll_loss_nd.default: nll,
    aten.log_softmax.int: _log_softmax,
    aten.softmax.int: _softmax,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
}
