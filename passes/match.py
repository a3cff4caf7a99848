"""match: recognises what the axes of the parameters are. It names and ranks; correctness never rests on it.

Before: leaf of 12 in c_attn.weight, c_attn.bias, c_proj.weight
After:  heads (QKV -> attention -> projection)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autotp.axis import Axis, find, leaves, touches
from autotp.passes.axes import Axes, Factor

aten = torch.ops.aten
CONTRACTIONS = ("aten.linear", "aten.mm", "aten.bmm", "aten.matmul", "aten.einsum")
LOOKUPS = ("aten.embedding",)
ATTENTION, MLP = "QKV -> attention -> projection", "linear -> activation -> linear"
LOSSES = ("aten.cross_entropy_loss", "aten.nll_loss", "aten.log_softmax")


@dataclass
class Candidate:
    """A leaf that some parameter has.

    Attributes:
        leaf: the axis.
        nodes: the operators that could be cut along it, in graph order, each with its factor.
        parameters: the parameters that have it.
        name: heads, kv_heads, group, width, vocab; or "" where nothing was recognised.
        pattern: what was recognised, for the plan's reader.
        hub: True if its weights lead to more than two other axes, as those of the residual stream do.
        weights: those of `parameters` that a product, or a lookup of the model's inputs, reads; the cut is for them.
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
        return self.pattern in (ATTENTION, MLP) and not self.hub


def match(graph: fx.Graph, axes: Axes, parameters: Mapping[str, str], inputs: Collection[str]) -> list[Candidate]:
    """The leaves that parameters have and that can be cut somewhere, named where their use is known.

    Args:
        parameters: placeholder name -> parameter name.
        inputs: placeholder names of the model's inputs.
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
    for node, bound in axes.bound.items():
        for leaf in dict.fromkeys(leaf for factor in bound.factors for leaf in leaves(factor.axis)):
            factor = bound.cuttable(leaf) if leaf in found else None
            if factor is not None:
                found[leaf].nodes.append((node, factor))
    ranks = {find(leaf) for leaf, candidate in found.items() if _is_rank(candidate, axes)}
    for candidate in found.values():
        if find(candidate.leaf) not in ranks:
            candidate.name, candidate.pattern = _recognised(candidate, axes, inputs)
        candidate.weights = _weights(candidate, axes)
        candidate.hub = len(_partners(candidate, axes) - ranks) > 2
    return [candidate for candidate in found.values() if candidate.nodes]


def _recognised(candidate: Candidate, axes: Axes, inputs: Collection[str]) -> tuple[str, str]:
    """Name and pattern of a candidate."""
    kinds = [(str(node.target), factor) for node, factor in candidate.nodes]
    weighed = [(node, factor) for node, factor in candidate.nodes if _reads_weight(node, axes, factor)]
    made = any(factor.outs for _, factor in weighed)
    used = any(not factor.outs for _, factor in weighed)
    if any(kind.startswith(LOOKUPS) and not factor.outs for kind, factor in kinds) and _from_input(candidate, inputs):
        return "vocab", "embedding" + (", head" if made else "") + (", loss" if _in_loss(kinds) else "")
    if _in_loss(kinds) and made:
        return "vocab", "head, loss"
    if made and used and _closed(candidate):
        attention = _attention(candidate, axes)
        return (attention, ATTENTION) if attention else ("width", MLP)
    return "", ""


def _is_rank(candidate: Candidate, axes: Axes) -> bool:
    """True for the rank of a low-rank product, LoRA's `B(A(x))`: two weights, nothing but views and casts between.

    Narrower than what it joins, it divides little, for the price of a width.
    """
    products = [node for node, _ in candidate.nodes if str(node.target).startswith(CONTRACTIONS)]
    between = [axes.bound[node] for node, _ in candidate.nodes if node not in products]
    narrow = candidate.leaf.size.number**2 < max(p.meta["val"].numel() for p in candidate.parameters)
    plain = all(bound.rule.linear and len(bound.operands) == 1 for bound in between)
    weighed = all(_reads_weight(node, axes, factor) for node, factor in candidate.nodes if node in products)
    return len(products) == 2 and narrow and plain and weighed


def _closed(candidate: Candidate) -> bool:
    """True if whatever is cut is read by operators that can be cut, too: nothing has to be gathered on the way."""
    nodes = {node for node, _ in candidate.nodes}
    return all(reader in nodes for node, factor in candidate.nodes if factor.outs for reader in readers(node))


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The operators that read a value's elements (not only its sizes), those of a tuple's items included."""
    for user in node.users:
        if user.target is operator.getitem:
            yield from readers(user)
        elif user.op == "output" or isinstance(user.meta.get("val"), torch.Tensor | list | tuple):
            yield user


def maker(node: fx.Node) -> fx.Node:
    """The operator that makes a value: for an item of a tuple, that of the tuple."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def _in_loss(kinds: list[tuple[str, Factor]]) -> bool:
    return any(kind.startswith(LOSSES) and factor.mark == "!" for kind, factor in kinds)


def _reads_weight(node: fx.Node, axes: Axes, factor: Factor) -> bool:
    """True for a contraction with a weight that has the factor."""
    if not str(node.target).startswith(CONTRACTIONS):
        return False
    return any(_root(axes.bound[node].operands[i]).op == "placeholder" for i in factor.ins)


def _weights(candidate: Candidate, axes: Axes) -> list[fx.Node]:
    read = set()
    for node, factor in candidate.nodes:
        product = str(node.target).startswith(CONTRACTIONS)
        if product or (candidate.name == "vocab" and str(node.target).startswith(LOOKUPS)):
            read |= {_root(axes.bound[node].operands[i]) for i in factor.ins}
    return [parameter for parameter in candidate.parameters if parameter in read]


def _partners(candidate: Candidate, axes: Axes) -> set[Axis]:
    """The axes that the candidate's weights lead to."""
    others = (find(axis) for weight in candidate.weights for axis in axes.of(weight))
    return {axis for axis in others if not touches(axis, candidate.leaf)}


def _root(node: fx.Node) -> fx.Node:
    """The placeholder a value is a view of, or the value itself."""
    while node.op != "placeholder" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _from_input(candidate: Candidate, inputs: Collection[str]) -> bool:
    """True if some lookup's indices come from the model's inputs: tokens do, positions (counted up) do not."""
    lookups = [node for node, _ in candidate.nodes if str(node.target).startswith(LOOKUPS)]
    seen: set[fx.Node] = set()
    queue = [node.args[1] for node in lookups]
    while queue:
        node = queue.pop()
        if isinstance(node, fx.Node) and node not in seen and not str(node.target).startswith("aten.sym_size"):
            seen.add(node)
            queue += node.all_input_nodes
    return any(node.op == "placeholder" and node.name in inputs for node in seen)


def _attention(candidate: Candidate, axes: Axes) -> str:
    """heads, kv_heads or group where the leaf counts independent attentions; else ""."""
    for node, factor in candidate.nodes:
        if str(node.target).startswith("aten.scaled_dot_product_attention") and factor.outs and factor.name != "e":
            return "kv_heads" if factor.name == "k" else "group" if factor.name == "g" else "heads"
    batched = [f for n, f in candidate.nodes if str(n.target).startswith(CONTRACTIONS) and len(f.ins) == 2 and f.outs]
    softmax = any(str(n.target).startswith("aten.softmax") and f.mark == "" for n, f in candidate.nodes)
    return "heads" if softmax and len(batched) >= 2 else ""
