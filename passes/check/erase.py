"""Erases placements, for `check`: brings the operators of a rank and of the model into the same form.

rank's  split_with_sizes(x, [3, 3, 3], 2)   family SPLIT, operands [x]
model's chunk(x, 3, 2)                      family SPLIT, operands [x]

Operators are listed here a second time on purpose: see NOTE [What is proved] in `check.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autotp.ops import dropout, lookup
from autotp.ops.attention.causal_rows import causal_rows
from autotp.ops.attention.zigzag import zigzag_rows
from autotp.ops.experts import rows as routing
from autotp.ops.losses import cross_entropy
from autotp.ops.losses.argmax import argmax_key, linear_argmax_key
from autotp.ops.losses.linear_cross_entropy import linear_class_terms
from autotp.passes.check.types import CONJUGATES
from autotp.passes.lower.local_sizes import PARTS
from autotp.rules.call import is_tensor, operand_nodes, outputs_of, parameters
from autotp.rules.traits import draws
from autotp.sharding.axis import Axis, Size, product

aten = torch.ops.aten

NUMBERS = int | float | torch.SymInt | torch.SymFloat | torch.SymBool
SPLIT, SLICE = aten.split_with_sizes.default, aten.slice.Tensor
SDPA = aten.scaled_dot_product_attention.default
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_ZIGZAG = ("query", "key", "value", "parts", "rank", "scale", "enable_gqa")
FORMS: dict[Any, tuple[Any, tuple[str, ...], str]] = {
    lookup.embedding: (aten.embedding.default, ("weight", "indices", "start", "size", "padding_idx"), ""),
    lookup.gather: (aten.gather.default, ("self", "dim", "index", "start", "size"), ""),
    cross_entropy.class_terms: (cross_entropy.class_terms, ("x", "top", "classes", "dim", "start", "size"), ""),
    linear_class_terms: (linear_class_terms, parameters(linear_class_terms), ""),
    argmax_key: (argmax_key, ("x", "dim", "start"), ""),
    linear_argmax_key: (linear_argmax_key, parameters(linear_argmax_key), ""),
    causal_rows: (SDPA, ("query", "key", "value", "start", "scale", "enable_gqa"), ""),
    zigzag_rows: (zigzag_rows, (*_ZIGZAG, "dropout_p"), ""),
    dropout.fast_causal_rows: (SDPA, ("query", "key", "value", "start", "scale", "enable_gqa", "dropout_p"), "fast"),
    dropout.fast_zigzag_rows: (zigzag_rows, (*_ZIGZAG, "dropout_p"), "fast"),
    dropout.exact_dropout: (aten.dropout.default, ("input", "p"), "exact"),
    dropout.fast_dropout: (aten.dropout.default, ("input", "p"), "fast"),
    dropout.exact_attention: (SDPA, _ATTENTION, "exact"),
    dropout.fast_attention: (SDPA, _ATTENTION, "fast"),
    routing.dispatch: (routing.dispatch, ("chosen", "number", "grouped", "start", "stop", "capacity"), ""),
    routing.counts: (routing.counts, ("chosen", "number", "grouped", "start", "stop", "capacity"), ""),
}
"""A parallel form -> (the operator, the names of its arguments, its randomness or "" for both)."""
BIASED = {aten.linear.default: (aten.linear.default, (0, 1, 2)), aten.addmm.default: (aten.mm.default, (1, 2, 0))}
"""A product with a bias -> (the product without bias, the places of its operands and of the bias)."""


class ModelNodes:
    """The nodes of the model's graph: ordered nodes in order; pure operators by region, operator and operands.

    Attributes:
        parts: the symbol of a part of a symbolic length along another mesh axis -> the node that computes it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.region, self.ordered = 0, iter([n for n in graph.nodes if is_ordered(n)])
        self.pure: dict[Any, Any] = {}
        self.parts = {Size.of(n.meta["val"]): n for n in graph.nodes if n.target in PARTS}
        region, live = 0, _live(graph)
        for node in graph.nodes:
            # Equal operators on both sides of an effect, such as entering autocast, may compute different values.
            region += is_ordered(node) and not outputs_of(node)
            if node in live and not is_ordered(node) and not is_number(node):
                self.pure.setdefault((region, family(node), *tensor_operands(node)), []).append(node)

    def next(self) -> fx.Node | None:
        """Returns the next ordered node; a node with an effect, such as entering autocast, begins a new region."""
        node = next(self.ordered, None)
        self.region += node is not None and not outputs_of(node)
        return node

    def on(self, name: Any, *operands: fx.Node) -> list[fx.Node]:
        """Returns the pure operators of this family on these operands that are not matched yet."""
        return self.pure.get((self.region, name, *operands), [])


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Returns the ordered nodes, and the nodes that they depend on."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_ordered(node) or node in live:
            live.update([node, *node.all_input_nodes])
    return live


