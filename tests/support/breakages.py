"""Ways to break a rank's graph, as test_check tries them: node -> changes of the same node in a copy of its graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autotp.ops import collectives
from autotp.ops.coalesced import together
from autotp.ops.overlapped_linear import columns

aten = torch.ops.aten
KINDS = (
    collectives.copy,
    collectives.reduce,
    collectives.scatter,
    collectives.gather,
    collectives.all_gather,
    collectives.reduce_scatter,
)

Change = Callable[[fx.Node], Any]


def replace_with(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)


def after(node: fx.Node, target: Any, *rest: Any) -> fx.Node:
    """A new call on `node`, with its example value."""
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, (node, *rest))
    new.meta = dict(node.meta)
    return new


def _is_item(node: fx.Node) -> bool:
    """True for one of several parameters that are read together."""
    return node.target is operator.getitem and getattr(node.args[0], "target", None) is together


def drop(node: fx.Node) -> Iterator[Change]:
    """No conjugate."""
    if node.target in KINDS:
        yield lambda n: replace_with(n, n.args[0])
    if _is_item(node):
        yield lambda n: replace_with(n, n.args[0].args[0][n.args[1]])


def twice(node: fx.Node) -> Iterator[Change]:
    """The same conjugate, or its opposite, once more."""
    if node.target in KINDS[:2]:
        for kind in KINDS[:2]:
            yield lambda n, kind=kind: replace_with(n, after(n, kind, *n.args[1:]))


def another(node: fx.Node) -> Iterator[Change]:
    """Another conjugate in its place."""
    alike = KINDS[:2] if node.target in KINDS[:2] else KINDS[2:]
    for kind in alike if node.target in KINDS else ():
        if kind is not node.target:
            yield lambda n, kind=kind: setattr(n, "target", kind)
    if node.target is collectives.reduce:
        reducer = "sum" if node.args[2:] == ("max",) else "max"
        yield lambda n: setattr(n, "args", (*n.args[:2], reducer))


def misplace(node: fx.Node) -> Iterator[Change]:
    """A wrong dimension, size or block of a conjugate."""
    for at in range(2, len(node.args)) if node.target in KINDS[2:] else ():
        if isinstance(node.args[at], fx.Node):  # A length that the inputs' sizes decide.
            yield lambda n, at=at: n.update_arg(at, 2)
            continue
        for by in (-1, 1):
            yield lambda n, at=at, by=by: n.update_arg(at, n.args[at] + by)  # type: ignore[operator]
    if node.target in KINDS[2:]:
        yield lambda n: setattr(n, "args", (*n.args[:4], 2) if len(n.args) == 4 else n.args[:4])
        yield lambda n: n.update_arg(1, "dp")
    if node.target is collectives.share:
        yield lambda n: n.update_arg(1, "tp")
        yield lambda n: n.update_arg(3, n.args[3][:-1])
    if node.target is together:
        yield lambda n: n.update_arg(1, "dp" if n.args[1] == "tp" else "tp")
        for i, at in enumerate(node.args[2]):  # type: ignore[arg-type]
            for other in [(0, ((0, 1),))] if at is None else [None, (at[0], at[1][:-1])]:
                yield lambda n, i=i, at=other: n.update_arg(2, (*n.args[2][:i], at, *n.args[2][i + 1 :]))
    if _is_item(node):
        yield lambda n: n.update_arg(1, (n.args[1] + 1) % len(n.args[0].args[0]))


def bypass(node: fx.Node) -> Iterator[Change]:
    """One reader reads what comes before the conjugate."""
    for i in range(len(node.users) if node.target in KINDS else 0):
        yield lambda n, i=i: list(n.users)[i].replace_input_with(n, n.args[0])


def late(node: fx.Node) -> Iterator[Change]:
    """A conjugate behind its reader, such as a bias that is added before the reduction."""

    def change(n: fx.Node, i: int) -> None:
        reader = list(n.users)[i]
        reader.replace_input_with(n, n.args[0])
        replace_with(reader, after(reader, n.target, *n.args[1:]))

    for i, reader in enumerate(node.users if node.target in KINDS else ()):
        if reader.op == "call_function" and isinstance(reader.meta.get("val"), Tensor):
            yield lambda n, i=i: change(n, i)


def insert(node: fx.Node) -> Iterator[Change]:
    """A conjugate that nothing asks for."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.is_floating_point():
        for kind in KINDS[:2]:
            yield lambda n, kind=kind: replace_with(n, after(n, kind, "tp"))


