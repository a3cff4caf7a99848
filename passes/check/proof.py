"""Proof: the types that `check` has derived so far, and its errors.

x f32[B, T@tp, 768]        known: its type, the model's value of which it is a part, the symbol for T@tp
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import fx

from autotp.errors import REPORT, Error
from autotp.passes.check.erase import ModelNodes, called, listed, plain, valued
from autotp.passes.check.local_calls import local_length
from autotp.passes.check.types import Typed
from autotp.passes.lower.local_sizes import PARTS, Target, cut_lengths, renamed
from autotp.passes.plan.infer_axes import Axes, Dims, infer_axes
from autotp.rules.call import outputs_of
from autotp.sharding.axis import ONE, Axis, Size, find, touches
from autotp.sharding.partition import chunk_size
from autotp.sharding.placement import Halo, Placement
from autotp.source_location import line_of

aten = torch.ops.aten


class Proof:
    """The facts that are proved about a rank's nodes so far."""

    def __init__(
        self, graph: fx.Graph, layouts: Any, trainable: Any, to: Target, local_outputs: Any, axes: Axes | None = None
    ) -> None:
        self.held, self.trainable, self.local_outputs = layouts, trainable, local_outputs
        self.to = replace(to, parts={})
        self.axes = axes or infer_axes(graph)
        self.graph, self.model = graph, ModelNodes(graph)
        self.types: dict[fx.Node, tuple[Typed, ...]] = {}
        self.whole: dict[fx.Node, fx.Node] = {}  # Node -> the model's node of whose value it is a part.
        self.numbers: dict[fx.Node, Any] = {}
        self.bundles: dict[Any, Any] = {}  # A `together` -> its operands.
        self.cuts: list[Axis] = []  # The cuts of parameters and inputs, each once.
        self.opened: dict[fx.Node, fx.Node] = {}  # The join of a split dimension -> the split.

    def give(self, node: fx.Node, whole: fx.Node, types: tuple[Typed, ...]) -> None:
        """Notes the types of a node, after comparing them with its example values."""
        for value, typed in zip(outputs_of(node), types, strict=True):
            self._learn_part(node, value, typed)
            shape = [local_length(self.to, axis, typed.leaf) for axis in typed.dims]
            if isinstance(typed.placement, Halo):  # How long it is may depend on documents.
                shape[typed.placement.dim] = Size.of(value.shape[typed.placement.dim])
            if plain(list(value.shape)) != plain(shape) or value.dtype != typed.dtype:
                self.refuse(node, f"is not this rank's {typed}", expected=listed(shape), got=listed(value.shape))
        self.types[node], self.whole[node] = types, whole

    def typed(self, value: torch.Tensor, dims: Dims, placement: Placement, flows: bool) -> Typed:
        """Returns the type of a value of the model; `flows` counts only where values can have gradients."""
        floating = value.is_floating_point() or value.is_complex()
        return Typed(value.dtype, dims, placement, flows and floating, self.to.axis)

    def refuse(self, node: fx.Node, problem: str, **facts: Any) -> NoReturn:
        cut = cut_lengths(self.graph)
        facts = {label: renamed(str(fact), cut) for label, fact in facts.items()}
        where = f"{self.to.axis} rank {self.to.rank} of {self.to.tp}"
        raise Error(f"{where}: `{node}` {problem}", **facts, at=line_of(node), fix=REPORT)

    def refuse_read(self, node: fx.Node, operand: fx.Node, typed: Typed, want: Placement, **facts: Any) -> NoReturn:
        expected, got = (f"{type(t.placement).__name__} {t}" for t in (replace(typed, placement=want), typed))
        self.refuse(node, f"reads `{operand}`", **facts, expected=expected, got=got)

    def number(self, node: fx.Node) -> Any:
        """Returns the value of a size, or of a number computed from sizes, in terms of the model's graph."""
        if node.target in PARTS and (size := self.model.parts.get(Size.of(node.meta["val"]))) is not None:
            if plain(self.erased(node.args)) != valued(size.args) or size.target is not node.target:
                self.refuse(node, "is not the part that the model computes", expected=called(size), got=called(node))
            return node.meta["val"]
        if node.target in PARTS:
            return self._part(node, node.target, *self.erased(node.args))
        if node.target is not aten.sym_size.int:
            return node.target(*self.erased(node.args), **self.erased(node.kwargs))  # type: ignore[operator]
        x, dim = node.args
        (typed,), size = self.types[x], self.whole[x].meta["val"].shape[dim]  # type: ignore[index]
        if typed.leaf is not None and touches(typed.dims[dim], typed.leaf):  # type: ignore[index]
            self.refuse(node, f"reads from `{x}` a size that is cut", got=typed)
        return size

    def _part(self, node: fx.Node, measure: Any, whole: Any, *where: Any) -> Any:
        """Returns the size that a graph computes for this rank's part of a symbolic length; it has its own symbol."""
        if where != (self.to.tp, self.to.rank):
            self.refuse(node, "is not of this rank's part", expected=(self.to.tp, self.to.rank), got=called(node))
        self._name_part(node, measure, Size.of(whole), Size.of(node.meta["val"]))
        return node.meta["val"]

    def _learn_part(self, node: fx.Node, value: torch.Tensor, typed: Typed) -> None:
        """Notes the symbol of this rank's part of a symbolic length, from the first value that is cut along it."""
        size = find(typed.leaf).size if typed.leaf is not None else ONE
        if size.symbols and (chunk_size, size) not in self.to.parts:
            (dim,) = typed.cut_dims(typed.leaf)
            rest = find(typed.dims[dim]).size.divided(size) or ONE
            self._name_part(node, chunk_size, size, Size.of(value.shape[dim]).divided(rest) or ONE)

    def _name_part(self, node: fx.Node, measure: Any, whole: Size, part: Size) -> None:
        expected = self.to.parts.setdefault((measure, whole), part)
        other_sizes = {whole, *(size for key, size in self.to.parts.items() if key != (measure, whole))}
        if expected != part or part in other_sizes or part.number != 1 or len(part.symbols) != 1:
            self.refuse(node, "has a part of its own of what is cut", expected=expected, got=part)

    def erased(self, value: Any) -> Any:
        """Returns arguments in terms of the model's graph: values as its nodes, sizes as numbers."""
        return fx.map_arg(value, lambda n: self.numbers[n] if n in self.numbers else self.whole[n])
