"""python_calls: torch's own Python functions for the operators that models use most.

Before: torch.ops.aten.add.Tensor(x, y)         After: torch.add(x, y)
Before: slice(x, 1, 4, 8)                       After: torch.narrow(x, 1, 4, 4), where the sizes are numbers
Before: a = x.narrow(3, 4, 4); b = x.narrow(3, 0, 4)    After: b, a = torch.split_with_sizes(x, [4, 4], 3)
Before: y = reshape(reshape(x, a), b)           After: y = reshape(x, b)
Before: a = apart(x); mul(y, a)                 After: mul(y, x)

Both run the same kernel. A call of `torch.ops` matches its arguments with a schema, and takes 1 to 3 us longer. Slices
that share out a dimension, such as the halves that rotary embeddings turn, are one split: its backward joins the
gradients once, where that of each slice fills a tensor of the whole's size, and autograd adds these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _nn
from torch._ops import OpOverload

from autotp.ops.attention.products import attention
from autotp.ops.placement_moves import apart
from autotp.rules.call import arguments_of
from autotp.rules.row import Trait
from autotp.rules.traits import has

aten = torch.ops.aten
PYTHON_CALLS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.contiguous.default: Tensor.contiguous,
    aten.cos.default: torch.cos,
    aten.detach.default: Tensor.detach,
    aten.div.Tensor: torch.div,
    aten.dropout.default: torch.dropout,
    aten.embedding.default: torch.embedding,
    aten.eq.Scalar: torch.eq,
    aten.exp.default: torch.exp,
    aten.expand.default: Tensor.expand,
    aten.flatten.using_ints: torch.flatten,
    aten.gelu.default: _nn.gelu,
    aten.layer_norm.default: torch.layer_norm,
    aten.linear.default: _nn.linear,
    aten.log.default: torch.log,
    aten.logical_not.default: torch.logical_not,
    aten.masked_fill.Scalar: torch.masked_fill,
    aten.matmul.default: torch.matmul,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.ne.Scalar: torch.ne,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape,
    aten.rms_norm.default: torch.rms_norm,
    aten.rsqrt.default: torch.rsqrt,
    aten.scaled_dot_product_attention.default: attention,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.silu.default: _nn.silu,
    aten.sin.default: torch.sin,
    aten.softmax.int: torch.softmax,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.sub.Tensor: torch.sub,
    aten.sum.default: torch.sum,
    aten.tanh.default: torch.tanh,
    aten.to.dtype: Tensor.to,
    aten.transpose.int: torch.transpose,
    aten.type_as.default: Tensor.type_as,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: Tensor.view,
}
"""Operator -> the Python function that takes its arguments in the same order, and runs the same operator."""

KEYWORD_ONLY: dict[Any, frozenset[str]] = {aten.to.dtype: frozenset({"memory_format"})}
"""Operator -> the arguments that its Python function takes by keyword only, where the operator takes them by place."""

BEFORE_CALLS: dict[Any, Callable[[], None]] = {}
"""Operator -> a function that a graph with such an operator calls first, each time."""

MAKES_NEW_TENSORS = Trait.PRODUCT | Trait.ADDED_PRODUCT | Trait.SOFTMAX | Trait.NORM | Trait.ATTENTION
"""Operators with one of these traits make a new tensor."""


def call_python(module: fx.GraphModule) -> fx.GraphModule:
    """Replaces operators in a graph and its blocks, in place, and returns the graph.

    It comes last, and only where the graph runs: passes and the estimate ask what an operator is.
    """
    # Blocks, and what is recomputed in them, are modules with graphs of their own.
    parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    _begin(module, {node.target for part in parts for node in part.graph.nodes})
    for part in parts:
        returned = _returned(part.graph)
        for node in list(part.graph.nodes):
            if node.target is apart and not any(user.op == "output" for user in node.users):
                node.replace_all_uses_with(node.args[0])
                part.graph.erase_node(node)
            elif node.target is aten.reshape.default and node not in returned and _is_read_once(node.args[0]):
                source = node.all_input_nodes[0]
                node.replace_input_with(source, source.all_input_nodes[0])
                part.graph.erase_node(source)
            elif node.target is aten.slice.Tensor:
                _narrow(node)
            if node.target in PYTHON_CALLS:
                _call_python_function(node)
        # At the end: by now each slice that can be one is a `narrow`.
        _split(part.graph, returned)
        part.graph.lint()
        part.recompile()
    return module


def _begin(module: fx.GraphModule, operators: Collection[Any]) -> None:
    """Lets a graph begin with what its operators, and those of its blocks, need first."""
    functions = [function for operator, function in BEFORE_CALLS.items() if operator in operators]
    with module.graph.inserting_before(next(node for node in module.graph.nodes if node.op != "placeholder")):
        for function in functions:
            module.graph.call_function(function)


def _call_python_function(node: fx.Node) -> None:
    """Makes the call of an operator one of its Python function, which takes some arguments by keyword only."""
    operator: Any = node.target
    keywords = KEYWORD_ONLY.get(operator, frozenset())
    names = [argument.name for argument in operator._schema.arguments]
    placed = list(zip(names, node.args, strict=False))
    node.args = tuple(value for name, value in placed if name not in keywords)
    node.kwargs = {**node.kwargs, **{name: value for name, value in placed if name in keywords}}
    node.target, node.meta["operator"] = PYTHON_CALLS[operator], operator


def _returned(graph: fx.Graph) -> set[fx.Node]:
    """Returns the values in whose memory the caller may write: what the graph returns, and what that may be a view of.

    Such a value must lie where the model put it: in memory of its own if a reshape has copied it, and not in a part of
    a split, where torch refuses writes.
    """
    returned, queue = set[fx.Node](), list(graph.output_node().all_input_nodes)
    while queue:
        node = queue.pop()
        if node not in returned:
            returned.add(node)
            queue += node.all_input_nodes if _may_be_view(node.target) else ()
    return returned


def _may_be_view(target: Any) -> bool:
    """True for an operator whose result may lie in an operand's memory. Schemas of composed operators do not tell."""
    if not isinstance(target, OpOverload):
        return True
    declared = has(target, Trait.MAY_ALIAS | Trait.RESHAPE) or any(
        x.alias_info is not None for x in target._schema.returns
    )
    composed = target.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)
    return declared or (composed and not has(target, MAKES_NEW_TENSORS))


