"""Sizes and example values of one rank, for the passes that make its graph."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from autotp.errors import Error
from autotp.ops import collectives
from autotp.ops.attention.documents import keys_seen
from autotp.passes.builder import Builder, evaluated
from autotp.rules.call import outputs_of
from autotp.sharding.axis import ONE, Axis, Size, find, touches
from autotp.sharding.grid import positions_of_part
from autotp.sharding.layout import ranges
from autotp.sharding.partition import chunk_bounds, chunk_size, chunk_start, chunk_stop
from autotp.source_location import line_of

aten = torch.ops.aten
SIZE_OPERATORS: dict[Any, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.Div: operator.truediv,
    "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "Max": torch.sym_max, "Min": torch.sym_min, "PowByNatural": operator.pow, "IntTrueDiv": operator.truediv,
    "ToFloat": torch.sym_float, "TruncToInt": math.trunc, "CeilToInt": math.ceil, "FloorToInt": math.floor,
    "RoundToInt": round, "ceiling": math.ceil, "floor": math.floor, "Abs": operator.abs,
}  # fmt: skip
"""The operators in printed expressions of sizes."""
PRINTED = 15
"""The digits to which a number with a point is printed. One with fewer digits is exact."""
SYMBOL = re.compile(r"\b[a-z]\d+\b")
"""A symbolic size in a text."""
PARTS = (chunk_start, chunk_stop, chunk_size)
"""The functions by which a graph computes a rank's part of a symbolic length."""


@dataclass(frozen=True)
class Target:
    """The rank whose graph is made.

    Attributes:
        axis: name of the mesh axis.
        tp, rank: the size of the mesh axis, and this rank's place on it.
        randomness: "exact" draws the same dropout masks as one device, "fast" draws a mask per rank.
        local_outputs: positions of the outputs that stay cut; the others are gathered.
        parts: start, stop and length of this rank's part of symbolic lengths, as far as the graph computes them:
            (one of `PARTS`, the length) -> size.
    """

    axis: str
    tp: int
    rank: int
    randomness: Literal["exact", "fast"] = "fast"
    local_outputs: frozenset[int] = frozenset()
    parts: dict[tuple[Callable[..., int], Size], Size] = field(default_factory=dict, compare=False)

    def chunk(self, leaf: Axis) -> tuple[int, int]:
        """Returns start and stop of this rank's part of a leaf."""
        return chunk_bounds(find(leaf).size.number, self.tp, self.rank)

    def length(self, leaf: Axis) -> int:
        """Returns the number of positions of a leaf that this rank has."""
        start, stop = self.chunk(leaf)
        return stop - start


def cut_lengths(graph: fx.Graph) -> dict[str, str]:
    """Returns the symbol of a rank's part of a length -> the length and the mesh axis: `s16` -> `s85@cp`.

    They are those that a graph moves values along: a graph of one context-parallel rank has the axis cp.
    """
    names: dict[str, str] = {}
    for node in graph.nodes:
        if node.target in (collectives.scatter, collectives.reduce_scatter, collectives.all_to_all):
            source, axis, dim = node.args[:3]
            dim = node.args[4] if node.target is collectives.all_to_all else dim
            whole, part = source.meta["val"].shape[dim], str(node.meta["val"].shape[dim])
            if SYMBOL.fullmatch(part):
                names.setdefault(part, f"{renamed(str(whole), names)}@{axis}")
    return names


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Returns a text with other names for symbolic sizes."""
    return SYMBOL.sub(lambda match: names.get(match.group(), match.group()), text)


def has_unknown_sizes(graph: fx.Graph) -> bool:
    """True if a tensor's size is an expression that no graph of a rank computes."""
    tensors = (x for node in graph.nodes for x in outputs_of(node))
    symbols = {symbol for x in tensors for length in x.shape for symbol in Size.of(length).symbols}
    return any(_parsed(symbol) is None for symbol in symbols)


def _parsed(symbol: str) -> ast.expr | None:
    """Returns a symbol of a size as an expression of Python; None if it has an operator that no graph computes."""
    try:
        term = ast.parse(symbol, mode="eval").body
    except SyntaxError:
        return None
    return term if all(map(_is_known, ast.walk(term))) else None


