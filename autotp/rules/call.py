"""A call of an operator, as rules see it: arguments by name, operands and outputs with their shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autotp.ops.dropout import exact_attention, exact_dropout, fast_attention, fast_dropout

DRAWS = (exact_dropout, fast_dropout, exact_attention, fast_attention)
"""Operators of our own that take numbers from the random stream: passes keep these, in order."""
POSITIONS = tuple(map(str, range(16)))


@dataclass(frozen=True)
class Call:
    """A call with its arguments bound to their names.

    Attributes:
        target: the operator, or a Python function.
        arguments: name -> value, defaults included; of a builtin without a signature: position -> value.
        operands: the tensor arguments in order, lists flattened; an optional one that is absent is None.
        outputs: the output tensors; empty for an operator that returns none.
    """

    target: Callable[..., Any]
    arguments: dict[str, Any]
    operands: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument called `name`, or `default` where this overload has none of that name."""
        return self.arguments.get(name, default)

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """A dimension argument, counted from the front of the first operand."""
        size = self.operands[0].dim() if ndim is None else ndim
        return self.arguments[name] % size if size else 0


def call_of(node: fx.Node) -> Call:
    """The call that a graph's node makes, with its operands' and outputs' example values (`node.meta["val"]`)."""
    arguments = bind(node)
    values = {name: fx.map_arg(value, lambda n: n.meta.get("val")) for name, value in arguments.items()}
    operands = tuple(None if n is None else n.meta["val"] for n in operand_nodes(node))
    return Call(node.target, values, operands, outputs_of(node))  # type: ignore[arg-type]


def bind(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by name, defaults filled in; nodes stay nodes."""
    if not isinstance(node.target, OpOverload):
        return dict(zip(_parameters(node.target), node.args, strict=False)) | dict(node.kwargs)
    bound: dict[str, Any] = {}
    for i, (name, default, kwarg_only, _) in enumerate(_schema(node.target)):
        if name in node.kwargs:
            bound[name] = node.kwargs[name]
        else:
            bound[name] = node.args[i] if not kwarg_only and i < len(node.args) else default
    return bound


def operand_nodes(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """The nodes that are tensor operands, in the order of `Call.operands`."""
    return tuple(_operands(node))


def outputs_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The example values of a node's outputs: one for a tensor, several for a tuple or list of them."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(v for v in value if isinstance(v, torch.Tensor))
    return ()


def _operands(node: fx.Node) -> Iterator[fx.Node | None]:
    if not isinstance(node.target, OpOverload):
        yield from (n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))
        return
    bound = bind(node)
    for name, _, _, kind in _schema(node.target):
        value = bound[name]
        if kind == "tensor" and (value is None or is_tensor(value)):
            yield value
        elif kind == "tensors" and value is not None:
            yield from (v if v is None or is_tensor(v) else None for v in value)


def operator_name(node: fx.Node) -> str:
    """The operator's name, without its overload, as `aten::add`."""
    return str(getattr(node.target, "_schema", node).name)


def placeholders(graph: fx.Graph) -> list[str]:
    """What a graph is given, by name."""
    return [node.name for node in graph.nodes if node.op == "placeholder"]


def returned(graph: fx.Graph) -> tuple[Any, ...]:
    """What a graph returns."""
    found: Any = graph.output_node().args[0]
    return tuple(found)


def draws(node: fx.Node) -> bool:
    """True for a call that takes numbers from the random stream; dropout does not in evaluation, or of nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return node.target in DRAWS
    arguments = bind(node)
    idle = arguments.get("train", True) is False, arguments.get("training", True) is False
    nothing = (
        node.target is not torch.ops.aten.native_dropout.default and "train" in arguments and arguments.get("p") == 0
    )
    return not (any(idle) or nothing or arguments.get("dropout_p") == 0)


def writes(node: fx.Node) -> bool:
    """True for a call that writes into what it is given, as its schema says."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_tensor(value: Any) -> bool:
    """True for a node that stands for a tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's parameters; of what is no Python function, the positions."""
    return tuple(inspect.signature(function).parameters) if inspect.isfunction(function) else POSITIONS


@cache
def _schema(op: OpOverload) -> tuple[tuple[str, Any, bool, str], ...]:
    """Name, default, keyword-only and kind (tensor, tensors, plain) of each argument."""
    rows = []
    for arg in op._schema.arguments:
        text = str(arg.type)
        kind = "plain" if "Tensor" not in text else "tensors" if text.startswith("List") else "tensor"
        rows.append((arg.name, arg.default_value if arg.has_default_value() else None, arg.kwarg_only, kind))
    return tuple(rows)
