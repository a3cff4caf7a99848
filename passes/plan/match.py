"""match: recognises the axes of parameters (heads, width, vocabulary), and ranks them. No result depends on it.

Before: leaf of 12 in c_attn.weight, c_attn.bias, c_proj.weight
After:  heads (QKV -> attention -> projection)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autotp.ops.experts import combine
from autotp.passes.plan.infer_axes import Axes, Bound, Factor
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, find, holds, leaves, touches
from autotp.sharding.grid import grid, splits
from autotp.sharding.layout import layout_of

aten = torch.ops.aten
ATTENTION, MLP = "QKV -> attention -> projection", "linear -> activation -> linear"
EXPERTS = "dispatch -> experts -> combine"


@dataclass
class Candidate:
    """A leaf axis of some parameter.

    Attributes:
        leaf: the axis.
        nodes: the operators that could be cut along it, in graph order, each with its factor.
        parameters: the parameters that have it.
        name: heads, kv_heads, group, experts, width, vocab; or "" if it is not recognised.
        pattern: the recognised pattern, for the plan's reader.
        hub: True if its weights connect it to more than two other axes, as in a residual stream.
        weights: the parameters that a product, or a lookup of the model's inputs, reads: the cut divides them.
    """

    leaf: Axis
    nodes: list[tuple[fx.Node, Factor]] = field(default_factory=list)
    parameters: list[fx.Node] = field(default_factory=list)
    name: str = ""
    pattern: str = ""
    weights: list[fx.Node] = field(default_factory=list)
    hub: bool = False

    @property
    def core(self) -> bool:
        """True for the axes inside a transformer block, which are always cut."""
        return self.pattern in (ATTENTION, EXPERTS) or (self.pattern == MLP and not self.hub)

    @property
    def turn(self) -> int:
        """Its turn: experts, heads, widths, vocabularies, the rest. (A low rank beside heads comes after the heads.)"""
        patterns = (self.pattern == EXPERTS, self.pattern == ATTENTION)
        return [*patterns, self.core, self.name == "vocab", True].index(True)


def match(
    graph: fx.Graph,
    axes: Axes,
    parameters: Mapping[str, str],
    inputs: Collection[str],
    tp: int = 1,
    kept: Collection[fx.Node] = (),
) -> list[Candidate]:
    """Returns the leaves of parameters along which some operator can be cut, with names if they are recognised.

    Args:
        parameters: placeholder name -> parameter name.
        inputs: placeholder names of the model's inputs.
        tp: number of ranks; if an axis has too few positions for them, two axes form a grid.
        kept: outputs that stay cut, such as a key-value cache, and the new values of buffers, which are small.
    """
    found: dict[Axis, Candidate] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in parameters:
            for axis in axes.of(node):
                for leaf in leaves(axis):
                    if not leaf.size.symbols and leaf.size.number > 1 and not leaf.tangled:
                        entry = found.setdefault(leaf, Candidate(leaf))
                        if node not in entry.parameters:
                            entry.parameters.append(node)
    touching: dict[Axis, list[fx.Node]] = {}
    for node, bound in axes.bound.items():
        for leaf in dict.fromkeys(leaf for factor in bound.factors for leaf in leaves(factor.axis)):
            touching.setdefault(leaf, []).append(node)
            factor = bound.cuttable(leaf) if leaf in found else None
            if factor is not None:
                found[leaf].nodes.append((node, factor))
    ranks = {find(leaf) for leaf, candidate in found.items() if _is_rank(candidate, axes)}
    _describe(found.values(), axes, inputs, kept, ranks)
    order = {node: i for i, node in enumerate(axes.bound)}
    grids = [_on_grid(leaf, touching, axes, found, order) for leaf in _grids(found.values(), axes, tp)]
    _describe(grids, axes, inputs, kept, ranks)
    shared = [candidate for candidate in grids if _shared_evenly(candidate, axes, tp)]
    return [candidate for candidate in [*shared, *found.values()] if candidate.nodes]


def _describe(
    candidates: Iterable[Candidate],
    axes: Axes,
    inputs: Collection[str],
    kept: Collection[fx.Node],
    ranks: Collection[Axis],
) -> None:
    """Names the candidates. The ranks of low-rank products get no name, and do not count for `hub`."""
    for candidate in candidates:
        if find(candidate.leaf) not in ranks:
            candidate.name, candidate.pattern = _recognised(candidate, axes, inputs, kept)
        candidate.weights = _weights(candidate, axes)
        candidate.hub = len(_partners(candidate, axes) - set(ranks)) > 2


# ---- grids: cuts of two axes at once, and of fused weights that have an axis in some parts only


def _grids(candidates: Iterable[Candidate], axes: Axes, tp: int) -> Iterator[Axis]:
    """Yields grids: for fewer key/value heads than ranks, and for heads in a fused weight with a part without heads."""
    for candidate in candidates:
        if not any(_counts_attentions(node, factor, axes) for node, factor in candidate.nodes):
            continue
        pair = _pair(candidate, axes)
        if pair is not None:
            parts = splits(pair[0].size.number, pair[1].size.number, tp)
            cuts = [(leaf, n, run) for leaf, n, run in zip(pair, parts, (parts[1], 1), strict=True) if n > 1]
            if parts[1] > 1:
                yield grid(cuts, tp)
        fused = (axis for node in candidate.parameters for axis in axes.of(node) if touches(axis, candidate.leaf))
        if not candidate.core and any(not holds(axis, candidate.leaf) for axis in fused):
            yield grid([(candidate.leaf, tp, 1)], tp)


def _pair(candidate: Candidate, axes: Axes) -> tuple[Axis, Axis] | None:
    """Returns key/value heads and the group of query heads of each, if `candidate` is the key/value heads."""
    for node, factor in candidate.nodes:
        inside = list(leaves(factor.axis))
        if (
            _counts_attentions(node, factor, axes)
            and find(factor.axis).kind == "product"
            and len(inside) == 2
            and inside[0] is find(candidate.leaf)
        ):
            return None if inside[1].size.symbols or inside[1].tangled else (inside[0], inside[1])
    return None


def _on_grid(
    leaf: Axis,
    touching: Mapping[Axis, list[fx.Node]],
    axes: Axes,
    found: Mapping[Axis, Candidate],
    order: Mapping[fx.Node, int],
) -> Candidate:
    """Returns a grid's candidate: the operators with one of its leaves that it can cut, in graph order."""
    nodes = dict.fromkeys(node for part in leaf.parts for node in touching.get(find(part), []))
    cut = [(node, axes.bound[node].cuttable(leaf)) for node in sorted(nodes, key=order.__getitem__)]
    parameters = dict.fromkeys(p for part in leaf.parts if find(part) in found for p in found[find(part)].parameters)
    return Candidate(leaf, [(node, factor) for node, factor in cut if factor is not None], list(parameters))


