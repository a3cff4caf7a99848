"""heads: lets attention run along whole sequences on a part of the heads, where that sends fewer bytes over `cp`.

    Before: attention(q, apart(k), apart(v))                                cut along the sequence: k and v are gathered
    After:  attention(by_heads(q), by_heads(k), by_heads(v))                cut along heads: `lower` writes all_to_all

A rank sends its part of the sequence for all heads, and gets all positions for its heads. What attention returns goes
back in the same way. The heads are `(h p)`, and `p`, with one position for each rank, is cut: so `h` is left for `tp`,
whose ranks have the heads that they have without `cp`. Heads of queries that read one head of keys stay together.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.display.text_table import bytes_text
from autotp.errors import Error
from autotp.ops.placement_moves import apart, by_heads
from autotp.passes.builder import Builder, fake_mode_of
from autotp.passes.plan.choose import elements
from autotp.passes.plan.infer_axes import Axes, Factor, infer_axes
from autotp.passes.plan.propagate import Have, needs_grad, propagate
from autotp.passes.plan.sequence.context_parallel import CutSequences, cut_sequences
from autotp.passes.plan.sequence.cut_along import HasForm
from autotp.passes.plan.sequence.halos import halo_bytes, reads_halo
from autotp.passes.plan.sequence.separate_keys import viewed, with_operands
from autotp.rules.call import nbytes_of, outputs_of
from autotp.rules.row import Trait
from autotp.rules.traits import draws, has, is_masked
from autotp.sharding.axis import Axis, find, leaves, touches
from autotp.source_location import layer_of, line_of

OPERANDS = 3
"""The queries, the keys and the values are the first operands of an attention."""


@dataclass(frozen=True)
class AttentionBytes:
    """What an attention sends over cp in either way.

    Attributes:
        node: the attention.
        heads, kv_heads: the numbers of heads of its queries, and of its keys and values; None if they vary.
        gather: the bytes that a rank sends, forward and backward, if keys and values are gathered.
        exchange: those that it sends if heads are exchanged.
        halo: those that an average rank sends if each reads the keys that its queries see; None if they are not known.
    """

    node: fx.Node
    heads: int | None
    kv_heads: int | None
    gather: float
    exchange: float
    halo: float | None = None

    @property
    def along_queries(self) -> float:
        """The bytes that a rank sends if attention is cut along its queries."""
        return self.gather if self.halo is None else self.halo

    def why_not(self, tp: int, cp: int) -> str:
        """Returns why its heads do not suffice; "" if they do."""
        if self.heads is None or self.kv_heads is None:
            return "no heads of a known number"
        if self.kv_heads % (tp * cp) or self.heads % self.kv_heads:
            each = f"{self.heads} heads" + f", {self.kv_heads} of keys and values" * (self.kv_heads != self.heads)
            return f"{each}: they do not divide by tp x cp = {tp} x {cp}"
        return ""


@dataclass(frozen=True)
class Exchanged:
    """A cut of sequences in which some attentions are cut along heads.

    Attributes:
        cut: the graph, its axes and its decision.
        nodes: the operators that are cut along heads.
        note: what the plan says of it.
    """

    cut: CutSequences
    nodes: frozenset[fx.Node]
    note: str


def exchange_heads(
    cut: CutSequences,
    tp: int,
    cp: int,
    choice: str,
    sources: Callable[[fx.Graph], frozenset[fx.Node]],
    has_form: HasForm,
) -> Exchanged:
    """Returns the cut in which attention is cut along heads where `choice` says so.

    Args:
        cut: the cut in which keys and values are gathered.
        choice: "gather", also for keys that queries see (`halos.py`); "heads"; or "auto", which takes what sends fewer
            bytes.
        sources, has_form: as for `context_parallel`.

    Raises:
        Error: the heads of an attention do not suffice for `choice="heads"`.
    """
    differentiable = needs_grad(cut.graph, sources(cut.graph))
    have = propagate(cut.graph, cut.axes, cut.decision.cuts, cut.decision.held)
    nodes = [node for node in cut.graph.nodes if _reads_sequence(node, cut)]
    candidates = [_counted(node, cut, cp, differentiable, have) for node in nodes]
    reasons = {row.node: row.why_not(tp, cp) for row in candidates}
    chosen = [row for row in candidates if not reasons[row.node] and choice != "gather"]
    if choice == "auto":
        chosen = [row for row in chosen if row.exchange < row.along_queries]
    result, fitting = cut, chosen
    while fitting:
        result, unfit = _by_heads(cut, [row.node for row in fitting], cp, sources, has_form)
        if not unfit:
            break
        masks = ", or a dropout mask that no part of it repeats"
        reasons |= {node: f"no heads that are one axis of the model{masks * draws(node)}" for node in unfit}
        result, fitting = cut, [row for row in fitting if row.node not in unfit]
    if choice == "heads":
        _expect_heads(cut, reasons)
    heads = frozenset(
        node for node, leaf in result.decision.cuts.items() if result is not cut and _is_new(leaf, result)
    )
    return Exchanged(result, heads, _note(candidates, fitting, reasons))


def _expect_heads(cut: CutSequences, reasons: dict[fx.Node, str]) -> None:
    fix = 'cp_attention="auto", which gathers keys and values there; or a smaller cp'
    for node, why in reasons.items():
        if why:
            name = f" of `{layer}`" if (layer := layer_of(node)) else ""
            raise Error(f'cp_attention="heads": the attention{name} has {why}', at=line_of(node), fix=fix)
    if not reasons:
        raise Error(
            'cp_attention="heads": no attention is one operator, such as F.scaled_dot_product_attention', fix=fix
        )


def _note(candidates: Sequence[AttentionBytes], chosen: Sequence[AttentionBytes], reasons: dict[fx.Node, str]) -> str:
    """Returns what the plan says: how many attentions exchange heads, and the bytes of both ways."""
    rest = [row for row in candidates if row not in chosen]
    parts = []
    if chosen:
        sent, other = _sent(chosen, "exchange"), _sent(chosen, "along_queries")
        instead = "a gather of keys" if all(row.halo is None for row in chosen) else "keys that queries see"
        parts.append(f"{len(chosen)} exchange heads for the sequence: a rank sends {sent} a step; {instead} {other}")
    for rows, what in (
        ([row for row in rest if row.halo is None], "gather keys and values"),
        ([row for row in rest if row.halo is not None], "read the keys and values that queries see"),
    ):
        why = next((reasons[row.node] for row in rows if reasons[row.node]), "")
        others = [f"a gather of all {_sent(rows, 'gather')}"] if rows and rows[0].halo is not None else []
        others += [why or f"an exchange of heads {_sent(rows, 'exchange')}"]
        if masked := sum(is_masked(row.node) for row in rows if row.halo is None):
            others.append(f"of {masked} the mask is a tensor, so which keys are seen is not known")
        if rows:
            parts.append(f"{len(rows)} {what}: a rank sends {_sent(rows, 'along_queries')} a step; {'; '.join(others)}")
    return "; ".join(parts)


def _sent(rows: Sequence[AttentionBytes], way: str) -> str:
    return bytes_text(round(sum(getattr(row, way) for row in rows)))


def _reads_sequence(node: fx.Node, cut: CutSequences) -> bool:
    """True for an attention that is one operator, and whose queries have a sequence."""
    if not has(node.target, Trait.ATTENTION):
        return False
    queries = cut.axes.of(cut.axes.bound[node].operands[0])
    return any(touches(axis, leaf) for axis in queries for leaf in cut.along)


def _counted(
    node: fx.Node, cut: CutSequences, cp: int, differentiable: Collection[fx.Node], have: Have
) -> AttentionBytes:
    bound, factor = cut.axes.bound[node], _heads(node, cut.axes)
    query, key = (operand.meta["val"] for operand in bound.operands[:2])
    counts = (query.shape[factor.ins[0]], key.shape[factor.ins[1]]) if factor is not None else (None, None)
    smallest = [min(viewed(operand), key=elements).meta["val"] for operand in bound.operands[1:OPERANDS]]
    if factor is not None and (dim := _unrepeated(node, 1, factor.ins[1], cut.axes)):
        counts = counts[0], dim[0].meta["val"].shape[dim[1]]
    heads, kv_heads = (n if isinstance(n, int) else None for n in counts)
    moved = sum(map(nbytes_of, (query, outputs_of(node)[0], *smallest)))
    # An attention that has no form for a part of the queries is computed whole, and so reads all of them.
    gathered = sum(map(nbytes_of, [*smallest, *([] if node in cut.decision.cuts else [query])]))
    others = (cp - 1) / cp
    exchange = 2 * moved * others / cp
    for i, mask in enumerate(bound.operands[OPERANDS:], OPERANDS):
        # A gradient flows to each part of it, so no rank computes it whole. It is exchanged, or gathered without heads.
        if mask in differentiable and mask in cut.decision.cuts:
            has_heads = factor is not None and i in factor.ins
            exchange += 2 * nbytes_of(mask.meta["val"]) * others / (cp if has_heads else 1)
    reach = reads_halo(node, cut.axes, cut.decision.cuts, have)
    halo = None if reach is None else 2 * halo_bytes(node, reach, cut.axes, cut.decision.cuts, cp)
    return AttentionBytes(node, heads, kv_heads, 2 * gathered * others, exchange, halo)


def _heads(node: fx.Node, axes: Axes) -> Factor | None:
    """Returns the factor of heads: the last that queries, keys, values and the result have."""
    factors = [f for f in axes.bound[node].factors if {0, 1, 2} <= f.ins.keys() and 0 in f.outs and f.mark != "^"]
    return max(factors, key=lambda f: f.ins[1], default=None)


def _unrepeated(node: fx.Node, position: int, dim: int, axes: Axes) -> tuple[fx.Node, int] | None:
    """Returns the last value of an operand before its heads are repeated, and the dimension of its heads."""
    operand = axes.bound[node].operands[position]
    chain = list(viewed(operand))
    least = min(map(elements, chain))
    first = next(leaves(axes.of(operand)[dim]))
    for value in chain:
        if elements(value) == least:
            dims = [dim] if value is operand else [d for d, axis in enumerate(axes.of(value)) if find(axis) is first]
            return (value, dims[0]) if dims else None
    return None


def _by_heads(
    cut: CutSequences,
    chosen: Sequence[fx.Node],
    cp: int,
    sources: Callable[[fx.Graph], frozenset[fx.Node]],
    has_form: HasForm,
) -> tuple[CutSequences, list[fx.Node]]:
    """Returns the cut in which these attentions are cut along heads, and those of them that cannot be."""
    writing = _ByHeads(cut, cp)
    unfit = [node for node in chosen if not writing.fits(node)]
    if unfit:
        return cut, unfit
    for node in cut.graph.nodes:
        writing.visit(node, node in chosen)
    graph = writing.builder.graph
    axes = infer_axes(graph)
    others = dict[fx.Node, Axis]()
    for node, (attention, marked) in writing.moved.items():
        leaf = next(find(f.axis) for f in axes.bound[marked].factors if f.name == "p")
        factor = axes.bound[node].cuttable(leaf) if leaf.kind == "leaf" else None
        if factor is None or (factor.mark == "!" and not has_form(node, factor, leaf)):
            unfit.append(attention)
        others[node] = leaf
    if unfit:
        return cut, unfit
    along = [find(axes.of(writing.builder.env[node])[dim]) for node, dim in _places(cut)]
    return cut_sequences(graph, axes, along, sources, has_form, others), []


def _places(cut: CutSequences) -> Iterator[tuple[fx.Node, int]]:
    """Yields a dimension of a value for each sequence."""
    for leaf in cut.along:
        yield next(
            (node, dim)
            for node in cut.axes.bound
            if len(cut.axes.dims[node]) == 1
            for dim, axis in enumerate(cut.axes.of(node))
            if find(axis) is find(leaf)
        )


def _is_new(leaf: Axis, cut: CutSequences) -> bool:
    """True for a leaf that is no sequence."""
    return all(find(leaf) is not find(sequence) for sequence in cut.along)


class _ByHeads:
    """The new graph.

    Attributes:
        moved: new operator on a part of the heads -> the attention of the old graph, and the `by_heads` before it.
        read: (old operand, heads that stay together) -> the operand on a part of the heads.
    """

    def __init__(self, cut: CutSequences, cp: int) -> None:
        self.cut, self.axes, self.cp = cut, cut.axes, cp
        self.builder = Builder(fake_mode_of(cut.graph))
        self.moved: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self.read: dict[tuple[fx.Node, int], fx.Node] = {}

    def fits(self, node: fx.Node) -> bool:
        """True if the heads of keys and of values are one dimension before they are repeated."""
        factor = _heads(node, self.axes)
        return factor is not None and all(_unrepeated(node, i, factor.ins[i], self.axes) for i in (1, 2))

    def visit(self, node: fx.Node, exchanged: bool) -> None:
        """Copies a node; an attention that is `exchanged` reads its operands `by_heads`."""
        self.builder.origin = node
        if not exchanged:
            self.builder.copy(node)
            return
        factor, operands = _heads(node, self.axes), self.axes.bound[node].operands
        assert factor is not None
        value, dim = _unrepeated(node, 1, factor.ins[1], self.axes) or (operands[1], 0)
        group = operands[0].meta["val"].shape[factor.ins[0]] // value.meta["val"].shape[dim]
        read = {0: self._queries(node, factor.ins[0], group)}
        read |= {i: self._keys(node, i, factor.ins[i]) for i in (1, 2)}
        copied = self.builder.copy(node)
        copied.args, copied.kwargs = with_operands(self.builder, node, operands, read)
        self.moved[copied] = node, read[0]

    def _queries(self, node: fx.Node, dim: int, group: int) -> fx.Node:
        operand = self.axes.bound[node].operands[0]
        if (operand, group) not in self.read:
            self.read[operand, group] = self._marked(node, self.builder.env[operand], dim, group, ())
        return self.read[operand, group]

    def _keys(self, node: fx.Node, position: int, dim: int) -> fx.Node:
        """Returns the keys, or the values: what `apart` reads, viewed up to its heads, `by_heads`, and repeated."""
        operand = self.axes.bound[node].operands[position]
        if (operand, 0) in self.read:
            return self.read[operand, 0]
        value, head_dim = _unrepeated(node, position, dim, self.axes) or (operand, dim)
        chain = list(viewed(operand))
        at, source = chain.index(value), chain[-1]
        x, separate = self.builder.env[source], tuple[int, ...]()
        if source.target is apart:
            read: Any = source.args[0]
            x, pairs = self.builder.env[read], zip(self.axes.of(read), self.axes.of(source), strict=True)
            new = [leaf for a, b in pairs if any(touches(a, s) for s in self.cut.along) for leaf in leaves(b)]
            dims = enumerate(self.axes.of(value))
            separate = tuple(d for d, axis in dims if any(touches(axis, leaf) for leaf in new))
        for view in reversed(chain[at:-1]):
            x = self._again(view, x)
        x = marked = self._marked(node, x, head_dim, 1, separate)
        for view in reversed(chain[:at]):
            x = self._again(view, x)
            self.moved[x] = node, marked
        self.read[operand, 0] = x
        return x

    def _again(self, view: fx.Node, x: fx.Node) -> fx.Node:
        """Returns the same view of another value: the graph has it already if something else reads it."""
        args, kwargs = (x, *self.builder.map(view.args[1:])), self.builder.map(view.kwargs)
        alike = (user for user in x.users if (user.target, user.args, user.kwargs) == (view.target, args, kwargs))
        return next(alike, None) or self.builder.call(view.target, *args, **kwargs)  # type: ignore[arg-type]

    def _marked(self, node: fx.Node, x: fx.Node, dim: int, group: int, separate: tuple[int, ...]) -> fx.Node:
        marked = self.builder.call(by_heads, x, dim, self.cp, group, separate)
        self.moved[marked] = node, marked
        return marked
