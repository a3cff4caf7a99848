"""inline: makes nested regions part of the one flat graph.

Before: wrap_with_set_grad_enabled(False, submod, x)      After: y = submod's operators; detach(y)
Before: the same, where submod writes into memory         After: y = submod's operators on detach(x); detach(y)
Before: wrap_with_autocast("cpu", ..., submod, x)         After: enter_autocast(...); operators; exit_autocast(...)
Before: _assert_tensor_metadata(x)                        After: nothing
Before: _vmap_increment_nesting(); operators on x[i];     After: operators on x, as vmap's rules for each say
        _vmap_decrement_nesting()
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._C._functorch import get_interpreter_stack
from torch._functorch import predispatch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autotp.errors import Error
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.capture.autocast_regions import enter_autocast, exit_autocast
from autotp.rules.call import writes, written_operand
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.source_location import line_of

aten = torch.ops.aten


def inline(graph: fx.Graph) -> fx.Graph:
    """Returns the graph with nested graphs inlined and without assertions about metadata."""
    builder = Builder(fake_mode_of(graph))
    _inline_nodes(builder, list(graph.nodes))
    return builder.graph


def _inline_nodes(builder: Builder, nodes: Sequence[fx.Node]) -> None:
    """Copies nodes into the new graph; those between the first and the last level of a `torch.vmap` all together."""
    region, depth = list[fx.Node](), 0
    for node in nodes:
        depth += node.target is predispatch._vmap_increment_nesting
        if not depth:
            _inline_node(builder, node)
            continue
        region.append(node)
        depth -= node.target is predispatch._vmap_decrement_nesting
        if not depth:
            _batched(builder, region)
            region = []


def _batched(builder: Builder, region: Sequence[fx.Node]) -> None:
    """Replaces the operators of a `torch.vmap`, on one row each, by those on all rows.

    The exporter records a vmap from above, and its operators have a meaning only while functorch's level is open. torch
    runs them here once more, and what is below vmap is recorded.

    Raises:
        Error: the vmap has a region that no operators on all rows can replace, or torch has no rule for an operator.
    """
    within = set(region)
    read = dict.fromkeys(n for node in region for n in node.all_input_nodes)
    # Nested graphs are no operands: `_run` runs them.
    outside = [node for node in read if node not in within and _nested(node) is None]
    results = [node for node in region if any(user not in within for user in node.users)]

    def run(*values: Any) -> Any:
        env = dict(zip(outside, values, strict=True))
        # An operator without a rule raises, and leaves its level of vmap open.
        with _levels_closed():
            _run(region, env)
        return [env[node] for node in results]

    operands = [builder.map(node) for node in outside]
    RULES()
    try:
        with builder.mode:  # For the tensors that the function makes.
            graph = make_fx(run)(*(x.meta["val"] if isinstance(x, fx.Node) else x for x in operands)).graph
    except Error:
        raise
    except Exception as error:
        raise Error(
            f"torch.vmap of a function that cannot be in a graph: {str(error).partition(chr(10))[0]}",
            at=line_of(_with_line(region)),
            fix="operators on the whole batch",
        ) from error
    graph.eliminate_dead_code(lambda node: node.target not in SIZES)  # Those that only vmap's rules ask for.
    near = _with_line(region).meta
    place = {name: near[name] for name in PLACE if name in near}
    for node in graph.nodes:
        node.meta = place | node.meta
    builder.env.update(zip(results, _inlined(builder, graph, operands), strict=True))


def with_whole(x: Tensor, in_dim: int, level: int) -> Any:
    """Does what torch's `_add_batch_dim` does, and notes on the rows of what they are."""
    row = predispatch._add_batch_dim(x, in_dim, level)
    row.autotp_whole = x, in_dim, row._version  # type: ignore[attr-defined]
    return row


def rows_first(x: Any, level: int, rows: int, out_dim: int) -> Any:
    """Does what torch's `_remove_batch_dim` does, in two steps that the exporter records.

    Rows that the function returns as it got them are the operand, also under `torch.no_grad()`. NOTE [Functions that
    return their operand]
    """
    whole, dim, version = getattr(x, "autotp_whole", (None, 0, 0))
    if whole is not None and not torch.is_grad_enabled() and out_dim % whole.ndim == dim and x._version == version:
        return whole
    batch = predispatch._remove_batch_dim(x, level, rows, 0)
    return batch if out_dim == 0 else batch.movedim(0, out_dim)


@contextmanager
def _levels_closed() -> Iterator[None]:
    """A region that closes the levels of vmap that an exception left open; torch's later operators would see them."""
    before = len(get_interpreter_stack() or ())
    try:
        yield
    finally:
        while len(get_interpreter_stack() or ()) > before:
            predispatch._vmap_decrement_nesting()


RULES = predispatch.lazy_load_decompositions
"""What loads vmap's rules, before the levels."""
SIZES = (aten.size.default, operator.getitem)
"""Operators that return sizes as numbers, and an element of these."""
PLACE = ("nn_module_stack", "stack_trace")
"""What a node's `meta` says of its place in the model."""


