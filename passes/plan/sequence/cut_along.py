"""cut_along: decides which operators are cut along some leaves, over an axis on which parameters are whole.

    Before: x = embedding(w, tokens); p = arange(s); h = linear(add(x, p), v); loss = mean(h)     along s
    After:  all of them are cut along s but `mean`, which has no form

Every operator that a gradient flows through is cut if its rule allows it. What is computed of numbers alone (a shift of
labels, positions, tables of sines) stays whole, unless only cut operators read it and it has the leaf anyway, such as
a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import fx

from autotp.ops.placement_moves import apart
from autotp.passes.plan.candidate import readers
from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import Axes, Factor
from autotp.rules.traits import draws
from autotp.sharding.axis import Axis, touches

Cut = tuple[Axis, Factor]
HasForm = Callable[[fx.Node, Factor, Axis], bool]
"""Returns whether an operator has a parallel form along a leaf of a factor that it mixes."""


def cut_along(
    graph: fx.Graph,
    axes: Axes,
    along: Sequence[Axis],
    differentiable: Collection[fx.Node],
    has_form: HasForm,
    others: Mapping[fx.Node, Axis] = MappingProxyType({}),
) -> Decision:
    """Returns the decision which operators are cut along which of the leaves `along`. No parameter is cut.

    Args:
        others: the operators that are cut along another leaf.
    """
    rest = [node for node in axes.bound if node not in others]
    possible = {node: cut for node in rest if (cut := _cut(node, axes, along, has_form)) is not None}
    cuts = dict(others)
    for node in reversed(graph.nodes):
        # From the last to the first: an operator on numbers alone is cut if all its readers are.
        if node in possible and (
            node in differentiable or draws(node) or _only_read_cut(node, possible[node], cuts, axes)
        ):
            cuts[node] = possible[node][0]
    return Decision(cuts)


def computed_whole(
    axes: Axes, decision: Decision, along: Sequence[Axis], differentiable: Collection[fx.Node]
) -> Iterator[fx.Node]:
    """Yields the operators on these leaves that a gradient flows through, and that every rank computes whole."""
    for node, bound in axes.bound.items():
        # An `apart` is there to be whole.
        if node in differentiable and node not in decision.cuts and node.target is not apart:
            read = [axis for operand in bound.operands for axis in axes.of(operand)]
            if any(touches(axis, leaf) for axis in read for leaf in along):
                yield node


def _cut(node: fx.Node, axes: Axes, along: Sequence[Axis], has_form: HasForm) -> Cut | None:
    """Returns the leaf along which an operator is cut: that of its rows, before one that it mixes or sums over."""
    cuts = [(leaf, factor) for leaf in along if (factor := axes.bound[node].cuttable(leaf)) is not None]
    able = [(leaf, factor) for leaf, factor in cuts if factor.mark != "!" or has_form(node, factor, leaf)]
    # Without a mark before "!", passed through before summed over, and then the earliest dimension.
    return min(able, key=lambda cut: (cut[1].mark, not cut[1].outs, min(cut[1].outs.values(), default=0)), default=None)


def _only_read_cut(node: fx.Node, cut: Cut, cuts: dict[fx.Node, Axis], axes: Axes) -> bool:
    """True for a value that cut operators read in parts, along the same leaf, and nothing else does."""
    leaf, factor = cut
    tensors = [user for user in readers(node) if user.op != "output"]
    read = len(tensors) == len(list(readers(node))) and bool(tensors) and bool(factor.outs)
    return read and all(cuts.get(user) is leaf and node in _parts(user, leaf, axes) for user in tensors)


def _parts(node: fx.Node, leaf: Axis, axes: Axes) -> Iterator[fx.Node]:
    """Yields the operands of which a cut operator reads its part."""
    factor = axes.bound[node].cuttable(leaf)
    return (axes.bound[node].operands[i] for i in (factor.ins if factor is not None else ()))
