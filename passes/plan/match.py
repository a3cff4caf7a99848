"""match: recognises the axes of parameters (heads, width, vocabulary), and ranks them. No result depends on it.

Before: leaf of 12 in c_attn.weight, c_attn.bias, c_proj.weight
After:  heads (QKV -> attention -> projection)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx

from autotp.ops.experts.rows import combine
from autotp.passes.plan.candidate import (
    ATTENTION,
    EXPERTS,
    MLP,
    Candidate,
    contracts,
    counts_attentions,
    cut_values,
    readers,
    root,
)
from autotp.passes.plan.head_grids import head_grids, on_grid, shared_evenly
from autotp.passes.plan.infer_axes import Axes, Factor
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, find, leaves, touches

aten = torch.ops.aten


def match(
    graph: fx.Graph,
    axes: Axes,
    parameters: Mapping[str, str],
    inputs: Collection[str],
    tp: int = 1,
    local_outputs: Collection[fx.Node] = (),
) -> list[Candidate]:
    """Returns the leaves of parameters along which some operator can be cut, with names if they are recognised.

    Args:
        parameters: placeholder name -> parameter name.
        inputs: placeholder names of the model's inputs.
        tp: number of ranks; if an axis has too few positions for them, two axes form a grid.
        local_outputs: outputs that stay cut, such as a key-value cache, and the new values of buffers, which are small.
    """
    candidates: dict[Axis, Candidate] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in parameters:
            for axis in axes.of(node):
                for leaf in leaves(axis):
                    if not leaf.size.symbols and leaf.size.number > 1 and not leaf.tangled:
                        entry = candidates.setdefault(leaf, Candidate(leaf))
                        if node not in entry.parameters:
                            entry.parameters.append(node)
    touching: dict[Axis, list[fx.Node]] = {}
    for node, bound in axes.bound.items():
        for leaf in dict.fromkeys(leaf for factor in bound.factors for leaf in leaves(factor.axis)):
            # Also operators that this leaf cannot cut: a grid may cut them (`on_grid`).
            touching.setdefault(leaf, []).append(node)
            factor = bound.cuttable(leaf) if leaf in candidates else None
            if factor is not None:
                candidates[leaf].nodes.append((node, factor))
    ranks = {find(leaf) for leaf, candidate in candidates.items() if _is_rank(candidate, axes)}
    # Before the grids, which are made of heads.
    _describe(candidates.values(), axes, inputs, local_outputs, ranks)
    order = {node: i for i, node in enumerate(axes.bound)}
    grids = [on_grid(leaf, touching, axes, candidates, order) for leaf in head_grids(candidates.values(), axes, tp)]
    _describe(grids, axes, inputs, local_outputs, ranks)
    shared = [candidate for candidate in grids if shared_evenly(candidate, axes, tp)]
    # Grids first: of equal candidates `choose` takes the one that comes first.
    return [candidate for candidate in [*shared, *candidates.values()] if candidate.nodes]


def candidate_at(leaf: Axis, touching: Collection[fx.Node], axes: Axes, parameters: Collection[fx.Node]) -> Candidate:
    """Returns a leaf as a candidate, without a name.

    Args:
        touching: the operators that have the leaf.
        parameters: those that have it.
    """
    rows = [(node, axes.bound[node].cuttable(leaf)) for node in touching]
    candidate = Candidate(leaf, [(node, factor) for node, factor in rows if factor is not None], list(parameters))
    candidate.weights = _weights(candidate, axes)
    return candidate


def _describe(
    candidates: Iterable[Candidate],
    axes: Axes,
    inputs: Collection[str],
    local_outputs: Collection[fx.Node],
    ranks: Collection[Axis],
) -> None:
    """Names the candidates. The ranks of low-rank products get no name, and do not count for `hub`."""
    for candidate in candidates:
        if find(candidate.leaf) not in ranks:
            candidate.name, candidate.pattern = _recognised(candidate, axes, inputs, local_outputs)
        candidate.weights = _weights(candidate, axes)
        partners = _partners(candidate, axes)
        candidate.hub = sum(not any(leaf in ranks for leaf in leaves(axis)) for axis in partners) > 2


def _recognised(
    candidate: Candidate, axes: Axes, inputs: Collection[str], local_outputs: Collection[fx.Node]
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
    # One product makes the axis, another one sums over it, and nobody between needs it whole: Megatron-LM's pair.
    if made and used and _closed(candidate, axes, local_outputs):
        attention = _attention(candidate, axes)
        return (attention, ATTENTION) if attention else ("width", MLP)
    return "", ""


def _is_rank(candidate: Candidate, axes: Axes) -> bool:
    """True for the rank of a low-rank product, LoRA's `B(A(x))` or `B @ A`: weights with only views and casts between.

    It is narrower than the axes around it, so a cut divides few weights, at the communication of a width.
    """
    products = [node for node, _ in candidate.nodes if contracts(axes.bound[node])]
    between = [axes.bound[node] for node, _ in candidate.nodes if node not in products]
    # The weight is [r d], with r*d elements: this says r < d.
    narrow = candidate.leaf.size.number**2 < max(p.meta["val"].numel() for p in candidate.parameters)
    plain = all(bound.rule.linear and len(bound.operands) == 1 for bound in between)
    ends = [
        root(axes.bound[node].operands[i]) for node, factor in candidate.nodes if node in products for i in factor.ins
    ]
    # `B(A(x))` reads a weight in each of two products, `B @ A` two in one.
    return len(products) in (1, 2) and sum(end.op == "placeholder" for end in ends) == 2 and narrow and plain


def _closed(candidate: Candidate, axes: Axes, local_outputs: Collection[fx.Node]) -> bool:
    """True if all readers of cut values can be cut, too, so that nothing is gathered between the two products."""
    nodes = {node for node, _ in candidate.nodes}
    made = [node for node, factor in candidate.nodes if factor.outs]
    values = [(node, value) for node in made for value in cut_values(node, candidate.leaf, axes)]
    rows = [(bool({node, value} & set(local_outputs)), reader) for node, value in values for reader in readers(value)]
    return all(reader in nodes or (reader.op == "output" and stays) for stays, reader in rows)


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
    partners = (find(axis) for weight in candidate.weights for axis in axes.of(weight)[-2:])
    return {axis for axis in partners if not touches(axis, candidate.leaf)}


def _from_input(candidate: Candidate, inputs: Collection[str]) -> bool:
    """True if the indices of a lookup come from the model's inputs: tokens do, counted positions do not."""
    lookups = [node for node, _ in candidate.nodes if has(node.target, Trait.LOOKUP)]
    visited: set[fx.Node] = set()
    queue = [node.args[1] for node in lookups]
    while queue:
        node = queue.pop()
        # The size of an input is no index from it: positions are counted up to one.
        if isinstance(node, fx.Node) and node not in visited and not str(node.target).startswith("aten.sym_size"):
            visited.add(node)
            queue += node.all_input_nodes
    return any(node.op == "placeholder" and node.name in inputs for node in visited)


def _attention(candidate: Candidate, axes: Axes) -> str:
    """Returns heads, kv_heads or group if the leaf counts independent attentions; else ""."""
    for node, factor in candidate.nodes:
        if has(node.target, Trait.ATTENTION) and counts_attentions(node, factor, axes):
            return "kv_heads" if factor.name == "k" else "group" if factor.name == "g" else "heads"
    batched = [node for node, factor in candidate.nodes if counts_attentions(node, factor, axes)]
    # Two batched products, and between them a softmax along another axis, are attention written out.
    softmax = any(has(n.target, Trait.SOFTMAX) and f.mark == "" for n, f in candidate.nodes)
    return "heads" if softmax and len(batched) >= 2 else ""
