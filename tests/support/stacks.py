"""Stacks of blocks, and how many of them run while they are captured once."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.passes.canonicalize.cse import cse
from autotp.passes.capture.capture import capture
from autotp.passes.capture.skeleton import skeleton_of
from autotp.passes.lower.dce import live
from autotp.rules.call import writes
from autotp.rules.traits import draws
from autotp.source_location import layer_of

RAN: list[str] = []
"""A word for each block that ran."""
X = torch.zeros(3, 5, 8)


def told(graph: fx.Graph) -> list[str]:
    """Every operator that matters: what it reads, what it gives and the module that it is from; draws in their order.

    Values are named for all that they are made of, so that nothing depends on the order of what may come in any.
    """
    if not any(map(writes, graph.nodes)):
        graph = cse(graph)  # A size is computed once for all layers, or in each.
    needed, names, found, drawn = live(graph), dict[fx.Node, str](), list[str](), 0

    for node in reversed(graph.nodes):
        if node in needed or writes(node):
            needed.update([node, *node.all_input_nodes])

    def spelled(a: Any) -> str:
        return names[a] if isinstance(a, fx.Node) else f"{type(a).__name__} {a}"

    for node in graph.nodes:
        if "lift" in node.name or (node.all_input_nodes and names.get(node.all_input_nodes[0]) == "constant"):
            names[node] = "constant"  # One for each time its line ran.
        elif node in needed:
            val = node.meta.get("val")
            several = val if isinstance(val, tuple | list) else [val]
            gives = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in several]
            args = fx.node.map_aggregate((node.args, node.kwargs), spelled)
            drawn += draws(node)
            line = f"{node.op} {node.target} {args} {gives} {layer_of(node)} {drawn if draws(node) else ''}"
            if isinstance(val, torch.SymInt):  # Computed again by a block, or not.
                line = f"{node.target} {args}"
                found = [it for it in found if it != line]
            found.append(line)
            names[node] = f"{node.name.rstrip('_0123456789')}-{zlib.crc32(line.encode()):x}"
    return sorted(found)


def runs(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """How many blocks ran while the model was captured, of which the graph is as if all had."""
    graphs, counts = [], []
    for once in (False, True):
        RAN.clear()
        graphs.append(told(capture(skeleton_of(model), args, kwargs, once=once).graph))
        counts.append(len(RAN))
    assert graphs[0] == graphs[1]
    return counts[1]


class Block(nn.Module):
    """x + dropout(down(up(x))), and whatever a test has it do besides."""

    def __init__(self, does: Callable[..., Any] | None = None, width: int = 16, **attributes: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.drop = nn.Dropout(0.1)
        self.does = does
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        RAN.append("block")
        y = x + self.drop(self.down(self.up(x)))
        return y if self.does is None else self.does(self, x, y, *args, **kwargs)


class Stack(nn.Module):
    """Blocks behind one another, each called as `call(model, i, block, x)` says."""

    def __init__(self, *blocks: nn.Module, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x) if self.call is None else self.call(self, i, block, x)
        return x


def stack(n: int = 4, does: Callable[..., Any] | None = None, call: Callable[..., Any] | None = None) -> Stack:
    return Stack(*(Block(does) for _ in range(n)), call=call)


def scaled(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return y / (block.index + 1)


class Noted:
    """An object that a block may leave something in."""
