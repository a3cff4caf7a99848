"""row_independence: proves from the axes that no row of a batch depends on other rows.

Before: x = norm(x, w); m = mean(x, [0]); y = sub(x, m)
After:  an Error that names `mean`: it has the batch's axis in what it reads, and not in what it gives

Each value is one of four kinds, and what an operator gives follows from what it reads:

    free      has no rows: it is the same for each part of the batch
    rows      has the batch along one dimension, and there each row is made of that row alone
    numbers   `arange(batch)`, or of the places that rows have, along one dimension: from 0 again in each part
    sums      a sum over the batch, of which parts add up

NOTE [Two batches that are one]
All inputs have as many rows (`one_batch` says so to torch), but how long their rows are the model need not say: `b x s`
of one and `b x t` of another may be read side by side, flattened. Both are divided along the batch: where that is
outermost in both, they go together. (A mean of all there is has been multiplied by the rows it is of:
`loss_totals.py`.)

NOTE [Each row reads itself]
`mask[arange(batch)[:, None], keys]` reads row `i` of the mask where the result has row `i`, whichever part of the batch
is computed: both begin at 0 with the same row. So numbers of rows may be an index into as many rows, if all else that
has rows stands along the same dimension of what is read. Any other use of them gives a part something else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from autotp.errors import Error
from autotp.ops.placement_moves import apart
from autotp.passes.pipeline.loss_totals import is_mean, symbols
from autotp.passes.plan.infer_axes import Axes, Bound, Dims, is_getitem, named_dims
from autotp.rules.call import bind, draws, operator_name, outputs_of
from autotp.rules.language import names
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, find, leaves
from autotp.source_location import line_of

aten = torch.ops.aten


def batched(inputs: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[str]:
    """The inputs that are a batch: their first dimension is as long as that of the first."""
    return [name for name, shape in zip(inputs, shapes, strict=True) if shape and shape[0] == shapes[0][0]]


def one_batch(graph: fx.Graph, inputs: Collection[str]) -> None:
    """Says to torch that these placeholders have as many rows, where the model does not: then their axes are one."""
    first, *others = (n.meta["val"].shape[0] for n in graph.nodes if n.op == "placeholder" and n.name in inputs)
    for size in others:
        torch._check(size == first)


def expect_rows(graph: fx.Graph, axes: Axes, inputs: Collection[str]) -> None:
    """Raises Error where a row depends on others, of a graph whose loss is a sum over the batch.

    Args:
        inputs: names of the placeholders of what is a batch.
    """
    given = [node for node in graph.nodes if node.op == "placeholder" and node.name in inputs]
    if given[0].meta["val"].shape[0] == 1:  # Of a single row nothing shows it: `pipeline.analysed` looks at two.
        return
    proof = _Proof(axes, given)
    for node in graph.nodes:
        if node.op == "call_function" and outputs_of(node):
            proof.visit(node)


class _Proof:
    """What is known of the values of a graph so far.

    Attributes:
        sizes: the symbols that say how many rows there are.
        batch: the axes that rows lie along.
        rows, sums: the values of these kinds.
        numbers: a value of this kind -> the dimension along which it counts; None where it does not only count.
    """

    def __init__(self, axes: Axes, inputs: Sequence[fx.Node]) -> None:
        self.axes = axes
        self.sizes = {symbol for node in inputs for symbol in symbols(node.meta["val"].shape[0])}
        named = {str(symbol) for symbol in self.sizes}
        found = {find(leaf) for dims in axes.dims.values() for each in dims for axis in each for leaf in leaves(axis)}
        self.batch = {leaf for leaf in found if named & set(re.findall(r"\w+", " ".join(leaf.size.symbols)))}
        self.batch |= {find(leaf) for node in inputs for leaf in leaves(axes.of(node)[0])}
        self.rows, self.sums = set(inputs), set[fx.Node]()
        self.numbers: dict[fx.Node, int | None] = {}
        for node in inputs:
            if self._along(axes.of(node)) is None:
                _refuse(node, "is as long as the batch along two dimensions")

    def visit(self, node: fx.Node) -> None:
        """Adds a node's kind. Raises Error where it is none of the four."""
        read = set[fx.Node]() if has(node.target, Trait.FILL) else set(node.all_input_nodes)
        scalar = all(value.dim() == 0 for value in outputs_of(node))
        if self._counts(node):
            self.numbers[node] = self._counted(node)
        elif read & set(self.numbers):
            if not self._picks(node):
                _refuse(node, "computes with the numbers of rows")
            self.rows.add(node)
        elif read & self.sums and (not scalar or read & self.rows):
            _refuse(node, "gives each row what the batch sums up to")
        elif read & self.rows or self._has_rows(node):
            if not (self._adds(node) if scalar else self._is_by_row(node)):
                _refuse(node, "mixes the rows of the batch")
            (self.sums if scalar else self.rows).add(node)
        elif read & self.sums:
            self.sums.add(node)

    # ---- where rows lie

    def _has(self, axis: Axis) -> int:
        """How many times the batch is in an axis."""
        return sum(leaf in self.batch for leaf in leaves(axis))

    def _has_rows(self, node: fx.Node) -> bool:
        return any(self._has(axis) for dims in self.axes.dims[node] for axis in dims)

    def _along(self, dims: Dims) -> int | None:
        """The dimension along which a tensor has rows; None if there is none, or several."""
        found = [d for d, axis in enumerate(dims) for _ in range(self._has(axis))]
        return found[0] if len(found) == 1 else None

    def _leads(self, axis: Axis) -> bool:
        """True for an axis whose outermost part is the batch."""
        return next(leaves(axis)) in self.batch

    # ---- numbers of rows

    def _counts(self, node: fx.Node) -> bool:
        """True for numbers of rows, and for what leaves them what they are."""
        if operator_name(node) == "aten::arange":
            return any(symbols(n.meta["val"]) & self.sizes for n in node.all_input_nodes)
        return _leaves_numbers(node) and node.args[0] in self.numbers

    def _counted(self, node: fx.Node) -> int | None:
        """The dimension along which a node counts rows; None if it counts anything else, or rounds."""
        value = node.meta["val"]
        if value.dtype not in (torch.int64, torch.int32):
            return None
        if operator_name(node) == "aten::arange":
            given = bind(node)
            return 0 if given.get("start", 0) == 0 and given.get("step", 1) == 1 else None
        before, at = self.numbers[node.args[0]], self._along(self.axes.of(node))  # type: ignore[index]
        kept = [
            factor
            for factor in self.axes.bound[node].factors
            if factor.mark == "" and factor.ins.get(0) == before and factor.outs.get(0) == at
        ]
        alone = at is not None and before is not None and _lengths(node)[at] == _lengths(node.args[0])[before]
        return at if alone and kept else None

    def _picks(self, node: fx.Node) -> bool:
        """True for `x[numbers, ...]`, and a write to it, in which each row stands where its number does.

        NOTE [Each row reads itself]
        """
        if not has(node.target, Trait.INDICES):
            return False
        given = bind(node)
        x, indices, rest = given["self"], given["indices"], given.get("values")
        own = [i for i, index in enumerate(indices) if index in self.numbers]
        if len(own) != 1 or {x, rest} & set(self.numbers) or x not in self.rows:
            return False
        counted = self.numbers[indices[own[0]]]
        if counted is None or self._along(self.axes.of(x)) != own[0] or not self._leads(self.axes.of(x)[own[0]]):
            return False
        if _lengths(x)[own[0]] != _lengths(indices[own[0]])[counted]:
            return False
        used = [i for i, index in enumerate(indices) if index is not None]
        ranks = {i: indices[i].meta["val"].dim() for i in used}
        at = counted + max(ranks.values()) - ranks[own[0]]  # Indices are broadcast, aligned right.
        beside = [self._lies_at(indices[i], at, max(ranks.values())) for i in used if i != own[0]]
        front = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
        picked = x.meta["val"].dim() - len(used) + max(ranks.values())
        return all(beside) and (rest is None or self._lies_at(rest, front + at, picked))

    def _lies_at(self, node: fx.Node, at: int, rank: int) -> bool:
        """True if a value has its rows, if any, along dimension `at` of the `rank` that it is broadcast to."""
        dims = self.axes.of(node)
        return not self._has_rows(node) or (self._along(dims) == at - (rank - len(dims)))

    # ---- rows

    def _adds(self, node: fx.Node) -> bool:
        """True for a number that is a sum over rows."""
        return is_mean(node) or self._passes(self.axes.bound[node], node, True)

    def _is_by_row(self, node: fx.Node) -> bool:
        """True if each row of what an operator gives is made of that row alone."""
        if is_getitem(node):
            return True
        if any(self._along(dims) is None for dims in self.axes.dims[node]):
            return False
        bound = self.axes.bound[node]
        if node.target is apart or has(node.target, Trait.RANDOM_EACH):
            return all(self._side_by_side(dims, bound.dims[1][0]) for dims in bound.dims[0])
        return self._passes(bound, node, False)

    def _side_by_side(self, dims: Dims, others: Dims) -> bool:
        """True if two tensors have rows at the same places, outermost."""
        if not any(self._has(axis) for axis in dims):
            return True
        pairs = [(a, b) for a, b in zip(dims[::-1], others[::-1], strict=False) if self._has(a) or self._has(b)]
        return all(self._leads(axis) for pair in pairs for axis in pair)

    def _passes(self, bound: Bound, node: fx.Node, added: bool) -> bool:
        """True if an operator passes the batch through; or, if `added`, if it sums over it."""
        marks = {name.name: name.mark for term in bound.rule.ins for expr in term for name in names(expr)}
        named = [pair for row in named_dims(bound.rule, bound.dims[0]) for pair in row]
        along = {name for name, axis in named if name and self._has(axis)}
        for factor in bound.factors:
            if not self._has(factor.axis) and factor.name not in along:
                continue
            apart_ = factor.mark == "^" and marks.get(factor.name, "") == ""  # NOTE [Two batches that are one]
            lead = all(self._leads(axis) for name, axis in named if name == factor.name)
            by_row = factor.mark == "" or (factor.mark == "!" and draws(node))
            if not (by_row or (apart_ and lead)) or len(factor.outs) != (0 if added else len(bound.rule.outs)):
                return False
        return True


def _leaves_numbers(node: fx.Node) -> bool:
    """True for what leaves numbers what they are, at other places."""
    moves = Trait.SAME | Trait.RESHAPE | Trait.PERMUTE
    return has(node.target, moves) or node.target is aten.expand.default


def _lengths(node: Any) -> list[Any]:
    """The lengths of a tensor's dimensions, as expressions."""
    return [size if isinstance(size, int) else size.node.expr for size in node.meta["val"].shape]


def _refuse(node: fx.Node, what: str) -> None:
    raise Error(
        f"`{node.target}` {what}, which cannot be computed in parts",
        at=line_of(node),
        fix="autotp.parallelize, for whole batches",
    )
