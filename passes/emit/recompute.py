"""recompute: lets backward recompute blocks, or the scores of attention.

    Before: y = block(x, w)                                 After: y = recomputed(block)(x, w), which keeps x and w only
    Before: s = matmul(q, k); p = softmax(s); o = matmul(p, v)     After: o = recomputed(core)(q, k, v)      "selective"

Scores and values computed from them are most of the memory that attention keeps, and little of its computation.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autotp.ops.batch_halves.turns import arrived, recomputation
from autotp.ops.eager_mode import is_plain
from autotp.options import Recompute
from autotp.passes.emit.outline import blocks, outlined
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import draws, draws_from_numpy, has

aten = torch.ops.aten


class Recomputed(nn.Module):
    """A graph of which only the inputs are kept for backward; backward runs it again with the same random numbers."""

    def __init__(self, inner: fx.GraphModule) -> None:
        super().__init__()
        self.inner: nn.Module = inner
        self.draws = any(draws(node) for node in inner.graph.nodes)
        # `checkpoint` keeps torch's random state, and not numpy's.
        self.again = not any(draws_from_numpy(node) for node in inner.graph.nodes)

    def forward(self, *args: Any) -> Any:
        """Runs the graph. Under transforms of torch.func, which do not support recomputation, everything is kept."""
        plain = all(is_plain(x) for x in args if isinstance(x, Tensor)) or torch.compiler.is_compiling()
        if not plain or not torch.is_grad_enabled() or not self.again:
            return self.inner(*args)
        if torch.compiler.is_compiling():
            return checkpoint(self._run, *args, use_reentrant=False, preserve_rng_state=self.draws)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # What is kept for backward is handed to these hooks, which may read it: save_on_cpu copies it.
            args = tuple(map(arrived, args))
        calls = count()

        def run(*args: Any) -> Any:
            with recomputation() if next(calls) else nullcontext():
                return self._run(*args)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=self.draws)

    def _run(self, *args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # As around forward: backward calls this from outside of it.
            return self.inner(*args)


def recompute(graph: fx.Graph, how: Recompute, updated: Collection[str] = ()) -> fx.GraphModule:
    """Returns the graph as a module whose blocks are submodules, which recompute in backward what `how` says.

    A block that writes into buffers (batch norm) is not recomputed.

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
    """Makes all operators read a copy of a buffer, so that a recomputation sees its old value."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(aten.clone.default, (node,))
    copy.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    node.replace_all_uses_with(copy, lambda user: user is not copy)


def _recompute(module: fx.GraphModule) -> None:
    for name, part in _parts(module):
        if not any(map(_writes, part.graph.nodes)):
            module.add_module(name, Recomputed(part))


def _writes(node: fx.Node) -> bool:
    """True for an instance norm that updates running statistics; its schema does not say so.

    (`functionalize` has replaced batch norms.)
    """
    arguments = arguments_of(node) if node.target is aten.instance_norm.default else {}
    return bool(arguments) and arguments["use_input_stats"] and arguments["running_mean"] is not None


def _parts(module: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    return [(name, part) for name, part in module.named_children() if isinstance(part, fx.GraphModule)]


def _cores(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yields the operators of each attention that keeps scores: from the product that makes them to their reader.

    Fused attention without dropout keeps no scores, and is not recomputed.
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
    found, queue = {start}, [start]
    while queue:
        for node in step(queue.pop()):
            if node.op == "call_function" and node not in found:
                found.add(node)
                if not has(node.target, Trait.BATCHED):
                    queue.append(node)
    return found
