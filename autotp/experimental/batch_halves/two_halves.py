"""two_halves: computes a batch in two halves, in one graph; or the sequence of a batch of one row.

    Before: y = linear(x, w); z = gelu(y); loss = mean(z)
    After:  x0, x1 = halves(x, 0); y0 = linear(x0, w); y1 = linear(x1, w); z0 = gelu(y0); z1 = gelu(y1)
            loss = mean(joined(z0, z1, 0))

NOTE [Halves are two ranks of one process]
The batch is cut as over a mesh axis with two ranks that share one process and its parameters. So the same functions
plan, lower and check the two ranks' graphs, and `merged` makes one graph of both. There a scatter is `halves`, a gather
is `joined`, and a sum over the two ranks is an addition. What both ranks compute of the same values is computed once.
Autograd adds the gradients of a value that both halves read: a copy needs nothing. An operator that mixes rows (a batch
norm, a mean with a divisor) reads the whole batch, so no proof of independent rows is needed.

A row is divided as `context_parallel` cuts it; where that has cut it already, it is not divided again. Nothing is
divided in evaluation: in generation, caches would be copied for each token.

Random numbers are drawn for the whole batch, in the order of one device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autotp.errors import Error
from autotp.experimental.batch_halves.causal_masks import causal_masks
from autotp.experimental.batch_halves.halves import halves, joined
from autotp.ops.collectives import all_gather, copy, gather, joined_terms, reduce, reduce_scatter, scatter
from autotp.ops.placement_moves import apart, first
from autotp.passes.builder import PART, Builder, fake_mode_of
from autotp.passes.canonicalize.cse import argument_key
from autotp.passes.check.check import check
from autotp.passes.lower.dce import dce
from autotp.passes.lower.decompose import decompose
from autotp.passes.lower.defer_reductions import defer_reductions
from autotp.passes.lower.local_sizes import Target
from autotp.passes.lower.lower import lower
from autotp.passes.plan.infer_axes import Axes, Factor
from autotp.passes.plan.propagate import needs_grad
from autotp.passes.plan.sequence.context_parallel import CutSequences, context_parallel, cut_sequences
from autotp.passes.plan.sequence.separate_keys import joined_again
from autotp.passes.program.planned import decoupled
from autotp.passes.program.program import ProgramWithAxes
from autotp.passes.program.sequences import can_be_divided
from autotp.rules.traits import draws
from autotp.sharding.axis import Axis, leaves
from autotp.sharding.placement import JOINED
from autotp.source_location import line_of

aten = torch.ops.aten
AXIS = "half"
"""The name of the mesh axis whose two ranks are the halves."""
WITHOUT = 'overlap="none", and a report of it'
"""What to write if the halves do not compute the same."""


def two_halves(p: ProgramWithAxes) -> ProgramWithAxes:
    """Returns the program with a graph that computes the batch, or the sequence of its one row, in two halves."""
    cut = _cut(p)
    if cut is None:
        none = "nothing: a batch is divided in training, and one row where an attention has a sequence that can be cut"
        return replace(p, notes={**p.notes, "overlap": none})
    graph, axes, decision = decompose(cut.graph, cut.axes, cut.decision)
    if p.options.optional("defer_reductions"):
        graph, axes, decision = defer_reductions(graph, axes, decision)
    differentiable, separate = needs_grad(graph, p.sources_of(graph)), {n for n in graph.nodes if n.target is apart}
    graphs = []
    for half in (0, 1):
        to = Target(AXIS, 2, half, p.options.randomness)
        graphs.append(dce(lower(graph, axes, decision, differentiable, to, separate)))
        check(graphs[-1], graph, {}, [*p.captured.parameters, *p.captured.inputs], to, {})
    joined_graph = dce(joined_again(merged(graphs)))
    undivided = tuple((node, "it needs both halves: they wait for each other") for node in cut.whole)
    note = f"{len(cut.decision.cuts)} operators compute in halves, which take turns"
    # The graph of both is a new one, so its axes are inferred again.
    return decoupled(
        replace(p, graph=joined_graph, undivided=(*p.undivided, *undivided), notes={**p.notes, "overlap": note})
    )


def _cut(p: ProgramWithAxes) -> CutSequences | None:
    """Returns the decision which operators are divided along which axis; None if nothing is divided."""

    def has_halves(node: fx.Node, factor: Factor, leaf: Axis) -> bool:
        randomness = p.options.randomness
        return can_be_divided(randomness, node, factor, leaf) and (randomness == "fast" or not draws(node))

    if not p.call.training:
        return None
    if along := batch_axes(p.graph, p.axes, p.rows):
        return cut_sequences(p.graph, p.axes, along, p.sources_of, has_halves)
    return context_parallel(dce(causal_masks(p.graph)), p.sources_of, has_halves) if p.options.cp == 1 else None


def batch_axes(graph: fx.Graph, axes: Axes, rows: Collection[str]) -> list[Axis]:
    """Returns the axes of the batch.

    Args:
        rows: placeholder names of the inputs that are a batch, along their first dimension.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name in rows]
    return list(dict.fromkeys(next(leaves(axes.of(node)[0])) for node in inputs if node.meta["val"].shape[0] != 1))


def merged(graphs: Sequence[fx.Graph]) -> fx.Graph:
    """Returns one graph of the graphs of both halves.

    Args:
        graphs: the lowered graphs of the two ranks of the axis `AXIS`.
    """
    merging = _Merging(Builder(fake_mode_of(graphs[0])))
    # `lower` gives all ranks' graphs the same nodes (`Local.times`), so they are the same two by two.
    for pair in zip(*(graph.nodes for graph in graphs), strict=True):
        merging.visit(pair)
    return merging.builder.graph


