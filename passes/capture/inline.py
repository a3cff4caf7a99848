"""inline: makes nested regions part of the one flat graph.

Before: wrap_with_set_grad_enabled(False, submod, x)      After: y = submod's operators; detach(y)
Before: wrap_with_autocast("cpu", ..., submod, x)         After: enter_autocast(...); operators; exit_autocast(...)
Before: _assert_tensor_metadata(x)                        After: nothing
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.rules.row import Trait
from autotp.rules.traits import has

aten = torch.ops.aten


def inline(graph: fx.Graph) -> fx.Graph:
    """Returns the graph with nested graphs inlined and without assertions about metadata."""
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        _inline_node(builder, node)
    return builder.graph


def _inline_node(builder: Builder, node: fx.Node) -> None:
    builder.origin = node
    match str(node.target):
        case "wrap_with_set_grad_enabled":
            enabled, region, *args = node.args
            found = _region(builder, region, args)
            builder.env[node] = found if enabled else tuple(_detached(builder, value) for value in found)
        case "wrap_with_autocast":
            device, dtype, enabled, cache, region, *args = node.args
            entered = builder.raw(enter_autocast, (device, dtype, enabled, cache))
            builder.env[node] = _region(builder, region, args)
            builder.raw(exit_autocast, (entered,))
        case _ if has(node.target, Trait.ASSERTION) or _nested(node) is not None:
            builder.env[node] = None
        case _ if node.target is operator.getitem and isinstance(builder.map(node.args[0]), tuple):
            builder.env[node] = builder.map(node.args[0])[node.args[1]]
        case _:
            builder.copy(node)


def _nested(node: Any) -> fx.GraphModule | None:
    """Returns the nested graph that a `get_attr` node names; None if it names something else."""
    if node.op != "get_attr":
        return None
    value = getattr(node.graph.owning_module, str(node.target), None)
    return value if isinstance(value, fx.GraphModule) else None


def _region(builder: Builder, region: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Inlines a region's graph, called with `args` of the outer graph; returns its outputs in the new graph."""
    inner = _nested(region).graph  # type: ignore[union-attr]
    places = [node for node in inner.nodes if node.op == "placeholder"]
    for place, arg in zip(places, args, strict=True):
        builder.env[place] = builder.map(arg)
    for node in inner.nodes:
        if node.op not in ("placeholder", "output"):
            _inline_node(builder, node)
    found = builder.map(inner.output_node().args[0])
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _detached(builder: Builder, value: Any) -> Any:
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    floating = isinstance(val, torch.Tensor) and val.is_floating_point()
    return builder.call(aten.detach.default, value) if floating else value
