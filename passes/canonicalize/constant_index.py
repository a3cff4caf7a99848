"""constant_index: replaces a lookup of constant, consecutive positions with a slice.

Before: c = tensor([-2]); index(x, [None, c])        After: slice(x, 1, n - 2, n - 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autotp.passes.builder import Builder, fake_mode_of
from autotp.rules.row import Trait
from autotp.rules.traits import has

aten = torch.ops.aten


def constant_index(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> fx.Graph:
    """Returns the same function with lookups of constant, consecutive positions as slices.

    Args:
        constants: placeholder name -> constant tensor.
    """
    lookups = graph.find_nodes(op="call_function", target=aten.index.Tensor)
    slices = {node: bounds for node in lookups if (bounds := _slice(node, constants)) is not None}
    if not slices:
        return graph
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        builder.origin = node
        if node in slices:
            builder.env[node] = builder.call(aten.slice.Tensor, builder.env[node.args[0]], *slices[node])
        else:
            builder.copy(node)
    return builder.graph


def _slice(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> tuple[int, int, int] | None:
    """Returns dimension, start and end of the slice that an index picks; None if it is no constant slice."""
    x: Any = node.args[0]
    indices: Any = node.args[1]
    indexed = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(indexed) != 1:
        return None
    dim, index = indexed[0]
    # The exporter reads a constant through operators that change nothing, such as `lift_fresh_copy`.
    while has(index.target, Trait.SAME) and not has(index.target, Trait.CAST):
        index = index.args[0]
    constant, length = constants.get(index.name), x.meta["val"].shape[dim]
    if constant is None or constant.dim() != 1 or constant.is_floating_point() or constant.dtype == torch.bool:
        return None
    # A negative place counts from the end; of a symbolic length that is another place in each call.
    if not constant.numel() or not isinstance(length, int):
        return None
    places = [place + length * (place < 0) for place in constant.tolist()]
    return (dim, places[0], places[-1] + 1) if places == list(range(places[0], places[-1] + 1)) else None
