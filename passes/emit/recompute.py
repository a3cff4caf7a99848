"""recompute: lets backward compute blocks, or the scores of attention, again.

    Before: y = block(x, w)                                 After: y = recomputed(block)(x, w), which keeps x and w only
    Before: s = matmul(q, k); p = softmax(s); o = matmul(p, v)     After: o = recomputed(core)(q, k, v)      "selective"

The scores and what is made of them are most of what attention keeps and little of what it computes.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autotp.ops.eager_mode import is_plain
from autotp.options import Recompute
from autotp.passes.emit.outline import blocks, outlined
from autotp.rules.call import bind, draws
from autotp.rules.row import Trait
from autotp.rules.traits import has

aten = torch.ops.aten


class Recomputed(nn.Module):
    """A graph of which only the inputs are kept for backward; there it runs again, on the same random numbers."""

    def __init__(self, inner: fx.GraphModule) -> None:
        super().__init__()
        self.inner, self.draws = inner, any(draws(node) for node in inner.graph.nodes)

    def forward(self, *args: Any) -> Any:
        """What the graph returns. torch.func's transforms know no such thing: there everything is kept."""
        plain = all(is_plain(x) for x in args if isinstance(x, Tensor)) or torch.compiler.is_compiling()
        if not plain or not torch.is_grad_enabled():
            return self.inner(*args)
        return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=self.draws)

    def _run(self, *args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # As in forward: backward comes here by itself.
            return self.inner(*args)


def recompute(graph: fx.Graph, how: Recompute, updated: Collection[str] = ()) -> fx.GraphModule:
    """The graph as a module whose blocks are submodules, and keep as little as was asked for.

    A block that writes into buffers (batch norm) is computed once.

    Args:
        updated: placeholder names of the buffers that are written to between forward and backward.
    """
    for node in [n for n in graph.nodes if how != "none" and n.op == "placeholder" and n.name in updated]:
        _read_a_copy(node)
    module = outlined(graph, list(blocks(graph)), "block")
    if how == "full":
        _recompute(module)
    for name, block in _parts(module) if how == "selective" else ():
        inner = outlined(block.graph, list(_cores(block.graph)), "core")
        _recompute(inner)
        module.add_module(name, inner)
    return module


def _read_a_copy(node: fx.Node) -> None:
    """What is computed again reads what a buffer was."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(aten.clone.default, (node,))
    copy.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    node.replace_all_uses_with(copy, lambda user: user is not copy)


def _recompute(module: fx.GraphModule) -> None:
    for name, part in _parts(module):
        if not any(map(_writes, part.graph.nodes)):
            module.add_module(name, Recomputed(part))


def _writes(node: fx.Node) -> bool:
    """True for an operator that moves running statistics, which its schema does not say (`functionalize` took batch
    norms apart).
    """
    arguments = bind(node) if node.target is aten.instance_norm.default else {}
    return bool(arguments) and arguments["use_input_stats"] and arguments["running_mean"] is not None


def _parts(module: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    return [(name, part) for name, part in module.named_children() if isinstance(part, fx.GraphModule)]


def _cores(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The operators of each attention that keeps scores: from the product that makes them to the one that reads them.

    Fused attention without dropout keeps none, and is left as it is.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        fused = has(node.target, Trait.ATTENTION) and draws(node)
        core = [node] if fused else _around(node, order) if has(node.target, Trait.SOFTMAX) else []
        users = {user for one in core for user in one.users} - set(core)
        if core and not taken & set(core) and all(order[user] > order[core[-1]] for user in users):
            taken.update(core)
            yield core


def _around(softmax: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """What is on a way from the last products before a softmax to the first behind it; nothing where one is missing."""
    before, after = _until_product(softmax, lambda n: n.all_input_nodes), _until_product(softmax, lambda n: n.users)
    ends = [any(has(node.target, Trait.BATCHED) for node in side) for side in (before, after)]
    follows: set[fx.Node] = set()
    for node in sorted(before | after, key=order.__getitem__):
        if (has(node.target, Trait.BATCHED) and node in before) or any(n in follows for n in node.all_input_nodes):
            follows.add(node)
    return sorted(follows, key=order.__getitem__) if all(ends) else []


def _until_product(start: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """A node and all that is reached from it, no further than products."""
    found, queue = {start}, [start]
    while queue:
        for node in step(queue.pop()):
            if node.op == "call_function" and node not in found:
                found.add(node)
                if not has(node.target, Trait.BATCHED):
                    queue.append(node)
    return found
