"""decompose: replaces an operator that mixes the cut factor, such as softmax, by operators that can be cut.

    Before: log_softmax(x, v)            After: z = x - peak(x); z - log(sum(exp(z)))
    Before: mean(x, v)                   After: sum(x, v) / length
    Before: mse_loss(x, y)               After: mse_loss(x, y, reduction=sum) / length      rows are cut

The losses are in `vocab_parallel_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from autotp.ops.losses.argmax import argmax_key
from autotp.ops.losses.cross_entropy import peak
from autotp.passes.builder import Builder, dtype_of_sums, fake_mode_of
from autotp.passes.lower.losses.row_terms import place_in_graph
from autotp.passes.lower.losses.vocab_parallel_loss import MEAN, SUM, cross_entropy, mean_of_sum, nll
from autotp.passes.plan.choose import Decision, carry
from autotp.passes.plan.infer_axes import Axes, Factor, visit
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, is_major

aten = torch.ops.aten
NONE = 0
Expansion = Callable[[Builder, dict[str, Any]], fx.Node]


def decompose(graph: fx.Graph, axes: Axes, decision: Decision) -> tuple[fx.Graph, Axes, Decision]:
    """Returns the graph with mixing operators decomposed where they are cut, and its axes and cuts."""
    builder, new_axes, new_decision = Builder(fake_mode_of(graph)), Axes(), Decision(chosen=decision.chosen)
    for node in graph.nodes:
        builder.origin = node
        leaf = decision.cuts.get(node)
        factor = axes.bound[node].cuttable(leaf) if leaf is not None else None
        expansion = expansion_of(node, factor) if factor is not None else None
        if leaf is None or expansion is None:
            carry(builder.copy(node), node, axes, new_axes, decision, new_decision)
            continue
        last = len(builder.graph.nodes)
        builder.env[node] = expansion(builder, builder.map(arguments_of(node)))
        for made in list(builder.graph.nodes)[last:]:
            visit(made, new_axes)
            # Each new operator has a rule of its own, and is cut if it has the leaf.
            bound = new_axes.bound.get(made)
            if bound is not None and bound.cuttable(leaf) is not None:
                new_decision.cuts[made] = leaf
    return builder.graph, new_axes, new_decision


def expansion_of(node: fx.Node, factor: Factor) -> Expansion | None:
    """Returns the function that writes an operator in parts, to be cut along a factor; None if there is none."""
    if factor.mark != "!":
        return None
    # The rule of class losses names the classes `c`; all other factors are of rows.
    of_rows = arguments_of(node).get("reduction") == MEAN and factor.name != "c"
    return partial(_mean_loss, node.target) if of_rows else EXPANSIONS.get(node.target)


def has_expansion(node: fx.Node, factor: Factor, leaf: Axis) -> bool:
    """Returns whether an operator can be written in parts, to be cut along a leaf of a factor that it mixes.

    The class of a row is looked up in the part of a rank, whose classes must follow one another.
    """
    by_class = has(node.target, Trait.CLASS_LOSS) and factor.name == "c"
    return expansion_of(node, factor) is not None and (not by_class or is_major(factor.axis, leaf))


def _mean_loss(op: Any, builder: Builder, args: dict[str, Any]) -> fx.Node:
    """Writes a mean over rows as a sum and its divisor, both in at least float32."""
    dtype = next(x.meta["val"].dtype for x in args.values() if isinstance(x, fx.Node))
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
    of_classes = has(op, Trait.CLASS_LOSS)
    widened = {name: _widened(builder, value, wide) for name, value in args.items()}
    widened["reduction"] = SUM if of_classes else NONE
    by_name = {argument.name: widened.pop(argument.name) for argument in op._schema.arguments if argument.kwarg_only}
    loss = builder.call(op, *widened.values(), **by_name)
    mean = mean_of_sum(builder, loss, args, wide) if of_classes else _mean(builder, {"self": loss, "dtype": None})
    return builder.cast(mean, dtype)


def _widened(builder: Builder, value: Any, dtype: torch.dtype) -> Any:
    example = value.meta["val"] if isinstance(value, fx.Node) else None
    floating = isinstance(example, torch.Tensor) and example.is_floating_point()
    return builder.cast(value, dtype) if floating else value


def _centred(builder: Builder, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Returns `x - max` along `dim`, in at least float32, the logarithm of the sum of its exponentials, and `max`."""
    if x.meta["val"].dtype in (torch.float16, torch.bfloat16):
        x = builder.call(aten.to.dtype, x, torch.float32)
    # The maximum keeps `exp` from overflowing. It cancels out, and so it needs no gradient.
    top = builder.call(peak, x, dim)
    z = builder.call(aten.sub.Tensor, x, top)
    total = builder.call(aten.sum.dim_IntList, builder.call(aten.exp.default, z), [dim], True)
    return z, builder.call(aten.log.default, total), top


def _log_softmax(builder: Builder, args: dict[str, Any]) -> fx.Node:
    z, lse, _ = _centred(builder, _as(builder, args), args["dim"])
    return builder.cast(builder.call(aten.sub.Tensor, z, lse), args["dtype"] or args["self"].meta["val"].dtype)


def _softmax(builder: Builder, args: dict[str, Any]) -> fx.Node:
    z, lse, _ = _centred(builder, _as(builder, args), args["dim"])
    probabilities = builder.call(aten.exp.default, builder.call(aten.sub.Tensor, z, lse))
    return builder.cast(probabilities, args["dtype"] or args["self"].meta["val"].dtype)


def _logsumexp(builder: Builder, args: dict[str, Any]) -> fx.Node:
    x, call = args["self"], builder.call
    for dim in args["dim"]:
        _, lse, top = _centred(builder, x, dim)
        x = builder.cast(call(aten.add.Tensor, lse, top), x.meta["val"].dtype)
    if not args["keepdim"]:
        x = call(aten.squeeze.dims, x, list(args["dim"]))
    return x


def _argmax(builder: Builder, args: dict[str, Any]) -> fx.Node:
    dim = args["dim"] % args["self"].meta["val"].dim()
    result = place_in_graph(builder, builder.call(argmax_key, args["self"], dim, 0))
    return builder.call(aten.unsqueeze.default, result, dim) if args["keepdim"] else result


def _as(builder: Builder, args: dict[str, Any]) -> fx.Node:
    return builder.cast(args["self"], args["dtype"]) if args["dtype"] is not None else args["self"]


def _mean(builder: Builder, args: dict[str, Any]) -> fx.Node:
    x = args["self"]
    own = x.meta["val"].dtype
    dims, dtype = args.get("dim") or list(range(x.meta["val"].dim())), args["dtype"] or own
    # The sum of all ranks may be too large for float16 where the mean is not; torch, too, adds up in float32.
    wide = dtype_of_sums(dtype)
    keepdim = args.get("keepdim", False)
    total = builder.call(aten.sum.dim_IntList, x, dims, keepdim, dtype=None if wide == own else wide)
    for d in dims:
        # The length of the whole dimension: `lower` writes it so on a rank that has a part, too.
        total = builder.call(aten.div.Tensor, total, builder.size(x, d))
    return builder.cast(total, dtype)


EXPANSIONS: dict[Any, Expansion] = {
    aten.cross_entropy_loss.default: cross_entropy,
    aten.nll_loss.default: nll,
    aten.nll_loss_nd.default: nll,
    aten.log_softmax.int: _log_softmax,
    aten.softmax.int: _softmax,
    aten.logsumexp.default: _logsumexp,
    aten.argmax.default: _argmax,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
}
