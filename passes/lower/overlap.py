"""overlap: joins the products that read one conjugate into an `async_linear`, which overlaps communication in backward.

    Before: c = copy(x, "tp"); q = linear(c, w1, b1); k = linear(c, w2)
    After:  t = async_linear(x, "tp", None, None, (w1, w2), (b1, None), (False, False)); q = t[0]; k = t[1]
    Before: r = reshape(copy(x, "tp"), [-1, 32]); q = addmm(b1, r, w1)                              x: [... 32]
    After:  t = async_linear(x, "tp", None, ROWS, (w1,), (b1,), (True,)); q = t[0]

`separate` is the inverse: the checker reads the separate products, and collectives are counted there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from autotp.ops.async_linear import async_linear
from autotp.ops.collectives import all_gather, copy
from autotp.passes.builder import Builder, fake_mode_of
from autotp.rules.call import outputs_of
from autotp.rules.traits import draws

aten = torch.ops.aten


ROWS = 0, -2
"""What a reshape to `[-1, length of the last dimension]` flattens. (A flattening has other numbers.)"""


class Product(NamedTuple):
    """`x` times a weight [out hidden], or [hidden out] if `turned`, plus a bias."""

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    turned: bool


class ColumnGroup(NamedTuple):
    """A conjugate, the view of it that the products read (None: the conjugate itself), and the products in order."""

    conjugate: fx.Node
    view: fx.Node | None
    products: list[Product]


def overlap(graph: fx.Graph) -> fx.Graph:
    """Returns the same function; a conjugate that only products read is one operator with these products."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    groups = [group for node in graph.nodes if (group := _group(node, order)) is not None]
    first = {group.products[0].node: group for group in groups}
    inside = {node for group in groups for node in (group.conjugate, group.view, *(p.node for p in group.products))}
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        builder.origin = node
        if node in first:
            _together(builder, first[node])
        if node not in inside and node not in builder.env:
            builder.copy(node)
    return builder.graph


def _group(node: fx.Node, order: dict[fx.Node, int]) -> ColumnGroup | None:
    """Returns the group of a conjugate if only products read it, and no weight depends on one of them; else None."""
    if node.target not in (copy, all_gather) or node.kwargs or not node.meta["val"].is_floating_point():
        return None  # The operator's backward does not conjugate complex numbers.
    view = next(iter(node.users)) if len(node.users) == 1 else None
    view = view if view is not None and _flattened(view) is not None else None
    read = node if view is None else view
    products = [_product(user, read) for user in sorted(read.users, key=order.__getitem__)]
    matched = [product for product in products if product is not None]
    start = order[matched[0].node] if matched else 0
    early = all(_can_stand_before(p, start, order, read) for q in matched for p in (q.weight, q.bias) if p is not None)
    return ColumnGroup(node, view, matched) if matched and len(matched) == len(products) and early else None


def _flattened(view: fx.Node) -> tuple[int, int] | None:
    """Returns the first and last dimension that a view flattens, or ROWS; None for another operator."""
    if view.target is aten.flatten.using_ints:
        return view.args[1:]  # type: ignore[return-value]
    return ROWS if view.target is aten.reshape.default and view.args[1] == _rows(view.args[0]) else None


def _rows(x: Any) -> list[Any]:
    """Returns the sizes with which a reshape of `x` flattens all dimensions but the last."""
    return [-1, x.meta["val"].shape[-1]]


def _product(node: fx.Node, x: fx.Node) -> Product | None:
    """Returns a node as a product of `x` with a matrix; None if it is another operator."""
    args: Any = node.args
    if node.kwargs or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    flat = x.meta["val"].dim() == 2
    # A product of x with itself reads it as a weight, too.
    if node.target is aten.linear.default and args[0] is x and x not in args[1:]:
        return Product(node, args[1], args[2] if len(args) == 3 else None, False)
    if node.target is aten.addmm.default and len(args) == 3 and args[1] is x and args[0].meta["val"].dim() == 1:
        return Product(node, args[2], args[0], True)
    if node.target is (aten.mm.default if flat else aten.matmul.default) and args[0] is x and args[1] is not x:
        return Product(node, args[1], None, True) if args[1].meta["val"].dim() == 2 else None
    return None


