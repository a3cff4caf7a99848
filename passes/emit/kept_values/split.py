"""split: a block's graph for forward, and graphs for backward that compute again what forward has dropped.

    Before: h = linear(x, w); g = gelu(h); y = linear(g, v)           fates: {"gelu": "recompute"}
    After:  forward:  h = linear(x, w); g = gelu(h); enter(call); y = linear(g, v); leave(call); return y, (h,)
            backward: g = gelu(h), when the gradient of `v` asks for `g`

While a block runs between `enter` and `leave`, autograd gets a number for each tensor that it wants to keep. A part is
the operators that must run again for some of these numbers. Two parts have no dropped value in common, so each runs
when backward asks for its first number, and not before. An operator whose result nobody asks for is in no part.

NOTE [What a part reads]
A part reads inputs of the block, and outputs of kept operators, which stay until backward. A view is computed again.
What writes in place (a sum over ranks, an update of a cache) runs again exactly if the operator runs again that made
the memory. An operator that draws random numbers gets the random state of forward, unless the one that drew before it
is in the part as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._ops import OpOverload

from autotp.ops.collectives import copy
from autotp.ops.dropout import exact_dropout, fast_dropout
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.passes.emit.kept_values.exact_bits import is_exact
from autotp.passes.emit.kept_values.fates import Fates, SavedTensor, SavingRun
from autotp.rules.traits import draws

aten = torch.ops.aten
MASKS = {aten.dropout.default, aten.native_dropout.default, fast_dropout, exact_dropout}
"""Operators that draw a mask for their first operand, and read only its sizes for that."""
Policy = Literal["kept", "input", "recompute", "mask", "host", "bits"]
"""What happens with one saved tensor. mask: the operator that draws it runs again, on any operand."""
Source = tuple[Literal["part", "input", "store"], int]
"""Where backward gets a number's tensor: the number of a part, the place of an input, or the number of a memory."""


@dataclass(frozen=True, kw_only=True)
class ReplayPart:
    """Operators that backward runs again together.

    Attributes:
        run: runs their graph; it reads the call, `inputs` and `read_values`, and returns the values of `by_output`.
        inputs: places among the inputs of the block.
        read_values: places among the values that parts read.
        by_hook: for each tensor that autograd saves in this graph, in order, its number; -1 for none.
        by_output: the numbers of tensors that lie in the memory of an output, in the order of the outputs.
        draws: whether it draws random numbers.
    """

    run: Callable[..., Any]
    inputs: tuple[int, ...]
    read_values: tuple[int, ...]
    by_hook: tuple[int, ...]
    by_output: tuple[int, ...]
    draws: bool


@dataclass(frozen=True, kw_only=True)
class Split:
    """A block's graph for forward, and what backward runs again.

    Attributes:
        forward: runs the graph; it reads the call and the block's inputs, and returns the result and the values that
            parts read.
        policies: for each tensor that autograd saves between `enter` and `leave`, in order, what happens with it.
        numbers_only: whether autograd gets a number for each of them.
        saved: the places of these tensors among all that autograd saves.
        sources: number -> where backward gets the tensor.
        parts: what runs again.
        inputs: the places of the inputs that must stay for this.
        read_values: the nodes whose outputs parts read.
        learns: for each of them whether it has a gradient.
        states: the names of operators before which forward notes the random state.
        blanks: the names of nodes whose place a tensor with any values takes.
    """

    forward: Callable[..., Any]
    policies: tuple[Policy, ...]
    numbers_only: bool
    saved: tuple[int, ...]
    sources: tuple[Source | None, ...]
    parts: tuple[ReplayPart, ...]
    inputs: tuple[int, ...]
    read_values: tuple[fx.Node, ...]
    learns: tuple[bool, ...]
    states: tuple[str, ...]
    blanks: tuple[str, ...]


