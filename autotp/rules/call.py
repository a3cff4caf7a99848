"""A call of an operator, as rule functions get it: arguments by name, operands and outputs with their shapes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

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
        """Returns the argument `name`, or `default` if this overload has no such argument."""
        return self.arguments.get(name, default)

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """Returns a dimension argument as an index from the front of the first operand."""
        # Dimensions may count from the back, and a number takes 0 and -1 although it has none.
        size = self.operands[0].dim() if ndim is None else ndim
        return self.arguments[name] % size if size else 0


def call_of(node: fx.Node) -> Call:
    """Returns the call of a node, with the example values (`node.meta["val"]`) of its operands and outputs."""
    arguments = arguments_of(node)
    values = {name: fx.map_arg(value, lambda n: n.meta.get("val")) for name, value in arguments.items()}
    operands = tuple(None if n is None else n.meta["val"] for n in operand_nodes(node))
    return Call(node.target, values, operands, outputs_of(node))  # type: ignore[arg-type]


def operator_of(node: fx.Node) -> Any:
    """Returns what a node calls; where `python_calls` has put a Python function in its place, the operator."""
    return node.meta.get("operator", node.target)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of a node by name, with defaults; nodes stay nodes."""
    operator = operator_of(node)
    if not isinstance(operator, OpOverload):
        # Not strict: a call may leave out parameters that have defaults.
        return dict(zip(parameters(operator), node.args, strict=False)) | dict(node.kwargs)
    return bound_arguments(operator, node.args, node.kwargs)


def bound_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, in the order of the schema, with defaults."""
    bound: dict[str, Any] = {}
    for i, (name, default, kwarg_only, _) in enumerate(_schema(op)):
        if name in kwargs:
            bound[name] = kwargs[name]
        else:
            bound[name] = args[i] if not kwarg_only and i < len(args) else default
    return bound


def positional_arguments(op: OpOverload, bound: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments by name as a call has them: the inverse of `bound_arguments`."""
    plain = [bound[name] for name, _, kwarg_only, _ in _schema(op) if not kwarg_only]
    return plain, {name: bound[name] for name, _, kwarg_only, _ in _schema(op) if kwarg_only}


def called_with(op: OpOverload, bound: Mapping[str, Any]) -> Any:
    """Returns what an operator gives for arguments by name."""
    args, kwargs = positional_arguments(op, bound)
    return op(*args, **kwargs)


def operand_nodes(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """Returns the nodes that are tensor operands, in the order of `Call.operands`."""
    return tuple(_operands(node))


def outputs_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Returns the example values of a node's output tensors."""
    return result_tensors(node.meta.get("val"))


def result_tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of an operator's result."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(v for v in value if isinstance(v, torch.Tensor))
    return ()


def _operands(node: fx.Node) -> Iterator[fx.Node | None]:
    if not isinstance(node.target, OpOverload):
        nodes: list[fx.Node] = []  # Not `all_input_nodes`, which names a node once even if it is two operands.
        fx.map_arg((node.args, node.kwargs), nodes.append)
        yield from (n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor))
        return
    yield from tensor_arguments(node.target, arguments_of(node), is_tensor)


def tensor_arguments(op: OpOverload, bound: Mapping[str, Any], is_tensor: Callable[[Any], bool]) -> Iterator[Any]:
    """Yields the arguments of a call that are tensors, lists flattened; None for an optional one that is absent."""
    for name, _, _, category in _schema(op):
        value = bound[name]
        if category == "tensor" and (value is None or is_tensor(value)):
            yield value
        elif category == "tensors" and value is not None:
            yield from (v if v is None or is_tensor(v) else None for v in value)


def elements_of(shape: Iterable[Any]) -> int:
    """Returns the elements of a tensor of this shape, at the captured sizes; a size that depends on values counts as 0.

    shape: numbers, and symbols of sizes
    """
    return math.prod(n if isinstance(n, int) else int(n.node.hint or 0) for n in shape)


def nbytes_of(value: torch.Tensor) -> int:
    """Returns the bytes of an example value, as `elements_of` counts them."""
    return elements_of(value.shape) * value.dtype.itemsize


def operator_name(node: fx.Node) -> str:
    """Returns the operator's name without its overload: `aten::add`."""
    return str(getattr(node.target, "_schema", node).name)


def placeholders(graph: fx.Graph) -> list[str]:
    """Returns the names of a graph's placeholders."""
    return [node.name for node in graph.nodes if node.op == "placeholder"]


def returned(graph: fx.Graph) -> tuple[Any, ...]:
    """Returns the outputs of a graph."""
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs)


def writes(node: fx.Node) -> bool:
    """True for a call that writes into its arguments, as its schema says."""
    operator = operator_of(node)
    return isinstance(operator, OpOverload) and operator._schema.is_mutable


def updates_statistics(node: fx.Node) -> bool:
    """True for a batch norm that updates its running mean and variance, although its schema does not say so."""
    if node.target is not torch.ops.aten.batch_norm.default:
        return False
    arguments = arguments_of(node)
    return bool(arguments["training"]) and arguments["running_mean"] is not None


def written_operand(node: fx.Node) -> Any:
    """Returns the operand that a call writes into: its first one or `out`; None if it is another, or several."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    places = [i for i, arg in enumerate(schema) if arg.alias_info is not None and arg.alias_info.is_write]
    if places == [0]:
        return node.args[0]
    return node.kwargs.get("out") if len(places) == 1 and schema[places[0]].is_out else None


def is_tensor(value: Any) -> bool:
    """True for a node whose value is a tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def is_loss(node: fx.Node) -> bool:
    """True for a floating tensor without dimensions."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


@cache
def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of an operator's or a function's parameters; positions if it is neither."""
    if isinstance(function, OpOverload):
        return tuple(name for name, *_ in _schema(function))
    return tuple(inspect.signature(function).parameters) if inspect.isfunction(function) else POSITIONS


@cache
def _schema(op: OpOverload) -> tuple[tuple[str, Any, bool, str], ...]:
    """Returns name, default, keyword-only and category (tensor, tensors, plain) of each argument."""
    rows = []
    for arg in op._schema.arguments:
        text = str(arg.type)
        # The type as text: `Optional[Tensor]` and `List[Optional[Tensor]]` count as tensors, too.
        category = "plain" if "Tensor" not in text else "tensors" if text.startswith("List") else "tensor"
        rows.append((arg.name, arg.default_value if arg.has_default_value() else None, arg.kwarg_only, category))
    return tuple(rows)