def _is_known(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=float() as number):
            return len(f"{number:.17g}".replace(".", "").strip("0")) < PRINTED
        case ast.Constant(value=number):
            return isinstance(number, int)
        case ast.Call(func=ast.Name(id=name)):
            return name in SIZE_OPERATORS
        case ast.operator():
            return type(node) in SIZE_OPERATORS
    return isinstance(node, ast.Name | ast.BinOp | ast.UnaryOp | ast.USub | ast.Load)


def value_of(size: Any) -> Any:
    """Returns a size that is a number or a node, as a number that may be symbolic."""
    return size.meta["val"] if isinstance(size, fx.Node) else size


class Local:
    """Sizes of one rank, as numbers or as nodes of its graph, and its example values."""

    def __init__(self, builder: Builder, to: Target) -> None:
        self.builder, self.to = builder, to
        self.symbols: dict[str, tuple[fx.Node, int]] = {}
        self.read: dict[str, fx.Node] = {}
        self.parts: dict[tuple[Callable[..., int], Size], fx.Node] = {}
        self.halos: dict[tuple[Size, str], Any] = {}

    def learn(self, node: fx.Node, whole: torch.Tensor | None, cut: Collection[int] = ()) -> None:
        """Notes the symbolic sizes that can be read off a value; an expression such as `s0 - 1` counts as one symbol.

        Args:
            node: the value in this rank's graph.
            whole: its example value in the model's graph.
            cut: the dimensions that are cut.
        """
        for d, length in enumerate(whole.shape if isinstance(whole, torch.Tensor) else ()):
            size = Size.of(length)
            # A cut dimension has the rank's length, and the symbol stands for that of the whole.
            if size.number == 1 and len(size.symbols) == 1 and d not in cut:
                self.symbols.setdefault(size.symbols[0], (node, d))

    # ---- sizes as arguments: numbers, or nodes that compute sizes from the inputs' sizes

    def size(self, size: Any) -> Any:
        """Returns a global size."""
        product: Any = Size.of(size).number
        for symbol in Size.of(size).symbols:
            if symbol not in self.read:
                self.read[symbol] = self._symbol(symbol)
            product = self.read[symbol] if product == 1 else self.times(product, self.read[symbol])
        return product

    def _symbol(self, symbol: str) -> fx.Node:
        if symbol in self.symbols:
            return self.call(aten.sym_size.int, *self.symbols[symbol])
        term = _parsed(symbol)  # An expression of other symbols, which is no dimension of a tensor yet.
        computed = None if term is None or isinstance(term, ast.Name) else self._computed(term)
        if not isinstance(computed, fx.Node):
            where = line_of(self.builder.origin) if self.builder.origin else "?"
            raise Error(
                f"the size {symbol} cannot be computed from the inputs' shapes",
                at=where,
                fix="a fixed length and a mask, or this number as the length of an input",
            )
        return computed

    def _computed(self, term: ast.AST) -> Any:
        """Returns an expression of sizes as calls."""
        match term:
            case ast.Constant(value=number):
                return number
            case ast.Name(id=symbol):
                return self.size(Size(1, (symbol,)))
            case ast.BinOp(left=left, op=op, right=right):
                return self._of(SIZE_OPERATORS[type(op)], self._computed(left), self._computed(right))
            case ast.UnaryOp(operand=operand):
                # A minus sign: `_is_known` lets no other sign pass.
                return self._of(operator.mul, -1, self._computed(operand))
            case ast.Call(func=ast.Name(id="Max" | "Min" as name), args=[first, *rest]):
                result = self._computed(first)
                for argument in rest:
                    result = self._of(SIZE_OPERATORS[name], result, self._computed(argument))
                return result
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return self._of(SIZE_OPERATORS[name], *map(self._computed, arguments))
        raise TypeError(ast.dump(term))

    def _of(self, target: Callable[..., Any], *sizes: Any) -> Any:
        """Returns a function of sizes: a number if all of them are numbers."""
        return self.call(target, *sizes) if any(isinstance(n, fx.Node) for n in sizes) else target(*sizes)

    def local_size(self, size: Any, axis: Axis, leaf: Axis | None) -> Any:
        """Returns the local size of a dimension with this axis and global size."""
        if leaf is None or not touches(axis, leaf):
            return self.size(size)
        if find(leaf).size.symbols:
            return self.times(self.size(find(axis).size.divided(find(leaf).size) or ONE), self.part(chunk_size, leaf))
        if not find(axis).size.symbols:
            return sum(b - a for a, b in ranges(axis, leaf, self.to.tp, self.to.rank))
        whole_size, part = positions_of_part(axis, leaf, self.to.tp, self.to.rank)
        return self.times(part, self.size(find(axis).size.divided(whole_size) or ONE))

    def part(self, measure: Callable[..., int], leaf: Axis) -> Any:
        """Returns start, stop or length (`measure`, one of `PARTS`) of this rank's part of a leaf."""
        size = find(leaf).size
        if not size.symbols:
            return measure(size.number, self.to.tp, self.to.rank)
        if (measure, size) not in self.parts:
            whole = self.size(size)
            node = self.parts[measure, size] = self.builder.raw(measure, (whole, self.to.tp, self.to.rank))
            # A length that depends on values has no hint.
            hint = measure(int(whole.meta["val"].node.hint or 0), self.to.tp, self.to.rank)
            node.meta["val"] = self.builder.length(
                f"{measure.__name__}({size}, {self.to.tp}, {self.to.rank})", max(hint, 2)
            )  # A hint of 0 or 1 would make a number of it.
        return self.parts[measure, size]

    def halo_length(self, leaf: Axis, before: Any, after: Any) -> Any:
        """Returns the length of this rank's part of a leaf with the positions around it, for example values.

        It is a symbol if the length, `before` or `after` is one. Where documents end earlier, it is shorter.
        """
        size, around = find(leaf).size, (value_of(before), value_of(after))
        hints = [n if isinstance(n, int) else n.node.hint or 0 for n in (value_of(self.size(size)), *around)]
        first, stop = keys_seen(hints[0], self.to.tp, hints[1], None, after=hints[2])[self.to.rank]
        length = stop - first
        if not size.symbols and all(isinstance(n, int) for n in around):
            return length
        key = size, f"{before}, {after}"
        if key not in self.halos:
            name = f"halo({key[0]}, {key[1]}, {self.to.tp}, {self.to.rank})"
            self.halos[key] = self.builder.length(name, max(length, 2))
        return self.halos[key]

    def times(self, a: Any, b: Any) -> Any:
        """Returns a product of sizes. A factor 1 is multiplied, too: the graphs of all ranks have the same nodes."""
        are_numbers = isinstance(a, int) and isinstance(b, int)
        return a * b if are_numbers else self.call(operator.mul, a, b)

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Adds a call that returns a size."""
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node = self.builder.raw(target, args)
        node.meta["val"] = values[0].shape[values[1]] if target is aten.sym_size.int else target(*values)
        return node

    # ---- example values

    def value(self, value: torch.Tensor, dims: tuple[Axis, ...], leaf: Axis) -> torch.Tensor:
        """Returns the local example value for a global one that is cut along `leaf`."""
        shape: list[Any] = []
        for size, axis in zip(value.shape, dims, strict=True):
            if not touches(axis, leaf):
                shape.append(size)
            elif find(leaf).size.symbols:
                whole_size, part = self.size(find(leaf).size), self.part(chunk_size, leaf)
                shape.append(size // whole_size.meta["val"] * part.meta["val"])
            elif isinstance(size, int):
                shape.append(sum(b - a for a, b in ranges(axis, leaf, self.to.tp, self.to.rank)))
            else:
                whole_size, part = positions_of_part(axis, leaf, self.to.tp, self.to.rank)
                shape.append(size // whole_size.number * part)
        return self.empty(shape, value)

    def resized(self, value: torch.Tensor, dim: int, length: Any) -> torch.Tensor:
        """Returns an example value with another length along `dim`."""
        return self.empty([length if d == dim else n for d, n in enumerate(value.shape)], value)

    def empty(self, shape: list[Any], like: torch.Tensor) -> torch.Tensor:
        # Its dtype is no argument, which a mode of `verify` would change: some operators return float32 at any dtype.
        return evaluated(self.builder.mode, torch.Tensor.new_empty, like, shape)
