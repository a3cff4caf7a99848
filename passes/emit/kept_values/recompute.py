"""recompute: lets backward recompute blocks, or the scores of attention.

    Before: y = block(x, w)                                 After: y = recomputed(block)(x, w), which keeps x and w only
    Before: s = matmul(q, k); p = softmax(s); o = matmul(p, v)     After: backward computes s and p again    "selective"

Scores and values computed from them are most of the memory that attention keeps, and little of its computation.
Both give fates to operators (`kept_values.py`): "full" drops what each makes, "selective" what those of attention make.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import fx

from autotp.options import Recompute
from autotp.passes.emit.kept_values.fates import Fates
from autotp.passes.emit.kept_values.recomputed import Recomputed
from autotp.passes.emit.outline import blocks, outlined
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has

aten = torch.ops.aten


def recompute(graph: fx.Graph, how: Recompute, updated: Collection[str] = ()) -> fx.GraphModule:
    """Returns the graph as a module whose blocks are submodules, which recompute in backward what `how` says.

    A block that writes into buffers (batch norm) is not recomputed.

    Args:
        updated: placeholder names of the buffers that are written to between forward and backward.
    """
    for node in [n for n in graph.nodes if how != "none" and n.op == "placeholder" and n.name in updated]:
        read_a_copy(node)
    module = outlined(graph, list(blocks(graph)), "block")
    for name, block in _parts(module) if how != "none" else ():
        fates = None if how == "full" else scores(block.graph)
        if not any(map(writes_buffers, block.graph.nodes)) and (fates is None or fates):
            module.add_module(name, Recomputed(block, fates))
    return module


def read_a_copy(node: fx.Node) -> None:
    """Makes all operators read a copy of a buffer, so that a recomputation sees its old value."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(aten.clone.default, (node,))
    copy.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    node.replace_all_uses_with(copy, lambda user: user is not copy)


def writes_buffers(node: fx.Node) -> bool:
    """True for an instance norm that updates running statistics; its schema does not say so.

    (`functionalize` has replaced batch norms.)
    """
    arguments = arguments_of(node) if node.target is aten.instance_norm.default else {}
    return bool(arguments) and arguments["use_input_stats"] and arguments["running_mean"] is not None


def _parts(module: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    return [(name, part) for name, part in module.named_children() if isinstance(part, fx.GraphModule)]


def scores(graph: fx.Graph) -> Fates:
    """Returns the fates of a block under "selective": what attention makes until its last product is computed again."""
    return {node.name: "recompute" for core in _cores(graph) for node in (core[:-1] or core)}


def _cores(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yields the operators of each attention that keeps scores: from the product that makes them to their reader.

    Fused attention without dropout keeps no scores, and is not recomputed.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        fused = has(node.target, Trait.ATTENTION) and draws(node)
        core = [node] if fused else _around(node, order) if has(node.target, Trait.SOFTMAX) else []
        if core:
            yield core


def _around(softmax: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Returns the nodes between the last products before a softmax and the first products after it; else nothing."""
    before, after = _until_product(softmax, lambda n: n.all_input_nodes), _until_product(softmax, lambda n: n.users)
    ends = [any(has(node.target, Trait.BATCHED) for node in side) for side in (before, after)]
    follows: set[fx.Node] = set()
    for node in sorted(before | after, key=order.__getitem__):
        if (has(node.target, Trait.BATCHED) and node in before) or any(n in follows for n in node.all_input_nodes):
            follows.add(node)
    return sorted(follows, key=order.__getitem__) if all(ends) else []


def _until_product(start: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Returns a node and all nodes reached from it by `step`, up to products."""
    reached, queue = {start}, [start]
    while queue:
        for node in step(queue.pop()):
            if node.op == "call_function" and node not in reached:
                reached.add(node)
                if not has(node.target, Trait.BATCHED):
                    queue.append(node)
    return reached