def _shared_evenly(candidate: Candidate, axes: Axes, tp: int) -> bool:
    """True if every shard that several ranks hold is held by one whole group of ranks."""
    run = find(candidate.leaf).counts[0][1]
    for node in candidate.parameters:
        layout = layout_of(tuple(node.meta["val"].shape), axes.of(node), candidate.leaf, tp, "")
        if layout.dim is None or not layout.holders() <= {1, tp if run == 1 else run}:
            return False
    return True


def _recognised(
    candidate: Candidate, axes: Axes, inputs: Collection[str], kept: Collection[fx.Node]
) -> tuple[str, str]:
    """Returns name and pattern of a candidate."""
    if any(node.target is combine and not factor.outs for node, factor in candidate.nodes):
        return "experts", EXPERTS
    weighed = [(node, factor) for node, factor in candidate.nodes if _reads_weight(node, axes, factor)]
    made = any(factor.outs for _, factor in weighed)
    used = any(not factor.outs for _, factor in weighed)
    loss = any(has(node.target, Trait.CLASSES) and factor.mark == "!" for node, factor in candidate.nodes)
    looked_up = any(has(node.target, Trait.LOOKUP) and not factor.outs for node, factor in candidate.nodes)
    if looked_up and _from_input(candidate, inputs):
        return "vocab", "embedding" + (", head" if made else "") + (", loss" if loss else "")
    if loss and made:
        return "vocab", "head, loss"
    if made and used and _closed(candidate, axes, kept):
        attention = _attention(candidate, axes)
        return (attention, ATTENTION) if attention else ("width", MLP)
    return "", ""


def _is_rank(candidate: Candidate, axes: Axes) -> bool:
    """True for the rank of a low-rank product, LoRA's `B(A(x))`: two weights with only views and casts between.

    It is narrower than the axes around it, so a cut divides few weights, at the communication of a width.
    """
    products = [node for node, _ in candidate.nodes if contracts(axes.bound[node])]
    between = [axes.bound[node] for node, _ in candidate.nodes if node not in products]
    narrow = candidate.leaf.size.number**2 < max(p.meta["val"].numel() for p in candidate.parameters)
    plain = all(bound.rule.linear and len(bound.operands) == 1 for bound in between)
    weighed = all(_reads_weight(node, axes, factor) for node, factor in candidate.nodes if node in products)
    return len(products) == 2 and narrow and plain and weighed


def _closed(candidate: Candidate, axes: Axes, kept: Collection[fx.Node]) -> bool:
    """True if all readers of cut values can be cut, too, so that nothing is gathered between the two products."""
    nodes = {node for node, _ in candidate.nodes}
    made = [node for node, factor in candidate.nodes if factor.outs]
    values = [(node, it) for node in made for it in cut_values(node, candidate.leaf, axes)]
    rows = [(bool({node, it} & set(kept)), reader) for node, it in values for reader in readers(it)]
    return all(reader in nodes or (reader.op == "output" and stays) for stays, reader in rows)


