"""candidate: an axis of parameters that may be cut; and questions about the operators that have it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autotp.passes.builder import ancestors
from autotp.passes.plan.infer_axes import Axes, Bound, Factor
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, Size, touches

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


def contracts(bound: Bound | None) -> bool:
    """True for a product that sums over a factor of both operands: linear, matmul, einsum, grouped products."""
    if bound is None or not {frozenset({0}), frozenset({1})} <= set(bound.rule.linear):
        return False
    return any({0, 1} <= factor.ins.keys() and not factor.outs for factor in bound.factors)


def counts_attentions(node: fx.Node, factor: Factor, axes: Axes) -> bool:
    """True for a factor that counts independent attentions, or independent products of a batch."""
    if has(node.target, Trait.ATTENTION):
        return bool(factor.outs) and factor.name != "e"
    return contracts(axes.bound[node]) and len(factor.ins) == 2 and bool(factor.outs)


def cut_values(node: fx.Node, leaf: Axis, axes: Axes) -> Iterator[fx.Node]:
    """Yields the operator itself, or the items of its tuple, whose value has the leaf."""
    items = [user for user in node.users if user.target is operator.getitem and user in axes.dims]
    yield from [item for item in items if any(touches(axis, leaf) for axis in axes.of(item))] if items else [node]


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


def root(node: fx.Node) -> fx.Node:
    """Returns the placeholder that a value views, scales, adds to or takes rows of; the value itself if there is none.

    A weight with an adapter is such a sum.
    """
    while node.op != "placeholder":
        if has(node.target, Trait.ROWS):
            node = node.args[0]  # type: ignore[assignment]
        elif node.target is aten.mul.Tensor and _scaled(node) is not None:
            node = _scaled(node)  # type: ignore[assignment]
        elif node.target is aten.add.Tensor and (weight := _added_to(node)) is not None:
            node = weight
        elif len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        else:
            break
    return node


def _added_to(node: fx.Node) -> fx.Node | None:
    """Returns the weight to which a sum of fixed size adds what is computed without it; None for another sum."""
    shape = node.meta["val"].shape
    if any(Size.of(n).symbols for n in shape):
        return None
    terms = [(term, root(term)) for term in node.all_input_nodes]
    weights = {end for _, end in terms if end.op == "placeholder"}
    if len(weights) != 1 or not any(end in weights and term.meta["val"].shape == shape for term, end in terms):
        return None  # A bias has another shape.
    # `x + f(x)` of a model's input has such a form, too.
    return None if any(end not in weights and weights & ancestors([term]) for term, end in terms) else weights.pop()


def _scaled(node: fx.Node) -> fx.Node | None:
    """Returns the placeholder that an elementwise product scales (weight norm's direction); else None."""
    first: Any = node.args[0]
    return first if isinstance(first, fx.Node) and first.op == "placeholder" else None
