"""cost: what the blocks of a model cost, in multiplications, for dividing them among stages.

Before: a graph and its axes                          After: [2.5e9, 2.5e9, ...]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from autotp.axis import Size, find
from autotp.passes.axes import Axes
from autotp.passes.match import SDPA, contracts
from autotp.passes.plan import NOMINAL, elements
from autotp.source import block_of


def block_costs(graph: fx.Graph, axes: Axes, blocks: Sequence[str]) -> list[float]:
    """What each block costs at nominal batch and sequence; what is before the blocks is the first's, and what stands
    behind one (a head, the loss) is that one's.
    """
    found = [0.0] * max(len(blocks), 1)
    at = 0
    for node in graph.nodes:
        name = block_of(node) if node.op == "call_function" else ""
        at = blocks.index(name) if name in blocks else at
        found[at] += multiplications(node, axes)
    return found


def multiplications(node: fx.Node, axes: Axes) -> float:
    """Those of a product, or of an attention's two: of everything else they do not count."""
    bound = axes.bound.get(node)
    if contracts(bound):
        summed = [factor for factor in bound.factors if not factor.outs]  # type: ignore[union-attr]
        return elements(node) * math.prod(_nominal(find(factor.axis).size) for factor in summed)
    if str(node.target).startswith(SDPA):
        query, key = bound.operands[:2]  # type: ignore[union-attr]
        return (elements(query) + elements(node)) * _nominal(Size.of(key.meta["val"].shape[-2]))
    return 0.0


def _nominal(size: Size) -> int:
    return size.number * NOMINAL ** len(size.symbols)
