"""balance: gives the ranks of a cut sequence equal work in causal attention.

    Before: q = linear(x, w); attention(q, apart(k), apart(v), is_causal=True)            all cut along the sequence
    After:  q = linear(zigzag(x), w); zigzag_rows(q, in_order(apart(k)), in_order(apart(v)))

A query reads the keys before it, so the rank with the end of a sequence would have the most work. In the order of
`zigzag` each rank has a piece from the front and one from the back. What a cut operator reads is brought into this
order, and what is read whole is brought back; keys and values are read in order. An operator that is cut along its rows
computes each row by itself, so that it may have its rows in any order. A sequence keeps its order where one operator
needs it: `Balanced.reasons` says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.ops.attention.zigzag import in_order, zigzag
from autotp.ops.placement_moves import apart, by_heads
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.plan.choose import Decision, carry
from autotp.passes.plan.infer_axes import Axes, visit
from autotp.passes.plan.propagate import Have, propagate
from autotp.rules.call import arguments_of, parameters
from autotp.rules.traits import draws, zigzag_of
from autotp.sharding.axis import Axis, Size, find, touches
from autotp.sharding.placement import Shard

aten = torch.ops.aten


@dataclass(frozen=True)
class Balanced:
    """A graph with balanced sequences.

    Attributes:
        graph: the graph.
        axes: its axes.
        decision: which operators are cut along which sequence.
        sequences: those in the order of `zigzag`.
        keys: the operators that bring keys and values in order.
        balanced: the number of causal attentions with equal work on all ranks.
        reasons: why the others have not: a sentence for each.
    """

    graph: fx.Graph
    axes: Axes
    decision: Decision
    sequences: tuple[Axis, ...] = ()
    keys: frozenset[fx.Node] = frozenset()
    balanced: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class OperandRead:
    """An operator that reads a value.

    Attributes:
        operand: the value.
        order: the sequence in whose order the operator reads it; None for the model's order.
    """

    operand: fx.Node
    order: Axis | None


def balance(graph: fx.Graph, axes: Axes, decision: Decision, parts: int, randomness: str) -> Balanced:
    """Returns the same function with sequences in the order of `zigzag` where causal attention is cut.

    Args:
        graph: with `apart` for keys and values.
        parts: the number of ranks over which sequences are cut.
        randomness: "exact" if dropout draws the numbers of one device: then rows keep their order.
    """
    have = propagate(graph, axes, decision.cuts, decision.held)
    attentions = [node for node in decision.cuts if _is_causal(node, axes, decision)]
    leaves = list(dict.fromkeys(find(decision.cuts[node]) for node in attentions))
    against = {leaf: next(_needs_order(graph, leaf, axes, decision, have, randomness), "") for leaf in leaves}
    # One operator that needs the order keeps it for the whole sequence.
    chosen = [leaf for leaf in leaves if not against[leaf]]
    reasons = tuple(dict.fromkeys(filter(None, against.values())))
    if not chosen:
        return Balanced(graph, axes, decision, reasons=reasons)
    writing = _BalancedGraph(graph, axes, decision, have, chosen, parts)
    for node in graph.nodes:
        writing.visit(node)
    count = sum(_among(decision.cuts[node], chosen) is not None for node in attentions)
    return Balanced(
        writing.builder.graph, writing.new_axes, writing.new, tuple(chosen), frozenset(writing.keys), count, reasons
    )


def _is_causal(node: fx.Node, axes: Axes, decision: Decision) -> bool:
    """True for a causal attention that is cut along its queries."""
    factor = axes.bound[node].cuttable(decision.cuts[node])
    return factor is not None and factor.mark == "!" and zigzag_of(node) is not None


def _needs_order(
    graph: fx.Graph, leaf: Axis, axes: Axes, decision: Decision, have: Have, randomness: str
) -> Iterator[str]:
    """Yields why a sequence has to keep its order."""
    for node, cut in decision.cuts.items():
        factor = axes.bound[node].cuttable(cut)
        if find(cut) is not leaf or factor is None:
            continue
        # One device draws a mask in the model's order.
        if draws(node) and randomness == "exact":
            yield f'{_name(node)} draws the numbers of one device (randomness="exact")'
        elif _is_causal(node, axes, decision):
            query, key = (arguments_of(node)[name].meta["val"] for name in ("query", "key"))
            dim = factor.ins[0] - query.dim()
            if Size.of(query.shape[dim]) != Size.of(key.shape[dim]):
                yield f"{_name(node)} reads another sequence"
            elif _dim(axes, axes.bound[node].operands[0], leaf) is None:
                yield f"{_name(node)} reads a sequence inside of a larger dimension"
        # It mixes rows, or makes them by their places.
        elif (factor.mark and not draws(node)) or not factor.ins:
            yield f"{_name(node)} depends on the order of rows"
    for node in graph.nodes:
        # It reads the sequence whole, on its heads, and in the model's order.
        if node.target is by_heads and any(touches(axis, leaf) for axis in axes.of(node.args[0])):
            yield "another attention exchanges heads for it"
        readings = list(_readings(node, axes, decision, have, [leaf]))
        moved = [reading for reading in readings if reading.order is not _order(reading.operand, have, [leaf])]
        if any(_dim(axes, reading.operand, leaf) is None for reading in moved):
            yield f"{_name(node)} reads a sequence inside of a larger dimension"
        if len({reading.operand for reading in readings}) < len(set(readings)):
            yield f"{_name(node)} reads one value in two orders"


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def _readings(node: fx.Node, axes: Axes, decision: Decision, have: Have, leaves: list[Axis]) -> Iterator[OperandRead]:
    """Yields each operand of a node, with the order in which the node reads it."""
    leaf, bound = decision.cuts.get(node), axes.bound.get(node)
    if bound is None:  # A size is the same in each order, and an item of a tuple is in the order of the tuple.
        keeps = node.op != "output" and isinstance(node.meta.get("val"), torch.Tensor | list | tuple)
        for operand in node.all_input_nodes if node.target is not aten.sym_size.int else ():
            yield OperandRead(operand, _order(operand, have, leaves) if keeps else None)
        return
    factor = bound.cuttable(leaf) if leaf is not None else None
    for i, operand in enumerate(bound.operands):
        yield OperandRead(operand, _among(leaf, leaves) if factor is not None and i in factor.ins else None)


def _order(node: fx.Node, have: Have, leaves: list[Axis]) -> Axis | None:
    """Returns the sequence in whose order a value is; None for a value in the model's order."""
    sequences = (_among(placement.axis, leaves) for placement in have.get(node, ()) if isinstance(placement, Shard))
    return next((leaf for leaf in sequences if leaf is not None), None)


