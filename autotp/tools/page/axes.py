"""axes: the axes that a page names and colours, and shapes as cells, of which each belongs to an axis.

Before: bf16[s87, s85, 8192@tp]        with 8192 = heads x head size
After:  [[{"text": "b", "axis": 0}], [{"text": "s", "axis": 1}], [{"text": "64", "axis": 2, "cut": True}, ...]]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from autotp.diagnostics.node_text import dtype_text
from autotp.passes.check.types import Typed
from autotp.passes.lower.local_sizes import cut_lengths, renamed
from autotp.passes.plan.candidate import Candidate
from autotp.sharding.axis import ONE, Axis, Size, find, leaves, touches
from autotp.sharding.placement import Copied, Partial
from autotp.tools.page.subject import Subject

LETTERS = {"batch": "b", "sequence": "s"}
"""The names of axes whose length is a symbol -> how the symbol is written."""
JOINTS = {"product": "·", "concat": "+"}
"""How the parts of an axis are joined."""
MARKS: dict[type, str] = {Copied: "copied", Partial: "partial"}
"""A placement -> the word for it. A shard is seen by its cells."""
Dims = list[list[dict[str, Any]]]
"""A shape: for each dimension its cells, as plain data."""


class PageAxes:
    """The axes of a page, numbered in the order in which they are met.

    Attributes:
        block: the block that is described now: axes of alike blocks that have one name are one axis of the page.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._names = axis_names(subject)
        self._numbers: dict[int, int] = {}
        self._found: list[dict[str, Any]] = []
        self._taken: set[tuple[str, str]] = set()
        self._keep: list[Axis] = []  # An axis that was freed would give its id to another.
        self._parts = cut_lengths(subject.program.graph)
        self.block = ""

    def shape(self, typed: Typed) -> dict[str, Any]:
        """Returns a value's type as plain data: dtype, dims, the mark of its placement, and its axes."""
        dims = [list(self._cells(axis, typed.leaf)) for axis in typed.dims]
        mark = MARKS.get(type(typed.placement), "")
        touched = sorted({cell["axis"] for dim in dims for cell in dim if cell["axis"] is not None})
        return {"dtype": dtype_text(typed.dtype), "dims": dims, "mark": mark, "axes": touched}

    def number(self, leaf: Axis) -> int | None:
        """Returns the number of a leaf's axis on the page; None for an axis without extent."""
        leaf = find(leaf)
        if leaf.kind != "leaf" or leaf.size in (ONE, Size(0)):
            return None
        if id(leaf) not in self._numbers:
            self._keep.append(leaf)
            self._numbers[id(leaf)] = self._entry(leaf)
        return self._numbers[id(leaf)]

    def touched(self, *axes: Axis | None) -> list[int]:
        """Returns the numbers of all leaves of these axes."""
        numbers = {self.number(leaf) for axis in axes if axis is not None for leaf in _parts(axis)}
        return sorted(n for n in numbers if n is not None)

    def data(self) -> list[dict[str, Any]]:
        """Returns the axes: label, size, and whether they are cut."""
        return self._found

    def _entry(self, leaf: Axis) -> int:
        """Returns the number of a new leaf: a new axis of the page, or that of an alike block's axis."""
        name, size = self._names.get(id(leaf), ""), self._text(leaf.size)
        # Two axes of one block that have the same name, or two of different length, are told apart by a number.
        for count in itertools.count(1):
            label = (name or f"axis of {size}") + (f" #{count}" if count > 1 else "")
            entry = next((axis for axis in self._found if axis["label"] == label), None)
            free = not {(label, self.block), (label, "")} & self._taken
            if entry is None or (free and entry["size"] == size):
                break
        self._taken.add((label, self.block))
        if entry is None:
            entry = {"number": len(self._found), "label": label, "size": size, "cut": False}
            self._found.append({**entry, "length": self._subject.length(leaf.size)})
        return int(entry["number"])

    def _cells(self, axis: Axis, cut: Axis | None) -> Iterator[dict[str, Any]]:
        axis = find(axis)
        if axis.kind in JOINTS:
            for i, part in enumerate(axis.parts):
                inner = list(self._cells(part, cut))
                if i:
                    inner[0]["joint"] = JOINTS[axis.kind]
                yield from inner
            return
        number = self.number(axis)
        is_cut = cut is not None and number is not None and touches(axis, cut)
        if is_cut and number is not None:
            self._found[number]["cut"] = True
        yield {"text": self._text(axis.size), "axis": number, "cut": is_cut, "joint": ""}

    def _text(self, size: Size) -> str:
        """Returns a size as text: symbols as letters, b and s."""
        letters = {symbol: LETTERS.get(name, symbol) for symbol, name in symbol_names(self._subject).items()}
        letters |= {part: renamed(text, letters) for part, text in self._parts.items()}
        parts = [str(size.number)] * (size.number != 1 or not size.symbols)
        return "·".join([*parts, *(letters.get(symbol, symbol) for symbol in size.symbols)])