Pair = tuple[fx.Node, fx.Node]


@dataclass
class _Merging:
    """The graph of both halves.

    Attributes:
        env: for each half: node of its graph -> node of the new graph.
    """

    builder: Builder

    def __post_init__(self) -> None:
        self.env: tuple[dict[fx.Node, fx.Node], dict[fx.Node, fx.Node]] = {}, {}

    def visit(self, pair: Pair) -> None:
        """Writes an operator of both halves."""
        self.builder.origin = pair[0]
        if any(node.op != pair[0].op or node.target is not pair[0].target for node in pair) and not _is_named(pair[0]):
            problem = f"the halves of a batch are computed by other operators: {pair}"
            raise Error(problem, at=line_of(pair[0]), fix=WITHOUT)
        if pair[0].target in MOVES and pair[0].args[1] == AXIS:
            self._give(pair, *MOVES[pair[0].target](self, pair))
            return
        arguments = [self._mapped(half, (node.args, node.kwargs)) for half, node in enumerate(pair)]
        if argument_key(arguments[0]) == argument_key(arguments[1]) or _is_one_size(pair):
            shared = self._written(pair[0], arguments[0], None)
            self._give(pair, shared, shared)
        else:
            self._give(pair, *(self._written(node, arguments[half], half) for half, node in enumerate(pair)))

    def _written(self, node: fx.Node, arguments: tuple[Any, Any], half: int | None) -> fx.Node:
        merged_node = self.builder.graph.create_node(node.op, node.target, *arguments, name=node.name)
        merged_node.meta = dict(node.meta) if half is None else {**node.meta, PART: (half, 2)}
        return merged_node

    def _mapped(self, half: int, value: Any) -> Any:
        return fx.map_arg(value, lambda node: self.env[half][node])

    def _give(self, pair: Pair, a: fx.Node, b: fx.Node) -> None:
        self.env[0][pair[0]], self.env[1][pair[1]] = a, b

    def operands(self, pair: Pair) -> tuple[fx.Node, fx.Node]:
        """Returns the first operands of an operator in the new graph."""
        return self.env[0][pair[0].args[0]], self.env[1][pair[1].args[0]]  # type: ignore[index]

    def call(self, like: fx.Node | None, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Writes a call, with the example value of `like`."""
        node = self.builder.raw(target, args)
        if like is not None:
            node.meta["val"] = like.meta["val"]
        return node

    def divided(self, pair: Pair, x: fx.Node, dim: int, block: int) -> tuple[fx.Node, fx.Node]:
        """Writes the halves of a tensor."""
        pieces = self.call(None, halves, x, dim, block)
        pieces.meta["val"] = [node.meta["val"] for node in pair]
        a, b = (self.call(node, operator.getitem, pieces, i) for i, node in enumerate(pair))
        return a, b


def _is_one_size(pair: Pair) -> bool:
    """True for the size of an undivided dimension, which each half reads off a value of its own."""
    a, b = (node.meta.get("val") for node in pair)
    return isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and a.node.expr == b.node.expr


def _is_named(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")


def _where(pair: Pair) -> tuple[int, int]:
    """Returns the dimension along which a conjugate moves a value, and the number of positions that stay together."""
    _, _, dim, _, block = (*pair[0].args, 1)[:5]
    return dim % pair[0].args[0].meta["val"].dim(), block  # type: ignore[union-attr, return-value]


def _same(merging: _Merging, pair: Pair) -> tuple[fx.Node, fx.Node]:
    """A copy: both halves read it. A `first`: both have the same numbers, and one gets the gradient."""
    a, b = merging.operands(pair)
    return (a, b) if pair[0].target is copy else (a, a)


def _scattered(merging: _Merging, pair: Pair) -> tuple[fx.Node, fx.Node]:
    a, b = merging.operands(pair)
    if a is not b:
        problem = "a value that both halves compute for themselves cannot be divided"
        raise Error(problem, at=line_of(pair[0]), fix=WITHOUT)
    return merging.divided(pair, a, *_where(pair))


def _gathered(merging: _Merging, pair: Pair) -> tuple[fx.Node, fx.Node]:
    gathered = merging.call(pair[0], joined, *merging.operands(pair), _where(pair)[0])
    return gathered, gathered


def _summed(merging: _Merging, pair: Pair) -> fx.Node:
    a, b = merging.operands(pair)
    op = pair[0].args[2] if pair[0].target is reduce and len(pair[0].args) > 2 else "sum"
    if op in JOINED:
        both = merging.call(pair[0].args[0], aten.stack.default, [a, b])  # type: ignore[arg-type]
        return merging.call(pair[0].args[0], joined_terms, both, op)  # type: ignore[arg-type]
    joins = {"max": aten.maximum.default}
    return merging.call(pair[0].args[0], joins.get(op, aten.add.Tensor), a, b)  # type: ignore[arg-type, call-overload]


def _reduced(merging: _Merging, pair: Pair) -> tuple[fx.Node, fx.Node]:
    total = _summed(merging, pair)
    return total, total


def _reduce_scattered(merging: _Merging, pair: Pair) -> tuple[fx.Node, fx.Node]:
    return merging.divided(pair, _summed(merging, pair), *_where(pair))


MOVES: dict[Any, Callable[[_Merging, Pair], tuple[fx.Node, fx.Node]]] = {
    copy: _same,
    first: _same,
    scatter: _scattered,
    gather: _gathered,
    all_gather: _gathered,
    reduce: _reduced,
    reduce_scatter: _reduce_scattered,
}
"""What a conjugate of two ranks is in the graph of both."""
