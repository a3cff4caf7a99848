"""dce: drops operators that no output needs.

Before: m = le(a, b), which nothing reads              After: nothing
"""

from __future__ import annotations

import torch
from torch import fx

from autotp.passes.builder import Builder, fake_mode_of
from autotp.rules.call import outputs_of
from autotp.rules.traits import draws


def dce(graph: fx.Graph) -> fx.Graph:
    """Returns the same function and the same collectives, without dead operators."""
    needed = live(graph)
    if len(needed) == len(graph.nodes):
        return graph
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        if node in needed:
            builder.copy(node)
    return builder.graph


def live(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that the outputs depend on, and nodes with effects: inputs, regions, random draws."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        # Callers give arguments by position, so unread placeholders stay.
        needed = node in live or node.op in ("placeholder", "output")
        if needed or draws(node) or (not outputs_of(node) and _acts(node)):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _acts(node: fx.Node) -> bool:
    """True for a call with an effect: its result is neither a tensor nor a size."""
    numbers = int | float | torch.SymInt | torch.SymFloat | torch.SymBool
    gives = isinstance(node.meta.get("val"), torch.Tensor | numbers | list | tuple)
    return node.op == "call_function" and not gives
