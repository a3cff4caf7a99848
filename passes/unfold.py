"""unfold: what a block's call stands for where it was captured as "the same again" (`autotp/repeats.py`).

Before: a = begin([x], 0); b = linear(a[0], w0); c = end([b], [w0], 0); d = again([c[0]], [w1], 0); read(d[0])
After:  b = linear(x, w0); b1 = linear(b, w1); read(b1)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autotp.builder import META, Builder, fake_mode_of
from autotp.call import writes
from autotp.repeats import again, begin, end


class Entangled(Exception):
    """A block shares memory with what is around it, which calls by operators do not show: they must not be made."""


@dataclass
class Region:
    """A call that was captured, in the old graph.

    Attributes:
        stack: the modules that it is inside of.
        inputs: the nodes that stand for what it is given, in order: as many as were given, some read by nobody.
        nodes: its operators.
        made: what it returns.
        own: the block's parameters and buffers.
    """

    stack: dict[str, Any]
    inputs: list[list[fx.Node]] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    made: list[fx.Node] = field(default_factory=list)
    own: list[fx.Node] = field(default_factory=list)


def unfold(graph: fx.Graph) -> fx.Graph:
    """The same function, every call of a block with operators of its own.

    Raises:
        Entangled: a block writes into what it is given, returns a view of it, or has parameters that were computed.
    """
    builder, regions = Builder(fake_mode_of(graph)), dict[int, Region]()
    current: Region | None = None
    for node in graph.nodes:
        args: Any = node.args
        if node.target is begin:
            current = regions.setdefault(args[1], Region(_stack(node)))
            current.inputs += [[user for user in node.users if user.args[1] == i] for i in range(len(args[0]))]
            builder.env[node] = builder.map(args[0])
        elif node.target is end:
            region, current = regions[args[2]], None
            region.made += args[0]
            region.own = [_first(n) for n in args[1]]
            _expect_apart(region)
            builder.env[node] = builder.map(args[0])
        elif node.target is again:
            builder.env[node] = _written_out(builder, regions[args[2]], node)
        elif node.target is operator.getitem and args[0].target in (begin, end, again):
            builder.env[node] = builder.env[args[0]][args[1]]
        else:
            builder.copy(node)
            if current is not None:
                current.nodes.append(node)
    _drop_unread(graph, builder)
    return builder.graph


def _drop_unread(graph: fx.Graph, builder: Builder) -> None:
    """Drops what nothing reads any more: a call was given it, and its block has no use for it."""
    for node in reversed(graph.nodes):
        new = builder.env.get(node)
        if node.op != "call_function" or not node.users or not isinstance(new, fx.Node) or new.users:
            continue
        if not writes(new):
            builder.graph.erase_node(new)
            builder.env[node] = None


def _written_out(builder: Builder, region: Region, call: fx.Node) -> list[Any]:
    """The operators of a region once more, on other inputs and the parameters of another block; its outputs."""
    inputs, own = (builder.map(args) for args in call.args[:2])
    env = {old: new for parts, new in zip(region.inputs, inputs, strict=True) for old in parts}
    env |= dict(zip(region.own, own, strict=True))
    for node in region.nodes:
        new = env[node] = builder.graph.node_copy(node, lambda old: env[old] if old in env else builder.env[old])
        new.meta = {key: node.meta[key] for key in META if key in node.meta}
        new.meta["nn_module_stack"] = _moved(_stack(node), region.stack, _stack(call))
    return [env[node] if node in env else builder.env[node] for node in region.made]


def _first(node: Any) -> fx.Node:
    """The parameter or buffer itself, of what an operator returned that wrote into it.

    Raises:
        Entangled: it is neither: the block was called with others than its own.
    """
    while writes(node):
        node = node.args[0]
    if node.op != "placeholder":
        raise Entangled
    return node


def _stack(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("nn_module_stack") or {}


def _moved(stack: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The modules that a node of one call is inside of, in another call."""
    old, new = (list(around.values())[-1][0] if around else "" for around in (before, after))
    deeper = list(stack.items())[len(before) :]
    return after | {key: (new + path.removeprefix(old), kind) for key, (path, kind) in deeper}


def _expect_apart(region: Region) -> None:
    """Raises Entangled if what a call made, or wrote into, lies in memory that was there before."""
    before = _before(region)
    within = {node for node in region.nodes if not _memory(node) & before}
    written = [node for node in region.nodes if writes(node)]
    if not within >= {*region.made} or any(set(node.all_input_nodes[:1]) - within - {*region.own} for node in written):
        raise Entangled
    lies = [_memory(node) for node in region.made]
    if len(set().union(*lies)) < sum(map(len, lies)):
        raise Entangled


def _before(region: Region) -> set[int]:
    """The memory of all that a region reads from outside."""
    inside = set(region.nodes)
    read = {n for node in region.nodes for n in node.all_input_nodes if n not in inside}
    return set().union(*map(_memory, read))


def _memory(node: fx.Node) -> set[int]:
    """The storages that a node's tensors lie in."""
    values = node.meta.get("val")
    several = values if isinstance(values, tuple | list) else [values]
    return {value.untyped_storage()._cdata for value in several if isinstance(value, torch.Tensor)}
