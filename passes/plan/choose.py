"""choose: decides along which leaf axis each operator and each parameter is cut.

    Before: candidates heads (h.0), width (h.0), vocab, hidden, ...
    After:  cuts {linear: heads, attention: heads, ...}, held {c_attn.weight: heads, ...}; hidden is not cut

The choice is greedy. Heads come first, with the most even division of attentions, then widths; then the axes that
divide most weights for their communication, if that is worth it. The hidden axis is in every weight and would need the
most communication, so it comes last, when nothing is left to divide. An operator is cut along one leaf at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import prod
from typing import Literal

import torch
from torch import fx

from autotp.errors import Error
from autotp.ops.channels import conv_transpose, convolution
from autotp.passes.builder import number_of_parts
from autotp.passes.plan.candidate import ATTENTION, MLP, Candidate, contracts, cut_values, maker, readers, root
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.user_cuts import NO_CHOICES, Choices
from autotp.sharding.axis import Axis, Size, find, leaves, touches
from autotp.sharding.grid import slices_of
from autotp.sharding.layout import Layout, divided_as, layout_of, ranges
from autotp.sharding.partition import chunk_length
from autotp.source_location import line_of

NOMINAL = 512
"""The assumed length of a symbolic dimension (batch, sequence) in the estimate of communication."""
WORTH = 8
"""A vocabulary is cut if it divides at least this many parameters for each element exchanged per token."""
WORTH_UNKNOWN = 32
"""The same threshold for an axis without a name, or of which another axis has taken operators already."""
SHARE = 0.005
"""Such an axis must also divide at least this share of all parameters."""


@dataclass(frozen=True)
class Decision:
    """The decision what is cut.

    Attributes:
        cuts: node -> the leaf that the operator is cut along.
        held: parameter placeholder -> the leaf along which it is stored cut.
        chosen: the candidates that were accepted, in the order of acceptance.
        scattered: sum over ranks -> the sequence axis along which it is reduce-scattered.
    """

    cuts: dict[fx.Node, Axis] = field(default_factory=dict)
    held: dict[fx.Node, Axis] = field(default_factory=dict)
    chosen: list[Candidate] = field(default_factory=list)
    scattered: dict[fx.Node, Axis] = field(default_factory=dict)


def carry(copy: fx.Node, node: fx.Node, old: Axes, axes: Axes, before: Decision, after: Decision) -> None:
    """Copies axes, rule and cuts of `node` to its copy in another graph."""
    if node in old.dims:
        axes.dims[copy] = old.dims[node]
    if node in old.bound:
        axes.bound[copy] = old.bound[node].renamed(copy)
    if node in before.cuts:
        after.cuts[copy] = before.cuts[node]
    if node in before.held:
        after.held[copy] = before.held[node]


def choose(
    axes: Axes,
    candidates: list[Candidate],
    trainable: Collection[fx.Node],
    total: int,
    tp: int,
    local_outputs: Collection[fx.Node] = (),
    choices: Choices = NO_CHOICES,
) -> Decision:
    """Returns the cuts for `tp` ranks.

    Args:
        candidates: the axes, without what the user does not want (`Choices.allowed`).
        trainable: values that a gradient flows through: only these cost communication in backward.
        total: number of elements of all parameters.
        local_outputs: outputs that stay cut; other cut outputs are gathered, which costs communication.
        choices: what the user has chosen, which is cut first.
    """
    decision = Decision()
    convolutions = {
        id(candidate): [node for node, _ in candidate.nodes if _convolves(node, axes)] for candidate in candidates
    }

    def worth(candidate: Candidate) -> float:
        """Returns the elements of weights that are divided for each exchanged element, per token or pixel."""
        cost = _cost(candidate, decision, axes, trainable, local_outputs)
        reads = _gain(candidate, decision, axes, tp, lambda weight: _places(weight, convolutions[id(candidate)], axes))
        # A cut that sends nothing has no cost.
        return reads / max(cost, 1)

    def key(i: int) -> tuple[int, float, float, int]:
        candidate = candidates[i]
        # Of several ways to cut heads, grids among them, the one with the most even work is tried first.
        share = _busiest(candidate.leaf, tp) if candidate.pattern == ATTENTION else 0
        return candidate.turn, share, -worth(candidate), i

    queue = [key(i) for i in range(len(candidates))]
    if choices.cuts:
        for *_, i in sorted(queue):
            chosen = choices.wants(candidates[i], axes, decision.held)
            if any(_only_read_cut(parameter, candidates[i], decision) for parameter in chosen):
                accept(choices.narrowed(candidates[i], chosen, axes), decision)
    heapify(queue)
    while queue:
        stale = heappop(queue)
        i = stale[-1]
        now = worth(candidates[i])
        if queue and key(i) > max(stale, queue[0]):  # Cuts made since have lowered its worth: it queues again.
            heappush(queue, key(i))
        elif _acceptable(candidates[i], decision, axes, now, _gain(candidates[i], decision, axes, tp), total):
            accept(candidates[i], decision)
    return decision


def _acceptable(candidate: Candidate, decision: Decision, axes: Axes, worth: float, gain: float, total: int) -> bool:
    """True for an axis inside a block if none of its operators is cut yet, and for axes worth their communication.

    Convolutions have few weights for their large outputs, so the channels between two must be worth it, too.
    """
    if find(candidate.leaf).kind == "grid" and candidate.pattern != ATTENTION:
        return False
    if candidate.core and not any(node in decision.cuts for node, _ in candidate.nodes):
        convolved = candidate.pattern == MLP and any(_convolves(node, axes) for node, _ in candidate.nodes)
        return gain > 0 and (worth >= WORTH_UNKNOWN or not convolved)
    if candidate.name == "vocab":
        return gain > 0 and worth >= WORTH
    return gain > SHARE * total and worth >= WORTH_UNKNOWN


@dataclass(frozen=True)
class Refusal:
    """Why an axis is not cut, with all that is cut now.

    Attributes:
        kind: "unweighed": no weight has it; "taken": its weights are cut along the axes of `others`; "read": other
            readers of its weights, `nodes`, cannot be cut along it; "small": it divides few parameters; "sent": a cut
            would send more than it saves, most of all the values of `nodes`.
    """

    kind: Literal["unweighed", "taken", "read", "small", "sent"]
    others: tuple[Candidate, ...] = ()
    nodes: tuple[fx.Node, ...] = ()


def refusal(
    candidate: Candidate, decision: Decision, axes: Axes, trainable: Collection[fx.Node], total: int, tp: int
) -> Refusal:
    """Returns why a candidate was not accepted. Arguments as for `choose`."""
    weights = [weight for weight in candidate.weights if weight.meta["val"].dim() > 1]  # A vector scales what is read.
    if not weights:
        return Refusal("unweighed")
    nodes = {node for node, _ in candidate.nodes}
    rest = [weight for weight in weights if weight not in decision.held]
    read = [reader for weight in rest for reader in readers(weight)]
    along = [decision.held[weight] for weight in weights if weight in decision.held]
    cut = {find(leaf) for leaf in [*along, *(decision.cuts[reader] for reader in read if reader in decision.cuts)]}
    conflicts = tuple(chosen for chosen in decision.chosen if find(chosen.leaf) in cut)
    if not any(_only_read_cut(weight, candidate, decision) for weight in rest):
        blocked = tuple(reader for reader in read if reader not in nodes and reader not in decision.cuts)
        return Refusal("read", conflicts, blocked) if blocked else Refusal("taken", conflicts)
    if not candidate.core and candidate.name != "vocab" and _gain(candidate, decision, axes, tp) <= SHARE * total:
        return Refusal("taken" if conflicts else "small", conflicts)
    sent, order = set(_exchanged(candidate, decision, axes, trainable, ())), axes.dims
    largest = max([node for node in order if node in sent], key=elements, default=None)  # Of equal ones the first.
    return Refusal("sent", nodes=() if largest is None else (largest,))


class OtherCut(Error):
    """Raised for a graph that does not have the axis along which one of its tensors is cut."""

    def for_user(self) -> Error:
        """Returns the error that a user sees, where the call cannot run in another way."""
        return Error(self.problem, **self.facts).within(self.call)


def choose_as(axes: Axes, candidates: list[Candidate], stored: Mapping[fx.Node, Layout], tp: int) -> Decision:
    """Returns the cuts for a further graph of a model whose parameters are stored already.

    The storage of parameters does not change; operators that cannot be cut that way read them gathered.

    Args:
        stored: placeholder of a parameter, or of an input that is cut -> its layout.

    Raises:
        Error: a tensor is cut along an axis that this graph does not have.
    """
    decision = Decision()
    grids = [c for c in candidates if find(c.leaf).kind == "grid" and _stored_so(c, stored, axes, tp)]
    for candidate in grids:
        decision.held.update((node, candidate.leaf) for node in candidate.parameters if node in stored)
    undivided: list[tuple[fx.Node, Layout]] = []
    for node, layout in stored.items():
        if layout.dim is not None and node not in decision.held and node.users:
            leaf = _leaf_of(node, layout, axes, tp, [candidate.leaf for candidate in grids])
            if leaf is None:
                undivided.append((node, layout))
            else:
                decision.held[node] = leaf
    # Only now are all stored leaves known: one that another tensor is cut along is not divided.
    for node, layout in undivided:
        stored_leaves = {find(leaf) for leaf in decision.held.values()}
        decision.held[node] = _leaf_of(node, layout, axes, tp, ()) or _divided(node, layout, axes, tp, stored_leaves)
    stored_leaves = {find(leaf) for leaf in decision.held.values()}
    for candidate in candidates:
        if find(candidate.leaf) in stored_leaves:
            for cuttable, _ in candidate.nodes:
                decision.cuts.setdefault(cuttable, candidate.leaf)
            decision.chosen.append(candidate)
    return decision


def _stored_so(candidate: Candidate, stored: Mapping[fx.Node, Layout], axes: Axes, tp: int) -> bool:
    """True if all parameters of a candidate are stored cut along its leaf."""
    rows = [(axes.of(node), stored[node]) for node in candidate.parameters if node in stored]
    return bool(rows) and all(
        layout_of(layout.shape, dims, candidate.leaf, tp, layout.axis) == layout for dims, layout in rows
    )


def _leaf_of(node: fx.Node, layout: Layout, axes: Axes, tp: int, grids: Sequence[Axis]) -> Axis | None:
    """Returns the leaf along which a parameter with this layout is cut; None if the graph does not have it."""
    dims = axes.of(node)
    for leaf in [*grids, *leaves(dims[layout.dim or 0])]:
        if layout_of(layout.shape, dims, leaf, tp, layout.axis) == layout:
            return leaf
    return None


def _divided(node: fx.Node, layout: Layout, axes: Axes, tp: int, stored_leaves: Collection[Axis]) -> Axis:
    """Returns a new leaf of an axis that this graph does not divide: NOTE [Axes of a part].

    Args:
        stored_leaves: leaves along which other tensors are cut; none of these is divided.
    """
    axis = find(axes.of(node)[layout.dim or 0])
    leaf = None if axis in stored_leaves else divided_as(axis, layout.pieces, tp)
    if leaf is not None:
        return leaf
    raise OtherCut(
        f"this call uses a tensor {list(layout.shape)} in a way that does not fit its cut by "
        f"{layout.axis or 'an axis without a name'}",
        at=line_of(next(iter(node.users), node)),
        fix="give parallelize this call's arguments as example_inputs",
        alternative="what was changed in the model since, as peft does, before autotp.parallelize",
    )


def accept(candidate: Candidate, decision: Decision) -> None:
    """Cuts a candidate's free operators along its leaf, and the parameters that only cut operators read."""
    for node, _ in candidate.nodes:
        # An operator keeps the cut of the candidate that was accepted first.
        decision.cuts.setdefault(node, candidate.leaf)
    for parameter in candidate.parameters:
        if parameter not in decision.held and _only_read_cut(parameter, candidate, decision):
            decision.held[parameter] = candidate.leaf
    decision.chosen.append(candidate)


