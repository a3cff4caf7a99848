"""context_parallel: decides which operators are cut along a sequence, over the ranks of the axis `cp`.

    Before: x = embedding(w, tokens); q = linear(x, wq); attention(q, apart(k), apart(v), mask)
    After:  all of them are cut along the sequence of x; `apart` reads the keys whole

`cut_along` decides, along the sequence of an operator's rows. Parameters are whole on every rank. What mixes along a
sequence otherwise (a recurrence, a convolution) is computed whole by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from autotp.passes.plan.choose import Decision
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.propagate import needs_grad
from autotp.passes.plan.sequence.cut_along import HasForm, computed_whole, cut_along
from autotp.passes.plan.sequence.separate_keys import separate_keys
from autotp.sharding.axis import Axis


@dataclass(frozen=True)
class CutSequences:
    """A graph and the operators that are cut along its sequences.

    Attributes:
        graph: the graph, with `apart`.
        axes: its axes.
        decision: which operators are cut along which sequence. No parameter is cut.
        whole: the operators on a sequence that a gradient flows through, and that every rank computes.
        along: the sequences.
    """

    graph: fx.Graph
    axes: Axes
    decision: Decision
    whole: tuple[fx.Node, ...]
    along: tuple[Axis, ...] = ()


def context_parallel(
    graph: fx.Graph,
    sources: Callable[[fx.Graph], frozenset[fx.Node]],
    has_form: HasForm,
) -> CutSequences | None:
    """Returns the decision which operators are cut along which sequence; None if no attention reads a sequence.

    Args:
        sources: returns the nodes of a graph that may require a gradient.
        has_form: as for `cut_along`.
    """
    separated = separate_keys(graph)
    if not separated.sequences:
        return None
    return cut_sequences(separated.graph, separated.axes, separated.sequences, sources, has_form)


def cut_sequences(
    graph: fx.Graph,
    axes: Axes,
    along: Sequence[Axis],
    sources: Callable[[fx.Graph], frozenset[fx.Node]],
    has_form: HasForm,
    others: Mapping[fx.Node, Axis] = MappingProxyType({}),
) -> CutSequences:
    """Returns the decision which operators of a graph are cut along which of the leaves `along`; arguments as there."""
    differentiable = needs_grad(graph, sources(graph))
    decision = cut_along(graph, axes, along, differentiable, has_form, others)
    whole = tuple(computed_whole(axes, decision, along, differentiable))
    return CutSequences(graph, axes, decision, whole, tuple(along))
