"""loss_totals: turns a mean over a batch into a sum that is divided by the count of the whole batch.

    Before: l = cross_entropy_loss(x, t)                                   the mean of the tokens that count
    After:  l = div(cross_entropy_loss(x, t, reduction=sum), total_0)       counts(t) = sum(ne(t, -100))

With the totals of the whole batch, the losses of its parts (microbatches, replicas) sum to its loss, and their
gradients to its gradients, even if the parts have different numbers of tokens. What a loss computes from sums in
another way is left out, and the graph returns these sums, too: `batch_sums.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import fx

from autotp.errors import Error
from autotp.options import Balance
from autotp.passes.builder import Builder, ancestors, copied, dtype_of_sums, evaluated, fake_mode_of
from autotp.passes.pipeline.batch_sums import (
    BatchSums,
    Name,
    batch_sums,
    function_of_sums,
    is_any_mean,
    is_mean,
    read_sums,
    symbols,
    with_counts,
)
from autotp.rules.call import arguments_of, operator_name, outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import draws, draws_from_numpy, has
from autotp.source_location import line_of

aten = torch.ops.aten
SUM = 2
Term = Literal["mean", "sum", "count", "function"]
TOTAL = "total"
"""The names of placeholders for totals begin with this, and end with a number."""

NUMBERS = (*range(2, 34), 48, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 512, 1000, 1024, 4096)
"""Numbers of rows for which the model's comparisons are evaluated."""
LENGTHS = ("size", "sizes", "shape", "repeats", "dims")
"""The names of arguments that list sizes of a result."""


@dataclass(frozen=True)
class Totals:
    """A loss as a sum over the batch.

    Attributes:
        graph: returns the loss alone; it has the old placeholders and `total_0`, ..., floating scalars.
        counts: returns the contribution of a part of the batch to each total; it has the placeholders that it needs.
        by_rows: the source lines of means over places as well, such as `[batch seq]`, of which rows are counted: they
            are right if all parts have rows of the same length.
        functions: returns the rest of the loss, which is computed from sums; its placeholders are what `graph` returns
            after the loss. None if there is no rest. NOTE [Functions of sums]
        names: NOTE [Names of sums]
    """

    graph: fx.Graph
    counts: fx.Graph
    by_rows: tuple[str, ...]
    functions: fx.Graph | None = None
    names: frozenset[Name] = frozenset()


@dataclass(frozen=True)
class Kinds:
    """The nodes that depend on constants only; on inputs only; on everything except values of inputs.

    And the sums over the batch, and those among them that are a number of rows or of places.
    """

    constant: Collection[fx.Node]
    free: Collection[fx.Node]
    fixed: Collection[fx.Node]
    sums: BatchSums
    counts: Collection[fx.Node]

    def varies(self, value: Any) -> bool:
        """True for a value that is not constant."""
        return isinstance(value, fx.Node) and value not in self.constant


def loss_totals(
    graph: fx.Graph,
    loss: fx.Node,
    inputs: Sequence[str],
    balance: Balance = "batch",
    names: frozenset[Name] | None = None,
) -> Totals:
    """Returns the graph with its loss as a sum over the batch, without other outputs.

    Args:
        loss: a scalar that the graph returns.
        inputs: placeholder names of the inputs whose first dimension is the batch.
        balance: whether a function of sums over the batch reads those of the whole batch, or is a mean of its values in
            the parts.
        names: of a graph of one row, those in the graph of two.

    Raises:
        Error: the loss is not a sum of scaled means over the batch, nor computed from sums over it.
    """
    rows = _symbols_of_rows(graph, inputs)
    graph, loss, counted, readers = with_counts(graph, loss, inputs, rows, names or ())
    _expect_any_number(graph, inputs, ancestors([loss]) - counted)
    constant = _made_of(graph, (), without=counted)
    sums, names_of_sums = batch_sums(graph, inputs, rows, names or (), counted, constant)
    if names is not None and names - readers - names_of_sums:
        raise Error(
            "the loss of one row is computed by other operators than that of several rows",
            at=next(iter(sorted(names - readers - names_of_sums)))[1],
            fix="microbatches of two rows or more, or a mean in place of a division by the number of rows",
        )
    kinds = Kinds(constant, _made_of(graph, inputs), _made_of(graph, _places(graph) - set(inputs), True), sums, counted)
    terms = _terms(loss, kinds)
    if balance == "microbatch":
        terms = {node: "mean" if term == "function" else term for node, term in terms.items()}
    divided = {node: term == "count" for node, term in terms.items() if term in ("mean", "count")}
    _expect_divisors_only(loss, divided)
    builder, total_of, totals = Builder(fake_mode_of(graph)), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        builder.origin = node
        if node.op != "placeholder" and not totals:
            totals = {term: _total(builder, i, term) for i, term in enumerate(divided)}
            first = next(copy for old, copy in builder.env.items() if old.name == inputs[0])
        if node in totals:
            builder.env[node], count = _by_total(builder, node, totals[node], None if divided[node] else first)
            total_of[node] = builder.call(aten.to.dtype, count, torch.float64)
        elif terms.get(node) == "function":  # `functions` adds it.
            builder.env[node] = builder.call(aten.full.default, [], 0, dtype=node.meta["val"].dtype)
        elif node.op != "output":
            _copy(builder, node)
    ordered = [
        total_of[term] for term in divided
    ]  # As their placeholders; the graph may compute them in another order.
    functions = [node for node, term in terms.items() if term == "function"]
    read = read_sums(functions, sums, divided) if functions else []
    parts = {node: _parts_of(builder, node, first, node in divided) for node in read}
    of_loss = returning(builder.graph, [builder.env[loss], *(x for some in parts.values() for x in some)], draw=True)
    examples = {node: [x.meta["val"] for x in some] for node, some in parts.items()}
    by_rows = tuple(line_of(n) for n in dict.fromkeys([*divided, *read]) if _is_over_places(n, rows))
    return Totals(
        of_loss, returning(builder.graph, ordered, places=False), by_rows,
        function_of_sums(graph, loss, terms, examples) if functions else None, readers | names_of_sums,
    )  # fmt: skip


