"""cost: counts the cost of each block of a model, to divide the blocks among stages.

Before: a graph and its axes
After:  [Cost(multiplications=2.5e9, parameters=7087872, activations=98304), ...]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from autotp.passes.plan.candidate import contracts
from autotp.passes.plan.choose import NOMINAL, elements
from autotp.passes.plan.infer_axes import Axes
from autotp.rules.call import elements_of, outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Size, find
from autotp.source_location import block_of


@dataclass(frozen=True)
class Cost:
    """The cost of a block.

    Attributes:
        multiplications: number of multiplications at nominal batch and sequence.
        parameters: number of elements of the parameters that it reads.
        activations: number of elements that its operators make for one microbatch, at the captured sizes.
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
    """Returns the cost of each block. Operators before the blocks count for the first block, and operators behind a
    block (a head, the loss) for that block.

    Args:
        parameters: placeholder names of the parameters.
    """
    costs = [Cost()] * max(len(blocks), 1)
    read: list[set[fx.Node]] = [set() for _ in costs]
    index = 0
    for node in (node for node in graph.nodes if node.op == "call_function"):
        name = block_of(node)
        index = blocks.index(name) if name in blocks else index
        # A weight that several operators of a block read counts once.
        weights = {n for n in node.all_input_nodes if n.name in parameters}
        costs[index] += Cost(multiplications(node, axes), sum(map(_numbers, weights - read[index])), _made(node))
        read[index] |= weights
    return costs


def multiplications(node: fx.Node, axes: Axes) -> float:
    """Returns the multiplications of a product, or of the two products of an attention; 0 for other operators.

    A head in one operator with its loss counts as the product that it is.
    """
    bound = axes.bound.get(node)
    if bound is not None and has(node.target, Trait.HEAD):
        weight, x = bound.operands[:2]
        return elements(x) * _nominal(find(axes.of(weight)[0]).size)
    if contracts(bound):
        summed = [factor for factor in bound.factors if not factor.outs and 1 in factor.ins]  # type: ignore[union-attr]
        return elements(node) * math.prod(_nominal(find(factor.axis).size) for factor in summed)
    if has(node.target, Trait.ATTENTION):
        # Each element of the queries and of the output meets each key: documents in packed rows are not known here.
        summed = [factor for factor in bound.factors if {1, 2} <= factor.ins.keys() and not factor.outs]  # type: ignore[union-attr]
        keys = math.prod(_nominal(find(factor.axis).size) for factor in summed)
        return (elements(bound.operands[0]) + elements(node)) * keys  # type: ignore[union-attr]
    return 0.0


def _nominal(size: Size) -> int:
    return size.number * NOMINAL ** len(size.symbols)


def _made(node: fx.Node) -> int:
    """Returns the number of elements that an operator makes in new memory."""
    return 0 if _memory(node) & _memory(*node.all_input_nodes) else _numbers(node)


def _numbers(node: fx.Node) -> int:
    """Returns the number of elements of a node's tensors, at the captured sizes."""
    return sum(elements_of(x.shape) for x in outputs_of(node))


def _memory(*nodes: fx.Node) -> set[int]:
    return {x.untyped_storage()._cdata for node in nodes for x in outputs_of(node)}
