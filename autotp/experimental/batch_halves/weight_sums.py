"""weight_sums: the gradients that a weight has from both halves of a batch are summed in one memory.

    Before: y0 = linear(x0, w); y1 = linear(x1, w)
    After:  w0, w1 = read_twice(w); y0 = linear(x0, w0); y1 = linear(x1, w1)

Here `linear` is that of `read_twice.py`: the second product adds its gradient into the memory
of the first, and no third tensor is written.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autotp.experimental.batch_halves.halves import half_of
from autotp.experimental.batch_halves.read_twice import linear, read_twice
from autotp.ops.async_linear import async_linear
from autotp.passes.builder import PART, copied

LINEAR = torch.ops.aten.linear.default


def weight_sums(graph: fx.Graph) -> fx.Graph:
    """Returns the same function. Its nodes are those of a bound graph."""
    weights = {w: readers for w in graph.find_nodes(op="placeholder") if (readers := _readers(w)) is not None}
    if not weights:
        return graph
    result, env = fx.Graph(), dict[fx.Node, fx.Node]()
    read: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = dict[fx.Node, list[fx.Node]]()
    for w, readers in weights.items():
        # `read_twice` stands before the first of the two readers.
        first.setdefault(min(readers, key=order.__getitem__), []).append(w)
    for node in graph.nodes:
        for w in first.get(node, ()):
            pair = _call(result, read_twice, node, (env[w],), [w.meta["val"]] * 2)
            for half, reader in enumerate(weights[w]):
                read[w, reader] = _call(result, operator.getitem, node, (pair, half), w.meta["val"])
        env[node] = copied(result, node, lambda x, node=node: read.get((x, node), env[x]))  # type: ignore[misc]
        if node.target is LINEAR and (node.args[1], node) in read:
            env[node].target = linear
    return result


def _readers(w: fx.Node) -> list[fx.Node] | None:
    """Returns the products of the first and of the second half that read a weight; None unless there is one of each."""
    products = [node for node in w.users if _is_weight_of(w, node)]
    by_half = {half_of(node): node for node in products}
    return [by_half[0], by_half[1]] if len(products) == 2 and by_half.keys() == {0, 1} else None


def _is_weight_of(w: fx.Node, node: fx.Node) -> bool:
    """True for a product that reads `w` as one of its weights, and nowhere else."""
    if node.target is LINEAR:
        return node.args[1] is w and node.args[0] is not w and w not in node.args[2:] and not node.kwargs
    return node.target is async_linear and list(node.args[4]).count(w) == 1 and w not in (node.args[0], *node.args[5])  # type: ignore[arg-type,misc]


def _call(graph: fx.Graph, target: object, reader: fx.Node, args: tuple[object, ...], value: object) -> fx.Node:
    """Writes a call in the block of its reader."""
    call = graph.call_function(target, args)  # type: ignore[arg-type]
    call.meta = {key: x for key, x in reader.meta.items() if key != PART} | {"val": value}
    return call
