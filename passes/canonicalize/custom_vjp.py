"""custom_vjp: keeps a backward that the model defines in the graph, and later moves it to a separate graph.

`mark`, before planning
Before: a, b = vjp_output(y, name); g = vjp_kept(x); ...; s = vjp_sent(x, dx); z = vjp_result(a, [s])
After:  o = output(y, name); a = o[0]; b = o[1]; g = kept(x); ...; s = sent(x, dx); z = result(a, (o, s))

`fuse`, on a rank's graph after the check
Before: o = output(y, name); a = o[0]; b = o[1]; dx = neg(b); s = sent(x, dx); z = result(a, (o, s))
After:  o = vjp(y, x); z = o[0]                 vjp's backward: neg(b)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.errors import Error
from autotp.ops.custom_vjp import RECORDED, Places, Vjp, is_gradient, kept, output, result, sent
from autotp.passes.builder import Builder, copied, fake_mode_of
from autotp.rules.call import outputs_of
from autotp.rules.traits import draws
from autotp.source_location import line_of


def mark(graph: fx.Graph) -> fx.Graph:
    """Returns the same function with the recorded marks as operators that passes know."""
    if not any(graph.find_nodes(op="call_function", target=mark) for mark in RECORDED.values()):
        return graph
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        builder.origin = node
        args: Any = builder.map(node.args)
        if node.target is RECORDED["output"]:
            _mark(builder, node, output, args, tuple(node.meta["val"]))
        elif node.target is RECORDED["kept"]:
            _mark(builder, node, kept, args, node.meta["val"])
        elif node.target is RECORDED["sent"]:
            _mark(builder, node, sent, args, (node.meta["val"],))
        elif node.target is RECORDED["result"]:
            y, marks = args
            _mark(builder, node, result, (y, (y.args[0], *marks)), node.meta["val"])
        else:
            builder.copy(node)
    for group in _groups(builder.graph):
        _expect_no_draws(group)
    return builder.graph


def _mark(builder: Builder, node: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> None:
    builder.env[node] = builder.raw(target, args)
    builder.env[node].meta["val"] = value


def _expect_no_draws(group: FunctionCall) -> None:
    """Raises Error if backward draws random numbers itself (it may read numbers that forward drew and saved)."""
    visited, queue = set[fx.Node](), [*group.inside, *group.saved]
    kept_values = {node.args[0] for node in group.inside if node.target is kept}
    while queue:
        node = queue.pop()
        if node in visited or node in kept_values or node.target is output:
            continue
        visited.add(node)
        queue += [] if node.target is kept or is_gradient(node) else node.all_input_nodes
        if draws(node):
            raise Error(
                f"the backward of the torch.autograd.Function `{group.outputs[0].args[1]}` draws random numbers",
                at=line_of(group.outputs[0]),
                fix="draw them in forward, and save them for backward",
            )


def backward_of(graph: fx.Graph) -> set[fx.Node]:
    """Returns the operators of a graph that belong to backward: they depend on kept values or on a gradient."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        reads = any(n in backward for n in node.all_input_nodes) and node.target not in (sent, output, result)
        if node.target is kept or is_gradient(node) or (reads and outputs_of(node)):  # A size is not backward's.
            backward.add(node)
    return backward


@dataclass(frozen=True)
class FunctionCall:
    """One call of a Function.

    Attributes:
        sent: the gradients of its operands, in order.
        outputs: its outputs, in order.
        inside: the operators of its backward, in order.
        saved: the values of forward that its backward reads.
    """

    sent: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]


def fuse(graph: fx.Graph) -> fx.Graph:
    """Returns a rank's graph with each Function's backward in a separate graph."""
    groups = _groups(graph)
    if not groups:
        return graph
    last = {max(group.sent, key=_order(graph).__getitem__): group for group in groups}
    inside = {node for group in groups for node in group.inside}
    builder = Builder(fake_mode_of(graph))
    for node in graph.nodes:
        builder.origin = node
        source: Any = node.args[0] if node.args else None
        if node in last:
            _call(builder, last[node])
        elif node.target is result:
            builder.env[node] = builder.env[node.args[0]]
        elif node.target in (output, sent) or (isinstance(source, fx.Node) and source.target is output):
            continue
        elif node not in inside:
            _copied(builder, node)
    return builder.graph