def _symbols_of_rows(graph: fx.Graph, inputs: Collection[str]) -> set[Any]:
    """Returns the symbols of the number of rows; none for one row."""
    return {symbol for node in graph.nodes if node.name in inputs for symbol in symbols(node.meta["val"].shape[0])}


def _parts_of(builder: Builder, node: fx.Node, rows: fx.Node, replaced: bool) -> list[fx.Node]:
    """Returns a sum over the batch; of a mean, what of it adds up, and its count.

    Args:
        rows: an input, for its number of rows.
        replaced: whether the loss reads the total in its place.
    """
    builder.origin = node
    if is_any_mean(node):
        return [*_sum_and_count(builder, node, rows)]
    return [builder.copy(node) if replaced else builder.env[node]]


def returning(graph: fx.Graph, outputs: Sequence[fx.Node], places: bool = True, draw: bool = False) -> fx.Graph:
    """Returns the part of a graph that these values need, with them as outputs.

    Args:
        places: whether to keep placeholders that are not needed.
        draw: whether to keep random numbers that are not needed: those behind them are others without them.
    """
    needed = {*outputs, *(node for node in graph.nodes if draw and draws(node))}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    part, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in needed or (places and node.op == "placeholder"):
            env[node] = copied(part, node, env.__getitem__)
    part.output(tuple(env[node] for node in outputs))
    return part


def _copy(builder: Builder, node: fx.Node) -> None:
    """Copies a node. Behind a mean that is computed in a wider dtype, its example value is in that dtype, too."""
    copy = builder.copy(node)
    if any(_dtype(builder.env[x]) != _dtype(x) for x in node.all_input_nodes):
        target: Any = node.target
        args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
        copy.meta["val"] = evaluated(builder.mode, target, *args, **kwargs)


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _total(builder: Builder, i: int, of: fx.Node) -> fx.Node:
    node = builder.graph.placeholder(f"{TOTAL}_{i}")
    with builder.mode:
        node.meta["val"] = torch.empty_like(of.meta["val"], dtype=dtype_of_sums(of.meta["val"].dtype))
    return node


def _widened(builder: Builder, value: Any) -> Any:
    """Returns a floating tensor in the dtype for sums; any other value unchanged."""
    example = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(example, torch.Tensor) or dtype_of_sums(example.dtype) == example.dtype:
        return value
    return builder.call(aten.to.dtype, value, dtype_of_sums(example.dtype))


def _places(graph: fx.Graph) -> set[str]:
    return {node.name for node in graph.nodes if node.op == "placeholder"}


