"""Prints a graph as text: one line for each node, with its type; blocks that are alike are printed once.

x: f32[b, s, 768]
h.0:
  up = linear(x, mlp.up.weight): f32[b, s, 3072]
h.1 ... h.11 are as h.0
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autotp.diagnostics.node_text import dtype_text, operator_text, size_text, sizes_of, type_text
from autotp.rules.call import outputs_of
from autotp.source_location import block_of

INDENT = "  "

TypeText = Callable[[fx.Node], str]


def graph_text(
    graph: fx.Graph,
    parameter_names: Mapping[str, str],
    input_names: Mapping[str, str] = MappingProxyType({}),
    types: TypeText | None = None,
    block: str | None = None,
) -> str:
    """Returns a graph as text, with letters for symbolic sizes, and items of a tuple as `split[0]`.

    Args:
        parameter_names: placeholder -> name of a parameter or buffer.
        input_names: placeholder -> name of an input.
        types: returns the text of a node's type; None: dtype and shape of its example value.
        block: the name of a block, such as `h.0`, if the graph is that of a block; None: the graph may contain blocks.
    """
    return "\n".join(_Page(graph, parameter_names, input_names, types, block).lines())


class _Page:
    """The names of nodes in a text, and its lines."""

    def __init__(
        self,
        graph: fx.Graph,
        parameter_names: Mapping[str, str],
        input_names: Mapping[str, str],
        types: TypeText | None,
        block: str | None,
    ) -> None:
        self.graph, self.held, self.given, self.block = graph, parameter_names, input_names, block
        self.letters = sizes_of(graph)
        self.types = types or self.shape_of
        self.called: dict[fx.Node, str] = {}

    def shape_of(self, node: fx.Node) -> str:
        """Returns dtypes and shapes of a node's example value."""
        return ", ".join(
            type_text(value.dtype, [size_text(n, self.letters) for n in value.shape]) for value in outputs_of(node)
        )

    def lines(self) -> Iterator[str]:
        """Yields the lines of the text."""
        printed_blocks: dict[tuple[str, ...], str] = {}
        repeated: list[str] = []
        visible = [node for node in self.graph.nodes if not self._is_inline(node)]
        if self.block is not None:
            yield from self._region(self.block, visible)
            return
        printed = ""  # The printed block with the same text as the blocks in `repeated`.
        for block, nodes in _regions(visible):
            text = tuple(self._region(block, nodes))
            original = printed_blocks.get(text, "") if block else ""
            # The run of blocks that are alike ends here.
            if repeated and original != printed:
                yield _alike_text(repeated, printed)
                repeated.clear()
            printed = original
            if original:
                repeated.append(block)
                continue
            if block:
                printed_blocks[text] = block
                yield f"{block}:"
            yield from (INDENT * bool(block) + line for line in text)
        if repeated:
            yield _alike_text(repeated, printed)

    def _is_inline(self, node: fx.Node) -> bool:
        """True for a node without its own line: a parameter (printed before its reader), a size, an item of a tuple."""
        is_held = node.op == "placeholder" and node.name in self.held
        return is_held or _is_size(node) or node.target is operator.getitem

    def _region(self, block: str, nodes: Sequence[fx.Node]) -> Iterator[str]:
        """Yields the lines of some nodes, with each parameter before its first reader.

        Each block has its own names; the values that it reads are `x`, `x1`, ...
        """
        # Outside of blocks, a value of a block is read by its full name.
        local = {} if block else dict(self.called)
        counts: dict[str, int] = {}
        outside = 0
        for node in nodes:
            for read in dict.fromkeys(map(_source, node.all_input_nodes)):
                if read in local or _is_size(read):
                    continue
                if read.name in self.held:
                    local[read] = self.held[read.name].removeprefix(f"{block}.")
                    if node.op != "call_module":
                        yield f"{local[read]}: {self.types(read)}"
                else:
                    local[read] = f"x{outside or ''}"
                    outside += 1
            if node.op == "placeholder":
                local[node] = self.given.get(node.name, "x" if self.block else node.name)
            elif node.op != "output":
                local[node] = _fresh(_base(node), counts, set(local.values()))
            self.called[node] = f"{block}.{local[node]}" if block and node in local else local.get(node, "")
            yield self._line(node, local)

    def _line(self, node: fx.Node, local: Mapping[fx.Node, str]) -> str:
        if node.op == "placeholder":
            return f"{local[node]}: {self.types(node)}"
        if node.op == "output":
            return f"return {_value(node.args[0], local, self.letters)}"
        args = [a for a in node.args if node.op != "call_module" or not self._is_inline(_source(a))]
        operands = [_value(a, local, self.letters) for a in args]
        operands += [f"{key}={_value(a, local, self.letters)}" for key, a in node.kwargs.items()]
        typed = self.types(node)
        return f"{local[node]} = {operator_text(node)}({', '.join(operands)})" + (f": {typed}" if typed else "")


def operators_of(graph: fx.Graph) -> list[fx.Node]:
    """Returns the operators of a graph: no parameters, no inputs, no sizes and no items of tuples."""
    calls: Any = [node for node in graph.nodes if node.op in ("call_function", "call_module")]
    return [node for node in calls if not _is_size(node) and node.target is not operator.getitem]


def _alike_text(blocks: Sequence[str], printed: str) -> str:
    """Returns the line for blocks with the same text as a printed block."""
    return f"{blocks[0]} {'is' if len(blocks) == 1 else f'... {blocks[-1]} are'} as {printed}"


def _is_size(node: fx.Node) -> bool:
    """True for a node whose value is a size."""
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _source(node: Any) -> Any:
    """Returns the node that makes the tuple of an item; any other node itself."""
    while node.target is operator.getitem:
        node = node.args[0]
    return node


def _regions(nodes: Sequence[fx.Node]) -> Iterator[tuple[str, list[fx.Node]]]:
    """Yields consecutive nodes of one block, with its name; "" outside of blocks."""
    run: list[fx.Node] = []
    block = ""
    for node in nodes:
        node_block = block_of(node) if node.op in ("call_function", "call_module") else ""
        if node_block != block and run:
            yield block, run
            run = []
        block = node_block
        run.append(node)
    if run:
        yield block, run


def _base(node: fx.Node) -> str:
    """Returns the base of a value's name: its operator."""
    return operator_text(node).rpartition(".")[2].strip("_")


def _fresh(base: str, counts: dict[str, int], used: set[str]) -> str:
    while True:
        counts[base] = counts.get(base, 0) + 1
        name = base if counts[base] == 1 else f"{base}{counts[base]}"
        if name not in used:
            return name


def _value(value: Any, local: Mapping[fx.Node, str], letters: Mapping[str, str]) -> str:
    if isinstance(value, fx.Node) and _is_size(value):
        return size_text(value.meta["val"], letters)
    if isinstance(value, fx.Node) and value.target is operator.getitem:
        return f"{_value(value.args[0], local, letters)}[{value.args[1]}]"
    if isinstance(value, fx.Node):
        return local[value]
    if isinstance(value, list | tuple):
        inside = ", ".join(_value(x, local, letters) for x in value)
        return f"[{inside}]"
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    return repr(value) if isinstance(value, str) else str(value)