def is_ordered(node: fx.Node) -> bool:
    """True for inputs and outputs, random draws, and calls with an effect: their order counts."""
    return node.op != "call_function" or draws(node) or node.meta.get("val") is None


def is_number(node: fx.Node) -> bool:
    """True for a size, and for a number that is computed from sizes alone."""
    number = isinstance(node.meta.get("val"), NUMBERS)
    return number and (node.target is aten.sym_size.int or not any(map(is_tensor, node.all_input_nodes)))


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Returns the tensor operands in order; an operand that a parallel form reads twice appears twice."""
    if isinstance(node.target, OpOverload):
        # Not `all_input_nodes`, which names a node once even if it is two operands.
        return [operand for operand in operand_nodes(node) if operand is not None]
    # A call of opaque code gets its operands in a list.
    args: Any = node.args[0] if hasattr(node.target, "rule_function") else node.args
    return [arg for arg in args if isinstance(arg, fx.Node) and outputs_of(arg)]


def family(node: Any) -> Any:
    """Returns the model's operator for a node, or a common name for operators that mean the same on a rank."""
    if node.target is operator.getitem:
        return node.target, node.args[1]
    packet = getattr(node.target, "overloadpacket", node.target)
    splits, slices = (aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split), (aten.slice, aten.narrow)
    return SPLIT if packet in splits else SLICE if packet in slices else FORMS.get(node.target, (node.target,))[0]


def valued(arguments: Any) -> Any:
    """Returns arguments of the model's graph with sizes as numbers."""
    return plain(fx.map_arg(arguments, lambda n: n.meta["val"] if isinstance(n.meta.get("val"), NUMBERS) else n))


def plain(value: Any) -> Any:
    """Returns arguments in a form in which those of two graphs are equal if they mean the same."""
    if isinstance(value, torch.SymInt | Size):
        size = Size.of(value)
        # Zero times a symbol is the number zero.
        return size if size.symbols and size.number else size.number
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    # As text NaN equals itself, and 1.0 differs from 1.
    return str(value) if isinstance(value, float | torch.SymFloat | torch.SymBool) else value


def target_name(target: Any) -> str:
    """Returns an operator's name for messages."""
    return str(target) if isinstance(target, OpOverload | str) else str(target.__name__)


def called(node: fx.Node) -> str:
    """Returns a node's call for messages: `aten.add.Tensor(x, y)`"""
    return f"{target_name(node.target)}({', '.join(map(listed, [*node.args, *node.kwargs.values()]))})"


def listed(value: Any) -> str:
    """Returns an argument for messages: `[s0, 6]`, with items by `str`."""
    return f"[{', '.join(map(listed, value))}]" if isinstance(value, list | tuple) else str(value)


# ---- a dimension that is split before a conjugate and joined after it


def is_along(axis: Any, of: str) -> bool:
    """True for the mesh axis `of`, or a part of it (`tp/4`)."""
    return str(axis).partition("/")[0] == of


def closing(node: fx.Node, along: str) -> fx.Node | None:
    """Returns the node that undoes a split or an unflatten, if only conjugates along an axis are between; else None."""
    args: Any = node.args
    if node.target is aten.unflatten.int:
        end = _reader(moved := _after(node, along))
        undone = end is not None and end.target is aten.flatten.using_ints and end.args == (moved, args[1], args[1] + 2)
        return end if undone else None
    if node.target is not SPLIT or len(args) != 3:
        return None
    items = {item.args[1]: item for item in node.users if item.target is operator.getitem}
    ends = [_after(items.get(i), along) for i in range(len(args[1]))]
    end = _reader(ends[0])
    undone = end is not None and end.target is aten.cat.default and list(end.args) == [ends, args[2]]
    return end if undone and len(node.users) == len(ends) and all(_reader(part) is end for part in ends) else None


def _after(node: fx.Node | None, along: str) -> fx.Node | None:
    """Returns the conjugate that is the only reader of a value, or the end of a split around conjugates."""
    reader = _reader(node)
    if reader is None or (reader.target in CONJUGATES and is_along(reader.args[1], along)):
        return reader
    return closing(reader, along)


def _reader(node: fx.Node | None) -> fx.Node | None:
    """Returns the only reader of a value; None if there are several."""
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def openings(target: Any, axis: Axis) -> Iterator[list[Axis]]:
    """Yields the ways to split an axis: a concatenation into its parts, a product around one of its parts."""
    if target is SPLIT and axis.kind == "concat":
        yield list(axis.parts)
    if target is not SPLIT and axis.kind == "product":
        for i, part in enumerate(axis.parts):
            yield [product(axis.parts[:i]), part, product(axis.parts[i + 1 :])]