def _order(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _groups(graph: fx.Graph) -> list[FunctionCall]:
    backward, order = backward_of(graph), _order(graph)
    calls: dict[tuple[fx.Node, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is result:
            made, *marks = node.args[1]
            calls.setdefault(tuple(marks), []).append(made)
    return [_group(marks, made, backward, order) for marks, made in calls.items()]


def _group(
    marks: tuple[fx.Node, ...], made: Sequence[fx.Node], backward: set[fx.Node], order: dict[fx.Node, int]
) -> FunctionCall:
    members, queue = set[fx.Node](), [mark.args[1] for mark in marks]
    while queue:
        node: Any = queue.pop()
        if node not in members:
            members.add(node)
            queue += [] if node not in backward or node.target is kept or is_gradient(node) else node.all_input_nodes
    outputs = {*made, *(node.args[0] for node in members if is_gradient(node))}
    read = (node for node in members if node.target is kept or node not in backward)
    saved = {node.args[0] if node.target is kept else node for node in read}
    inside = (node for node in members if node in backward)
    return FunctionCall(marks, *(tuple(sorted(part, key=order.__getitem__)) for part in (outputs, inside, saved)))  # type: ignore[arg-type]


def _call(builder: Builder, group: FunctionCall) -> None:
    """Writes the operator `Vjp` for a call, and its results."""
    parts = [node.args[0] for node in group.outputs], [node.args[0] for node in group.sent], group.saved
    operands: list[Any] = list(dict.fromkeys(node for part in parts for node in part))
    places = Places(*(tuple(map(operands.index, part)) for part in parts))
    name = str(group.outputs[0].args[1])
    call = builder.raw(Vjp(_backward_graph(group), places, name), builder.map(tuple(operands)))
    call.meta["val"] = tuple(node.meta["val"][0] for node in group.outputs)
    for i, node in enumerate(group.outputs):
        for user in [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]:
            item = builder.raw(operator.getitem, (call, i))
            item.meta["val"] = node.meta["val"][0]
            builder.env[user] = item


def _backward_graph(group: FunctionCall) -> fx.Graph:
    """Returns the graph of a backward: (gradients of outputs, saved values) -> gradients of operands."""
    graph, env, grads = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for i, node in enumerate(group.outputs):
        grads[node] = graph.placeholder(f"grad_{i}")
        grads[node].meta["val"] = node.meta["val"][1]
    for i, node in enumerate(group.saved):
        env[node] = graph.placeholder(f"saved_{i}")
        env[node].meta["val"] = node.meta.get("val")
    for node in group.inside:
        if is_gradient(node):
            env[node] = grads[node.args[0]]  # type: ignore[index]
        elif node.target is kept:
            env[node] = env[node.args[0]]  # type: ignore[index]
        else:
            env[node] = copied(graph, node, env.__getitem__)
    graph.output(tuple(env[node.args[1]] for node in group.sent))  # type: ignore[index]
    return graph


def _copied(builder: Builder, node: fx.Node) -> None:
    """Copies a node of forward, and operators of backward that compute a size for it.

    For sizes, `kept(x)` and the gradient of x may be replaced by x.
    """
    for operand in node.all_input_nodes:
        if operand in builder.env:
            continue
        if operand.target is kept:
            builder.env[operand] = builder.env[operand.args[0]]  # type: ignore[index]
        elif is_gradient(operand):
            builder.env[operand] = builder.env[operand.args[0].args[0]]  # type: ignore[index,union-attr]
        else:
            _copied(builder, operand)
    builder.copy(node)
