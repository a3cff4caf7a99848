"""context_parallel: decides which operators are cut along a sequence, over the ranks of the axis `cp`.

    Before: x = embedding(w, tokens); q = linear(x, wq); attention(q, apart(k), apart(v), mask)
    After:  all of them are cut along the sequence of x; `apart` reads the keys whole

Every operator that a gradient flows through is cut if its rule allows it, along the sequence of its rows. What is
computed of numbers alone (a shift of labels, positions, tables of sines) stays whole, unless only cut operators read
it and it has the sequence anyway, such as a mask. Parameters are whole on every rank. What mixes along a sequence
otherwise (a recurrence, a convolution) is computed whole by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autotp.ops.placement_moves import apart
from autotp.passes.plan.candidate import readers
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import Axes, Factor
from autotp.passes.plan.propagate import needs_grad
from autotp.passes.plan.sequence.separate_keys import separate_keys
from autotp.rules.traits import draws
from autotp.sharding.axis import Axis, touches

Cut = tuple[Axis, Factor]


@dataclass(frozen=True)
class CutSequences:
    """A graph and the operators that are cut along its sequences.

    Attributes:
        graph: the graph, with `apart`.
        axes: its axes.
        decision: which operators are cut along which sequence. No parameter is cut.
        whole: the operators on a sequence that a gradient flows through, and that every rank computes.
    """

    graph: fx.Graph
    axes: Axes
    decision: Decision
    whole: tuple[fx.Node, ...]


def context_parallel(
    graph: fx.Graph,
    sources: Callable[[fx.Graph], frozenset[fx.Node]],
    has_form: Callable[[fx.Node, Factor, Axis], bool],
) -> CutSequences | None:
    """Returns the decision which operators are cut along which sequence; None if no attention reads a sequence.

    Args:
        sources: returns the nodes of a graph that may require a gradient.
        has_form: returns whether an operator has a parallel form along a leaf of a factor that it mixes.
    """
    separated = separate_keys(graph)
    if not separated.sequences:
        return None
    differentiable = needs_grad(separated.graph, sources(separated.graph))
    axes, sequences = separated.axes, separated.sequences
    decision = _decided(separated.graph, axes, sequences, differentiable, has_form)
    whole = tuple(_computed_whole(axes, decision, sequences, differentiable))
    return CutSequences(separated.graph, axes, decision, whole)


def _decided(
    graph: fx.Graph,
    axes: Axes,
    sequences: Sequence[Axis],
    differentiable: Collection[fx.Node],
    has_form: Callable[[fx.Node, Factor, Axis], bool],
) -> Decision:
    found = {node: cut for node in axes.bound if (cut := _along(node, axes, sequences, has_form)) is not None}
    cuts: dict[fx.Node, Axis] = {}
    for node in reversed(graph.nodes):
        if node in found and (node in differentiable or draws(node) or _only_read_cut(node, found[node], cuts, axes)):
            cuts[node] = found[node][0]
    return Decision(cuts)


def _computed_whole(
    axes: Axes, decision: Decision, sequences: Sequence[Axis], differentiable: Collection[fx.Node]
) -> Iterator[fx.Node]:
    """Yields the operators on a sequence that a gradient flows through, and that every rank computes whole."""
    for node, bound in axes.bound.items():
        if node in differentiable and node not in decision.cuts and node.target is not apart:
            read = [axis for operand in bound.operands for axis in axes.of(operand)]
            if any(touches(axis, leaf) for axis in read for leaf in sequences):
                yield node


def _along(
    node: fx.Node, axes: Axes, sequences: Sequence[Axis], has_form: Callable[[fx.Node, Factor, Axis], bool]
) -> Cut | None:
    """Returns the sequence along which an operator is cut: that of its rows, before one that it mixes or sums over."""
    cuts = [(leaf, factor) for leaf in sequences if (factor := axes.bound[node].cuttable(leaf)) is not None]
    able = [(leaf, factor) for leaf, factor in cuts if factor.mark != "!" or has_form(node, factor, leaf)]
    return min(able, key=lambda cut: (cut[1].mark, not cut[1].outs, min(cut[1].outs.values(), default=0)), default=None)


def _only_read_cut(node: fx.Node, cut: Cut, cuts: dict[fx.Node, Axis], axes: Axes) -> bool:
    """True for a value that cut operators read in parts, along the same sequence, and nothing else does."""
    leaf, factor = cut
    tensors = [user for user in readers(node) if user.op != "output"]
    read = len(tensors) == len(list(readers(node))) and bool(tensors) and bool(factor.outs)
    return read and all(cuts.get(user) is leaf and node in _parts(user, leaf, axes) for user in tensors)


def _parts(node: fx.Node, leaf: Axis, axes: Axes) -> Iterator[fx.Node]:
    """Yields the operands of which a cut operator reads its part."""
    factor = axes.bound[node].cuttable(leaf)
    return (axes.bound[node].operands[i] for i in (factor.ins if factor is not None else ()))