def cut_values(node: fx.Node, leaf: Axis, axes: Axes) -> Iterator[fx.Node]:
    """Yields the operator itself, or the items of its tuple, whose value has the leaf."""
    items = [user for user in node.users if user.target is operator.getitem and user in axes.dims]
    yield from [item for item in items if any(touches(axis, leaf) for axis in axes.of(item))] if items else [node]


def contracts(bound: Bound | None) -> bool:
    """True for a product that sums over a factor of both operands: linear, matmul, einsum, grouped products."""
    if bound is None or not {frozenset({0}), frozenset({1})} <= set(bound.rule.linear):
        return False
    return any({0, 1} <= factor.ins.keys() and not factor.outs for factor in bound.factors)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the operators that read a value's elements (not only its sizes), also through items of a tuple."""
    for user in node.users:
        if user.target is operator.getitem:
            yield from readers(user)
        elif user.op == "output" or isinstance(user.meta.get("val"), torch.Tensor | list | tuple):
            yield user


def maker(node: fx.Node) -> fx.Node:
    """Returns the operator that makes a value; for an item of a tuple, the operator that makes the tuple."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def _reads_weight(node: fx.Node, axes: Axes, factor: Factor) -> bool:
    """True for a product with a weight that has the factor."""
    if not contracts(axes.bound[node]):
        return False
    return any(root(axes.bound[node].operands[i]).op == "placeholder" for i in factor.ins)


def _weights(candidate: Candidate, axes: Axes) -> list[fx.Node]:
    read = set()
    for node, factor in candidate.nodes:
        product = contracts(axes.bound[node])
        if product or (candidate.name == "vocab" and has(node.target, Trait.LOOKUP)):
            read |= {root(axes.bound[node].operands[i]) for i in factor.ins}
    return [parameter for parameter in candidate.parameters if parameter in read]


def _partners(candidate: Candidate, axes: Axes) -> set[Axis]:
    """Returns the other axes of the candidate's weights; of a stack of experts' weights, its last two axes."""
    others = (find(axis) for weight in candidate.weights for axis in axes.of(weight)[-2:])
    return {axis for axis in others if not touches(axis, candidate.leaf)}


def root(node: fx.Node) -> fx.Node:
    """Returns the placeholder that a value views, scales or takes rows of; the value itself if there is none."""
    while node.op != "placeholder":
        if has(node.target, Trait.ROWS):
            node = node.args[0]  # type: ignore[assignment]
        elif node.target is aten.mul.Tensor and _scaled(node) is not None:
            node = _scaled(node)  # type: ignore[assignment]
        elif len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        else:
            break
    return node


def _scaled(node: fx.Node) -> fx.Node | None:
    """Returns the placeholder that an elementwise product scales (weight norm's direction); else None."""
    first: Any = node.args[0]
    return first if isinstance(first, fx.Node) and first.op == "placeholder" else None


def _from_input(candidate: Candidate, inputs: Collection[str]) -> bool:
    """True if the indices of a lookup come from the model's inputs: tokens do, counted positions do not."""
    lookups = [node for node, _ in candidate.nodes if has(node.target, Trait.LOOKUP)]
    seen: set[fx.Node] = set()
    queue = [node.args[1] for node in lookups]
    while queue:
        node = queue.pop()
        if isinstance(node, fx.Node) and node not in seen and not str(node.target).startswith("aten.sym_size"):
            seen.add(node)
            queue += node.all_input_nodes
    return any(node.op == "placeholder" and node.name in inputs for node in seen)


def _attention(candidate: Candidate, axes: Axes) -> str:
    """Returns heads, kv_heads or group if the leaf counts independent attentions; else ""."""
    for node, factor in candidate.nodes:
        if has(node.target, Trait.ATTENTION) and _counts_attentions(node, factor, axes):
            return "kv_heads" if factor.name == "k" else "group" if factor.name == "g" else "heads"
    batched = [node for node, factor in candidate.nodes if _counts_attentions(node, factor, axes)]
    softmax = any(has(n.target, Trait.SOFTMAX) and f.mark == "" for n, f in candidate.nodes)
    return "heads" if softmax and len(batched) >= 2 else ""


def _counts_attentions(node: fx.Node, factor: Factor, axes: Axes) -> bool:
    """True for a factor that counts independent attentions, or independent products of a batch."""
    if has(node.target, Trait.ATTENTION):
        return bool(factor.outs) and factor.name != "e"
    return contracts(axes.bound[node]) and len(factor.ins) == 2 and bool(factor.outs)