@dataclass(frozen=True)
class Operators:
    """What the nodes of a block are, before a later pass calls torch's Python functions in their place.

    Attributes:
        by_name: name of a node -> its operator.
        drawing: the names of nodes that draw random numbers.
    """

    by_name: Mapping[str, Any]
    drawing: frozenset[str]

    @classmethod
    def of(cls, graph: fx.Graph) -> Operators:
        """Returns what the nodes of a graph are."""
        by_name = {node.name: node.target for node in graph.nodes if node.op == "call_function"}
        return cls(by_name, frozenset(node.name for node in graph.nodes if draws(node)))

    def is_view(self, node: fx.Node) -> bool:
        """True for an operator that writes nothing, so that it may run again on memory that is not its own."""
        # A node that came later is one of several views of a tensor: `python_calls.py`.
        target = self.by_name.get(node.name)
        if isinstance(target, OpOverload):
            return not target._schema.is_mutable
        # `fresh` lets a sum write into its operand, and a copy into its gradient: `in_place.py`.
        return target is copy or not node.kwargs.get("fresh")


def split_block(
    module: fx.GraphModule, operators: Operators, run: SavingRun, fates: Fates, ends_early: bool = True
) -> Split:
    """Returns a block's graph for forward, and what backward runs again.

    Args:
        operators: what the nodes of the graph are.
        run: a run of the block, which tells what autograd saves.
        ends_early: whether operators whose results backward does not need are left out; else all that is dropped runs
            again, and what reads it, as in a checkpoint around both.
    """
    return _Splitting(module, operators, run, fates).result(ends_early)