def _among(axis: Axis | None, leaves: list[Axis]) -> Axis | None:
    """Returns which of these sequences an axis is. Axes that are unified are one."""
    return next((leaf for leaf in leaves if axis is not None and find(axis) is find(leaf)), None)


def _dim(axes: Axes, node: fx.Node, leaf: Axis) -> int | None:
    """Returns the dimension of a value that is a sequence; None if a dimension only contains it."""
    return next((d for d, axis in enumerate(axes.of(node)) if find(axis) is find(leaf)), None)


class _BalancedGraph:
    """The new graph, its axes and its decision.

    Attributes:
        moved: (old node, sequence) -> its value in the order of this sequence, or of the model (None).
        keys: the operators that bring keys and values in order.
    """

    def __init__(
        self, graph: fx.Graph, axes: Axes, decision: Decision, have: Have, leaves: list[Axis], parts: int
    ) -> None:
        self.axes, self.decision, self.have, self.leaves, self.parts = axes, decision, have, leaves, parts
        self.builder, self.new_axes = Builder(fake_mode_of(graph)), Axes()
        self.new = Decision(chosen=decision.chosen)
        self.moved: dict[tuple[fx.Node, Axis | None], fx.Node] = {}
        self.keys: list[fx.Node] = []

    def visit(self, node: fx.Node) -> None:
        self.builder.origin = node
        if node.target is apart and (leaf := _order(node.args[0], self.have, self.leaves)) is not None:  # type: ignore[arg-type]
            self._apart(node, leaf)
            return
        readings = list(_readings(node, self.axes, self.decision, self.have, self.leaves))
        before = {reading.operand: self.builder.env[reading.operand] for reading in readings}
        self.builder.env.update({reading.operand: self._in(reading.order, reading.operand) for reading in readings})
        leaf = _among(self.decision.cuts.get(node), self.leaves)
        if leaf is not None and (attention := zigzag_of(node)) is not None:
            self._attention(node, attention, leaf)
        else:
            carry(self.builder.copy(node), node, self.axes, self.new_axes, self.decision, self.new)
        # Other readers may need another order.
        self.builder.env.update(before)

    def _in(self, order: Axis | None, operand: fx.Node) -> fx.Node:
        """Returns a value in an order. It is moved once for all readers."""
        have = _order(operand, self.have, self.leaves)
        if order is have:
            return self.builder.env[operand]
        if (operand, order) not in self.moved:
            if order is None:
                move, leaf, read = in_order, have, self.builder.env[operand]
            else:
                # From one sequence's order to that of another by way of the model's.
                move, leaf, read = zigzag, order, self._in(None, operand)
            assert leaf is not None
            self.moved[operand, order] = self._called(move, read, _dim(self.axes, operand, leaf), self.parts)
        return self.moved[operand, order]

    def _called(self, target: Any, *args: Any) -> fx.Node:
        node = self.builder.call(target, *args)
        visit(node, self.new_axes)
        return node

    def _apart(self, node: fx.Node, leaf: Axis) -> None:
        """Writes a value that is read whole: its positions are brought in order after they are gathered."""
        read: Any = node.args[0]
        whole = self.builder.copy(node)
        carry(whole, node, self.axes, self.new_axes, self.decision, self.new)
        self.builder.env[node] = self._called(in_order, whole, _dim(self.axes, read, leaf), self.parts)
        self.keys.append(self.builder.env[node])

    def _attention(self, node: fx.Node, target: Any, leaf: Axis) -> None:
        arguments: Mapping[str, Any] = {**self.builder.map(arguments_of(node)), "parts": self.parts, "rank": None}
        attention = self._called(target, *(arguments[name] for name in parameters(target)))
        self.builder.env[node] = attention
        self.new.cuts[attention] = leaf