def _run(nodes: Sequence[fx.Node], env: dict[fx.Node, Any]) -> None:
    """Runs nodes on the values in `env`, and adds theirs. A region without gradients detaches what it gives."""

    def value(x: Any) -> Any:
        return env.get(x, x)

    for node in nodes:
        if has(node.target, Trait.ASSERTION):
            continue
        args = fx.node.map_aggregate(node.args, value)
        kwargs = fx.node.map_aggregate(node.kwargs, value)
        if str(node.target) == "wrap_with_set_grad_enabled":
            enabled, _, *operands = cast("Sequence[Any]", args)
            inner = _graph_of(node.args[1])
            _expect_pure(node, inner)
            env.update(zip(inner.find_nodes(op="placeholder"), operands, strict=True))
            _run([n for n in inner.nodes if n.op not in ("placeholder", "output")], env)
            outputs = fx.node.map_aggregate(inner.output_node().args[0], value)
            env[node] = outputs if enabled else pytree.tree_map(_without_gradient, outputs)
        elif node.op == "call_function" and str(node.target) != "wrap_with_autocast":
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif _nested(node) is None:
            raise _no_operator(node)


def _expect_pure(node: fx.Node, inner: fx.Graph) -> None:
    """Raises Error if the graph in a region without gradients writes into memory: `detach` would not be the same."""
    if any(writes(n) for n in inner.nodes):
        raise _no_operator(node)


def _no_operator(node: fx.Node) -> Error:
    """Returns the Error for a node of a `torch.vmap` that is a region and no operator."""
    return Error(
        "torch.vmap of a function that switches autocast, or writes under torch.no_grad, cannot be in a graph",
        at=line_of(_with_line([node])),
        fix="the switch around the vmap, or operators on the whole batch",
    )


def _with_line(nodes: Sequence[fx.Node]) -> fx.Node:
    """Returns the first of these nodes whose source line is known, or of the nodes in their regions."""
    inner = [n for node in nodes for arg in node.all_input_nodes for n in _nodes_of(arg)]
    return next((node for node in (*nodes, *inner) if line_of(node) != "?"), nodes[0])


def _nodes_of(region: fx.Node) -> list[fx.Node]:
    graph = _nested(region)
    return [] if graph is None else list(graph.graph.nodes)


def _without_gradient(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _inline_node(builder: Builder, node: fx.Node) -> None:
    builder.origin = node
    match str(node.target):
        case "wrap_with_set_grad_enabled":
            enabled, region, *args = node.args
            builder.env[node] = (_region if enabled else _region_without_gradients)(builder, region, args)
        case "wrap_with_autocast":
            device, dtype, enabled, cache, region, *args = node.args
            entered = builder.raw(enter_autocast, (device, dtype, enabled, cache))
            builder.env[node] = _region(builder, region, args)
            builder.raw(exit_autocast, (entered,))
        # A nested graph is read by its region only, and that is written out.
        case _ if has(node.target, Trait.ASSERTION) or _nested(node) is not None or node.target is RULES:
            builder.env[node] = None
        # A region that was written out is a tuple of nodes.
        case _ if node.target is operator.getitem and isinstance(builder.map(node.args[0]), tuple):
            builder.env[node] = builder.map(node.args[0])[node.args[1]]
        case _:
            builder.copy(node)


def _nested(node: Any) -> fx.GraphModule | None:
    """Returns the nested graph that a `get_attr` node names; None if it names something else."""
    if node.op != "get_attr":
        return None
    value = getattr(node.graph.owning_module, str(node.target), None)
    return value if isinstance(value, fx.GraphModule) else None


def _region(builder: Builder, region: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Inlines a region's graph, called with `args` of the outer graph; returns its outputs in the new graph."""
    return _inlined(builder, _graph_of(region), [builder.map(arg) for arg in args])


def _region_without_gradients(builder: Builder, region: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The same under `torch.no_grad`: its outputs carry no gradient.

    If it writes into memory, it reads through `detach()`: `functionalize` says what that means. A tensor of the outer
    graph that it writes to and returns is that tensor, with its gradient.
    """
    inner, operands = _graph_of(region), [builder.map(arg) for arg in args]
    if not any(writes(node) for node in inner.nodes):
        return tuple(_detached(builder, value) for value in _inlined(builder, inner, operands))
    outputs = _inlined(builder, inner, [_detached(builder, value) for value in operands])
    outer = dict(zip((node for node in inner.nodes if node.op == "placeholder"), operands, strict=True))
    returned = [_written_to(node) for node in pytree.arg_tree_leaves(inner.output_node().args[0])]
    pairs = zip(returned, outputs, strict=True)
    return tuple(outer[node] if node in outer else _detached(builder, value) for node, value in pairs)


def _written_to(node: Any) -> Any:
    """Returns the tensor that an in-place operator returns."""
    while isinstance(node, fx.Node) and writes(node) and written_operand(node) is not None:
        node = written_operand(node)
    return node


def _graph_of(region: Any) -> fx.Graph:
    return _nested(region).graph  # type: ignore[union-attr]


def _inlined(builder: Builder, inner: fx.Graph, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Copies a nested graph, called with values of the new graph; returns its outputs."""
    places = [node for node in inner.nodes if node.op == "placeholder"]
    builder.env.update(zip(places, operands, strict=True))
    _inline_nodes(builder, [node for node in inner.nodes if node.op not in ("placeholder", "output")])
    outputs = builder.map(inner.output_node().args[0])
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def _detached(builder: Builder, value: Any) -> Any:
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    floating = isinstance(val, torch.Tensor) and val.is_floating_point()
    return builder.call(aten.detach.default, value) if floating else value
