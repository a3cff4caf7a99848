"""bucket: copies the parameters of a block together, so that one collective sums their gradients.

    Before: c = copy(w, "tp"); norm(x, c); d = copy(v, "tp"); norm(y, d)
    After:  t = together((w, v), "tp", (None, None)); norm(x, t[0]); norm(y, t[1])

There is one all-reduce for each block, mesh axis and dtype, in place of one for each parameter. A parameter that only
some ranks hold (`share`) is summed among these. Parameters that are read before the blocks, behind the blocks, and on
both sides are separate buckets, because the sides may be in different stages of a pipeline.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from autotp.ops.coalesced import together
from autotp.ops.collectives import copy, share
from autotp.passes.builder import Builder, fake_mode_of
from autotp.source_location import block_of


def bucket(graph: fx.Graph) -> fx.Graph:
    """Returns the same function with one conjugate for all parameters of a block, a mesh axis and a dtype."""
    bundles: dict[Any, list[fx.Node]] = {}
    keys: dict[fx.Node, Any] = {}  # A copy over the first of two mesh axes -> the key of its bundle.
    behind_blocks = _behind_blocks(graph)
    for node in graph.nodes:
        before = node.args[0] if node.target in (copy, share) else None
        if before is not None and (before.op == "placeholder" or before in keys):
            sides = block_of(node) or frozenset(user in behind_blocks for user in _readers(node))
            # A copy over a second axis is joined only with copies of the same first bundle: all of them exist then.
            keys[node] = sides, node.args[1], node.meta["val"].dtype, keys.get(before)
            bundles.setdefault(keys[node], []).append(node)
    buckets = [nodes for nodes in bundles.values() if len(nodes) > 1]
    if not buckets:
        return graph
    first, inside = {nodes[0]: nodes for nodes in buckets}, {node for nodes in buckets for node in nodes}
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        builder.origin = node
        if node in first:
            _read_together(builder, first[node])
        if node not in inside:
            builder.copy(node)
    return builder.graph


def _behind_blocks(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes behind the first one that is in a block."""
    nodes = list(graph.nodes)
    first = next((i for i, node in enumerate(nodes) if node.op == "call_function" and block_of(node)), len(nodes))
    return set(nodes[first:])


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the operators that read a parameter's copy, or a copy of it over another mesh axis."""
    for user in node.users:
        if user.target in (copy, share):
            yield from _readers(user)
        else:
            yield user


def _read_together(builder: Builder, nodes: list[fx.Node]) -> None:
    where = tuple(None if node.target is copy else (node.args[2], node.args[3]) for node in nodes)
    copies = builder.raw(together, (tuple(builder.env[node.args[0]] for node in nodes), nodes[0].args[1], where))  # type: ignore[index]
    copies.meta["val"] = [node.meta["val"] for node in nodes]
    for i, node in enumerate(nodes):
        builder.env[node] = builder.raw(operator.getitem, (copies, i))
        builder.env[node].meta["val"] = node.meta["val"]