def _made_of(
    graph: fx.Graph, names: Collection[str], sizes: bool = False, without: Collection[fx.Node] = ()
) -> set[fx.Node]:
    """Returns the nodes that depend on these placeholders and constants only; `sizes`: or on sizes of any tensor."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        made = node.name in names if node.op == "placeholder" else all(n in nodes for n in node.all_input_nodes)
        made = made and node not in without
        if made or (sizes and node.target is aten.sym_size.int):
            nodes.add(node)
    return nodes


def _terms(node: fx.Node, kinds: Kinds) -> dict[fx.Node, Term]:
    """Returns what a loss is made of by sums, differences, constant factors, and divisions by counts.

    These are means (and terms without inputs), sums over the batch, counts, and functions of sums over the batch.
    """
    x, y = (*node.args, None, None)[:2]
    if node.target is aten.mul.Tensor and not kinds.varies(x):
        x, y = y, x
    reduced = (is_mean(node) or _is_sum(node)) and isinstance(x, fx.Node)
    if reduced and x.meta["val"].dim() == 0 and y is None:  # type: ignore[union-attr]
        return _terms(x, kinds)  # type: ignore[arg-type]  # The mean or sum of one number is the number.
    if reduced and node in kinds.sums.functions:
        return {node: "function"}
    if is_mean(node) or node in kinds.fixed:
        return {node: "mean"}
    if _is_sum(node):
        return {node: "sum"}
    if node.target is aten.add.Tensor and type(y) in (int, float) and y == 0:  # Python's sum() begins with 0.
        return _terms(x, kinds)  # type: ignore[arg-type]
    operands = [x] if _passes_on(node) or (has(node.target, Trait.SCALE) and not kinds.varies(y)) else []
    operands = [x, y] if has(node.target, Trait.SUM) and kinds.varies(x) and kinds.varies(y) else operands
    counts = _counts(y, kinds) if node.target is aten.div.Tensor and kinds.varies(y) else []  # type: ignore[arg-type]
    terms: dict[fx.Node, Term] = dict.fromkeys(counts, "count")
    for operand in operands or [x] * bool(counts):
        more = _terms(operand, kinds)  # type: ignore[arg-type]
        terms |= {term: kind for term, kind in more.items() if terms.get(term) != "count"}
    if terms and not (counts and "function" in terms.values()):
        return terms
    if node in kinds.sums.functions:
        return {node: "function"}
    raise Error(
        f"the loss is not a mean over the batch, nor a sum of such means: `{node.target}`",
        at=line_of(node),
        fix="cross_entropy, mse_loss, ... with reduction='mean', x.mean(), or x.sum() / counts.sum()",
    )


def _expect_divisors_only(loss: fx.Node, divided: Mapping[fx.Node, bool]) -> None:
    """Raises Error if a count is also a term of the loss: each part would add the count of the whole batch."""
    terms = [loss]
    for node in terms:  # It grows.
        if divided.get(node):
            raise Error(
                f"the loss is divided by `{node.target}`, and adds it, too",
                at=line_of(node),
                fix="the loss without this term: it has no gradient",
            )
        if _adds_up(node):
            operands = node.all_input_nodes[:1] if node.target is aten.div.Tensor else node.all_input_nodes
            terms += [n for n in operands if n not in terms]


def _adds_up(node: fx.Node) -> bool:
    """True for a scalar that is made of terms: a sum, a difference, a product with a number, a quotient."""
    return node.op == "call_function" and bool(node.all_input_nodes) and _of_a_number(node)


def _expect_any_number(graph: fx.Graph, inputs: Sequence[str], needed: Collection[fx.Node]) -> None:
    """Raises Error if the needed nodes of a graph depend on the number of rows: parts of a batch have fewer."""
    lengths = [node.meta["val"].shape[0] for node in graph.nodes if node.name in inputs]
    rows = _symbols_of_rows(graph, inputs)
    if not rows and lengths[0] > 1:  # For a single row the caller captures a batch of two.
        raise Error(
            f"the model can be traced for batches of {lengths[0]} rows only, and parts of a batch have fewer",
            fix="in the model, x.shape[0] as it is, without int(); or autotp.parallelize, for whole batches",
        )
    for node in graph.nodes:
        if draws_from_numpy(node):
            raise Error(
                f"`{node.target}` draws from `numpy.random` for all rows of a batch together, and parts of a batch "
                "would draw other numbers",
                at=line_of(node),
                fix="config.apply_spec_augment = False, for a model of sound; or autotp.parallelize, for whole batches",
            )
        if node.op == "call_function" and node in needed and outputs_of(node) and not _only_lengths(node, rows):
            raise Error(
                f"`{node.target}` computes with the number of rows, which differs in each part of a batch",
                at=line_of(node),
                fix="a mean, which is one over the whole batch",
            )
    _expect_no_branches(graph, rows)


def _expect_no_branches(graph: fx.Graph, rows: Collection[Any]) -> None:
    """Raises Error if the model compared the number of rows, and the result differs for other numbers."""
    environment: Any = getattr(fake_mode_of(graph), "shape_env", None)
    for made in environment.guards if environment is not None else ():
        guard, values = environment.replace(made.expr), environment.backed_var_to_val
        if not guard.free_symbols & set(rows):
            continue
        substitution = {symbol: values[symbol] for symbol in guard.free_symbols - set(rows) if symbol in values}
        if not all(guard.xreplace({**substitution, **dict.fromkeys(rows, sympy.Integer(n))}) for n in NUMBERS):
            raise Error(
                "the model branches on the number of rows, which differs in each part of a batch",
                at=str(made.sloc),
                fix="a branch on other sizes, or on settings",
            )


def _only_lengths(node: fx.Node, rows: Collection[Any]) -> bool:
    """True if an operator uses the number of rows as a size of its result only, or as a bound of a slice of rows."""
    if node.target is aten.slice.Tensor:
        x, dim, *_ = (*node.args, 0)
        if symbols(x.meta["val"].shape[dim]) & set(rows):  # type: ignore[union-attr]
            return True
    if operator_name(node) == "aten::arange":
        # `row_independence.py` looks at these.
        return True
    for name, value in arguments_of(node).items():
        sizes = list[fx.Node]()
        fx.map_arg(value, sizes.append)
        listed = isinstance(value, list | tuple) and name in LENGTHS
        if not listed and any(symbols(n.meta.get("val")) & set(rows) for n in sizes):
            return False
    return True


def _counts(node: fx.Node, kinds: Kinds) -> list[fx.Node]:
    """Returns the sums that a divisor is made of; an empty list if it is not made of sums over inputs."""
    if node in kinds.counts or (_is_sum(node) and not _of_a_number(node)):
        return [node] if node in kinds.free and node not in kinds.sums.functions else []
    counts = [_counts(n, kinds) for n in node.all_input_nodes if kinds.varies(n)]
    return [n for some in counts for n in some] if all(counts) else []


def _of_a_number(node: fx.Node) -> bool:
    """True for an operator on a tensor without dimensions."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return all(value.dim() == 0 for value in values if isinstance(value, torch.Tensor))


