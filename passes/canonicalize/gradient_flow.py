"""gradient_flow: whether a gradient may flow from a value of a graph to a parameter or an input."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from autotp.passes.builder import at_captured_sizes, evaluated
from autotp.rules.row import Trait
from autotp.rules.traits import has


def carries_gradient(node: fx.Node, plain: Collection[str], mode: FakeTensorMode) -> bool:
    """True if a gradient may flow through a value.

    Args:
        plain: names of the placeholders that no gradient flows to.
        mode: a fake mode without symbols.
    """
    return any(name not in plain for name in _sources(node, mode))


def with_gradient(node: fx.Node, mode: FakeTensorMode) -> frozenset[str]:
    """Returns the names of the placeholders that a gradient of a value flows to.

    Args:
        mode: a fake mode without symbols.
    """
    return frozenset(_sources(node, mode))


def _sources(node: fx.Node, mode: FakeTensorMode) -> Iterator[str]:
    """Yields the placeholders, by name, from which a value has a gradient."""
    queue, visited = [node], {node}
    while queue:
        source = queue.pop()
        if source.op == "placeholder" and _is_floating(source.meta.get("val")):
            yield source.name
        if source.op == "call_function" and _passes_gradient(source, mode):
            before = set(source.all_input_nodes) - visited
            queue += before
            visited |= before


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _passes_gradient(node: fx.Node, mode: FakeTensorMode) -> bool:
    """True if a gradient may flow from a result to an operand. An operator of torch's is called on fake tensors."""
    if not isinstance(node.target, OpOverload):
        return not has(node.target, Trait.NO_GRADIENT)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: at_captured_sizes(n.meta["val"], mode))
    try:
        return bool(evaluated(mode, _wants_gradient, node.target, args, kwargs))
    except RuntimeError:  # Sizes that depend on values are made up, and may not fit each other: then it may flow.
        return True


def _wants_gradient(target: Any, args: Any, kwargs: Any) -> bool:
    """True if a result of a call wants a gradient, where each operand does.

    Some operators refuse that, as `cumsum` with a dtype of integers. A model calls them without the gradients that they
    refuse, so each operand is tried by itself; from one that is refused no gradient flows.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    floating = [i for i, x in enumerate(leaves) if _is_floating(x)]

    def wants(places: Collection[int]) -> bool:
        operands = [x.detach().requires_grad_(i in places) if i in floating else x for i, x in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(operands, spec)
        with torch.enable_grad():
            results = pytree.tree_leaves(target(*args, **kwargs))
        return any(x.requires_grad for x in results if isinstance(x, torch.Tensor))

    def may_want(place: int) -> bool:
        try:
            return wants([place])
        except RuntimeError:
            return False

    try:
        return wants(floating)
    except RuntimeError:
        wants([])  # What it refuses without gradients, too, is an error.
        return any(map(may_want, floating))
