"""row_independence: proves from the axes that no row of a batch depends on other rows.

Before: x = norm(x, w); m = mean(x, [0]); y = sub(x, m)
After:  an Error that names `mean`: its operand has the batch's axis, and its result does not

Each value has one of five kinds, and the kind of a result follows from the kinds of the operands:

    free      has no rows: it is the same for each part of the batch
    rows      has the batch along one dimension, and there each row is made of that row alone
    numbers   `arange(batch)`, or of the places that rows have, along one dimension: from 0 again in each part
    sums      a sum over the batch, of which parts add up
    made      computed from sums in another way (`batch_sums.py`)

NOTE [Two batches that are one]
All inputs have the same number of rows (`one_batch` tells torch). The lengths of their rows may differ: an operator may
read `b x s` of one input and `b x t` of another, both flattened, elementwise. Both are divided along the batch. If the
batch is outermost in both, equal positions belong to the same part. (A mean over all elements has been multiplied by
its number of rows: `loss_totals.py`.)

NOTE [Each row reads itself]
`mask[arange(batch)[:, None], keys]` reads row `i` of the mask for row `i` of the result, also when only a part of the
batch is computed: both count from 0 at the same row. So row numbers may be an index into a tensor with as many rows, if
all other operands with rows have them along the same dimension. Any other use of row numbers differs between parts.

NOTE [Documents that lie in several rows]
Attention of packed documents reads the tokens of a document, which may lie in several rows. Where documents end is an
input without rows. A replica gets its own from the loop, a microbatch has those in its rows (`documents.py`), and no
document lies in two parts: each step tests it. So each part has all rows that a row depends on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from types import FunctionType
from typing import Any

import sympy
import torch
from torch import fx

from autotp.errors import Error
from autotp.ops.collectives import scatter
from autotp.ops.placement_moves import apart
from autotp.passes.pipeline.batch_sums import equal_symbols, is_mean, is_zero, symbols
from autotp.passes.pipeline.documents import ends_of, reads_documents
from autotp.passes.plan.infer_axes import Axes, Bound, Dims, is_getitem, named_dims
from autotp.rules.call import arguments_of, operand_nodes, operator_name, outputs_of, returned
from autotp.rules.language import names
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has
from autotp.sharding.axis import Axis, find, leaves
from autotp.source_location import line_of

aten = torch.ops.aten


def batched(inputs: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[str]:
    """Returns the inputs that are a batch: those as long as the first input that has dimensions."""
    length = next((shape[0] for shape in shapes if shape), None)
    return [name for name, shape in zip(inputs, shapes, strict=True) if shape and shape[0] == length]


def one_batch(graph: fx.Graph, inputs: Collection[str]) -> None:
    """Tells torch that these placeholders have the same number of rows, so that their axes are unified."""
    first, *sizes = (n.meta["val"].shape[0] for n in graph.nodes if n.op == "placeholder" and n.name in inputs)
    for size in sizes:
        torch._check(size == first)


def expect_rows(graph: fx.Graph, axes: Axes, inputs: Collection[str]) -> None:
    """Raises Error if a row depends on other rows, in a graph whose loss is a sum over the batch.

    Args:
        inputs: placeholder names of the inputs that are a batch.
    """
    batch_inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name in inputs]
    if batch_inputs[0].meta["val"].shape[0] == 1:  # A single row shows nothing: the caller captures a batch of two.
        return
    proof = _Proof(axes, batch_inputs)
    for node in graph.nodes:
        if node.op == "call_function" and outputs_of(node):
            proof.visit(node)
    for node in returned(graph)[1:]:  # What functions of sums read: NOTE [Functions of sums] in `batch_sums.py`.
        if node not in proof.sums and node.target is not aten.full.default:  # A number of rows.
            _refuse(node, "is read by the loss, and is not a sum over the batch")


def expect_sums(graph: fx.Graph, axes: Axes, inputs: Collection[str]) -> None:
    """Raises Error if a count that divides the loss is not a sum over the rows: of parts it would not add up.

    Args:
        graph: returns the counts (`loss_totals.py`).
        inputs: placeholder names of the inputs that are a batch.
    """
    batch_inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name in inputs]
    if not batch_inputs or batch_inputs[0].meta["val"].shape[0] == 1:
        return
    proof = _Proof(axes, batch_inputs)
    for node in graph.nodes:
        if node.op == "call_function" and outputs_of(node):
            proof.visit(node)
    for count in returned(graph):
        node = count.args[0]  # Converted to float64.
        if node not in proof.sums and node.target is not aten.full.default:  # The number of rows.
            _refuse(node, "divides the loss, and is not a sum over the batch")


class _Proof:
    """The kinds of a graph's values so far.

    Attributes:
        sizes: the symbols of the number of rows.
        batch: the axes of rows.
        rows, sums, made: the values of these kinds.
        numbers: a value of this kind -> the dimension along which it counts; None if it contains other numbers, too.
    """

    def __init__(self, axes: Axes, inputs: Sequence[fx.Node]) -> None:
        self.axes = axes
        self.sizes = {symbol for node in inputs for symbol in symbols(node.meta["val"].shape[0])}
        named = {str(symbol) for symbol in self.sizes}
        axis_leaves = {
            find(leaf) for outputs in axes.dims.values() for dims in outputs for axis in dims for leaf in leaves(axis)
        }
        self.batch = {leaf for leaf in axis_leaves if named & set(re.findall(r"\w+", " ".join(leaf.size.symbols)))}
        self.batch |= {find(leaf) for node in inputs for leaf in leaves(axes.of(node)[0])}
        self.rows, self.sums, self.made = set(inputs), set[fx.Node](), set[fx.Node]()
        self.numbers: dict[fx.Node, int | None] = {}
        for node in inputs:
            if self._along(axes.of(node)) is None:
                _refuse(
                    node,
                    "is as long as the batch along two dimensions",
                    fix="example_inputs= with another number of rows, if one of these is as long by chance",
                )

    def visit(self, node: fx.Node) -> None:
        """Adds a node's kind. Raises Error if it has none of the five."""
        read = set[fx.Node]() if has(node.target, Trait.FILL) else set(node.all_input_nodes)
        scalar = all(value.dim() == 0 for value in outputs_of(node))
        ended = scalar or not self._has_rows(node)
        if reads_documents(node):
            if not self._is_by_document(node):
                _refuse(node, "mixes the rows of the batch")
            self.rows.add(node)
        elif self._counts(node):
            self.numbers[node] = self._counted(node)
        elif read & set(self.numbers):
            if not self._picks(node):
                _refuse(node, "computes with the numbers of rows")
            self.rows.add(node)
        elif read & (self.sums | self.made) and (not ended or read & self.rows):
            _refuse(node, "gives each row a sum over the batch")
        elif read & self.rows or self._has_rows(node):
            if not (self._adds(node) if ended else self._is_by_row(node)):
                _refuse(node, "mixes the rows of the batch")
            (self.sums if ended else self.rows).add(node)
        elif read & (self.sums | self.made):
            (self.sums if self._is_linear(node) else self.made).add(node)

    # ---- dimensions with rows

    def _has(self, axis: Axis) -> int:
        """Returns how often the batch is in an axis."""
        return sum(leaf in self.batch for leaf in leaves(axis))

    def _has_rows(self, node: fx.Node) -> bool:
        return any(self._has(axis) for dims in self.axes.dims[node] for axis in dims)

    def _along(self, dims: Dims) -> int | None:
        """Returns the dimension along which a tensor has rows; None if there is none, or several."""
        row_dims = [d for d, axis in enumerate(dims) for _ in range(self._has(axis))]
        return row_dims[0] if len(row_dims) == 1 else None

    def _leads(self, axis: Axis) -> bool:
        """True for an axis whose outermost part is the batch."""
        return next(leaves(axis)) in self.batch

    # ---- numbers of rows

    def _counts(self, node: fx.Node) -> bool:
        """True for row numbers, and for operators that do not change them."""
        if operator_name(node) == "aten::arange":
            return any(symbols(n.meta["val"]) & self.sizes for n in node.all_input_nodes)
        return _leaves_numbers(node) and node.args[0] in self.numbers

    def _counted(self, node: fx.Node) -> int | None:
        """Returns the dimension along which a node counts rows; None if it counts something else, or rounds."""
        value = node.meta["val"]
        if value.dtype not in (torch.int64, torch.int32):
            return None
        if operator_name(node) == "aten::arange":
            args = arguments_of(node)
            return 0 if args.get("start", 0) == 0 and args.get("step", 1) == 1 else None
        if node.target is apart:  # Only its axes are others.
            return self.numbers[node.args[0]]  # type: ignore[index]
        before, dim = self.numbers[node.args[0]], self._along(self.axes.of(node))  # type: ignore[index]
        factors = [
            factor
            for factor in self.axes.bound[node].factors
            if factor.mark == "" and factor.ins.get(0) == before and factor.outs.get(0) == dim
        ]
        alone = dim is not None and before is not None and _lengths(node)[dim] == _lengths(node.args[0])[before]
        return dim if alone and factors else None

    def _picks(self, node: fx.Node) -> bool:
        """True for `x[numbers, ...]`, and a write to it, in which row `i` of the result uses row `i` of `x`.

        NOTE [Each row reads itself]
        """
        if not has(node.target, Trait.INDICES):
            return False
        args = arguments_of(node)
        x, indices, rest = args["self"], args["indices"], args.get("values")
        numbered = [i for i, index in enumerate(indices) if index in self.numbers]
        if len(numbered) != 1 or {x, rest} & set(self.numbers) or x not in self.rows:
            return False
        place = numbered[0]
        counted = self.numbers[indices[place]]
        if counted is None or self._along(self.axes.of(x)) != place or not self._leads(self.axes.of(x)[place]):
            return False
        if _lengths(x)[place] != _lengths(indices[place])[counted]:
            return False
        used = [i for i, index in enumerate(indices) if index is not None]
        ranks = {i: indices[i].meta["val"].dim() for i in used}
        dim = counted + max(ranks.values()) - ranks[place]  # Indices are broadcast, aligned right.
        beside = [self._lies_at(indices[i], dim, max(ranks.values())) for i in used if i != place]
        front = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
        picked = x.meta["val"].dim() - len(used) + max(ranks.values())
        return all(beside) and (rest is None or self._lies_at(rest, front + dim, picked))

    def _lies_at(self, node: fx.Node, dim: int, rank: int) -> bool:
        """True if a value has no rows, or has them along `dim` of the `rank` dimensions it is broadcast to."""
        dims = self.axes.of(node)
        return not self._has_rows(node) or (self._along(dims) == dim - (rank - len(dims)))

    # ---- rows

    def _adds(self, node: fx.Node) -> bool:
        """True for a value without rows that is a sum over rows, or a mean, which `loss_totals.py` makes one of."""
        bound = self.axes.bound[node]
        if is_mean(node) or self._adds_by_class(node):
            return True
        if node.target is aten.mean.dim:
            return self._along(bound.dims[0][0]) is not None
        return bound.rule.reducer == "sum" and self._passes(bound, node, True)

    def _is_linear(self, node: fx.Node) -> bool:
        """True for an operator that is linear in the sums that it reads: its result is a sum, too."""
        operands = operand_nodes(node)
        sums = {i for i, x in enumerate(operands) if x in self.sums}
        zeros = {i for i, x in enumerate(operands) if is_zero(x)}
        linear = any(sums <= group <= sums | zeros for group in self.axes.bound[node].rule.linear)
        unchanged = has(node.target, Trait.SAME) or (has(node.target, Trait.SUM) and is_zero(node.args[1]))
        return not self.made & set(node.all_input_nodes) and (linear or unchanged)

    def _adds_by_class(self, node: fx.Node) -> bool:
        """True for an operator that counts, or adds up, what there is of each class, wherever it lies."""
        args = arguments_of(node)
        if node.target is aten.histc.default and args["min"] < args["max"]:
            return True
        if node.target is aten.bincount.default:
            classes, values = args["self"], args["weights"]
        elif has(node.target, Trait.ADDS_AT) and is_zero(args["self"]):
            classes, values = args["index"], args.get("src", args.get("source"))
        else:
            return False
        if values is None:
            return True
        lengths, value_lengths = _lengths(classes), _lengths(values)
        if lengths != value_lengths:
            equal = equal_symbols(node.graph)
            lengths, value_lengths = (
                [sympy.sympify(n).subs(equal) for n in sizes] for sizes in (lengths, value_lengths)
            )
        return lengths == value_lengths and self._side_by_side(self.axes.of(classes), self.axes.of(values))

    def _is_by_row(self, node: fx.Node) -> bool:
        """True if each row of an operator's result depends on the same row of its operands only."""
        if is_getitem(node):
            return True
        if any(self._along(dims) is None for dims in self.axes.dims[node]):
            return False
        bound = self.axes.bound[node]
        if node.target is apart or has(node.target, Trait.RANDOM_EACH):
            return all(self._side_by_side(dims, bound.dims[1][0]) for dims in bound.dims[0])
        return self._passes(bound, node, False)

    def _is_by_document(self, node: fx.Node) -> bool:
        """True for attention of tokens of rows, in their order, in documents whose ends are not made of rows.

        NOTE [Documents that lie in several rows]
        """
        made_of_rows = self.rows | self.sums | self.made | self.numbers.keys()
        tokens = {x for ends, x in ends_of(node) if ends not in made_of_rows and not self._has_rows(ends)}
        rows = set(node.all_input_nodes) & made_of_rows
        leads = all(self._along(self.axes.of(x)) == 0 and self._leads(self.axes.of(x)[0]) for x in rows)
        return len(tokens) == 2 and leads and tokens <= rows <= self.rows

    def _side_by_side(self, dims: Dims, other_dims: Dims) -> bool:
        """True if two tensors have rows along the same dimensions, as the outermost factor."""
        if not any(self._has(axis) for axis in dims):
            return True
        pairs = [(a, b) for a, b in zip(dims[::-1], other_dims[::-1], strict=False) if self._has(a) or self._has(b)]
        return all(self._leads(axis) for pair in pairs for axis in pair)

    def _passes(self, bound: Bound, node: fx.Node, added: bool) -> bool:
        """True if an operator passes the batch through; if `added`, True if it sums over the batch."""
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
    """True for an operator that moves elements without changing them."""
    moves = Trait.SAME | Trait.RESHAPE | Trait.PERMUTE
    return has(node.target, moves) or node.target in (aten.expand.default, apart)


def _lengths(node: Any) -> list[Any]:
    """Returns the lengths of a tensor's dimensions as expressions."""
    return [size if isinstance(size, int) else size.node.expr for size in node.meta["val"].shape]


def _refuse(node: fx.Node, problem: str, fix: str = "") -> None:
    whole = "autotp.parallelize, for whole batches"
    if node.target is scatter:  # It stands where cp cuts a sequence: here the only dimension of packed tokens.
        raise Error(
            "the tokens of a batch are its first dimension, and cp cannot cut rows",
            at=line_of(node),
            fix="[1, tokens] in place of [tokens]: tokens.unsqueeze(0), and the same of what is as long",
            alternative=whole,
        )
    name = node.target.__name__ if isinstance(node.target, FunctionType) else node.target
    raise Error(
        f"`{name}` {problem}, which cannot be computed in parts",
        at=line_of(node),
        fix=fix or whole,
        alternative=whole if fix else (),
    )
