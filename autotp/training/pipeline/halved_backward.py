"""halved_backward: backward in two halves: first the gradients of a stage's inputs, later those of its weights.

Zero-bubble schedules (Qi et al. 2023, "Zero Bubble Pipeline Parallelism") send the first half to the stage before, and
fill with the second half the time in which a rank would wait. torch's own halves (torch.distributed.pipelining) are
wrong, or fail, for weights that several operators read, for operators with several outputs, and for frozen weights
(pytorch#170277, pytorch#180952). These halves are right for any graph:

- The *path* is the set of nodes of the autograd graph that lead from the outputs to an input. A *fork* is a node of the
  path that leads to weights by edges that leave the path. The first half runs the path for the inputs only, and notes
  the gradients that reach each fork.
- The second half starts at the forks, each with the gradients noted for it, and runs to the weights. Forks that lead to
  a common weight run together, so that each counts once though one may lead to the other.

Backward communicates, so every rank runs the forks in the same order, that of the graph: dicts keep it, sets do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
Nodes = dict[Node, None]
"""A set of nodes in an order."""
Gradients = tuple[Tensor | None, ...]
"""The gradients of a node's outputs."""


@dataclass(frozen=True)
class WeightHalf:
    """The second half of backward.

    Attributes:
        starts: node -> the weights that it leads to; forks, and outputs that lead to weights only.
        noted: fork -> the gradients that reach it.
        weight_edges: the edges of outputs that lead to weights only, each with its gradient.
    """

    starts: dict[Node, Nodes]
    noted: dict[Node, Gradients]
    weight_edges: list[tuple[GradientEdge, Tensor]]

    def run(self) -> None:
        """Adds the gradients of the weights to their `grad`."""
        # A fork that no gradient has reached has none to pass on.
        reached = {node: weights for node, weights in self.starts.items() if node in self.noted}
        reached |= {edge.node: self.starts[edge.node] for edge, _ in self.weight_edges}
        for nodes, weights in _with_common_weights(reached):
            for leaf, grad in zip(weights, self._gradients(nodes, weights), strict=True):
                weight: Tensor = leaf.variable  # type: ignore[attr-defined]
                if grad is not None:
                    weight.grad = grad if weight.grad is None else weight.grad + grad

    def _gradients(self, nodes: Sequence[Node], weights: Nodes) -> Gradients:
        """Returns the gradients of `weights` that come by way of `nodes`."""
        forks = [node for node in nodes if node in self.noted]
        edges = [(GradientEdge(fork, i), x) for fork in forks for i, x in enumerate(self.noted[fork]) if x is not None]
        edges += [(edge, grad) for edge, grad in self.weight_edges if edge.node in nodes]
        # A fork that leads to another one would add to the gradients that the first half noted for that one.
        handles = [_fix(fork, self.noted[fork]) for fork in forks if len(forks) > 1]
        try:
            return torch.autograd.grad(
                [edge for edge, _ in edges],
                [GradientEdge(leaf, 0) for leaf in weights],
                [grad for _, grad in edges],
                retain_graph=True,  # The nodes between two forks may be between others, too.
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()


def input_half(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
) -> tuple[Gradients, WeightHalf]:
    """Runs the first half of backward.

    Args:
        outputs: the stage's outputs, or its loss. They are detached.
        grads: the gradients of `outputs`; None: the output is a loss, whose gradient is 1.
        inputs: the stage's inputs, tensors that require gradients among them.

    Returns:
        The gradients of `inputs`, which their `grad` has as well; None for what needs none. And the second half.
    """
    outputs_and_grads = [
        (x, torch.ones_like(x) if grads is None else grads[i]) for i, x in enumerate(outputs) if x.requires_grad
    ]
    edges = [(x, get_gradient_edge(x), grad) for x, grad in outputs_and_grads if grad is not None]
    learn = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    path = _leading_to([get_gradient_edge(x).node for x in learn], [edge.node for _, edge, _ in edges])
    aside = [(edge, grad) for _, edge, grad in edges if edge.node not in path]
    half = WeightHalf(_forks(path) | {edge.node: _leaves([edge.node]) for edge, _ in aside}, {}, aside)
    handles = [fork.register_prehook(_noting(half.noted, fork)) for fork in half.starts if fork in path]
    try:
        results = _gradients_of(learn, [(x, grad) for x, edge, grad in edges if edge.node in path])
    finally:
        for handle in handles:
            handle.remove()
    for x, grad in zip(learn, results, strict=True):
        if grad is not None:
            x.grad = grad if x.grad is None else x.grad + grad
    for x in outputs:
        # torch refuses to detach a view in place.
        if not x._is_view():
            x.detach_()  # Frees what only the first half reads.
    by_id = {id(x): grad for x, grad in zip(learn, results, strict=True)}
    return tuple(by_id.get(id(x)) for x in inputs), half


def _gradients_of(inputs: Sequence[Tensor], outputs_and_grads: Sequence[tuple[Tensor, Tensor]]) -> Gradients:
    if not outputs_and_grads or not inputs:
        return (None,) * len(inputs)
    outputs, grads = [x for x, _ in outputs_and_grads], [grad for _, grad in outputs_and_grads]
    # The second half needs the graph.
    return torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)


def _noting(noted: dict[Node, Gradients], fork: Node) -> Callable[[Gradients], None]:
    def note(grads: Gradients) -> None:
        noted[fork] = grads

    return note


def _fix(fork: Node, grads: Gradients) -> RemovableHandle:
    """Makes `fork` take `grads`, whatever reaches it."""
    return fork.register_prehook(lambda _: grads)


def _reached(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Returns the nodes that `nodes` lead to, and themselves, each with the nodes that lead to it in one step."""
    before: dict[Node, list[Node]] = {node: [] for node in nodes}
    waiting = list(before)
    while waiting:
        node = waiting.pop()
        for after, _ in node.next_functions:
            if after is not None:
                if after not in before:
                    before[after] = []
                    waiting.append(after)
                before[after].append(node)
    return before


def _leaves(nodes: Iterable[Node]) -> Nodes:
    return {node: None for node in _reached(nodes) if isinstance(node, AccumulateGrad)}


def _leading_to(ends: Iterable[Node], roots: Iterable[Node]) -> Nodes:
    """Returns the nodes between `roots` and `ends`, both included."""
    before = _reached(roots)
    waiting = [node for node in ends if node in before]
    path = set(waiting)
    while waiting:
        for node in before[waiting.pop()]:
            if node not in path:
                path.add(node)
                waiting.append(node)
    return {node: None for node in before if node in path}


def _forks(path: Nodes) -> dict[Node, Nodes]:
    """Returns each fork of the path: node -> the weights that it leads to by edges that leave the path."""
    off = {
        node: [after for after, _ in node.next_functions if after is not None and after not in path] for node in path
    }
    weights_by_fork = {node: _leaves(after) for node, after in off.items() if after}
    return {node: weights for node, weights in weights_by_fork.items() if weights}


def _with_common_weights(reached: dict[Node, Nodes]) -> list[tuple[list[Node], Nodes]]:
    """Returns the nodes in groups, each with its weights: nodes that lead to a common weight are in one group."""
    groups: list[tuple[list[Node], Nodes]] = []
    for node, weights in reached.items():
        near = [group for group in groups if group[1].keys() & weights.keys()]
        nodes, every = [x for nodes, _ in near for x in nodes], {x: None for _, more in near for x in more}
        groups = [group for group in groups if group not in near]
        groups.append(([*nodes, node], every | weights))
    return groups
