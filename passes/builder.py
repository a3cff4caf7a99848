"""Builder: makes a torch.fx graph from another; the old graph stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils import _pytree as pytree

from autotp.attached import attached
from autotp.ops.attention.zigzag import in_order, zigzag, zigzag_like, zigzag_rows, zigzag_rows_like
from autotp.ops.channels import conv_transpose, conv_transpose_like, convolution, convolution_like
from autotp.ops.collectives import copy
from autotp.ops.dropout import fast_zigzag_rows
from autotp.ops.losses.argmax import linear_argmax_key, linear_argmax_key_like
from autotp.ops.losses.linear_cross_entropy import (
    linear_class_terms,
    linear_class_terms_like,
    linear_loss_sum,
    linear_loss_sum_like,
)
from autotp.ops.losses.linear_mixture import linear_mixture_sums, linear_mixture_sums_like

aten = torch.ops.aten
PART = "part"
"""The key of `node.meta` that tells which part of the batch an operator computes, of how many: `(0, 2)`.

Operators without it compute the whole.
"""
META = ("val", "stack_trace", "nn_module_stack", PART)
"""The keys of `node.meta` that passes carry over; `val` is the example value."""


class Results(dict[Any, Any]):
    """Operator and kinds of its arguments -> result under a fake mode: see `evaluated`."""


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums: 65,504 is the largest number of float16, and bfloat16 has 8 bits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _linear_like(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the example value of `linear`. Without a bias, torch 2.11 needs a number of elements without symbols."""
    some = weight.new_empty(weight.shape[:1]) if bias is None and weight.dim() == 2 else bias
    return torch.nn.functional.linear(x, weight, some)


def _baddbmm_like(x: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, **_: Any) -> torch.Tensor:
    """Returns the example value of `baddbmm`. Where torch 2.13 broadcasts `x`, it takes no symbols for sizes."""
    return torch.bmm(batch1, batch2).to(x.dtype)


def _addbmm_like(x: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, **_: Any) -> torch.Tensor:
    """Returns the example value of `addbmm`, which torch computes by `baddbmm`."""
    return torch.bmm(batch1, batch2).sum(0).to(x.dtype)


def _copy_like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Returns the example value of `copy`, whose group has no ranks while a graph is planned."""
    return x.view_as(x)


SIZES: dict[Any, Callable[..., Any]] = {
    copy: _copy_like,
    aten.linear.default: _linear_like,
    aten.baddbmm.default: _baddbmm_like,
    aten.addbmm.default: _addbmm_like,
    convolution: convolution_like,
    conv_transpose: conv_transpose_like,
    linear_class_terms: linear_class_terms_like,
    linear_loss_sum: linear_loss_sum_like,
    linear_argmax_key: linear_argmax_key_like,
    linear_mixture_sums: linear_mixture_sums_like,
    zigzag: zigzag_like,
    in_order: zigzag_like,
    zigzag_rows: zigzag_rows_like,
    fast_zigzag_rows: zigzag_rows_like,
}
"""Functions whose example values another function makes, which assumes nothing about sizes."""


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Returns the fake mode that the example values of `graph` belong to."""
    first = next((value for node in graph.nodes if isinstance(value := node.meta.get("val"), FakeTensor)), None)
    return detect_fake_mode(first) or FakeTensorMode(allow_non_fake_inputs=True)


def size_assumptions(graph: fx.Graph) -> list[Any]:
    """Returns all that was assumed about symbolic sizes up to now, as sympy expressions.

    A comparison of symbolic sizes in Python (`if n == 5`) assumes its outcome for all calls.
    """
    environment: Any = fake_mode_of(graph).shape_env
    return [] if environment is None else [assumed.expr for assumed in environment.guards]


