"""checkpointed: a block for torch.compile, which computes again what torch's `checkpoint` marks.

    Before: p = softmax(s); d = dropout(p); o = matmul(d, v); y = linear(o, w)      p and d are computed again
    After:  o = part(s, v); y = linear(o, w)

Compiled code has no hooks on single tensors. So what runs again there are whole groups of operators: recomputed ones
that read each other, with the first that read their results. The fates "host" and "bits" do nothing in compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from autotp.passes.capture.autocast_regions import enter_autocast
from autotp.passes.emit.kept_values.fates import Fates
from autotp.passes.emit.kept_values.kept_call import arrived, recomputation
from autotp.passes.emit.outline import outlined
from autotp.rules.traits import draws, draws_from_numpy


class Checkpointed(nn.Module):
    """A graph of which torch keeps only the inputs for backward; backward runs it again with the same random numbers.

    Attributes:
        inner: the graph, or what compiled code has in its place.
        draws: whether it draws random numbers.
    """

    def __init__(self, inner: fx.GraphModule) -> None:
        super().__init__()
        self.inner: nn.Module = inner
        self.draws = any(draws(node) for node in inner.graph.nodes)
        # An exception would leave a region of autocast that the graph has entered open.
        self.stops_early = not inner.graph.find_nodes(op="call_function", target=enter_autocast)
        # torch's `checkpoint` keeps torch's random state, and not numpy's.
        self.again = not any(draws_from_numpy(node) for node in inner.graph.nodes)

    def forward(self, *args: Any) -> Any:
        """Runs the graph."""
        if not torch.is_grad_enabled() or not self.again:
            return self.inner(*args)
        if torch.compiler.is_compiling():
            return checkpoint(self._plain, *args, use_reentrant=False, preserve_rng_state=self.draws)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # What is kept for backward is handed to these hooks, which may read it: save_on_cpu copies it.
            args = tuple(map(arrived, args))
        runs, early = self._second_time_apart(), self.stops_early
        return checkpoint(runs, *args, use_reentrant=False, preserve_rng_state=self.draws, early_stop=early)

    def _plain(self, *args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # As around forward: backward calls this from outside of it.
            return self.inner(*args)

    def _second_time_apart(self) -> Callable[..., Any]:
        """Returns `_plain`, which waits in its second run for all sums that it has started there."""
        calls = count()

        def run(*args: Any) -> Any:
            with recomputation() if next(calls) else nullcontext():
                return self._plain(*args)

        return run


def checkpointed(block: fx.GraphModule, fates: Fates) -> fx.GraphModule:
    """Returns a block with groups of recomputed operators as calls that torch's `checkpoint` runs."""
    module = outlined(block.graph, list(_groups(block.graph, fates)), "part")
    for name, part in list(module.named_children()):
        assert isinstance(part, fx.GraphModule)
        module.add_module(name, Checkpointed(part))
    return module


def _groups(graph: fx.Graph, fates: Fates) -> Iterator[list[fx.Node]]:
    """Yields the operators of each group, in order; a reader between two of them would run before their call."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    again = [n for n in graph.nodes if n.op == "call_function" and fates.get(n.name) == "recompute"]
    grouped: set[fx.Node] = set()
    for start in again:
        group, queue = set[fx.Node](), [start]
        while queue:
            node = queue.pop()
            if node not in group:
                group.add(node)
                queue += [n for n in (*node.all_input_nodes, *node.users) if n in again]
        group |= {user for node in group for user in node.users if user.op == "call_function"}
        ordered = sorted(group, key=order.__getitem__)
        outside = {user for node in ordered for user in node.users} - group
        if not group & grouped and all(order[user] > order[ordered[-1]] for user in outside):
            grouped |= group
            yield ordered