class _Splitting:
    """What `split_block` knows of a block: the policy of each saved tensor, and what can be read in backward."""

    def __init__(self, module: fx.GraphModule, operators: Operators, run: SavingRun, fates: Fates) -> None:
        self.operators, self.run, self.fates = operators, run, fates
        self.nodes = list(module.graph.nodes)
        self.by_name = {node.name: node for node in self.nodes}
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.places = {n: i for i, n in enumerate(n for n in self.nodes if n.op == "placeholder")}
        self.drawing = [node for node in self.nodes if node.name in operators.drawing]
        self.regions = {n for n in self.nodes if n.target in (enter_autocast, exit_autocast)}
        self.writers: dict[str, list[fx.Node]] = {}
        for node in self.nodes:
            if self.maker(node) not in (None, node.name) and not operators.is_view(node):
                self.writers.setdefault(str(self.maker(node)), []).append(node)
        self.policies = [self._policy(saved) for saved in run.saved]

    def maker(self, node: fx.Node) -> str | None:
        """Returns the name of the node that made the memory of a node's output; None for what is no tensor."""
        return self.run.origins.get(node.name)

    def _is_input(self, name: str | None) -> bool:
        return name is not None and self.by_name[name].op == "placeholder"

    def _policy(self, saved: SavedTensor) -> Policy:
        fate, plain = saved.fate(self.fates), saved.index not in self.run.irregular
        node = self.by_name[saved.node]
        target = self.operators.by_name.get(node.name)
        if self._is_input(saved.origin):
            unchanged = plain and self.run.geometries[str(saved.origin)].dtype == saved.dtype
            # Several inputs in one memory may lie elsewhere in it at the next call: autograd keeps the right one.
            unchanged &= saved.memory not in self.run.shared
            return "input" if unchanged else "kept"
        if fate == "bits" and saved.origin is None and target in MASKS and node in self.drawing:
            return "mask"
        if fate == "recompute" or (fate == "host" and plain and saved.bytes):
            return fate
        return "bits" if fate == "bits" and plain and is_exact(saved, node, self.run.geometries) else "kept"

    def is_dropped(self, node: fx.Node) -> bool:
        """True if the memory of a node's output is dropped after forward."""
        maker = self.maker(node)
        return maker is not None and not self._is_input(maker) and self.fates.get(maker) == "recompute"

    def is_there(self, node: fx.Node) -> bool:
        """True if backward can read a node's output: NOTE [What a part reads]."""
        if node.op == "placeholder" or self.maker(node) is None:
            return node not in self.regions
        if self.is_dropped(node):
            return False
        made = {node.name, node.args[0].name if node.target is operator.getitem else node.name}  # type: ignore[union-attr]
        return self.maker(node) in made or not self.operators.is_view(node)

    def needed(self, targets: list[fx.Node]) -> set[fx.Node]:
        """Returns the operators that must run so that these have run."""
        nodes, queue = set[fx.Node](), list(targets)
        while queue:
            node = queue.pop()
            if node not in nodes:
                nodes.add(node)
                queue += [n for n in node.all_input_nodes if not self.is_there(n)]
                queue += self.writers.get(node.name, [])
        return nodes

    def provider(self, saved: SavedTensor) -> tuple[fx.Node, int | None] | None:
        """Returns the node in whose output a dropped tensor lies, and the place among its outputs; None if in none."""
        if saved.origin is None or saved.index in self.run.irregular:
            return None
        name, place, geometry = self.run.outputs[saved.memory]
        return (self.by_name[name], place) if geometry.dtype == saved.dtype else None

    # ---- parts

    def groups(self, ends_early: bool) -> list[set[fx.Node]]:
        """Returns the operators of each part: of dropped tensors that have a dropped value in common."""
        groups: list[set[fx.Node]] = []
        for saved, policy in zip(self.run.saved, self.policies, strict=True):
            if policy != "recompute":
                continue
            provider = self.provider(saved)
            nodes = self.needed([self.by_name[saved.node] if provider is None else provider[0]])
            dropped = {node for node in nodes if self.is_dropped(node) or node is self.by_name[saved.node]}
            for group in [group for group in groups if group & dropped]:
                groups.remove(group)
                nodes |= group
            groups.append(nodes)
        if groups and not ends_early:
            makers = [node for node in self.nodes if self.is_dropped(node)]
            readers = [user for node in makers for user in node.users if user.op == "call_function"]
            groups[0] |= self.needed(makers + readers)
        return groups

    def result(self, ends_early: bool) -> Split:
        """Returns the split."""
        groups = [(nodes, False) for nodes in self.groups(ends_early)]
        masks = dict.fromkeys(
            t.node for t, policy in zip(self.run.saved, self.policies, strict=True) if policy == "mask"
        )
        groups += [({self.by_name[name]}, True) for name in masks]
        hooked = {
            t.node for t, policy in zip(self.run.saved, self.policies, strict=True) if policy not in ("kept", "input")
        }
        saved = [t for t in self.run.saved if t.node in hooked]
        numbers = {t.index: j for j, t in enumerate(saved)}
        sources: list[Source | None] = [self._source(t) for t in saved]
        states = [node for nodes, _ in groups for node in self._after_others(nodes)]
        states.sort(key=self.order.__getitem__)
        builder = _Parts(self, numbers, states)
        parts = []
        for nodes, on_any_operand in groups:
            part = builder.part(nodes, on_any_operand)
            parts.append(part)
            for j in (*part.by_hook, *part.by_output):
                if j >= 0:
                    sources[j] = "part", len(parts) - 1
        inputs = {i for part in parts for i in part.inputs} | {s[1] for s in sources if s and s[0] == "input"}
        read_values = builder.read_values
        policies = tuple(self.policies[t.index] for t in saved)
        return Split(
            forward=self._forward(hooked, states, read_values), policies=policies,
            numbers_only=not {"kept", "host", "bits"} & set(policies),
            saved=tuple(t.index for t in saved), sources=tuple(sources), parts=tuple(parts),
            inputs=tuple(sorted(inputs)), read_values=tuple(read_values),
            learns=tuple(n.name in self.run.learns for n in read_values),
            states=tuple(node.name for node in states), blanks=tuple(builder.blanks),
        )  # fmt: skip

    def _source(self, saved: SavedTensor) -> Source | None:
        """Returns where backward gets a tensor that is in no part."""
        match self.policies[saved.index]:
            case "input":
                return "input", self.places[self.by_name[str(saved.origin)]]
            case "host" | "bits":
                return "store", saved.memory
        return None

    def _after_others(self, nodes: set[fx.Node]) -> Iterator[fx.Node]:
        """Yields the operators of a part that draw after one that is not in the part."""
        before: fx.Node | None = None
        for node in self.drawing:
            if node in nodes and before not in nodes:
                yield node
            before = node

    def _forward(self, hooked: set[str], states: list[fx.Node], read_values: list[fx.Node]) -> Callable[..., Any]:
        graph, env, is_open = fx.Graph(), dict[fx.Node, fx.Node](), False
        call = graph.placeholder("call")
        saving = {t.node for t in self.run.saved}
        for node in self.nodes:
            if node.op == "output":
                break
            if is_open and node.name in saving - hooked:
                graph.call_method("leave", (call,))
                is_open = False
            if node in states:
                graph.call_method("note_state", (call,))
            if node.name in hooked and not is_open:
                graph.call_method("enter", (call,))
                is_open = True
            env[node] = graph.node_copy(node, env.__getitem__)
        if is_open:
            graph.call_method("leave", (call,))
        result = fx.map_arg(self.nodes[-1].args[0], env.__getitem__)
        graph.output((result, tuple(env[node] for node in read_values)))
        return fx.GraphModule(nn.Module(), graph).forward


