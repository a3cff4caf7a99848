"""bind: puts process groups and the device into a lowered graph, in place of mesh axes and devices of capture.

Attention of a rank that has no heads becomes `attention`, whose inputs all have gradients.

Before: reduce(x, "tp"); arange(n, device="cuda")      After: reduce(x, "5"); arange(n, device="cuda:1")
Before: sym_size(x, 0)                                 After: x.size(0), which works under vmap, too
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from autotp.ops import collectives
from autotp.ops.async_linear import async_linear
from autotp.ops.attention.products import attention
from autotp.ops.coalesced import together
from autotp.ops.custom_vjp import Vjp
from autotp.ops.experts import exchange
from autotp.passes.builder import copied
from autotp.passes.canonicalize.relocate import drawn_on_cpu, on_device
from autotp.passes.emit.in_place import fresh, written
from autotp.rules.call import arguments_of
from autotp.rules.traits import in_place_of

COMMUNICATING = frozenset({
    collectives.copy, collectives.reduce, collectives.scatter, collectives.gather, collectives.all_gather,
    collectives.reduce_scatter, collectives.all_to_all, collectives.halo, collectives.share, together, async_linear,
    exchange.exchange_counts, exchange.to_experts, exchange.to_rows, exchange.select_own,
})  # fmt: skip
"""Operators whose second argument is the mesh axis over which they communicate, or whose part they take."""


def bind(
    graph: fx.Graph,
    device: torch.device,
    groups: Mapping[str, str | None],
    owned: Collection[str] = (),
    reuse: bool = True,
) -> fx.Graph:
    """Returns a copy of `graph` for `device`, with axis names replaced by names of process groups.

    Args:
        groups: name of a mesh axis -> name of a process group.
        owned: placeholder names of the inputs that the graph may write to.
        reuse: whether operators may overwrite inputs that no other operator reads.
    """
    bound, in_place, into_input = fx.Graph(), fresh(graph) if reuse else set(), written(graph, owned)
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copy = copied(bound, node, env.__getitem__)
        env[node] = copy
        if not drawn_on_cpu(node):
            copy.args, copy.kwargs = on_device((copy.args, copy.kwargs), device)
        if isinstance(node.target, Vjp):
            copy.target = node.target.on(bind(node.target.graph, device, groups, reuse=False))
        if node.target in COMMUNICATING and node.args[1] in groups:
            copy.args = (copy.args[0], groups[str(node.args[1])], *copy.args[2:])
        if node.target is torch.ops.aten.sym_size.int:
            copy.target = torch.Tensor.size  # vmap has no rule for the operator.
        if _is_empty_attention(node):
            copy.target = attention
        if node in into_input:
            copy.target = in_place_of(node.target)  # type: ignore[assignment]
        if node in in_place:
            copy.kwargs = {"fresh": True}
    return bound


def _is_empty_attention(node: fx.Node) -> bool:
    """True for attention with a mask whose result has no elements on this rank."""
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return False
    masked = arguments_of(node)["attn_mask"] is not None
    return masked and any(isinstance(n, int) and n == 0 for n in node.meta["val"].shape)