def _only_read_cut(parameter: fx.Node, candidate: Candidate, decision: Decision) -> bool:
    leaf = find(candidate.leaf)
    nodes = {node for node, _ in candidate.nodes}
    readers = [node for node in parameter.users if isinstance(node.meta.get("val"), torch.Tensor | list | tuple)]
    # A reader without a cut would get that of this leaf.
    return bool(readers) and all(n in nodes and find(decision.cuts.get(n, leaf)) is leaf for n in readers)


def _gain(
    candidate: Candidate, decision: Decision, axes: Axes, tp: int, counts: Callable[[fx.Node], float] = lambda p: 1
) -> float:
    """Returns the elements of weights that the fullest rank no longer holds, weighted by `counts`."""
    cut = [p for p in candidate.weights if p not in decision.held and _only_read_cut(p, candidate, decision)]
    return sum(p.meta["val"].numel() * (1 - _fullest(candidate.leaf, p, axes, tp)) * counts(p) for p in cut)


def _places(weight: fx.Node, convolutions: Sequence[fx.Node], axes: Axes) -> float:
    """Returns how often a step reads each element of a weight: once a token, or once a pixel in a convolution."""
    for node in convolutions:
        if root(axes.bound[node].operands[1]) is weight:
            # The elements of an output channel: batch times places.
            return max(number_of_parts(node) * elements(node) // _channels(node), 1)
    # Batch and sequence have the nominal length.
    return float(NOMINAL**2)


def _channels(node: fx.Node) -> int:
    """Returns the number of output channels of a convolution."""
    places = node.args[1].meta["val"].dim() - (2 if node.target is convolution else 3)  # type: ignore[union-attr]
    return int(node.meta["val"].shape[-1 - places])


def _convolves(node: fx.Node, axes: Axes) -> bool:
    """True for a convolution that sums over channels."""
    return node.target in (convolution, conv_transpose) and contracts(axes.bound[node])


def _fullest(leaf: Axis, parameter: fx.Node, axes: Axes, tp: int) -> float:
    """Returns the share of a parameter that the fullest rank holds."""
    axis = next(axis for axis in axes.of(parameter) if touches(axis, leaf))
    if find(leaf).kind != "grid":
        return chunk_length(leaf.size.number, tp) / leaf.size.number
    lengths = [sum(b - a for a, b in ranges(axis, leaf, tp, rank)) for rank in range(tp)]
    return max(lengths) / axis.size.number


def _busiest(leaf: Axis, tp: int) -> float:
    """Returns the share of all attentions that the busiest rank computes, if `leaf` counts attentions."""
    return prod(chunk_length(axis.size.number, parts) / axis.size.number for axis, parts, _ in slices_of(leaf, tp))


def _cost(
    candidate: Candidate,
    decision: Decision,
    axes: Axes,
    trainable: Collection[fx.Node],
    local_outputs: Collection[fx.Node],
) -> float:
    """Returns the elements exchanged in a step, forward and backward, at nominal batch and sequence."""
    return sum(elements(node) for node in _exchanged(candidate, decision, axes, trainable, local_outputs))


def _exchanged(
    candidate: Candidate,
    decision: Decision,
    axes: Axes,
    trainable: Collection[fx.Node],
    local_outputs: Collection[fx.Node],
) -> list[fx.Node]:
    """Returns the values that are summed, copied for backward, or gathered and divided, if the candidate is cut."""
    free = {node: factor for node, factor in candidate.nodes if node not in decision.cuts}
    # Terms that the ranks sum in forward.
    summed = [node for node, factor in free.items() if not factor.outs and factor.summed]
    copied, moved = set(), set()
    for node, factor in free.items():
        for i, operand in enumerate(axes.bound[node].operands):
            # Read whole by ranks that each do a part of the work, so its gradients are summed.
            if i not in factor.ins and operand in trainable and operand.op != "placeholder":
                copied.add(operand)
            # Read in parts, and made whole or cut in another way.
            if i in factor.ins and maker(operand) not in free and operand.op != "placeholder":
                moved.add(operand)
        for value in cut_values(node, candidate.leaf, axes) if factor.outs else ():
            # Made in parts, and read whole.
            if any(
                reader not in free for reader in readers(value) if node not in local_outputs or reader.op != "output"
            ):
                moved.add(value)
    return [*summed, *copied, *moved]


def elements(node: fx.Node) -> int:
    """Returns the number of elements of a node's value at nominal batch and sequence, or of a part of it."""
    value = node.meta["val"]
    total = 0
    for tensor in value if isinstance(value, list | tuple) else [value]:
        size = Size.of(1)
        for n in tensor.shape if isinstance(tensor, torch.Tensor) else ():
            size = size * Size.of(n)
        total += size.number * NOMINAL ** len(size.symbols) // (number_of_parts(node) if size.symbols else 1)
    return total
