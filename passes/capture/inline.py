"""inline: makes nested regions part of the one flat graph.

Before: wrap_with_set_grad_enabled(False, submod, x)      After: y = submod's operators; detach(y)
Before: the same, where submod writes into memory         After: y = submod's operators on detach(x); detach(y)
Before: wrap_with_autocast("cpu", ..., submod, x)         After: enter_autocast(...); operators; exit_autocast(...)
Before: _assert_tensor_metadata(x)                        After: nothing
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.rules.call import writes, written_operand
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
            builder.env[node] = (_region if enabled else _region_without_gradients)(builder, region, args)
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
    return _inlined(builder, _graph_of(region), [builder.map(arg) for arg in args])


def _region_without_gradients(builder: Builder, region: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The same under `torch.no_grad`: its outputs carry no gradient.

    If it writes into memory, it reads through `detach()`: `functionalize` says what that means. A tensor of the outer
    graph that it writes to and returns is that tensor, with its gradient.
    """
    inner, given = _graph_of(region), [builder.map(arg) for arg in args]
    if not any(writes(node) for node in inner.nodes):
        return tuple(_detached(builder, value) for value in _inlined(builder, inner, given))
    found = _inlined(builder, inner, [_detached(builder, value) for value in given])
    outer = dict(zip((node for node in inner.nodes if node.op == "placeholder"), given, strict=True))
    returned = [_written_to(node) for node in pytree.arg_tree_leaves(inner.output_node().args[0])]
    pairs = zip(returned, found, strict=True)
    return tuple(outer[node] if node in outer else _detached(builder, value) for node, value in pairs)


def _written_to(node: Any) -> Any:
    """Returns the tensor that an in-place operator returns."""
    while isinstance(node, fx.Node) and writes(node) and written_operand(node) is not None:
        node = written_operand(node)
    return node


def _graph_of(region: Any) -> fx.Graph:
    return _nested(region).graph  # type: ignore[union-attr]


def _inlined(builder: Builder, inner: fx.Graph, given: Sequence[Any]) -> tuple[Any, ...]:
    """Copies a nested graph, called with values of the new graph; returns its outputs."""
    places = [node for node in inner.nodes if node.op == "placeholder"]
    builder.env.update(zip(places, given, strict=True))
    for node in inner.nodes:
        if node.op not in ("placeholder", "output"):
            _inline_node(builder, node)
    found = builder.map(inner.output_node().args[0])
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _detached(builder: Builder, value: Any) -> Any:
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    floating = isinstance(val, torch.Tensor) and val.is_floating_point()
    return builder.call(aten.detach.default, value) if floating else value