def miscount(node: fx.Node) -> Iterator[Change]:
    """Another number: a local size, a start, a bound, a dimension, a scale, a flag."""

    def change(n: fx.Node, at: int, by: Callable[[Any], Any]) -> None:
        seen = iter(range(10**6))
        turned = lambda a: by(a) if isinstance(a, int | float) and next(seen) == at else a  # noqa: E731
        n.args = fx.node.map_aggregate(n.args, turned)

    numbers: list[Any] = []
    fx.node.map_aggregate(node.args, lambda a: numbers.append(a) if isinstance(a, int | float) else None)
    for at, number in enumerate(numbers if node.op == "call_function" and node.target not in KINDS else ()):
        if isinstance(number, bool):
            yield lambda n, at=at: change(n, at, operator.not_)
        else:
            yield lambda n, at=at: change(n, at, lambda a: a + 1)
            yield lambda n, at=at: change(n, at, lambda a: a * 2)


def skip(node: fx.Node) -> Iterator[Change]:
    """No operator, where one operand has the shape of the result."""
    if node.op == "call_function" and node.target not in KINDS and isinstance(node.meta.get("val"), Tensor):
        for i, operand in enumerate(node.all_input_nodes):
            value = operand.meta.get("val")
            if isinstance(value, Tensor) and list(map(str, value.shape)) == list(map(str, node.meta["val"].shape)):
                yield lambda n, i=i: replace_with(n, n.all_input_nodes[i])


def swap(node: fx.Node) -> Iterator[Change]:
    """The first two operands the other way round; another operator."""
    both = [isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), Tensor) for arg in node.args[:2]]
    if both == [True, True] and node.target not in (aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor):
        yield lambda n: setattr(n, "args", (n.args[1], n.args[0], *n.args[2:]))
    others = {
        aten.add.Tensor: aten.sub.Tensor,
        aten.gelu.default: aten.silu.default,
        aten.relu.default: aten.abs.default,
    }
    if node.target in others:
        yield lambda n: setattr(n, "target", others[n.target])


def confuse(node: fx.Node) -> Iterator[Change]:
    """Another value of the same shape, the one computed last before."""
    earlier: dict[str, list[int]] = {}
    for i, n in enumerate(node.graph.nodes):
        if n is node:
            break
        earlier.setdefault(_shape(n), []).append(i)
    for operand in node.all_input_nodes if node.target not in KINDS else ():
        found = earlier.get(_shape(operand), []) if isinstance(operand.meta.get("val"), Tensor) else []
        names = [list(node.graph.nodes)[i].name for i in found[-3:]]
        for name in names:
            if name != operand.name:
                yield lambda n, a=operand.name, b=name: n.replace_input_with(_named(n.graph, a), _named(n.graph, b))


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {list(map(str, value.shape))}" if isinstance(value, Tensor) else ""


def _named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def expose(node: fx.Node) -> Iterator[Change]:
    """An output before its conjugate, or with one more."""
    for i, value in enumerate(node.args[0] if node.op == "output" else ()):  # type: ignore[arg-type, var-annotated]
        for kind in KINDS[:2]:

            def change(n: fx.Node, i: int = i, kind: Any = kind) -> None:
                outs = list(n.args[0])  # type: ignore[arg-type]
                outs[i] = after(outs[i], kind, "tp")
                n.args = (tuple(outs),)

            if value.meta["val"].is_floating_point():
                yield change


def regroup(node: fx.Node) -> Iterator[Change]:
    """Something else of products that are one operator."""
    if node.target is operator.getitem and getattr(node.args[0], "target", None) is columns:
        yield lambda n: n.update_arg(1, (n.args[1] + 1) % len(n.args[0].args[4]))
    if node.target is not columns:
        return
    yield lambda n: n.update_arg(0, next(x for x in n.all_input_nodes if x is not n.args[0]))
    yield lambda n: n.update_arg(1, "dp")
    yield lambda n: n.update_arg(2, (1, 2, 1) if n.args[2] is None else None)
    yield lambda n: n.update_arg(3, (0, 1) if n.args[3] is None else None)
    for at in (4, 5, 6):
        yield lambda n, at=at: n.update_arg(at, n.args[at][::-1])
        yield lambda n, at=at: n.update_arg(at, n.args[at][:-1])
    yield lambda n: n.update_arg(5, (None,) * len(n.args[5]))
    yield lambda n: n.update_arg(6, tuple(not turn for turn in n.args[6]))
    yield from miscount(node)


WAYS = (drop, twice, another, misplace, bypass, late, insert, miscount, skip, swap, confuse, expose)


def changed(graph: fx.Graph, at: int, change: Change) -> fx.Graph:
    """A copy of a graph in which the node at a position is changed."""
    copy, env = fx.Graph(), {}
    for node in graph.nodes:
        env[node] = copy.node_copy(node, lambda n: env[n])
    change(list(copy.nodes)[at])
    return copy
