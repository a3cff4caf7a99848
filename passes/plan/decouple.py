"""decouple: gives a value made without parameters, such as a mask, separate axes where its axes do not fit.

    Before: slopes = cat(a[4], b[2]); scores + slopes        heads would be `4 | 2`, and never cut
    After:  slopes = cat(a[4], b[2]); scores + apart(slopes)

`apart(x)` is `x` with separate axes. It is whole on every rank, so a cut reader takes its part without communication.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx

from autotp.ops.placement_moves import apart as read_apart
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.plan.infer_axes import Axes, named_dims, visit
from autotp.rules.call import call_of, operand_nodes
from autotp.rules.registry import rule_of
from autotp.sharding.axis import ONE, Axis, Size, find

Misfits = dict[fx.Node, list[Size | None]]
"""Operand -> for each of its dimensions the size that it should have at this operator; None if it fits."""


def decouple(graph: fx.Graph, parameters: Collection[str]) -> tuple[fx.Graph, Axes]:
    """Returns the same function with `apart` where axes do not fit, and the axes of all values.

    Args:
        parameters: placeholder names of the parameters.
    """
    builder, axes, made = Builder(fake_mode_of(graph)), Axes(), set[fx.Node]()
    for node in graph.nodes:
        builder.origin = node
        aside = {n: builder.env[n] for n in node.all_input_nodes}
        for operand, sizes in _misfits(node, axes, made, builder).items():
            builder.env[operand] = _read_apart(builder, builder.env[operand], sizes)
            visit(builder.env[operand], axes)
        visit(builder.copy(node), axes)
        # Only this operator reads the values apart.
        builder.env.update(aside)
        if node.name in parameters or any(n in made for n in node.all_input_nodes):
            made.add(node)
    return builder.graph, axes


def _misfits(node: fx.Node, axes: Axes, made: Collection[fx.Node], builder: Builder) -> Misfits:
    """Returns the operands that do not depend on parameters and whose axes do not fit those of the other operands."""
    operands = [n for n in operand_nodes(node) if n is not None] if node.op == "call_function" else []
    # An operand of parameters and one of none: only then is there an axis to protect, and one that could harm it.
    if len({n in made for n in operands}) < 2 or (rule := rule_of(call_of(node))) is None:
        return {}
    dims = [axes.of(builder.env[n]) for n in operands]
    axes_by_name: dict[str, Axis] = {}
    terms = list(named_dims(rule, dims))
    for operand, named in zip(operands, terms, strict=True):
        # The axes of what depends on parameters are those that must stay as they are.
        axes_by_name |= {name: find(axis) for name, axis in named if name and operand in made}
    misfits: Misfits = {}
    for operand, named in zip(operands, terms, strict=True):
        sizes = [_misfit(find(axis), axes_by_name.get(name)) for name, axis in named]
        if operand not in made and any(sizes):
            misfits[operand] = sizes
    return misfits


def _misfit(axis: Axis, expected: Axis | None) -> Size | None:
    """Returns the size that a dimension should have if, unified with it, `expected` could not be cut."""
    if expected is None or expected is axis or ONE in (axis.size, expected.size):
        return None
    if axis.size != expected.size:
        return None if expected.size.symbols else expected.size
    return expected.size if _splits(list(_factors(axis)), list(_factors(expected))) else None


def _factors(axis: Axis) -> Iterator[Axis]:
    """Yields the factors of a product, major to minor."""
    axis = find(axis)
    if axis.kind == "product":
        for part in axis.parts:
            yield from _factors(part)
    else:
        yield axis


def _splits(factors: list[Axis], expected_factors: list[Axis]) -> bool:
    """True if an expected factor of constant size meets a concatenation with other parts, or another size."""
    for factor, expected in zip(factors, expected_factors, strict=False):
        if factor.size != expected.size or (
            factor.kind == "concat" and factor is not expected and not expected.size.symbols
        ):
            return True
    return False


def _read_apart(builder: Builder, x: fx.Node, sizes: list[Size | None]) -> fx.Node:
    """Writes `apart(x)`, with known sizes where the exporter has expressions (`6*s0 // s1`)."""
    value = x.meta["val"]
    plain = [size if size is None or size.symbols else size.number for size in sizes]
    shape = [size if isinstance(size, int) else n for n, size in zip(value.shape, plain, strict=True)]
    node = builder.raw(read_apart, (x,))
    with builder.mode:
        node.meta["val"] = torch.empty(shape, dtype=value.dtype, device=value.device)
    return node