def _passes_on(node: fx.Node) -> bool:
    """True for an operator that changes nothing of a scalar but its sign."""
    return has(node.target, Trait.SAME | Trait.RESHAPE) or node.target is aten.neg.default


def _is_over_places(node: fx.Node, rows: Collection[Any]) -> bool:
    """True for a mean over more elements than rows, whose number is not fixed."""
    if not is_any_mean(node) or _counts_targets(arguments_of(node), node):
        return False
    x = node.all_input_nodes[0].meta["val"]
    return any(symbols(size) - set(rows) for size in x.shape)


def _counts_targets(arguments: Mapping[str, Any], node: fx.Node) -> bool:
    """True for a class loss, whose mean is over the targets that are not ignored."""
    return has(node.target, Trait.CLASS_LOSS) and not arguments["target"].meta["val"].is_floating_point()


def _is_sum(node: fx.Node) -> bool:
    """True for a sum over all elements, or a loss with this reduction."""
    return node.target is aten.sum.default or (
        node.op == "call_function" and arguments_of(node).get("reduction") == SUM
    )


def _by_total(builder: Builder, node: fx.Node, total: fx.Node, rows: fx.Node | None) -> tuple[fx.Node, fx.Node]:
    """Returns a mean as a sum divided by `total`, and this part's contribution to the total.

    Args:
        rows: an input, for its number of rows; None if `node` is itself a count, which `total` replaces.
    """
    if rows is None:
        return total, builder.copy(node)
    summed, count = _sum_and_count(builder, node, rows)
    return builder.call(aten.div.Tensor, summed, total), count


def _sum_and_count(builder: Builder, node: fx.Node, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Returns a mean times a count, and the count.

    A mean over elements, and a term without inputs, count rows; a class loss counts the targets that are not ignored.
    """
    arguments = builder.map(arguments_of(node))
    if _counts_targets(arguments, node):
        wide = {name: _widened(builder, value) for name, value in arguments.items()}
        summed = builder.call(node.target, *(wide | {"reduction": SUM}).values())  # type: ignore[arg-type]
        return summed, _counted(builder, arguments)
    size = builder.call(aten.sym_size.int, rows, 0)
    summed = builder.call(aten.mul.Tensor, _widened(builder, builder.copy(node)), size)
    return summed, builder.call(aten.full.default, [], size, dtype=torch.float64)


def _counted(builder: Builder, arguments: dict[str, Any]) -> fx.Node:
    """Returns the number of targets that are not ignored, or the sum of their weights."""
    target, weight, ignored = arguments["target"], arguments["weight"], arguments["ignore_index"]
    counts = builder.call(aten.ne.Scalar, target, ignored)
    if weight is None:
        return builder.call(aten.sum.default, counts)
    classes = builder.call(aten.where.ScalarOther, counts, target, 0)
    weights = builder.call(aten.mul.Tensor, builder.call(aten.index.Tensor, weight, [classes]), counts)
    return builder.call(aten.sum.default, weights)
