"""fuse_bias: puts a bias back into its product if the product is not reduced.

Before: y = linear(x, w); z = add(y, b)                After: z = linear(x, w, b)
Before: p = reduce(linear(x, w)); z = add(p, b)        After: the same (NOTE [Why the bias leaves the linear])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autotp.passes.builder import Builder, fake_mode_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Size

aten = torch.ops.aten


def fuse_bias(graph: fx.Graph) -> fx.Graph:
    """Returns the same function and the same collectives, with biases inside their products."""
    joined = {node: product for node in graph.nodes if (product := _product(node)) is not None}
    if not joined:
        return graph
    builder = Builder(fake_mode_of(graph))
    inside = set(joined.values())
    for node in graph.nodes:
        builder.origin = node
        if node in joined:
            builder.env[node] = _with_bias(builder, node, joined[node])
        elif node not in inside:
            builder.copy(node)
    return builder.graph


def _with_bias(builder: Builder, add: fx.Node, product: fx.Node) -> fx.Node:
    bias = builder.map(next(arg for arg in add.args if arg is not product))
    x, w = builder.map(product.args[:2])
    linear = product.target is aten.linear.default
    fused = builder.raw(*((aten.linear.default, (x, w, bias)) if linear else (aten.addmm.default, (bias, x, w))))
    fused.meta["val"] = add.meta["val"]
    return fused


def _product(node: fx.Node) -> fx.Node | None:
    """Returns the product to which a sum adds a one-dimensional bias, if nothing else reads the product; else None."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    for product, bias in (node.args, reversed(node.args)):
        if _is_product(product) and len(product.users) == 1 and _is_bias(bias, product, node):  # type: ignore[union-attr]
            return product  # type: ignore[return-value]
    return None


def _is_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and has(node.target, Trait.TAKES_BIAS) and len(node.args) == 2


def _is_bias(bias: Any, product: Any, add: fx.Node) -> bool:
    """True for a placeholder with a vector along the product's last dimension."""
    if not isinstance(bias, fx.Node) or bias.op != "placeholder":
        return False
    vector, matrix = bias.meta["val"], product.meta["val"]
    same_dtype = vector.dtype == matrix.dtype == add.meta["val"].dtype
    fits = same_dtype and vector.dim() == 1 and matrix.dim() >= 2
    return fits and Size.of(vector.shape[0]) == Size.of(matrix.shape[-1])  # `==` would assume something of sizes.