def _can_stand_before(node: fx.Node, start: int, order: dict[fx.Node, int], x: fx.Node) -> bool:
    """True for a node before `start`, and for pure operators on such nodes, such as a weight's cast; False for `x`."""
    if node is x or order[node] < start:
        return node is not x
    pure = node.op == "call_function" and bool(outputs_of(node)) and not draws(node)
    return pure and all(_can_stand_before(operand, start, order, x) for operand in node.all_input_nodes)


def _together(builder: Builder, group: ColumnGroup) -> None:
    """Writes the joined operator, and the results of its products."""
    node, products = group.conjugate, group.products
    x, axis, *where = node.args
    flat = None if group.view is None else _flattened(group.view)
    gathered = None if node.target is copy else (*where, 1)[:3]
    for operand in (n for p in products for n in (p.weight, p.bias) if n is not None):
        _copy_early(builder, operand)
    parameters = [builder.map(tuple(part)) for part in zip(*((p.weight, p.bias) for p in products), strict=True)]
    turned = tuple(p.turned for p in products)
    joined = builder.raw(async_linear, (builder.map(x), axis, builder.map(gathered), flat, *parameters, turned))
    joined.meta["val"] = [p.node.meta["val"] for p in products]
    for i, product in enumerate(products):
        builder.env[product.node] = _item(builder, joined, i)


def _copy_early(builder: Builder, node: fx.Node) -> None:
    # A weight's cast may stand between the products, and the joined operator stands where the first of them is.
    if node not in builder.env:
        for operand in node.all_input_nodes:
            _copy_early(builder, operand)
        builder.copy(node)


def _item(builder: Builder, node: fx.Node, i: int) -> fx.Node:
    item = builder.raw(operator.getitem, (node, i))
    item.meta["val"] = node.meta["val"][i]
    return item


def separate(graph: fx.Graph) -> fx.Graph:
    """Returns the same function with each joined operator as a conjugate and products."""
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        builder.origin = node
        source: Any = node.args[0] if node.args else None
        if node.target is async_linear:
            builder.env[node] = list(_separated(builder, node, *builder.map(node.args)))
        elif node.target is operator.getitem and source.target is async_linear:
            builder.env[node] = builder.env[source][node.args[1]]
        else:
            builder.copy(node)
    return builder.graph


def _separated(
    builder: Builder, node: fx.Node, x: Any, axis: Any, gathered: Any, flat: Any, weights: Any, biases: Any, turned: Any
) -> Iterable[fx.Node]:
    """Writes the conjugate and the products of a joined operator; yields the products."""
    rest = () if gathered is None else gathered[: 2 if gathered[2] == 1 else 3]
    read = builder.raw(copy if gathered is None else all_gather, (x, axis, *rest))
    read.meta["val"] = _resized(builder, x.meta["val"], gathered)
    if flat is not None:
        view = (aten.reshape.default, _rows(read)) if flat == ROWS else (aten.flatten.using_ints, *flat)
        read = builder.call(view[0], read, *view[1:])
    for weight, bias, turn, value in zip(weights, biases, turned, node.meta["val"], strict=True):
        operands = (read, weight) if bias is None else (bias, read, weight) if turn else (read, weight, bias)
        bare = aten.mm.default if read.meta["val"].dim() == 2 else aten.matmul.default
        target = aten.linear.default if not turn else bare if bias is None else aten.addmm.default
        product = builder.raw(target, operands)
        product.meta["val"] = value
        yield product


def _resized(builder: Builder, value: torch.Tensor, gathered: Any) -> torch.Tensor:
    """Returns the example value of a gathered tensor, from that of its part."""
    if gathered is None:
        return value
    dim, size, _ = gathered
    shape: list[Any] = list(value.shape)
    shape[dim] = size.meta["val"] if isinstance(size, fx.Node) else size
    with builder.mode:
        return value.new_empty(shape)
