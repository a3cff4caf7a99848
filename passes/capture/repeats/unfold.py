"""unfold: replaces the operator that stands for a repeated block by the operators of the block.

Before: a = begin([x], 0); b = linear(a[0], w0); c = end([b], [w0], 0); d = again([c[0]], [w1], 0); read(d[0])
After:  b = linear(x, w0); b1 = linear(b, w1); read(b1)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autotp.passes.builder import META, Builder, copied, fake_mode_of
from autotp.passes.capture.repeats.queries import Entangled
from autotp.passes.capture.repeats.record import LAST, again, begin, end
from autotp.rules.call import updates_statistics, writes
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has


@dataclass
class Step:
    """A part of a call, up to a request or to the end of the call.

    Attributes:
        stack: the modules around its end.
        nodes: its operators.
        made: its outputs.
    """

    stack: dict[str, Any]
    nodes: list[fx.Node] = field(default_factory=list)
    made: list[fx.Node] = field(default_factory=list)


@dataclass
class Region:
    """A captured call, in the old graph.

    Attributes:
        stack: the modules around the call.
        known: for each tensor of the call, by place, the nodes that stand for it inside the block; a tensor that the
            block made has none.
        steps: its parts.
        own: the block's parameters and buffers.
    """

    stack: dict[str, Any]
    known: list[list[fx.Node]] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    own: list[fx.Node] = field(default_factory=list)

    @property
    def nodes(self) -> list[fx.Node]:
        """All its operators."""
        return [node for step in self.steps.values() for node in step.nodes]


def unfold_calls(graph: fx.Graph) -> fx.Graph:
    """Returns a graph of the same function in which every call of a block has its own operators.

    Raises:
        Entangled: a block writes into an argument, returns a view of an argument, or has computed parameters.
    """
    unfolding = _Unfolding(graph)
    for node in graph.nodes:
        unfolding.visit(node)
    _drop_unread(graph, unfolding.builder)
    return unfolding.builder.graph


class _Unfolding:
    """The state of the pass: the new graph so far.

    Attributes:
        inside: the operators of the current step of a first call; None outside of first calls.
        asking: during a request of a later call: the modules around the request in the first call, the modules around
            the first call, and the modules around the later call.
        shared: storages that both the current call and the code around it know.
        requested: storages of the arguments of requests.
        env: node of the first call -> node of the later call.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.builder, self.regions = Builder(fake_mode_of(graph)), dict[int, Region]()
        self.inside: list[fx.Node] | None = None
        self.asking: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None = None
        self.shared: set[int] = set()
        self.requested: set[int] = set()
        self.env: dict[fx.Node, Any] = {}

    def visit(self, node: fx.Node) -> None:
        """Writes a node of the old graph, or the operators that it stands for."""
        args: Any = node.args
        env = self.builder.env
        if node.target is begin:
            env[node] = self._begun(node, *args)
        elif node.target is end:
            env[node] = self._ended(node, *args)
        elif node.target is again:
            env[node] = self._repeated(node, *self.builder.map(args))
        elif node.target is operator.getitem and args[0].target in (begin, end, again):
            env[node] = env[args[0]][args[1]]
        else:
            self._copy(node)

    def _copy(self, node: fx.Node) -> None:
        if writes(node) and (self.shared | self.requested) & _memory(*_nodes(node.args[0])):
            raise Entangled  # The block and its surroundings may have views that the other side does not know.
        copy = self.builder.copy(node)
        if self.inside is not None:
            self.inside.append(node)
        elif self.asking is not None:
            copy.meta["nn_module_stack"] = _moved(*self.asking) | _deeper(_stack(node), self.asking[-1])

    def _begun(self, node: fx.Node, operands: list[fx.Node], index: int) -> Any:
        """Begins a step of a first call: its arguments or an answer enter the block."""
        region = self.regions.setdefault(index, Region(_stack(node)))
        region.known += [[user for user in node.users if user.args[1] == i] for i in range(len(operands))]
        self.inside = []
        self.shared |= _memory(node, *operands)
        return self.builder.map(operands)

    def _ended(self, node: fx.Node, made: list[fx.Node], tensors: list[Any], index: int, step: int) -> Any:
        """Ends a step of a first call: its result or the arguments of a request leave the block."""
        region = self.regions[index]
        part = region.steps.setdefault(step, Step(_stack(node)))
        part.nodes += self.inside or []
        part.made += made
        region.known += [[] for _ in made]
        region.own = [_first(n) for n in tensors]
        self.inside = None
        self.shared |= _memory(node, *made)
        if step != LAST:
            self.requested |= _memory(node, *made)
        else:
            _expect_apart(region)
            self.shared = set()
        return self.builder.map(made)

    def _repeated(self, call: fx.Node, operands: list[Any], tensors: list[Any], index: int, step: int) -> list[Any]:
        """Writes a step of a later call: the operators of the first call, on the later call's own tensors."""
        region, stack = self.regions[index], _stack(call)
        part = region.steps[step]
        # The first step of the later call; its next steps add to these.
        if self.asking is None:
            self.env = dict(zip(region.own, tensors, strict=True))
        # Not strict: later steps of the call bring the other tensors.
        self.env |= {old: operand for nodes, operand in zip(region.known, operands, strict=False) for old in nodes}
        for node in part.nodes:
            copy = self.env[node] = copied(self.builder.graph, node, self._read)
            copy.meta = {key: node.meta[key] for key in META if key in node.meta}
            copy.meta["nn_module_stack"] = _moved(_stack(node), region.stack, stack)
        self.shared |= _memory(call, *_nodes(call.args[0]))
        if step != LAST:
            self.asking = (part.stack, region.stack, stack)
            self.requested |= _memory(call)
        else:
            self.asking, self.shared = None, set()
        return [self._read(node) for node in part.made]

    def _read(self, old: fx.Node) -> Any:
        return self.env[old] if old in self.env else self.builder.env[old]


