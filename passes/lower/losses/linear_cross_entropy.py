"""linear_cross_entropy: makes one operator of a head and of what reads its logits, if that needs few numbers of a row.

    Before: y = reshape(to(linear(x, w), float32), [-1, 151936]); l = cross_entropy_loss(y, t)
    After:  e, z = linear_class_terms(w, reshape(x, [-1, 4096]), t, 0, 151936); l = sum(e - z) / 8192

Such readers are class losses, log-probabilities of given classes, logarithms of sums of exponentials, entropies,
divergences between two heads, and the greatest class. The operator computes logits in chunks of rows, in forward and
again in backward; `row_sums.py` says where once is enough, and `priced_forms.py` where that is faster. Views of rows
move to the input of the head; casts, a bias, numbers that multiply logits, and a bound by tanh become arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.lower.losses.logit_rules import has_precision, read
from autotp.passes.lower.losses.logit_values import (
    Affine,
    Exp,
    Logits,
    Lse,
    RowReader,
    Shares,
    Value,
    WeightedValue,
)
from autotp.passes.lower.losses.row_sums import sum_rows
from autotp.passes.lower.losses.row_terms import Terms, write_reader
from autotp.passes.lower.losses.term_requests import Mean, TermRequest, has_shares, labels_of, requests_of
from autotp.passes.lower.losses.vocab_parallel_loss import MEAN, NONE, mean_of_sum, reduced_loss
from autotp.passes.plan.choose import Decision, carry
from autotp.passes.plan.infer_axes import Axes, visit
from autotp.rules.call import arguments_of, outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import has
from autotp.sharding.axis import Axis, is_major

aten = torch.ops.aten
LEAST = 2**14
"""The classes from which on a head is one operator: 1,024 rows are one chunk, up to which it keeps probabilities. The
rows of an example decide nothing: they may be fewer than those of a batch, and others on other ranks."""
Leaf = Axis | None


@dataclass(frozen=True)
class Heads:
    """The heads whose logits are not computed.

    Attributes:
        leaves: head -> the part of the classes that is cut; None if every rank has all classes.
        values: operator -> its result, which has one number for each class.
        readers: operator -> what it reads, of which it makes one number for each row.
        requests: what each reader needs.
    """

    leaves: dict[fx.Node, Leaf]
    values: dict[fx.Node, Value]
    readers: dict[fx.Node, RowReader]
    requests: dict[fx.Node, list[TermRequest]]

    @property
    def read(self) -> set[fx.Node]:
        """The heads that have readers."""
        return linears_within(*(reader.value for reader in self.readers.values()))

    def behind(self, node: fx.Node) -> set[fx.Node]:
        """Returns the heads of the values that an operator reads."""
        return linears_within(*(self.values[n] for n in node.all_input_nodes if n in self.values))

    def leaf_of(self, node: fx.Node) -> Leaf:
        """Returns the cut of the classes of a value or a reader."""
        value = self.values[node] if node in self.values else self.readers[node].value
        return self.leaves[next(logits_within(value)).linear]


def linear_cross_entropy(
    graph: fx.Graph, axes: Axes, decision: Decision
) -> tuple[fx.Graph, Axes, Decision, dict[fx.Node, fx.Node]]:
    """Returns the graph with heads and readers of their logits in one operator, and its axes and cuts.

    Beside them the other heads, as of `heads_of`.
    """
    heads, refused = heads_of(graph, axes, decision)
    if not heads.readers:
        return graph, axes, decision, refused
    builder, new_axes, new_decision = Builder(fake_mode_of(graph)), Axes(), Decision(chosen=decision.chosen)

    def carry_over(node: fx.Node) -> None:
        carry(builder.copy(node), node, axes, new_axes, decision, new_decision)

    terms = Terms(builder, heads.requests, carry_over)
    for node in graph.nodes:
        if node in builder.env:  # The labels of a head, which an operator of its logits wanted earlier.
            continue
        builder.origin, last = node, len(builder.graph.nodes)
        if node in heads.values:
            # What has the rows of the logits stands for them.
            logits = list(logits_within(heads.values[node]))
            rows = [terms.input_of(linear, each.views) for each in logits for linear in each.linears]
            builder.env[node] = rows[0]
        elif node in heads.readers:
            builder.env[node] = _read(terms, node, heads)
        else:
            carry_over(node)
            continue
        leaf = heads.leaf_of(node)
        for made in (made for made in list(builder.graph.nodes)[last:] if made not in new_axes.dims):
            visit(made, new_axes)
            bound = new_axes.bound.get(made)
            if leaf is not None and bound is not None and bound.cuttable(leaf) is not None:
                new_decision.cuts[made] = leaf
    return *sum_rows(builder.graph, new_axes, new_decision), refused


# ---- the heads


def heads_of(graph: fx.Graph, axes: Axes, decision: Decision) -> tuple[Heads, dict[fx.Node, fx.Node]]:
    """Returns the heads whose readers need few numbers of each row; and others with a softmax or with such a reader.

    Of the others the first operator that needs all logits; the head itself where it is cut along its input.
    """
    leaves = {node: leaf for node in graph.nodes if _is_head(node) for leaf in _leaf_of(node, axes, decision)}
    whole = dict[fx.Node, fx.Node]()
    while True:
        heads = Heads(leaves, {}, {}, {})
        refusing = next(_refusing(graph, heads, decision), None)
        refused = heads.behind(refusing) if refusing is not None else leaves.keys() - heads.read
        if not refused:
            break
        leaves = {head: leaf for head, leaf in leaves.items() if head not in refused}
    cuts = {node: next(_leaf_of(node, axes, decision), None) for node in graph.nodes if _is_head(node)}
    every = Heads(cuts, {}, {}, {})
    for refusing in _refusing(graph, every, decision):
        whole = dict.fromkeys(every.behind(refusing), refusing) | whole
    probable = every.read | linears_within(*(value for value in every.values.values() if is_softmax(value)))
    return heads, {head: whole.get(head, head) for head in cuts if head in probable - heads.leaves.keys()}


def _is_head(node: fx.Node) -> bool:
    if node.target is not aten.linear.default or len(node.args) != 2 or not isinstance(node.args[1], fx.Node):
        return False
    shape = node.meta["val"].shape
    return len(shape) > 1 and isinstance(shape[-1], int) and shape[-1] >= LEAST


def _leaf_of(linear: fx.Node, axes: Axes, decision: Decision) -> Iterator[Leaf]:
    """Yields the cut of a head along the classes, None if it is whole; nothing for another cut."""
    leaf, weight = decision.cuts.get(linear), linear.args[1]
    factor = axes.bound[linear].cuttable(leaf) if leaf is not None else None
    by_class = factor is not None and set(factor.ins) == {1} and is_major(axes.of(weight)[0], leaf)  # type: ignore[arg-type]
    if leaf is None or by_class:
        yield leaf


def _refusing(graph: fx.Graph, heads: Heads, decision: Decision) -> Iterator[fx.Node]:
    """Adds values and readers in the order of the graph; yields each operator that needs their elements."""
    for node in graph.nodes:
        if node in heads.leaves:
            heads.values[node] = Affine(((Logits.of(node), 1.0),))
            continue
        operands = [n for n in node.all_input_nodes if n in heads.values]
        if not operands or (node.target is aten.sym_size.int and _is_of_rows(node, heads.values)):
            continue
        if not _add(node, heads, decision):
            yield node


def _is_of_rows(size: fx.Node, values: dict[fx.Node, Value]) -> bool:
    value, n = values[size.args[0]], size.args[0].meta["val"].dim()  # type: ignore[index, union-attr]
    return size.args[1] % n != n - 1 and not (isinstance(value, Affine) and value.is_moved)


def _add(node: fx.Node, heads: Heads, decision: Decision) -> bool:
    """Adds what an operator makes of values; returns False if it needs their elements."""
    result = read(node, heads.values) if outputs_of(node) and node.op == "call_function" else None
    if result is None:
        return False
    of = result.value if isinstance(result, RowReader) else result
    linears = linears_within(of)
    leaf = heads.leaves[next(iter(linears))] if linears else None
    if not linears or any(heads.leaves[linear] is not leaf for linear in linears):
        return False
    is_exact = not node.meta["val"].is_floating_point() or all(
        has_precision(node, logits) for logits in logits_within(of)
    )
    if not isinstance(result, RowReader):
        heads.values[node] = result
        return is_exact
    requests = requests_of(node, result)
    is_cut_so = decision.cuts.get(node) is leaf or (
        decision.cuts.get(node) is None and not has(node.target, Trait.CLASS_LOSS)
    )
    if requests is None or not is_exact or not is_cut_so:
        return False
    heads.readers[node], heads.requests[node] = result, requests
    return True


def is_softmax(value: Value) -> bool:
    """True for values made of exponentials of logits."""
    return not isinstance(value, Affine) or any(isinstance(row, Lse) for row, _ in value.rows)


def linears_within(*values: Value) -> set[fx.Node]:
    """Returns the products of heads of which values are made."""
    return {linear for value in values for logits in logits_within(value) for linear in logits.linears}


def logits_within(value: Value) -> Iterator[Logits]:
    """Yields the logits of which a value is made."""
    match value:
        case Affine():
            yield from (logits for logits, _ in value.parts)
            for mixture, _ in value.mixtures:
                yield from (*logits_within(mixture.first), *logits_within(mixture.second))
        case Exp():
            yield from logits_within(value.of)
        case WeightedValue():
            if isinstance(value.probabilities, Exp):
                yield from logits_within(value.probabilities)
            yield from logits_within(value.of)


# ---- the new operators


def _read(terms: Terms, node: fx.Node, heads: Heads) -> fx.Node:
    reader = heads.readers[node]
    return _loss(terms, node, reader.value.softmax_of) if reader.name == "loss" else write_reader(terms, node, reader)  # type: ignore[union-attr, arg-type]


def _loss(terms: Terms, node: fx.Node, logits: Logits) -> fx.Node:
    """Writes a class loss of the logits of a head. node: the loss in the old graph"""
    builder, call, args = terms.builder, terms.call, terms.builder.map(arguments_of(node))
    classes_read = labels_of(node)
    smoothing = args.get("label_smoothing") or 0.0
    lse, every = terms.lse(logits), None
    if has_shares(node):
        mean = Mean(-1.0, shares=Shares(node))
        shares = terms.sum_of_shares(Shares(node), logits)
        every = call(aten.add.Tensor, call(aten.mul.Tensor, lse, shares), terms.mean(logits, mean))
    if classes_read is None:
        assert every is not None
        total_loss = every if args["reduction"] == NONE else call(aten.sum.default, every)
        total_loss = mean_of_sum(builder, total_loss, args, logits.dtype) if args["reduction"] == MEAN else total_loss
    else:
        classes, ignored = terms.labels(classes_read)
        assert ignored is not None
        loss = call(aten.sub.Tensor, lse, terms.picked(logits, classes_read))
        total_loss = reduced_loss(builder, {**args, "label_smoothing": smoothing}, loss, every, ignored, classes)
    return builder.cast(total_loss, node.meta["val"].dtype)