def evaluated(mode: FakeTensorMode, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the result of a call on example values.

    Layers repeat, so most calls were evaluated before with arguments of the same sizes: then the stored result is
    returned. Use only its sizes, strides and dtype: several nodes may share one result.
    """
    key = target, _kind(args), _kind(kwargs)
    results = attached(mode, Results)
    # A size that depends on values has a symbol of its own in each call, so no result is shared.
    if key not in results or torch.Tag.dynamic_output_shape in getattr(target, "tags", ()):
        with mode, torch.no_grad():
            results[key] = SIZES.get(target, target)(*args, **kwargs)
    return results[key]


def _kind(value: Any) -> Any:
    """Returns arguments as a dict key: of a tensor sizes, strides, dtype and device. 1, 1.0 and True are three keys."""
    if isinstance(value, torch.Tensor):
        sizes = tuple(_kind(n) for n in (*value.shape, *value.stride(), value.storage_offset()))
        return torch.Tensor, value.dim(), sizes, value.dtype, value.device
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value), value.node._expr
    if isinstance(value, tuple | list):
        return tuple(_kind(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in value.items())
    if isinstance(value, slice):
        return slice, _kind((value.start, value.stop, value.step))
    return type(value), value


def number_of_parts(node: fx.Node) -> int:
    """Returns the number of parts of the batch of which an operator computes one."""
    parts: int = node.meta.get(PART, (0, 1))[1]
    return parts


def at_captured_sizes(values: Any, mode: FakeTensorMode) -> Any:
    """Returns example values with the sizes at capture as numbers. A call on them assumes nothing about other sizes.

    Args:
        mode: a fake mode without symbols.
    """

    def number(n: Any) -> Any:
        if not isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool):
            return n
        if n.node.hint is not None:
            return n.node.hint
        return _size_of_values(n) if isinstance(n, torch.SymInt) else 2

    def fixed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return number(x)
        sizes, strides = [number(n) for n in x.shape], [number(n) for n in x.stride()]
        with mode:
            return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)

    return pytree.tree_map(fixed, values)


def _size_of_values(size: torch.SymInt) -> int:
    """Returns an example of a size that depends on values.

    The symbols in it may be any number that the graph allows. They get the least from 2 on, and sizes that the graph
    found equal get the same: `bincount(minlength=5)` is 5 long, and beside a tensor of 7 rows it is 7 long.
    """
    environment, expr = size.node.shape_env, size.node.expr

    def example(symbol: Any) -> Any:
        if symbol in environment.backed_var_to_val:
            return environment.backed_var_to_val[symbol]
        bounds = environment.var_to_range[symbol]
        return min(max(sympy.Integer(2), bounds.lower), bounds.upper)

    return int(expr.xreplace({symbol: example(symbol) for symbol in expr.free_symbols}))


def copied(graph: fx.Graph, node: fx.Node, operand: Callable[[fx.Node], Any]) -> fx.Node:
    """Adds a copy of a node of another graph, with operands that `operand` gives.

    `Graph.node_copy` does the same in three times the time: it looks through all arguments for numbers that are
    symbols, which the arguments of a graph's nodes never are.
    """
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    copy.args = fx.map_arg(node.args, operand)
    if node.kwargs:
        copy.kwargs = fx.map_arg(node.kwargs, operand)
    copy.meta.update(node.meta)
    return copy


class Builder:
    """A new graph, and the map from nodes of the old graph to nodes of the new one (`env`).

    Attributes:
        origin: the node of the old graph whose source line new calls get.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph, self.mode = fx.Graph(), mode
        self.env: dict[fx.Node, Any] = {}
        self.origin: fx.Node | None = None

    def map(self, value: Any) -> Any:
        """Returns arguments of the old graph as arguments of the new graph."""
        return fx.map_arg(value, lambda node: self.env[node])

    def copy(self, node: fx.Node) -> fx.Node:
        """Copies a node of the old graph, with mapped operands, and notes the copy in `env`."""
        copy = self.env[node] = copied(self.graph, node, self.env.__getitem__)
        # No pass may rely on other keys, which are those of the exporter or of a single pass.
        for key in copy.meta.keys() - META:
            del copy.meta[key]
        return copy

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a call on nodes of the new graph; computes its example value from theirs."""
        node = self.raw(target, args, kwargs)
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = evaluated(self.mode, target, *values, **named)
        return node

    def cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Adds a cast of a node of the new graph, if it has another dtype."""
        return value if value.meta["val"].dtype == dtype else self.call(torch.ops.aten.to.dtype, value, dtype)

    def size(self, x: fx.Node, dim: int) -> Any:
        """Returns the length of a dimension of a value: a number, or a node that computes it."""
        length = x.meta["val"].shape[dim]
        return length if isinstance(length, int) else self.call(torch.ops.aten.sym_size.int, x, dim)

    def length(self, name: str, hint: int) -> Any:
        """Returns a new symbolic length for example values. torch makes a number of a `hint` of 0 or 1."""
        from torch._dynamo.source import ConstantSource  # All of Dynamo comes with it (1 s).

        env, source = self.mode.shape_env, ConstantSource(name)
        symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC)  # type: ignore[union-attr]
        return env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[union-attr]

    def raw(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Adds a call without an example value, with the source line of `origin`."""
        node = self.graph.call_function(target)  # With operands it takes longer: see `copied`.
        node.args, node.kwargs = args, kwargs or {}
        if self.origin is not None:
            node.meta = {key: self.origin.meta[key] for key in META if key in self.origin.meta and key != "val"}
        return node


def ancestors(nodes: Iterable[Any]) -> set[fx.Node]:
    """Returns these nodes and all that they are computed from."""
    reached, queue = set[fx.Node](), [n for n in nodes if isinstance(n, fx.Node)]
    while queue:
        node = queue.pop()
        if node not in reached:
            reached.add(node)
            queue += node.all_input_nodes
    return reached


def subgraph(graph: fx.Graph, results: Sequence[Any], nodes: Collection[fx.Node]) -> fx.Graph:
    """Returns these nodes of a graph as a graph with these results."""
    part, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in nodes and node.op != "output":
            env[node] = copied(part, node, env.__getitem__)
    part.output(fx.map_arg(tuple(results), env.__getitem__))
    return part