class _Parts:
    """Makes the graphs of parts; `read_values` and `blanks` are what they read so far beside inputs of the block."""

    def __init__(self, of: _Splitting, numbers: Mapping[int, int], states: list[fx.Node]) -> None:
        self.of, self.numbers, self.states = of, numbers, states
        self.read_values: list[fx.Node] = []
        self.blanks: list[str] = []

    def part(self, nodes: set[fx.Node], on_any_operand: bool) -> ReplayPart:
        """Returns a part. on_any_operand: what it reads may have any values: it is run for a mask."""
        of = self.of
        ordered = sorted(nodes | of.regions, key=of.order.__getitem__)
        reads = dict.fromkeys(n for node in ordered for n in node.all_input_nodes if n not in nodes | of.regions)
        graph = fx.Graph()
        call, env = graph.placeholder("call"), dict[fx.Node, fx.Node]()
        blanks = [node.all_input_nodes[0] for node in nodes if on_any_operand]
        inputs = [n for n in reads if n.op == "placeholder" and n not in blanks]
        read_values = [n for n in reads if n.op != "placeholder" and n not in blanks]
        env |= {n: graph.placeholder(n.name) for n in (*inputs, *read_values)}
        for n in blanks:
            env[n] = graph.call_method("blank", (call, len(self.blanks)))
            self.blanks.append(n.name)
        for node in ordered:
            if node in self.states:
                graph.call_method("set_state", (call, self.states.index(node)))
            env[node] = graph.node_copy(node, env.__getitem__)
        by_output = self._by_output(nodes)
        graph.output(tuple(_item(graph, env[node], place) for node, place in by_output.values()))
        self.read_values += [n for n in read_values if n not in self.read_values]
        saved = [t for t in of.run.saved if of.by_name[t.node] in nodes]
        policies = ("mask" if on_any_operand else "recompute"), "input"
        return ReplayPart(
            run=fx.GraphModule(nn.Module(), graph).forward, inputs=tuple(of.places[n] for n in inputs),
            read_values=tuple(map(self.read_values.index, read_values)),
            by_hook=tuple(self.numbers.get(t.index, -1) if of.policies[t.index] in policies else -1 for t in saved),
            by_output=tuple(by_output), draws=any(node in nodes for node in of.drawing),
        )  # fmt: skip

    def _by_output(self, nodes: set[fx.Node]) -> dict[int, tuple[fx.Node, int | None]]:
        """Returns, by number, where the tensors lie that are saved by operators outside of a part."""
        providers = {}
        for saved in self.of.run.saved:
            outside = self.of.by_name[saved.node] not in nodes and self.of.policies[saved.index] == "recompute"
            provider = self.of.provider(saved) if outside else None
            if provider is not None and provider[0] in nodes:
                providers[self.numbers[saved.index]] = provider
        return providers


def _item(graph: fx.Graph, value: fx.Node, place: int | None) -> fx.Node:
    return value if place is None else graph.call_function(operator.getitem, (value, place))