def _is_read_once(source: Any) -> bool:
    """True for a reshape that only one node reads."""
    # Nodes are replaced in order, so an earlier reshape is torch's function by now.
    return isinstance(source, fx.Node) and source.target is torch.reshape and len(source.users) == 1


def _split(graph: fx.Graph, returned: Collection[fx.Node]) -> None:
    """Makes slices that share out a dimension among them one split, unless the caller gets one: it may write there."""
    slices = dict[tuple[fx.Node, int], dict[int, fx.Node]]()
    lengths_by_node = dict[fx.Node, int]()
    for node in graph.find_nodes(op="call_function", target=torch.narrow):
        source, dim, start, lengths_by_node[node] = node.args
        if node not in returned:
            slices.setdefault((source, dim % source.meta["val"].dim()), {}).setdefault(start, node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for (source, dim), parts in slices.items():
        starts = sorted(parts)
        lengths = [lengths_by_node[parts[start]] for start in starts]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        # Only slices that follow one another from the beginning to the end are the parts of a split.
        if len(starts) < 2 or starts != [0, *ends[:-1]] or ends[-1] != source.meta["val"].shape[dim]:
            continue
        first = min(parts.values(), key=order.__getitem__)
        with graph.inserting_before(first):  # Its source is another node now if that was a slice, too.
            split = graph.call_function(torch.split_with_sizes, (first.args[0], lengths, dim))
            for i, start in enumerate(starts):
                parts[start].replace_all_uses_with(graph.call_function(operator.getitem, (split, i)))
        for node in parts.values():
            graph.erase_node(node)


def _narrow(node: fx.Node) -> None:
    """Makes a slice a `torch.narrow`, which has a Python function, if it takes neighbours and all sizes are numbers."""
    arguments, size = arguments_of(node), None
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if isinstance(source, Tensor):
        size = source.shape[arguments["dim"]]
    start, end = arguments["start"] or 0, arguments["end"]
    if arguments["step"] != 1 or not all(type(n) is int for n in (size, start, end if end is not None else 0)):
        return
    assert isinstance(size, int)
    # Python clips bounds that are negative or too large as torch's operator does.
    start, stop, _ = slice(start, end).indices(size)
    node.target, node.kwargs = torch.narrow, {}
    node.args = (node.args[0], arguments["dim"], start, max(stop - start, 0))