def _parts(axis: Axis) -> Iterator[Axis]:
    """Yields the leaves of an axis; those of a grid's cuts, too."""
    axis = find(axis)
    if axis.kind == "grid":
        for part in axis.parts:
            yield from _parts(part)
    else:
        yield from leaves(axis)


def symbol_names(subject: Subject) -> dict[str, str]:
    """Returns symbol of a size -> "batch" or "sequence": the first two dimensions of the first input."""
    captured, program = subject.program.captured, subject.program
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    first = next((nodes[name] for name in captured.inputs if name in nodes and nodes[name].meta["val"].dim()), None)
    shape: Sequence[Any] = () if first is None else first.meta["val"].shape
    names = zip(("batch", "sequence"), shape, strict=False)
    return {str(size): name for name, size in names if Size.of(size).symbols}


def axis_names(subject: Subject) -> dict[int, str]:
    """Returns the id of a leaf axis -> its name: batch, sequence, hidden, heads, kv heads, head size, width, vocab."""
    program, names = subject.program, dict[int, str]()
    # Where candidates share a leaf, the one with most parameters comes last, and names it.
    for candidate in sorted(program.candidates, key=lambda c: len(c.parameters)):
        names[id(find(candidate.leaf))] = candidate.name.replace("_", " ")
    hubs = [c for c in program.candidates if c.hub]
    if hubs:
        names[id(find(max(hubs, key=lambda c: len(c.parameters)).leaf))] = "hidden"
    symbols = symbol_names(subject)
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder" and n in program.axes.dims]
    for node in placeholders:
        for axis in program.axes.of(node):
            leaf = find(axis)
            if leaf.kind == "leaf" and len(leaf.size.symbols) == 1 and leaf.size.number == 1:
                # What the plan recognised counts more than the place of an input's dimension.
                names.setdefault(id(leaf), symbols.get(leaf.size.symbols[0], ""))
            names.update(_head_sizes(axis, names))
    return names | _groups(program.candidates, placeholders, program)


def _head_sizes(axis: Axis, names: dict[int, str]) -> dict[int, str]:
    """Returns the names of the leaves behind heads in a product."""
    axis, inner = find(axis), dict[int, str]()
    inside = [[names.get(id(leaf), "") for leaf in leaves(part)] for part in axis.parts]
    for i, part in enumerate(axis.parts):
        if axis.kind == "product" and any("heads" in inside[k] for k in range(i)) and "heads" not in inside[i]:
            inner |= {id(leaf): "head size" for leaf in leaves(part)}
        inner |= _head_sizes(part, names)
    return inner


def _groups(candidates: Sequence[Candidate], placeholders: Sequence[fx.Node], program: Any) -> dict[int, str]:
    """Returns the names of heads that are a product: key/value heads, and the queries of each."""
    heads, names = {id(find(c.leaf)) for c in candidates if c.name == "heads"}, dict[int, str]()
    for node in placeholders:
        for axis in program.axes.of(node):
            factors = [leaf for leaf in leaves(axis) if id(leaf) in heads]
            if len(factors) == 2 and factors[0] is not factors[1] and find(axis).kind == "product":
                names |= {id(factors[0]): "kv heads", id(factors[1]): "queries of a kv head"}
    return names
