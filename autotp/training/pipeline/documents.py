"""documents: packed documents in a step. Each microbatch has those in its rows, and where they end there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from autotp.attached import read_again
from autotp.ops.attention.documents import documents_in_parts, expect_no_longer, expect_whole_documents
from autotp.passes.capture.pytree import flatten, map_leaves
from autotp.passes.capture.replacements.number_arguments import as_length, is_countable
from autotp.passes.pipeline.documents import document_inputs, longest_documents, longest_of_inputs
from autotp.passes.program.program import Program


class Documents:
    """What a program knows of packed documents.

    Attributes:
        tokens: name of an input that says where documents end -> the number of their tokens, an expression of sizes.
        beside: the names of these inputs, and of those that stand for a number: no stage sends what has their sizes.
    """

    def __init__(self, program: Program) -> None:
        graph = _graph(program)
        self.tokens, self._longest = document_inputs(graph), longest_of_inputs(graph)
        shapes = {node.name: node.meta["val"].shape for node in graph.find_nodes(op="placeholder")}
        self._sizes = {name: shapes.get(name, ()) for name in program.captured.inputs}
        self._rows, self._over_cp = frozenset(program.rows), program.options.cp > 1
        numbers = {name for name, sizes in self._sizes.items() if len(sizes) == 2 and sizes[1] == 0}  # By `as_length`.
        self.beside = numbers | self.tokens.keys()

    def expect_whole(self, tensors: Sequence[Tensor], parts: int) -> None:
        """Raises Error if documents are wrong, longer than is said, or lie in several of the parts.

        The host waits once for ends on a GPU, if there are several parts, or ranks that have parts of a row.

        Args:
            tensors: the tensors of a batch.
            parts: the number of microbatches.
        """
        inputs = dict(zip(self._sizes, tensors, strict=True))
        names = [name for name in self.tokens if parts > 1 or self._over_cp or inputs[name].is_cpu]
        read_again([inputs[name] for name in names])
        for name in names:
            expect_whole_documents(inputs[name], self._count(name, inputs, parts), parts)
            longest = self._longest[name]
            expect_no_longer(inputs[name], None if longest is None else self._value(longest, inputs, parts))

    def divided(self, inputs: Mapping[str, Tensor], parts: int) -> dict[str, Tensor]:
        """Returns inputs in which the ends are those in each part, one part after another."""
        counts = {name: self._count(name, inputs, parts) for name in self.tokens if parts > 1}
        return {**inputs, **{name: documents_in_parts(inputs[name], n, parts) for name, n in counts.items()}}

    def _count(self, name: str, inputs: Mapping[str, Tensor], parts: int) -> int:
        """Returns the number of tokens of a batch whose documents this input ends: the graph is that of a part."""
        return parts * self._value(self.tokens[name], inputs, parts)

    def _value(self, size: Any, inputs: Mapping[str, Tensor], parts: int) -> int:
        """Returns an expression of sizes for the inputs of a batch."""
        values = dict[Any, int]()
        for other, sizes in self._sizes.items():
            shape = list(inputs[other].shape)
            shape[:1] = [n // parts if other in self._rows else n for n in shape[:1]]
            values |= {a.node.expr: n for a, n in zip(sizes, shape, strict=False) if isinstance(a, torch.SymInt)}
        return int(size.node.expr.xreplace(values) if isinstance(size, torch.SymInt) else size)


class LongestDocuments:
    """Numbers among the arguments that no document is longer than: inputs of all graphs but the first.

    Attributes:
        places: pairs of a structure of arguments, and the places of these numbers among them.
    """

    def __init__(self) -> None:
        self.places: list[tuple[Any, set[int]]] = []

    def note(self, arguments: Any, program: Program) -> None:
        """Notes the numbers among the arguments of a program."""
        lengths, leaves = longest_documents(_graph(program)), list[Any]()
        map_leaves(leaves.append, arguments)
        places = {i for i, leaf in enumerate(leaves) if is_countable(leaf) and leaf in lengths}
        if places:
            self.places.append((flatten(arguments)[1], places))

    def as_inputs(self, arguments: Any, device: torch.device) -> Any:
        """Returns the arguments with these numbers as inputs.

        Also where the first graph has them: other replicas have other numbers, and all make their graphs in one step.
        """
        spec, numbers = flatten(arguments)[1], count()
        places = next((places for known, places in self.places if known == spec), ())
        return map_leaves(
            lambda x: as_length(x, device) if next(numbers) in places and is_countable(x) else x, arguments
        )


def _graph(program: Program) -> fx.Graph:
    """Returns a graph in which each attention has all tokens."""
    return program.sequences.uncut_graph or program.graph
