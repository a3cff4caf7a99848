"""cost: counts what each block of a model costs, for dividing the blocks among stages.

Before: a graph and its axes
After:  [Cost(multiplications=2.5e9, parameters=7087872, activations=98304), ...]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.passes.plan.choose import NOMINAL, elements
from autotp.passes.plan.infer_axes import Axes
from autotp.passes.plan.match import contracts
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Size, find
from autotp.source_location import block_of


@dataclass(frozen=True)
class Cost:
    """What a block costs.

    Attributes:
        multiplications: at nominal batch and sequence.
        parameters: numbers that it reads of them.
        activations: numbers that its operators make of one microbatch, of the size that it was captured with.
    """

    multiplications: float = 0
    parameters: int = 0
    activations: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.multiplications + other.multiplications,
            self.parameters + other.parameters,
            self.activations + other.activations,
        )


def block_costs(graph: fx.Graph, axes: Axes, blocks: Sequence[str], parameters: Collection[str]) -> list[Cost]:
    """What each block costs; what is before the blocks is the first's, and what stands behind one (a head, the loss)
    is that one's.

    Args:
        parameters: placeholder names.
    """
    found = [Cost()] * max(len(blocks), 1)
    read: list[set[fx.Node]] = [set() for _ in found]
    at = 0
    for node in (node for node in graph.nodes if node.op == "call_function"):
        name = block_of(node)
        at = blocks.index(name) if name in blocks else at
        its = {n for n in node.all_input_nodes if n.name in parameters}
        found[at] += Cost(multiplications(node, axes), sum(map(_numbers, its - read[at])), _made(node))
        read[at] |= its
    return found


def multiplications(node: fx.Node, axes: Axes) -> float:
    """Those of a product, or of an attention's two: of everything else they do not count."""
    bound = axes.bound.get(node)
    if contracts(bound):
        summed = [factor for factor in bound.factors if not factor.outs and 1 in factor.ins]  # type: ignore[union-attr]
        return elements(node) * math.prod(_nominal(find(factor.axis).size) for factor in summed)
    if has(node.target, Trait.ATTENTION):
        query, key = bound.operands[:2]  # type: ignore[union-attr]
        return (elements(query) + elements(node)) * _nominal(Size.of(key.meta["val"].shape[-2]))
    return 0.0


def _nominal(size: Size) -> int:
    return size.number * NOMINAL ** len(size.symbols)


def _made(node: fx.Node) -> int:
    """Numbers that an operator makes, in memory of its own."""
    return 0 if _memory(node) & _memory(*node.all_input_nodes) else _numbers(node)


def _numbers(node: fx.Node) -> int:
    """The numbers in a node's tensors, at the sizes that it was captured with."""
    return sum(math.prod(n if isinstance(n, int) else n.node.hint or 0 for n in x.shape) for x in _tensors(node))


def _memory(*nodes: fx.Node) -> set[int]:
    return {x.untyped_storage()._cdata for node in nodes for x in _tensors(node)}


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val")
    return [x for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, torch.Tensor)]