def _drop_unread(graph: fx.Graph, builder: Builder) -> None:
    """Erases operators that nothing reads any more: their results were arguments that a block does not use.

    Those with effects stay: they write into memory, update running statistics or draw random numbers.
    """
    for node in reversed(graph.nodes):
        copy = builder.env.get(node)
        if node.op != "call_function" or not node.users or not isinstance(copy, fx.Node) or copy.users:
            continue
        if not (writes(copy) or updates_statistics(copy) or draws(copy)):
            builder.graph.erase_node(copy)
            builder.env[node] = None


def _first(node: Any) -> fx.Node:
    """Returns the placeholder of a parameter or buffer, behind operators that wrote into it or left it unchanged.

    Raises:
        Entangled: the node is not a parameter or buffer: the block was called with computed tensors in their place.
    """
    while writes(node) or (_may_be_operand(node) and _memory(node) == _memory(node.args[0])):
        node = node.args[0]
    if node.op != "placeholder":
        raise Entangled
    return node


def _may_be_operand(node: fx.Node) -> bool:
    return has(node.target, Trait.SAME) and has(node.target, Trait.MAY_ALIAS)


def _stack(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("nn_module_stack") or {}


def _moved(stack: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns the modules around a node, moved from one call of a block to another call."""
    old, new_path = (list(modules.values())[-1][0] if modules else "" for modules in (before, after))
    deeper = _deeper(stack, before)
    return after | {key: (new_path + path.removeprefix(old), cls) for key, (path, cls) in deeper.items()}


def _expect_apart(region: Region) -> None:
    """Raises Entangled if the outputs of a call, or the tensors that it wrote into, share memory with its inputs."""
    inside = set(region.nodes)
    before = _memory(*(n for node in inside for n in node.all_input_nodes if n not in inside))
    within = {node for node in inside if not _memory(node) & before}
    written = [node for node in inside if writes(node)]
    args = [node for step, part in region.steps.items() for node in part.made if step != LAST]
    made = region.steps[LAST].made
    if not within >= {*args, *made} or any(set(node.all_input_nodes[:1]) - within - {*region.own} for node in written):
        raise Entangled
    lies = [_memory(*args), *map(_memory, made)]  # Arguments of requests may share memory: nothing writes into them.
    if len(set().union(*lies)) < sum(map(len, lies)):
        raise Entangled


def _deeper(stack: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    """Returns the modules of a stack that are inside of the modules around a call."""
    return dict(list(stack.items())[len(outer) :])


def _nodes(argument: Any) -> list[fx.Node]:
    """Returns the nodes in an argument."""
    nodes: list[fx.Node] = []
    fx.map_arg(argument, nodes.append)
    return nodes


def _memory(*nodes: fx.Node) -> set[int]:
    """Returns the storages of the tensors of these nodes. Raises Entangled for a sparse tensor, which has several."""
    values = [node.meta.get("val") for node in nodes]
    flat = [x for value in values for x in (value if isinstance(value, tuple | list) else [value])]
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    if any(x.layout is not torch.strided for x in tensors):
        raise Entangled
    return {x.untyped_storage()._cdata for x in tensors}
