"""under_budget: gives each call of a block a module of its own, whose fates the graph's `Budget` sets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from autotp.passes.emit.kept_values.recompute import read_a_copy, writes_buffers
from autotp.passes.emit.kept_values.recomputed import Recomputed
from autotp.passes.emit.memory.budget import Allowance, Budget
from autotp.passes.emit.outline import blocks, outlined

NO_PARAMETERS: Mapping[str, int] = MappingProxyType({})


def under_budget(
    graph: fx.Graph,
    updated: Collection[str],
    allowance: Allowance,
    device: torch.device,
    sources: Mapping[str, Tensor],
    groups: Mapping[str, tuple[int, int]],
    even: bool = True,
    learning: Mapping[str, int] = NO_PARAMETERS,
) -> fx.GraphModule:
    """Returns the graph as a module whose blocks keep what a budget lets them keep.

    Args:
        updated: placeholder names of the buffers that are written to between forward and backward.
        sources: placeholder of a parameter, buffer or constant -> a tensor like it.
        groups: name of a process group -> the rank in it, and its size.
        even: whether all ranks have parameters of the same sizes.
        learning: as of `Budget`.
    """
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in updated]:
        read_a_copy(node)
    module = outlined(graph, list(blocks(graph)), "block")
    shared: dict[str, Any] = dict(module.named_children())
    known: dict[Any, Any] = {}
    for i, node in enumerate(module.graph.find_nodes(op="call_module")):
        inner = shared[str(node.target)]
        node.target = f"block_of_{i}"
        fixed = any(map(writes_buffers, inner.graph.nodes))
        module.add_module(node.target, inner if fixed else Recomputed(inner, {}, known))
    for name in shared:
        module.delete_submodule(name)
    places = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    budget = Budget(
        module=module, sources=sources, allowance=allowance, device=device, groups=groups, even=even,
        learning={name: n for name, n in learning.items() if name in places},
    )  # fmt: skip
    inputs = tuple(node for name, node in places.items() if name not in sources)
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        module.graph.call_function(budget, (inputs, tuple(places[name] for name in budget.learning)))
    module.recompile()
    return module


def hints(graph: fx.Graph, inputs: Collection[str]) -> list[Tensor] | None:
    """Returns tensors on `meta` of the sizes of the captured call, for these placeholders; None if one is not known."""
    tensors = []
    for node in graph.find_nodes(op="placeholder"):
        if node.name in inputs:
            value = node.meta.get("val")
            if not isinstance(value, Tensor):
                return None
            sizes = [size for size in map(_hint, value.shape) if size is not None]
            if len(sizes) < value.dim():
                return None
            tensors.append(torch.empty(sizes, dtype=value.dtype, device="meta", requires_grad=value.requires_grad))
    return tensors


def _hint(size: Any) -> int | None:
    return size if isinstance(size, int) else size.node.hint
